"""A device for scheduler tests, and the loop around it: every row is checked against what the request should be.

The device keeps, instead of caches, the token whose row was written at each place. A draw looks at every position of
its context through the page table, and at the last ones through the slot's ring, so a page or slot in wrong hands, a
copy that is missing and a row at a wrong position all show.
"""

import dataclasses
import random
import zlib
from collections import deque

from deepinfer_jax.scheduler.plan import Chunk, Plan, RankPlan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Limits, Sequence

EOS = 1
WINDOW = 4
JUNK = -7  # a draft that is rejected


def drawn_token(seed: int, position: int) -> int:
    """The token that a request of this seed draws for a position: EOS in one of 16 cases."""
    noise = zlib.crc32(f"{seed} {position}".encode())
    return EOS if noise % 16 == 0 else 2 + noise % 1000


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


class Device:
    """Pages and rings of all ranks."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler, self._config = scheduler, scheduler.config
        self._rng = random.Random(seed)
        self.clear()

    def clear(self) -> None:
        """Loses all state."""
        self._pages: dict[tuple[int, int], dict[int, int]] = {}  # (rank, page) -> offset -> token
        self._rings: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # (rank, slot) -> place -> position, token

    def run(self, plan: Plan, unread: list[Launched], expected: dict[str, Expected]) -> Launched:
        """The copies of each rank, all read before one writes, then its rows."""
        launched = Launched(plan, [], {})
        for rank, part in enumerate(plan.ranks):
            pages = {copy.target_page: dict(self._pages.get((rank, copy.source_page), {})) for copy in part.copies}
            rings = {copy.target_slot: dict(self._rings.get((rank, copy.source_slot), {})) for copy in part.copies}
            pages.pop(-1, None)
            self._pages.update({(rank, page): content for page, content in pages.items()})
            self._rings.update({(rank, slot): content for slot, content in rings.items()})
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
        if chunk.draw_source >= 0:
            front = unread[-1]
            source = front.plan.ranks[rank].drawing[chunk.draw_source]
            kept = front.drawn[rank][chunk.draw_source]
            assert (source.sequence, source.epoch) == (chunk.sequence, chunk.epoch)
            start -= 0 if front.plan.is_prefill else source.length - len(kept)
            tokens = kept[-1:]
        num_kept = chunk.length if plan.is_prefill else self._rng.randint(1, chunk.length)
        if not plan.is_prefill:
            assert len(tokens) == 1
            tokens += [expected.token(start + i) if i < num_kept else JUNK for i in range(1, chunk.length)]
        assert len(tokens) == chunk.length
        for position, token in enumerate(tokens, start=start):
            self._write(chunk.sequence.slot, rank, position, token)
        if not chunk.draws:
            return []
        self._check_context(chunk.sequence.slot, rank, start + num_kept, expected)
        first = start + num_kept if plan.is_prefill else start + 1
        assert chunk.draw_position - chunk.start == first - start
        return [expected.token(position) for position in range(first, start + num_kept + 1)]

    def _write(self, slot: int, rank: int, position: int, token: int) -> None:
        page_tokens = self._config.page_tokens
        page = int(self._scheduler.ranks[rank].page_table[slot, position // page_tokens])
        assert page >= 0, "a row has no page"
        self._pages.setdefault((rank, page), {})[position % page_tokens] = token
        ring_len = WINDOW + self._config.rollback_tokens
        self._rings.setdefault((rank, slot), {})[position % ring_len] = (position, token)

    def _check_context(self, slot: int, rank: int, length: int, expected: Expected) -> None:
        page_tokens, ring_len = self._config.page_tokens, WINDOW + self._config.rollback_tokens
        table = self._scheduler.ranks[rank].page_table[slot]
        for position in range(length):
            content = self._pages[rank, int(table[position // page_tokens])]
            assert content[position % page_tokens] == expected.token(position), "a page holds another token"
        for position in range(max(0, length - WINDOW), length):
            assert self._rings[rank, slot][position % ring_len] == (position, expected.token(position)), "wrong ring"


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

    @property
    def unfinished(self) -> list[str]:
        return [request_id for request_id, expected in self.expected.items() if not expected.has_ended]

    def add(self, prompt_len: int, max_tokens: int, *, ignore_eos: bool = False, rank: int | None = None) -> Sequence:
        index = len(self.expected)
        prompt = [1000 * (index + 2) + i for i in range(prompt_len)]
        limits = Limits(max_tokens=max_tokens, eos_id=EOS, ignore_eos=ignore_eos)
        sequence = Sequence(request_id=f"r{index}", prompt=prompt, limits=limits, options=index)
        self.scheduler.add(sequence, rank=rank)
        self._expect(sequence)
        return sequence

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
            self.unread.append(self.device.run(plan, list(self.unread), self.expected))
            self.num_steps += 1
        while self.unread and (plan is None or len(self.unread) > self.depth):
            self.commit()
        return plan

    def commit(self) -> None:
        """Reads the oldest step."""
        launched = self.unread.popleft()
        tokens = {
            chunk.sequence.request_id: drawn
            for part, of_rank in zip(launched.plan.ranks, launched.drawn, strict=True)
            for chunk, drawn in zip(part.drawing, of_rank, strict=True)
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
        once = config.prefill_any_interval + 4 * config.max_model_len + 2 * num_chunks + 4
        return (expected.num_ahead + 1) * once * (1 + self.num_lost)


def check_plan(plan: Plan, config: SchedulerConfig) -> None:
    """Budgets and kinds."""
    ids = [chunk.sequence.request_id for chunk in plan.chunks]
    assert ids and len(set(ids)) == len(ids)
    assert not any(chunk.is_stale for chunk in plan.chunks)
    for part in plan.ranks:
        assert part.num_rows <= config.max_num_batched_tokens
        _check_part(part, plan.is_prefill, config)


def _check_part(part: RankPlan, is_prefill: bool, config: SchedulerConfig) -> None:
    assert all(chunk.length > 0 and chunk.end <= config.max_model_len for chunk in part.chunks)
    if not is_prefill:
        assert all(chunk.draws and chunk.length <= config.max_decode_rows for chunk in part.chunks)
        return
    assert len(part.drawing) <= config.max_prompts_ended
    assert len(part.chunks) <= 1 or sum(chunk.end for chunk in part.chunks) <= config.prefill_max_key_tokens
    arrivals = [chunk.sequence.arrival for chunk in part.chunks]
    assert arrivals == sorted(arrivals)
    for chunk in part.chunks:
        assert chunk.draws == (chunk.end == chunk.sequence.prefill_len)
        assert chunk.draws or (config.is_chunked and chunk.end % config.chunk_multiple == 0)


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
    assert sequence.num_tokens <= max(num_prompt, config.max_model_len + 1)
    assert (sequence.finish_reason == "stop") == is_at_eos
    if sequence.finish_reason == "prompt_length_exceeded":
        assert output == []
    else:
        assert (sequence.finish_reason == "length") == (is_full and not is_at_eos)
    assert sequence.slot == -1 and sequence.pages == []


def check_invariants(scheduler: Scheduler) -> None:
    """Who holds what adds up."""
    config = scheduler.config
    assert scheduler.num_unfinished == sum(rank.num_unfinished for rank in scheduler.ranks)
    for rank in scheduler.ranks:
        holders = [0] * config.num_pages
        for sequence in rank.running:
            assert len(set(sequence.pages)) == len(sequence.pages)
            for page in sequence.pages:
                holders[page] += 1
        assert holders == [rank.pages.num_holders(page) for page in range(config.num_pages)]
        assert rank.pages.num_free == holders.count(0)
        slots = {sequence.slot for sequence in rank.running}
        assert len(slots) == len(rank.running) == rank.states.num_used <= config.max_num_seqs
        assert -1 not in slots and not slots & rank.states.quarantined
        assert rank.states.num_free + len(slots) + len(rank.states.quarantined) == config.num_slots
        assert all(sequence.slot == -1 and not sequence.pages for sequence in rank.waiting)
        for queue in (rank.waiting, rank.running):
            arrivals = [sequence.arrival for sequence in queue]
            assert arrivals == sorted(arrivals)
        _check_table(rank.page_table.tolist(), {sequence.slot: sequence.pages for sequence in rank.running})


def _check_table(table: list[list[int]], pages_of_slot: dict[int, list[int]]) -> None:
    for slot, row in enumerate(table):
        pages = pages_of_slot.get(slot, [])
        assert row == pages + [-1] * (len(row) - len(pages))
