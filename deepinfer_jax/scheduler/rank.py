"""The queues and the memory of one data-parallel rank."""

import bisect
from collections import deque

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.scheduler.pages import PageAllocator
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.sequence import Copy, Sequence
from deepinfer_jax.scheduler.states import StateSlots


class Rank:
    """Who waits, who runs, and what they hold. Both queues are in order of arrival.

    A request runs from its first chunk on: it has a state slot, and pages for all its known tokens from the start,
    so that a later chunk never lacks memory. Those that wait hold nothing.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.pages = PageAllocator(config.num_pages)
        self.states = StateSlots(config.num_slots)
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
    def takes_more(self) -> bool:
        """Whether a request may join the running ones: at most 90 % of the pages are in use (spec: interface 7)."""
        return (
            len(self.running) < self._config.max_num_seqs
            and self.states.num_free > 0
            and self.pages.num_used * 10 <= self.pages.num_pages * 9
        )

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a request in its place among those that wait: in front of later ones, where a preempted one belongs."""
        place = len(self.waiting)
        while place > 0 and self.waiting[place - 1].arrival > sequence.arrival:
            place -= 1
        self.waiting.insert(place, sequence)

    def admit(self, sequence: Sequence) -> bool:
        """Lets the first one waiting run, if there is memory for it."""
        num_pages = self._config.pages_of(sequence.prefill_len)
        self.is_blocked = not self.takes_more or num_pages > self.pages.num_free
        if self.is_blocked:
            return False
        self.waiting.remove(sequence)
        self._take_slot(sequence)
        self.add_pages(sequence, num_pages)
        return True

    def admit_fork(self, sequence: Sequence, parent: Sequence) -> bool:
        """Lets a fork run at once on its parent's state and pages, if that is possible and fair.

        Possible: the parent has read the rows in front of the fork's next position, and its rings have not gone too
        far beyond it. Fair: every request that waits still finds a place, and none of them lacks memory.
        """
        config, position = self._config, sequence.num_tokens - 1
        num_shared, num_partial = divmod(position, config.page_tokens)
        is_possible = (
            parent.slot >= 0
            and 0 < position <= parent.num_written
            and parent.state_end - position <= config.rollback_tokens
            and self.pages.num_free > 0
        )
        is_fair = self.num_unfinished < config.max_num_seqs and not (self.is_blocked and self.waiting)
        if not (is_possible and is_fair and self.takes_more):
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
        sequence.state_end = parent.state_end
        return True

    def add_pages(self, sequence: Sequence, count: int) -> None:
        """Gives a running request `count` more pages, which must be free."""
        self._append_pages(sequence, self.pages.allocate(count))

    def take_copies(self, step: int) -> tuple[Copy, ...]:
        """The copies of new forks, which this step makes."""
        copies: list[Copy] = []
        for sequence in self.running:
            if sequence.pending_copy is not None:
                copies.append(sequence.pending_copy)
                sequence.pending_copy, sequence.last_step = None, step
        return tuple(copies)

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

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self.states.allocate()
        bisect.insort(self.running, sequence, key=lambda running: running.arrival)

    def _append_pages(self, sequence: Sequence, pages: list[int]) -> None:
        start = len(sequence.pages)
        self.page_table[sequence.slot, start : start + len(pages)] = pages
        sequence.pages.extend(pages)
