"""The scheduler alone, driven at random: any order of arrivals, aborts, forks and broken steps, in tiny memory."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_jax.scheduler.policy import SchedulerConfig
from tests.scheduler.checks import check_invariants
from tests.scheduler.device import Loop


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page_tokens = draw(st.sampled_from([2, 4]))
    max_num_seqs = draw(st.integers(1, 4))
    max_decode_rows = draw(st.sampled_from([1, 1, 3, 6]))
    max_model_len = draw(st.integers(4, 40))
    chunk_multiple = draw(st.sampled_from([1, 2, 4]))
    is_chunked = draw(st.booleans())
    least = max(max_num_seqs * max_decode_rows, chunk_multiple, 0 if is_chunked else max_model_len)
    return SchedulerConfig(
        num_kv_tokens=draw(st.integers(page_tokens, 80)),
        page_tokens=page_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=draw(st.integers(least, least + 12)),
        num_ranks=draw(st.integers(1, 2)),
        max_prompts=draw(st.integers(1, 4)),
        max_decode_rows=max_decode_rows,
        chunk_multiple=chunk_multiple,
        is_chunked=is_chunked,
        prefill_interval=draw(st.integers(1, 4)),
        prefill_any_interval=draw(st.integers(1, 6)),
        prefill_max_key_tokens=draw(st.sampled_from([8, 2**30])),
        stops_preempted=draw(st.booleans()),
        prefix_mode=draw(st.sampled_from(["exact", "exact", "replay", "off"])),
        num_snapshots=draw(st.integers(1, 5)),
        snapshot_interval=page_tokens * draw(st.integers(1, 6)),
        replay_rows=draw(st.integers(0, 5)),
        has_tails=draw(st.sampled_from([False, False, True])),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Loop checks every row, every plan and every end; the invariants are checked between any two calls."""

    @initialize(config=configs(), depth=st.integers(0, 1), seed=st.integers(0, 2**16))
    def start(self, config: SchedulerConfig, depth: int, seed: int):
        self.loop = Loop(config, depth=depth, seed=seed)

    def pick(self, index: int) -> str:
        unfinished = self.loop.unfinished
        return unfinished[index % len(unfinished)]

    def has_unfinished(self) -> bool:
        return bool(self.loop.unfinished)

    def has_unread(self) -> bool:
        return bool(self.loop.unread)

    def has_any(self) -> bool:
        return bool(self.loop.expected)

    @rule(prompt_len=st.integers(1, 44), max_tokens=st.integers(1, 12), ignore_eos=st.booleans())
    def add_long(self, prompt_len: int, max_tokens: int, ignore_eos: bool):
        self.loop.add(prompt_len, max_tokens, ignore_eos=ignore_eos)

    @rule(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), max_tokens=st.integers(1, 30))
    def add_short(self, lengths: list[int], max_tokens: int):
        for length in lengths:
            self.loop.add(length, max_tokens, ignore_eos=True)

    @rule(
        family=st.integers(0, 1),
        common=st.integers(0, 30),
        own=st.integers(0, 9),
        tail_start=st.integers(0, 40),
        checkpoints=st.sets(st.integers(1, 40), max_size=2),
    )
    def add_relative(self, family: int, common: int, own: int, tail_start: int, checkpoints: set[int]):
        """A prompt that begins like others of its family."""
        prompt = [5000 + 100 * family + i for i in range(common)] + [7000 + own] * own
        self.loop.add(prompt or [7000], own + 1, ignore_eos=True, tail_start=tail_start, checkpoints=checkpoints)

    @precondition(has_any)
    @rule(
        index=st.integers(0, 99),
        num_dropped=st.sampled_from([0, 0, 1, 3, 9]),
        own=st.sampled_from([0, 1, 4]),
        with_output=st.booleans(),
        max_tokens=st.integers(1, 9),
    )
    def add_turn(self, index: int, num_dropped: int, own: int, with_output: bool, max_tokens: int):
        """The next turn behind any request, or the same prompt again."""
        earlier = list(self.loop.expected.values())[-1 - index % min(8, len(self.loop.expected))].sequence
        known = [*earlier.prompt, *(earlier.output if with_output else ())]
        prompt = known[: max(1, len(known) - num_dropped)] + [8000 + own] * own
        self.loop.add(prompt, max_tokens, ignore_eos=True, tail_start=max(1, len(prompt) - 3))

    @rule(
        prompt_len=st.integers(1, 30),
        num_drawn=st.integers(0, 6),
        num_missing=st.sampled_from([1, 1, 2, 5]),
        num_ahead=st.sampled_from([0, 0, 2, 6]),
    )
    def adopt(self, prompt_len: int, num_drawn: int, num_missing: int, num_ahead: int):
        num_written = max(1, prompt_len + num_drawn - num_missing)
        if num_written < prompt_len + num_drawn:
            prompt = [5000 + i for i in range(prompt_len)]
            self.loop.adopt(prompt, num_drawn, num_written, num_ahead=num_ahead)

    @rule()
    def clear_prefix_cache(self):
        self.loop.scheduler.clear_prefix_cache()

    @precondition(has_unfinished)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int):
        self.loop.abort(self.pick(index))

    @rule()
    def abort_running(self):
        for rank in self.loop.scheduler.ranks:
            for sequence in tuple(rank.running):
                self.loop.abort(sequence.request_id)

    @precondition(has_unfinished)
    @rule(
        index=st.integers(0, 99),
        drops=st.lists(st.sampled_from([0, 0, 1, 3, 9]), min_size=1, max_size=3),
        max_tokens=st.integers(1, 30),
    )
    def fork(self, index: int, drops: list[int], max_tokens: int):
        """A fork, and forks of that fork before it has run."""
        request_id = self.pick(index)
        for num_dropped in drops:
            child = self.loop.fork(request_id, num_dropped=num_dropped, max_tokens=max_tokens)
            if child.finish_reason:
                return
            request_id = child.request_id

    @rule(count=st.integers(1, 12))
    def run(self, count: int):
        for _ in range(count):
            self.loop.step()
            check_invariants(self.loop.scheduler)

    @rule()
    def run_one(self):
        self.loop.step()

    @precondition(has_unread)
    @rule()
    def flush(self):
        self.loop.flush()

    @precondition(has_unread)
    @rule(state_is_lost=st.booleans())
    def fail(self, state_is_lost: bool):
        self.loop.fail(state_is_lost=state_is_lost)

    @invariant()
    def adds_up(self):
        if hasattr(self, "loop"):
            check_invariants(self.loop.scheduler)

    def teardown(self):
        if hasattr(self, "loop"):
            self.loop.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    derandomize=True,  # the default run does not depend on luck
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("max_decode_rows", [1, 6], ids=["plain", "drafts"])
@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_thousands_of_steps_under_overload(depth: int, max_decode_rows: int, seed_from_name: int):
    """More arrivals than the memory can serve for 1,500 steps: each is served in turn, and nothing stays behind."""
    rng = random.Random(seed_from_name)
    config = SchedulerConfig(
        num_kv_tokens=96,
        page_tokens=4,
        max_num_seqs=6,
        max_model_len=48,
        max_num_batched_tokens=36,
        max_decode_rows=max_decode_rows,
        prefill_interval=7,
        prefill_any_interval=10,
    )
    loop = Loop(config, depth=depth, seed=seed_from_name)
    for _ in range(1500):
        if rng.random() < 0.25 and len(loop.unfinished) < 40:
            loop.add(rng.randint(1, 40), rng.randint(1, 30), ignore_eos=rng.random() < 0.5)
        if rng.random() < 0.06 and loop.unfinished:
            loop.fork(rng.choice(loop.unfinished), max_tokens=rng.randint(1, 20))
        if rng.random() < 0.02 and loop.unfinished:
            loop.abort(rng.choice(loop.unfinished))
        loop.step()
        check_invariants(loop.scheduler)
    loop.drain()
    counters = loop.scheduler.counters
    assert min(counters.preemptions, counters.forks_copied, counters.forks_queued) > 0
    assert counters.ended == len(loop.expected)


