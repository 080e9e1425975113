"""A device for scheduler tests, and the loop around it: every row is checked against what the request should be.

The device keeps, instead of caches, the token whose row was written at each place. A draw looks at every position of
its context through the page table, and at the last ones through the slot's ring, so a page or slot in wrong hands, a
copy that is missing and a row at a wrong position all show.
"""

import dataclasses
import random
import zlib
from collections import deque
from collections.abc import Iterable

from deepinfer_jax.scheduler.plan import Chunk, Plan, RankPlan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Limits, Sequence
from tests.scheduler.checks import check_invariants, check_plan

EOS = 1
WINDOW = 4
JUNK = -7  # a draft that is rejected


def drawn_token(seed: int, position: int) -> int:
    """The token that a request of this seed draws for a position: EOS in one of 16 cases."""
    noise = zlib.crc32(f"{seed} {position}".encode())
    return EOS if noise % 16 == 0 else 2 + noise % 1000


def drawing_of(part: RankPlan) -> list[Chunk]:
    return [chunk for chunk in part.chunks if chunk.draws]


@dataclasses.dataclass
class Expected:
    """What a request should turn into."""

    sequence: Sequence
    inherited: tuple[int, ...]  # output taken over from a fork's parent
    born: int  # steps before it came
    num_ahead: int  # unfinished requests of its rank when it came
    committed: list[int] = dataclasses.field(default_factory=list)
    has_ended: bool = False

    def token(self, position: int) -> int:
        """The right token at a position; also behind the end, where the device may already be."""
        known = (*self.sequence.prompt, *self.inherited)
        return known[position] if position < len(known) else drawn_token(self.sequence.options, position)


@dataclasses.dataclass
class Launched:
    """A plan that the device has run, unread."""

    plan: Plan
    drawn: list[list[list[int]]]  # tokens of each drawing chunk of each rank
    users: dict[tuple[int, int], tuple[str, int]]  # (rank, slot) -> (request, epoch)
    writes: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)  # (rank, page, offset)
    ring_writes: dict[tuple[int, int], set[int]] = dataclasses.field(default_factory=dict)  # (rank, slot) -> places


@dataclasses.dataclass
class Slot:
    """State of one request: its window ring, and how far that has come."""

    ring: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # place -> position, token
    end: int = 0  # positions seen; rejected rows count

    def copy(self) -> "Slot":
        return Slot(dict(self.ring), self.end)

    def write(self, position: int, token: int, ring_len: int) -> None:
        self.ring[position % ring_len] = (position, token)
        self.end = max(self.end, position + 1)


