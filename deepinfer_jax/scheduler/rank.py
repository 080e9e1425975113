"""The queues and the memory of one data-parallel rank."""

import bisect
from collections import deque
from collections.abc import Callable, Set

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.pages import PageAllocator
from deepinfer_jax.scheduler.plan import RankPlan
from deepinfer_jax.scheduler.policy import Counters, SchedulerConfig
from deepinfer_jax.scheduler.prefix import Hit, PrefixCache
from deepinfer_jax.scheduler.sequence import Copy, Sequence
from deepinfer_jax.scheduler.states import StateSlots


class Rank:
    """Who waits, who runs, and what they hold. Both queues are in order of arrival.

    A request runs from its first chunk on: it has a state slot, and pages for all its known tokens from the start,
    so that a later chunk never lacks memory. Those that wait hold nothing. What the prefix cache alone holds is free.
    """

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        self._config, self._counters = config, counters
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pages = PageAllocator(config.num_pages)
        self.states = StateSlots(config.num_slots)
        self.prefix = PrefixCache(config, self.pages, counters)
        self.is_blocked = False  # the last prefill step found no memory for the first one waiting
        # Page of each slot's tokens i * page_tokens and following. The engine copies it when it launches a step.
        self.page_table: Int32[np.ndarray, "S M"] = np.full((config.num_slots, config.max_pages), -1, np.int32)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def has_prompts(self) -> bool:
        """Whether a prefill step may have something to do."""
        return bool(self.waiting) or any(sequence.is_in_prefill for sequence in self.running)

    @property
    def num_pages_used(self) -> int:
        """Pages that requests hold."""
        return self.pages.num_used - self.prefix.num_pages_cached

    @property
    def takes_more(self) -> bool:
        """Whether a request may join the running ones: at most 90 % of the pages are in use (spec: interface 7)."""
        return (
            len(self.running) < self._config.max_num_seqs
            and self.states.num_free > 0
            and self.num_pages_used * 10 <= self.pages.num_pages * 9
        )

    def has_room(self, num_pages: int) -> bool:
        """Whether so many pages can be had without taking one from a request."""
        return num_pages <= self.pages.num_free or num_pages <= self.pages.num_pages - self.num_pages_used

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a request in its place among those that wait: in front of later ones, where a preempted one belongs."""
        place = len(self.waiting)
        while place > 0 and self.waiting[place - 1].arrival > sequence.arrival:
            place -= 1
        self.waiting.insert(place, sequence)
        sequence.window_start = 0

    def find_prefix(self, sequence: Sequence) -> Hit | None:
        """What the first one waiting can take over when it is admitted now."""
        if self._config.prefix_mode == "off" or sequence.scores_prompt or not self.takes_more:
            return None
        return self.prefix.look_up(sequence, last_read=self.states.last_read)

    def next_image(self, is_known: Callable[[ImageSpan], bool]) -> ImageSpan | None:
        """The first unknown image of a prompt that was begun, or else of the first one waiting."""
        begun = (one for one in self.running if one.is_in_prefill)
        for sequence in (*begun, *tuple(self.waiting)[:1]):
            unknown = [image for image in sequence.images if not is_known(image)]
            if not unknown:
                continue
            hit = self.find_prefix(sequence) if sequence.slot < 0 else None
            start = hit.position if hit else sequence.num_scheduled
            ahead = [image for image in unknown if image.start >= start]
            if ahead:
                return ahead[0]
        return None

    def admit(self, sequence: Sequence, hit: Hit | None = None) -> bool:
        """Lets the first one waiting run, if there is memory for it, from where the hit ends."""
        shared = [node.page for node in hit.nodes] if hit else []
        num_pages = self._config.pages_of(sequence.prefill_len) - len(shared)
        self.pages.share(shared)  # first of all, so that nothing evicts them
        self.is_blocked = not self.takes_more or not self.has_room(num_pages)
        if self.is_blocked:
            self.pages.release(shared)
            return False
        self.waiting.remove(sequence)
        self._take_slot(sequence)
        self._append_pages(sequence, shared)
        if hit:
            self.prefix.use(hit)
        self.add_pages(sequence, num_pages)  # this may evict the snapshot itself: the copy reads before all writes
        self._counters.prefix_lookups += self._config.prefix_mode != "off"
        if hit:
            self._start_from(sequence, hit)
        return True

    def _start_from(self, sequence: Sequence, hit: Hit) -> None:
        self._counters.prefix_hits += 1
        self._counters.prefix_hit_tokens += hit.position
        sequence.num_written = hit.position
        if hit.snapshot is None:
            sequence.window_start = hit.position
            return
        target_page = -1 if hit.source_page < 0 else sequence.pages[len(hit.nodes)]
        sequence.pending_copy = Copy(hit.source_slot, sequence.slot, hit.source_page, target_page)
        sequence.seen_end = hit.snapshot.state_end

    def admit_fork(self, sequence: Sequence, parent: Sequence) -> bool:
        """Lets a fork run at once on its parent's state and pages, if that is possible and fair.

        Possible: the parent has read the rows in front of the fork's next position, and its rings have not gone too
        far beyond it.
        """
        config, position = self._config, sequence.num_tokens - 1
        num_shared, num_partial = divmod(position, config.page_tokens)
        is_possible = (
            parent.slot >= 0
            and 0 < position <= parent.num_written
            and parent.state_end - position <= config.rollback_tokens
            and self.has_room(1)
        )
        if not (is_possible and self._is_fair and self.takes_more):
            return False
        self._take_slot(sequence)
        shared = parent.pages[:num_shared]
        self.pages.share(shared)
        self._append_pages(sequence, shared)
        source_slot, source_page, target_page = parent.slot, -1, -1
        if num_partial:
            self.add_pages(sequence, 1)
            source_page, target_page = parent.pages[num_shared], sequence.pages[-1]
        if parent.pending_copy is not None:  # its own state is not there yet: read where it will come from
            source_slot = parent.pending_copy.source_slot
            if source_page == parent.pending_copy.target_page:
                source_page = parent.pending_copy.source_page
        sequence.pending_copy = Copy(source_slot, sequence.slot, source_page, target_page)
        sequence.num_written = sequence.prefill_len = position
        sequence.seen_end, sequence.window_start = parent.state_end, parent.window_start
        return True

    def adopt(self, sequence: Sequence, num_written: int, state_end: int) -> bool:
        """Lets a request run at once on a state and pages that the caller writes before the next plan, if it is fair.

        Copies of the next plan still read slots and pages whose request has ended: it gets none of those.
        """
        pending = [running.pending_copy for running in self.running if running.pending_copy is not None]
        read_slots = self.prefix.source_slots.union(copy.source_slot for copy in pending)
        read_pages = frozenset(copy.source_page for copy in pending if copy.source_page >= 0)
        num_pages = self._config.pages_of(sequence.num_tokens)
        num_needed = num_pages + len(read_pages)
        is_possible = self.states.has_free(avoid=read_slots) and self.has_room(num_needed)
        if not (is_possible and self._is_fair and self.takes_more):
            return False
        self._take_slot(sequence, avoid=read_slots)
        self._evict(num_needed)
        self._append_pages(sequence, self.pages.allocate(num_pages, avoid=read_pages))
        sequence.num_written, sequence.seen_end = num_written, state_end
        if num_written == sequence.num_tokens - 1:
            sequence.prefill_len = num_written  # its next row is a decode row
        return True

    @property
    def _is_fair(self) -> bool:
        """Whether a newcomer may run at once: those that wait still find a place, and none of them lacks memory."""
        return self.num_unfinished < self._config.max_num_seqs and not (self.is_blocked and self.waiting)

    def add_pages(self, sequence: Sequence, count: int) -> None:
        """Gives a running request `count` more pages, for which there must be room."""
        self._evict(count)
        self._append_pages(sequence, self.pages.allocate(count))

    def _evict(self, num_pages: int) -> None:
        """Frees pages that only the prefix cache holds until there are so many."""
        while self.pages.num_free < num_pages and self.prefix.evict():
            pass

    def keep(self, sequence: Sequence, length: int, *, step: int = -1) -> None:
        """Keeps the first `length` tokens of a request, which `step` computes (-1: are read), if its state is real."""
        mode = self._config.prefix_mode
        if mode == "off" or sequence.slot < 0 or length < 1 or sequence.pending_copy is not None:
            return
        if mode == "replay" or sequence.window_start == 0:
            self.prefix.keep(sequence, length, step=step)

    def keep_chunks(self, part: RankPlan, *, is_prefill: bool, step: int) -> None:
        """Keeps what a prefill step computes up to a checkpoint or to the end of a prompt: the next step saves it."""
        for chunk in part.chunks if is_prefill else ():
            sequence, interval = chunk.sequence, self._config.checkpoint_interval
            if chunk.end == sequence.prefill_len or sequence.is_checkpoint(chunk.end, interval=interval):
                self.keep(sequence, chunk.end, step=step)

    def take_copies(self, step: int) -> tuple[Copy, ...]:
        """The copies that this step makes: for new forks, for prefix hits, and of states to be kept."""
        copies: list[Copy] = []
        for sequence in self.running:
            if sequence.pending_copy is not None:
                copies.append(sequence.pending_copy)
                sequence.pending_copy, sequence.last_step = None, step
        return (*copies, *self.prefix.take_saves())

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out of its queue and frees what it holds."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.pages.release(sequence.pages)
            self.states.release(sequence.slot, last_step=sequence.last_step)
            self.page_table[sequence.slot] = -1
        sequence.forget_rows()

    def _take_slot(self, sequence: Sequence, *, avoid: Set[int] = frozenset()) -> None:
        sequence.slot = self.states.allocate(avoid=avoid)
        bisect.insort(self.running, sequence, key=lambda running: running.arrival)

    def _append_pages(self, sequence: Sequence, pages: list[int]) -> None:
        start = len(sequence.pages)
        self.page_table[sequence.slot, start : start + len(pages)] = pages
        sequence.pages.extend(pages)