@pytest.mark.parametrize("max_decode_rows", [1, 3], ids=["plain", "drafts"])
@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_forks_in_ample_memory_take_over_pages_and_rings(depth: int, max_decode_rows: int, seed_from_name: int):
    """Trees of forks, some from several tokens back and some of forks that have not run, with broken steps between."""
    rng = random.Random(seed_from_name)
    config = SchedulerConfig(
        num_kv_tokens=2000,
        page_tokens=4,
        max_num_seqs=16,
        max_model_len=60,
        max_num_batched_tokens=64,
        max_decode_rows=max_decode_rows,
        prefill_interval=3,
    )
    loop = Loop(config, depth=depth, seed=seed_from_name)
    for _ in range(350):
        if len(loop.unfinished) < 6:
            loop.add(rng.randint(1, 20), 40, ignore_eos=True)
        while rng.random() < 0.5 and len(loop.unfinished) < 14:
            parent_id = rng.choice(loop.unfinished[-3:])
            loop.fork(parent_id, num_dropped=rng.choice([0, 1, 3, 6, 9]), max_tokens=rng.randint(20, 40))
        if rng.random() < 0.1:
            loop.abort(rng.choice(loop.unfinished))
        if rng.random() < 0.05 and loop.unread:
            loop.fail(state_is_lost=False)
        loop.step()
        check_invariants(loop.scheduler)
    loop.drain()
    assert min(loop.scheduler.counters.forks_copied, loop.scheduler.counters.forks_queued) > 25