class Device:
    """Pages and state slots of all ranks."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler, self._config = scheduler, scheduler.config
        self._ring_len = WINDOW + scheduler.config.rollback_tokens
        self._rng = random.Random(seed)
        self.clear()

    def clear(self) -> None:
        """Loses all state."""
        self._pages: dict[tuple[int, int], dict[int, int]] = {}  # (rank, page) -> offset -> token
        self._slots: dict[tuple[int, int], Slot] = {}  # (rank, slot)
        self._writes: set[tuple[int, int, int]] = set()  # of the step that runs
        self._ring_writes: dict[tuple[int, int], set[int]] = {}

    def spoil(self, broken: Launched, later: Iterable[Launched]) -> None:
        """What the rows of a broken step wrote is rubbish, and so are the states that later steps took from there."""
        overwritten = set[tuple[int, int, int]]().union(*(launched.writes for launched in later))
        for rank, page, offset in broken.writes - overwritten:
            self._pages[rank, page][offset] = JUNK
        spoiled = broken.ring_writes
        for launched in later:
            for rank, part in enumerate(launched.plan.ranks):
                taken = {(rank, copy.target_slot): spoiled.get((rank, copy.source_slot), set()) for copy in part.copies}
                spoiled = spoiled | taken
            spoiled = {slot: places - launched.ring_writes.get(slot, set()) for slot, places in spoiled.items()}
        for slot, places in spoiled.items():
            self._slots[slot].ring.update(dict.fromkeys(places, (JUNK, JUNK)))

    def run(self, plan: Plan, unread: list[Launched], expected: dict[str, Expected]) -> Launched:
        """The copies of each rank, all read before one writes, then its rows."""
        launched = Launched(plan, [], {})
        self._writes, self._ring_writes = launched.writes, launched.ring_writes
        for rank, part in enumerate(plan.ranks):
            pages = {copy.target_page: dict(self._pages.get((rank, copy.source_page), {})) for copy in part.copies}
            slots = {copy.target_slot: self._slots[rank, copy.source_slot].copy() for copy in part.copies}
            assert len(slots) == len(part.copies), "two copies write one slot"
            pages.pop(-1, None)
            self._pages.update({(rank, page): content for page, content in pages.items()})
            self._slots.update({(rank, slot): content for slot, content in slots.items()})
            launched.drawn.append([])
            for chunk in part.chunks:
                self._check_slot(chunk, rank, unread)
                launched.users[rank, chunk.sequence.slot] = (chunk.sequence.request_id, chunk.epoch)
                drawn = self._run_chunk(chunk, rank, plan, unread, expected[chunk.sequence.request_id])
                if chunk.draws:
                    launched.drawn[-1].append(drawn)
        return launched

    def _check_slot(self, chunk: Chunk, rank: int, unread: list[Launched]) -> None:
        me = (chunk.sequence.request_id, chunk.epoch)
        for earlier in unread:
            assert earlier.users.get((rank, chunk.sequence.slot), me) == me, (
                "a slot was reused before its step was read"
            )

    def _run_chunk(self, chunk: Chunk, rank: int, plan: Plan, unread: list[Launched], expected: Expected) -> list[int]:
        start, tokens = chunk.start, list(chunk.sequence.tokens_from(chunk.start, chunk.length))
        if chunk.follows:
            front = unread[-1]
            drawing = drawing_of(front.plan.ranks[rank])
            index = [source.sequence for source in drawing].index(chunk.sequence)
            source, kept = drawing[index], front.drawn[rank][index]
            assert source.epoch == chunk.epoch
            start -= 0 if front.plan.is_prefill else source.length - len(kept)
            tokens = kept[-1:]
        num_kept = chunk.length if plan.is_prefill else self._rng.randint(1, chunk.length)
        if not plan.is_prefill:
            assert len(tokens) == 1
            tokens += [expected.token(start + i) if i < num_kept else JUNK for i in range(1, chunk.length)]
        assert len(tokens) == chunk.length
        if plan.is_prefill and start == chunk.sequence.window_start:  # nothing of the state in front is looked at
            self._slots[rank, chunk.sequence.slot] = Slot(end=start)
        state = self._slots[rank, chunk.sequence.slot]
        assert state.end - start <= self._config.rollback_tokens, "the rings have gone too far"
        for index, token in enumerate(tokens):
            self._write(chunk.sequence.slot, rank, start + index, token)
            if index < num_kept:
                self._check_window(state, chunk.sequence.window_start, start + index, expected)
        assert state.end <= chunk.sequence.state_end
        self._check_pages(chunk.sequence.slot, rank, start + num_kept, expected)
        if not chunk.draws:
            return []
        first = start + num_kept if plan.is_prefill else start + 1
        assert chunk.draw_position - chunk.start == first - start
        return [expected.token(position) for position in range(first, start + num_kept + 1)]

    def _write(self, slot: int, rank: int, position: int, token: int) -> None:
        page_tokens = self._config.page_tokens
        page = int(self._scheduler.ranks[rank].page_table[slot, position // page_tokens])
        assert page >= 0, "a row has no page"
        self._pages.setdefault((rank, page), {})[position % page_tokens] = token
        self._writes.add((rank, page, position % page_tokens))
        self._ring_writes.setdefault((rank, slot), set()).add(position % self._ring_len)
        self._slots[rank, slot].write(position, token, self._ring_len)

    def restore(self, sequence: Sequence, num_written: int, state_end: int, unread: Iterable[Launched]) -> None:
        """What the caller of `adopt` writes, outside of any plan and behind the unread ones."""
        self._writes, self._ring_writes = set(), {}
        self._slots[sequence.rank, sequence.slot] = Slot()
        for position in range(state_end):
            if position < num_written:
                self._write(sequence.slot, sequence.rank, position, sequence.tokens_from(position, 1)[0])
            else:
                self._slots[sequence.rank, sequence.slot].write(position, JUNK, self._ring_len)
        for launched in unread:
            launched.writes -= self._writes

    def _check_window(self, state: Slot, window_start: int, row: int, expected: Expected) -> None:
        """What a row looks at in the ring: itself and those in front of it."""
        for position in range(max(window_start, row - WINDOW + 1), row + 1):
            assert state.ring[position % self._ring_len] == (position, expected.token(position)), "wrong ring"

    def _check_pages(self, slot: int, rank: int, length: int, expected: Expected) -> None:
        page_tokens, table = self._config.page_tokens, self._scheduler.ranks[rank].page_table[slot].tolist()
        for position in range(length):
            content = self._pages[rank, table[position // page_tokens]]
            assert content[position % page_tokens] == expected.token(position), "a page holds another token"


class Loop:
    """Scheduler and device together; depth 1 launches a step before the one in front is read."""

    def __init__(self, config: SchedulerConfig, *, depth: int, seed: int = 0) -> None:
        self.config, self.depth = config, depth
        self.scheduler = Scheduler(config)
        self.device = Device(self.scheduler, seed)
        self.expected: dict[str, Expected] = {}
        self.unread: deque[Launched] = deque()
        self.num_steps = 0
        self.num_lost = 0  # times that all state was lost
        self.num_hits = self.num_hit_tokens = 0  # prefixes that were not computed
        self._begun: set[tuple[str, int]] = set()  # (request, epoch) whose prompt was begun, or adopted

    @property
    def unfinished(self) -> list[str]:
        return [request_id for request_id, expected in self.expected.items() if not expected.has_ended]

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        rank: int | None = None,
        tail_start: int = 0,
        checkpoints: Iterable[int] = (),
    ) -> Sequence:
        """A new request; an int is the length of a prompt that no other begins like."""
        sequence = self._sequence(prompt, max_tokens, ignore_eos)
        sequence.tail_start, sequence.checkpoints = tail_start, frozenset(checkpoints)
        self.scheduler.add(sequence, rank=rank)
        self._expect(sequence)
        return sequence

    def _sequence(self, prompt: int | list[int], max_tokens: int, ignore_eos: bool) -> Sequence:
        index = len(self.expected)
        if isinstance(prompt, int):
            prompt = [1000 * (index + 2) + i for i in range(prompt)]
        limits = Limits(max_tokens=max_tokens, eos_id=EOS, ignore_eos=ignore_eos)
        return Sequence(request_id=f"r{index}", prompt=prompt, limits=limits, options=index)

    def adopt(
        self, prompt: int | list[int], num_drawn: int, num_written: int, *, num_ahead: int = 0, max_tokens: int = 20
    ) -> tuple[Sequence, bool]:
        """A request with `num_drawn` tokens of output, whose state was kept outside."""
        sequence = self._sequence(prompt, max_tokens, ignore_eos=True)
        num_prompt = len(sequence.prompt)
        sequence.output = [drawn_token(sequence.options, num_prompt + i) for i in range(num_drawn)]
        state_end = num_written + num_ahead
        has_state = self.scheduler.adopt(sequence, num_written, state_end=state_end)
        assert has_state == (sequence.slot >= 0)
        if has_state:
            self.device.restore(sequence, num_written, state_end, self.unread)
            self._begun.add((sequence.request_id, sequence.epoch))
        self._expect(sequence)
        return sequence, has_state

    def fork(self, parent_id: str, *, num_dropped: int = 0, max_tokens: int = 8) -> Sequence:
        parent = self.expected[parent_id].sequence
        index = len(self.expected)
        kept = max(len(parent.prompt), parent.num_tokens - num_dropped)
        limits = Limits(max_tokens=max_tokens, eos_id=EOS, ignore_eos=parent.limits.ignore_eos)
        child = self.scheduler.fork(parent_id, f"r{index}", num_tokens=kept, limits=limits, options=index)
        self._expect(child)
        return child

    def abort(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        self._take_ended()

    def step(self) -> Plan | None:
        """Plans and launches one step, and reads what must be read."""
        plan = self.scheduler.schedule()
        self._take_ended()
        assert plan is not None or self.unread or not self.unfinished, "stuck"
        if plan is not None:
            check_plan(plan, self.config)
            self._count_hits(plan)
            self.unread.append(self.device.run(plan, list(self.unread), self.expected))
            self.num_steps += 1
        while self.unread and (plan is None or len(self.unread) > self.depth):
            self.commit()
        return plan

    def _count_hits(self, plan: Plan) -> None:
        """A prompt that does not begin at its beginning has hit, and that is allowed up to its tail."""
        for chunk in plan.chunks if plan.is_prefill else ():
            key = (chunk.sequence.request_id, chunk.epoch)
            if key not in self._begun and chunk.start > 0:
                assert self.config.prefix_mode != "off" and chunk.end <= chunk.sequence.prefill_len
                assert not self.config.has_tails or chunk.start <= chunk.sequence.tail_start
                self.num_hits, self.num_hit_tokens = self.num_hits + 1, self.num_hit_tokens + chunk.start
            self._begun.add(key)

    def commit(self) -> None:
        """Reads the oldest step."""
        launched = self.unread.popleft()
        tokens = {
            chunk.sequence.request_id: drawn
            for part, of_rank in zip(launched.plan.ranks, launched.drawn, strict=True)
            for chunk, drawn in zip(drawing_of(part), of_rank, strict=True)
        }
        for sequence, taken in self.scheduler.commit(launched.plan, tokens):
            self.expected[sequence.request_id].committed.extend(taken)
        self._take_ended()

    def fail(self, *, state_is_lost: bool) -> None:
        """The oldest step breaks."""
        launched = self.unread.popleft()
        if state_is_lost or launched.plan.num_copies:
            self.device.clear()
            self.num_lost += 1
        else:
            self.device.spoil(launched, self.unread)
        self.scheduler.fail(launched.plan, RuntimeError("broken"), state_is_lost=state_is_lost)
        self._take_ended()

    def flush(self) -> None:
        """Reads every step."""
        while self.unread:
            self.commit()

    def drain(self) -> None:
        """Runs until nothing is left, and checks that everything is free."""
        while self.step() is not None or self.scheduler.num_unfinished:
            pass
        assert self.unfinished == []
        check_invariants(self.scheduler)
        counters = self.scheduler.counters
        assert (counters.prefix_hits, counters.prefix_hit_tokens) == (self.num_hits, self.num_hit_tokens)
        assert counters.prefix_lookups >= counters.prefix_hits
        assert self.scheduler.gauges.pages_used == 0
        self.scheduler.clear_prefix_cache()
        check_invariants(self.scheduler)
        for rank in self.scheduler.ranks:
            assert rank.pages.num_free == self.config.num_pages
            assert rank.states.num_free == self.config.num_slots

    def _expect(self, sequence: Sequence) -> None:
        num_ahead = self.scheduler.ranks[sequence.rank].num_unfinished
        expected = Expected(sequence, tuple(sequence.output), self.num_steps, num_ahead)
        self.expected[sequence.request_id] = expected
        self._take_ended()

    def _take_ended(self) -> None:
        for sequence in self.scheduler.take_ended():
            expected = self.expected[sequence.request_id]
            assert expected.sequence is sequence and not expected.has_ended, "ended twice"
            expected.has_ended = True
            check_end(expected, self.config)
            age, most = self.num_steps - expected.born, self._most_steps(expected)
            assert age <= most, f"it took {age} steps, more than {most}"

    def _most_steps(self, expected: Expected) -> int:
        """No starvation: once the oldest of its rank, a request needs no more than the summands, whatever the others.

        Its turn to begin, after newer forks have ended if those hold the memory; its chunks, with a decode step
        behind each; its tokens, with a prefill step of others behind each.
        """
        config = self.config
        num_chunks = config.max_model_len // max(1, config.max_num_batched_tokens // 2) + 1
        num_chunks += len(expected.sequence.checkpoints) + 1  # the last one is a branch point
        if config.checkpoint_interval:
            num_chunks += config.max_model_len // config.checkpoint_interval
        once = config.prefill_any_interval + 4 * config.max_model_len + 2 * num_chunks + 4
        return (expected.num_ahead + 1) * once * (1 + self.num_lost)


def check_end(expected: Expected, config: SchedulerConfig) -> None:
    """The output is the request's own stream, without a gap or a repetition, up to where it had to end."""
    sequence = expected.sequence
    num_prompt, output = len(sequence.prompt), sequence.output
    assert output == [expected.token(num_prompt + i) for i in range(len(output))]
    assert output == [*expected.inherited, *expected.committed]
    is_at_eos = bool(output) and output[-1] == EOS and not sequence.limits.ignore_eos
    is_full = len(output) >= sequence.limits.max_tokens or sequence.num_tokens > config.max_model_len
    inherited_more = len(expected.inherited) > sequence.limits.max_tokens
    assert len(output) <= sequence.limits.max_tokens or inherited_more
    assert sequence.num_tokens <= max(num_prompt + len(expected.inherited), config.max_model_len + 1)
    assert (sequence.finish_reason == "stop") == is_at_eos
    if sequence.finish_reason == "prompt_length_exceeded":
        assert output == list(expected.inherited)
    else:
        assert (sequence.finish_reason == "length") == (is_full and not is_at_eos)
    assert sequence.slot == -1 and sequence.pages == []
