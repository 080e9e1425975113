"""The scheduler's promises, one by one. test_scheduler_machine.py drives them all at random."""

import subprocess
import sys

import pytest

from deepinfer_jax.scheduler.plan import Plan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Copy, Limits, Sequence
from tests.scheduler.checks import check_invariants
from tests.scheduler.device import EOS, Loop


def config_of(**changes) -> SchedulerConfig:
    sizes = {"num_kv_tokens": 400, "page_tokens": 4, "max_num_seqs": 4, "max_model_len": 100}
    return SchedulerConfig(**(sizes | {"max_num_batched_tokens": 8} | changes))


def loop_of(*, depth: int = 0, **changes) -> Loop:
    return Loop(config_of(**changes), depth=depth)


def rows_of(plan: Plan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in plan.chunks]


def kinds_of(loop: Loop, count: int) -> str:
    """P or D for each of the next steps, - where there is none."""
    plans = [loop.step() for _ in range(count)]
    return "".join("-" if plan is None else "P" if plan.is_prefill else "D" for plan in plans)


def sequence_of(request_id: str, prompt_len: int = 3, *, max_tokens: int = 5, ignore_eos: bool = False) -> Sequence:
    limits = Limits(max_tokens=max_tokens, eos_id=EOS, ignore_eos=ignore_eos)
    return Sequence(request_id=request_id, prompt=list(range(50, 50 + prompt_len)), limits=limits)


# Prefill and decode.


def test_prompts_share_a_prefill_step_in_order_and_the_last_is_cut():
    loop = loop_of()
    for prompt_len in (5, 6, 2):
        loop.add(prompt_len, 2, ignore_eos=True)
    assert [rows_of(loop.step()) for _ in range(4)] == [
        [("r0", 0, 5), ("r1", 0, 3)],
        [("r0", 5, 1)],
        [("r1", 3, 3), ("r2", 0, 2)],
        [("r1", 6, 1), ("r2", 2, 1)],
    ]
    loop.drain()


def test_a_long_prompt_stalls_running_requests_by_one_chunk_at_a_time():
    loop = loop_of()
    loop.add(2, 30, ignore_eos=True)
    assert kinds_of(loop, 2) == "PD"
    loop.add(40, 1, ignore_eos=True)
    assert kinds_of(loop, 10) == "PDPDPDPDPD"
    loop.drain()


@pytest.mark.parametrize(
    "num_ranks, busy_ranks, num_decodes",
    [(1, (0,), 5), (2, (0,), 9), (2, (0, 1), 5)],
    ids=["one rank", "any rank", "all ranks"],
)
def test_prompts_that_come_later_wait_for_the_interval(num_ranks, busy_ranks, num_decodes):
    loop = loop_of(num_ranks=num_ranks, prefill_interval=5, prefill_any_interval=9)
    for rank in range(num_ranks):
        loop.add(1, 50, ignore_eos=True, rank=rank)
    assert kinds_of(loop, 3) == "PDD"
    for rank in busy_ranks:
        loop.add(1, 2, ignore_eos=True, rank=rank)
    assert kinds_of(loop, num_decodes - 1) == "D" * (num_decodes - 2) + "P"
    loop.drain()


def test_a_prompt_that_comes_after_many_decode_steps_does_not_wait():
    loop = loop_of(prefill_interval=5)
    loop.add(1, 50, ignore_eos=True)
    assert kinds_of(loop, 7) == "PDDDDDD"
    loop.add(1, 2)
    assert kinds_of(loop, 1) == "P"


def test_prefill_is_tried_at_once_when_nothing_else_can_be_done():
    loop = loop_of(prefill_interval=50)
    loop.add(1, 3, ignore_eos=True)
    assert kinds_of(loop, 3) == "PDD"
    loop.add(1, 2, ignore_eos=True)
    assert kinds_of(loop, 2) == "PD"


def test_no_new_prompt_above_ninety_percent_of_the_pages():
    loop = loop_of(num_kv_tokens=40, prefill_interval=1)
    loop.add(33, 7, ignore_eos=True)  # 9 of 10 pages
    assert kinds_of(loop, 6) == "PPPPPD"
    loop.add(1, 1)  # 90 % are not more than 90 %
    assert kinds_of(loop, 1) == "P"
    while loop.scheduler.ranks[0].pages.num_used < 10:
        loop.step()
    late = loop.add(1, 1)
    while loop.scheduler.get("r0"):
        assert kinds_of(loop, 1) == "D"
        assert late.slot == -1
    assert kinds_of(loop, 1) == "P"
    loop.drain()


def test_chunks_end_at_multiples_except_the_last():
    loop = loop_of(chunk_multiple=3)
    loop.add(16, 1)
    loop.add(5, 1)
    assert [rows_of(loop.step()) for _ in range(4)] == [
        [("r0", 0, 6)],  # 2 rows are left, too few for a multiple
        [("r0", 6, 6)],
        [("r0", 12, 4), ("r1", 0, 3)],
        [("r1", 3, 2)],
    ]


def test_whole_prompts_only_without_chunks():
    loop = loop_of(is_chunked=False, max_model_len=8)
    loop.add(5, 1)
    loop.add(6, 1)
    assert [rows_of(loop.step()) for _ in range(2)] == [[("r0", 0, 5)], [("r1", 0, 6)]]


def test_a_prefill_step_has_no_more_prompts_than_it_has_room_for():
    loop = loop_of(max_prompts=2)
    for _ in range(4):
        loop.add(1, 1)
    assert [len(rows_of(loop.step())) for _ in range(2)] == [2, 2]


def test_summed_key_lengths_of_a_prefill_are_capped_except_for_its_first_chunk():
    loop = loop_of(prefill_max_key_tokens=10)
    for prompt_len in (12, 6, 4, 1):
        loop.add(prompt_len, 1)
    assert [rows_of(loop.step()) for _ in range(3)] == [
        [("r0", 0, 8)],
        [("r0", 8, 4)],  # 12 keys alone
        [("r1", 0, 6), ("r2", 0, 2)],
    ]


def test_ranks_share_a_plan_and_the_largest_gives_the_sizes():
    loop = loop_of(num_ranks=2)
    ranks = [loop.add(prompt_len, 3, ignore_eos=True).rank for prompt_len in (6, 2, 1)]
    assert ranks == [0, 1, 0]  # to the rank with the fewest, the lowest of equals
    plan = loop.step()
    assert plan is not None
    assert [part.num_rows for part in plan.ranks] == [7, 2]
    assert (plan.num_rows, plan.num_logits, plan.context_len) == (7, 2, 6)
    loop.add(3, 1, rank=1)
    assert [len(part.chunks) for part in (loop.step() or plan).ranks] == [2, 1]
    loop.drain()


# Memory.


def test_the_newest_gives_way_and_the_oldest_is_never_computed_twice():
    loop = loop_of(num_kv_tokens=40, max_num_batched_tokens=32)
    sequences = [loop.add(8, 20, ignore_eos=True) for _ in range(3)]
    order = []
    while loop.scheduler.num_unfinished:
        loop.step()
        order += [
            s.request_id for s in sequences if loop.expected[s.request_id].has_ended and s.request_id not in order
        ]
    assert order == ["r0", "r1", "r2"]
    assert sequences[0].epoch == 1  # its end
    assert sequences[2].epoch > 1
    assert loop.scheduler.counters.preemptions == sum(s.epoch - 1 for s in sequences) > 0
    assert all(s.finish_reason == "length" and len(s.output) == 20 for s in sequences)


def test_a_preempted_request_ends_where_that_is_asked_for():
    loop = loop_of(num_kv_tokens=40, max_num_batched_tokens=32, stops_preempted=True)
    sequences = [loop.add(8, 20, ignore_eos=True) for _ in range(3)]
    loop.drain()
    assert [s.finish_reason for s in sequences] == ["length", *["insufficient_system_resource"] * 2]
    assert 0 < len(sequences[2].output) <= len(sequences[1].output) < 20


def test_a_preempted_request_goes_back_in_front_of_later_ones():
    loop = loop_of(num_kv_tokens=24, max_num_seqs=2)
    old, new = (loop.add(4, 18, ignore_eos=True) for _ in range(2))
    late = loop.add(4, 1, ignore_eos=True)
    while new.epoch == 0:
        loop.step()
    assert list(loop.scheduler.ranks[0].waiting) == [new, late]
    assert not loop.expected[old.request_id].has_ended
    loop.drain()


@pytest.mark.parametrize("prompt_len, num_kv_tokens", [(101, 400), (41, 40)], ids=["model length", "pages"])
def test_a_prompt_that_can_never_fit_ends_at_once(prompt_len, num_kv_tokens):
    loop = loop_of(num_kv_tokens=num_kv_tokens)
    sequence = loop.add(prompt_len, 5)
    assert (sequence.finish_reason, sequence.output) == ("prompt_length_exceeded", [])
    assert loop.step() is None


def test_the_longest_prompt_that_fits_gives_one_token():
    loop = loop_of()
    sequence = loop.add(100, 5, ignore_eos=True)
    loop.drain()
    assert (sequence.finish_reason, len(sequence.output)) == ("length", 1)


def test_a_request_that_outgrows_all_memory_ends_and_the_next_is_served():
    loop = loop_of(num_kv_tokens=12)
    greedy, small = loop.add(6, 50, ignore_eos=True), loop.add(3, 2, ignore_eos=True)
    loop.drain()
    assert (greedy.finish_reason, len(greedy.output)) == ("insufficient_system_resource", 7)  # 12 rows, 13 tokens
    assert small.finish_reason == "length"


def test_slot_of_an_unread_step_is_not_used_again():
    loop = loop_of(depth=1, max_num_seqs=1, max_num_batched_tokens=1, state_slots_ratio=1.0)
    assert loop.config.num_slots == 2
    loop.add(1, 9, ignore_eos=True)
    loop.step()
    loop.abort("r0")  # its step is launched
    assert loop.scheduler.ranks[0].states.quarantined == {0}
    second = loop.add(1, 9, ignore_eos=True)
    loop.step()
    assert second.slot == 1
    assert loop.scheduler.ranks[0].states.quarantined == frozenset()  # the first step has been read
    loop.drain()


# Results.


@pytest.mark.parametrize(
    "tokens, ignore_eos, max_model_len, kept, reason",
    [
        ([9, 9], False, 100, 2, ""),
        ([9, EOS, 9], False, 100, 2, "stop"),
        ([9, EOS, 9], True, 100, 3, ""),
        ([9, 9, 9, EOS, 9], False, 100, 4, "stop"),  # the end token wins over the length
        ([9, 9, 9, 9, 9], False, 100, 4, "length"),
        ([9, 9, 9], False, 5, 2, "length"),
    ],
    ids=["goes on", "eos", "ignored eos", "eos at the end", "max_tokens", "max_model_len"],
)
def test_what_follows_the_last_token_of_a_step_is_cut_off(tokens, ignore_eos, max_model_len, kept, reason):
    scheduler = Scheduler(config_of(max_decode_rows=5, max_num_batched_tokens=20, max_model_len=max_model_len))
    sequence = sequence_of("a", ignore_eos=ignore_eos)
    scheduler.add(sequence)
    commit_next(scheduler, {"a": [9]})
    plan = scheduler.schedule()
    assert plan is not None
    tokens = tokens[: plan.chunks[0].length]
    assert scheduler.commit(plan, {"a": tokens}) == [(sequence, tuple(tokens[:kept]))]
    assert sequence.output == [9, *tokens[:kept]]
    assert sequence.finish_reason == reason
    assert scheduler.take_ended() == ([sequence] if reason else [])
    assert scheduler.take_ended() == []


def commit_next(scheduler: Scheduler, tokens: dict[str, list[int]]) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, tokens)
    return plan


def test_lengths_are_corrected_when_a_step_keeps_fewer_rows():
    scheduler = Scheduler(config_of(max_decode_rows=3, max_num_batched_tokens=12))
    sequence = sequence_of("a", max_tokens=50)
    scheduler.add(sequence)
    commit_next(scheduler, {"a": [9]})
    first = scheduler.schedule()
    second = scheduler.schedule()  # before the first is read: as if it kept all its rows
    assert rows_of(first) == [("a", 3, 3)]
    assert rows_of(second) == [("a", 6, 3)]
    assert first is not None and second is not None
    assert [(c.follows, c.output_index) for c in (*first.chunks, *second.chunks)] == [(False, 1), (True, 4)]
    scheduler.commit(first, {"a": [9]})
    assert (sequence.num_written, sequence.num_scheduled) == (4, 7)
    scheduler.commit(second, {"a": [9, 9]})
    assert (sequence.num_written, sequence.num_scheduled, sequence.num_tokens) == (6, 6, 7)
    assert rows_of(scheduler.schedule()) == [("a", 6, 3)]


def test_next_step_takes_its_token_from_the_unread_one():
    scheduler = Scheduler(config_of())
    for name in ("a", "b"):
        scheduler.add(sequence_of(name, 2))
    prefill = scheduler.schedule()
    decode = scheduler.schedule()
    assert prefill is not None and decode is not None
    assert [(c.start, c.draws, c.follows, c.draw_position, c.output_index) for c in prefill.chunks] == [
        (0, True, False, 2, 0)
    ] * 2
    assert [(c.start, c.draws, c.follows, c.draw_position, c.output_index) for c in decode.chunks] == [
        (2, True, True, 3, 1),
        (2, True, True, 3, 1),
    ]
    with pytest.raises(ValueError, match="2 plans are unread; commit plan 0 first"):
        scheduler.schedule()
    scheduler.commit(prefill, {"a": [9], "b": [EOS]})
    scheduler.commit(decode, {"a": [8], "b": [7]})  # b's row was launched before its end was known
    assert [s.output for s in scheduler.take_ended()] == [[EOS]]
    assert scheduler.counters.results_dropped == 1
    plan = scheduler.schedule()
    assert plan is not None
    assert [(c.follows, list(c.sequence.tokens_from(c.start, c.length))) for c in plan.chunks] == [(False, [8])]


def test_no_row_is_launched_for_a_token_that_cannot_be_kept():
    loop = loop_of(depth=1)
    loop.add(2, 3, ignore_eos=True)
    assert kinds_of(loop, 4) == "PDD-"
    assert loop.scheduler.counters.results_dropped == 0


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 4, 6], ids=["waiting", "first chunk", "prompt done", "decode", "later"])
def test_abort_in_each_state_frees_everything(num_steps, depth):
    loop = loop_of(depth=depth)
    loop.add(20, 9, ignore_eos=True)
    other = loop.add(2, 9, ignore_eos=True)
    for _ in range(num_steps):
        loop.step()
    loop.abort("r0")
    check_invariants(loop.scheduler)
    assert loop.expected["r0"].sequence.finish_reason == "abort"
    loop.drain()
    assert other.finish_reason == "length"
    assert not loop.scheduler.abort("r0")


def test_abort_of_a_preempted_request_keeps_its_tokens():
    loop = loop_of(num_kv_tokens=24, max_num_seqs=2, depth=1)
    new = [loop.add(4, 18, ignore_eos=True) for _ in range(2)][1]
    while new.epoch == 0:
        loop.step()
    num_known = len(new.output)
    loop.abort(new.request_id)
    loop.drain()
    assert len(new.output) == num_known > 0


def test_end_carries_any_reason():
    scheduler = Scheduler(config_of())
    sequence, error = sequence_of("a"), TimeoutError("grammar")
    scheduler.add(sequence)
    assert scheduler.end("a", "xgrammar runtime errors or timeout", error=error)
    assert scheduler.take_ended() == [sequence]
    assert (sequence.finish_reason, sequence.error) == ("xgrammar runtime errors or timeout", error)


# Broken steps.


def test_a_broken_step_ends_its_own_requests_only():
    loop = loop_of(max_num_seqs=1)
    first, second = (loop.add(3, 3, ignore_eos=True) for _ in range(2))
    loop.depth = 1
    loop.step()
    loop.fail(state_is_lost=False)
    assert (first.finish_reason, str(first.error)) == ("abort", "broken")
    loop.drain()
    assert (second.finish_reason, second.error) == ("length", None)


def lose_everything(loop: Loop) -> Sequence:
    """The prefill of a new request breaks, and the state with it."""
    loop.depth = 1
    broken = loop.add(2, 2)
    loop.step()
    loop.fail(state_is_lost=True)
    assert broken.finish_reason == "abort"
    return broken


def test_the_others_are_computed_again_when_the_state_is_lost():
    loop = loop_of(prefill_interval=1)
    survivor = loop.add(6, 9, ignore_eos=True)
    for _ in range(3):
        loop.step()
    lose_everything(loop)
    assert (survivor.slot, survivor.prefill_len, survivor.num_tokens) == (-1, 9, 9)
    loop.drain()
    assert (survivor.finish_reason, len(survivor.output)) == ("length", 9)


def test_forks_are_computed_again_when_the_step_that_copies_for_them_breaks():
    loop, parent, child = forked(9, 2, prefill_interval=1)
    loop.depth = 1
    loop.add(2, 2)
    plan = loop.step()
    assert plan is not None and plan.is_prefill and plan.num_copies == 1
    loop.fail(state_is_lost=False)
    assert parent.slot == child.slot == -1
    loop.drain()


# Forks.


def forked(prompt_len: int, num_steps: int, **changes) -> tuple[Loop, Sequence, Sequence]:
    """A request after some steps, and its fork."""
    loop = loop_of(**({"max_num_batched_tokens": 16} | changes))
    parent = loop.add(prompt_len, 30, ignore_eos=True)
    parent.tail_start = 3
    for _ in range(num_steps):
        loop.step()
    return loop, parent, loop.fork(parent.request_id)


def test_fork_shares_full_pages_and_copies_the_open_one_and_the_state():
    loop, parent, child = forked(9, 2)
    assert (parent.num_tokens, child.num_tokens, child.num_written) == (11, 11, 10)
    assert child.pages[:2] == parent.pages[:2] and child.pages[2] != parent.pages[2]
    plan = loop.step()
    assert plan is not None
    assert plan.ranks[0].copies == (Copy(parent.slot, child.slot, parent.pages[2], child.pages[2]),)
    assert rows_of(plan) == [("r0", 10, 1), ("r1", 10, 1)]
    assert not (loop.step() or plan).num_copies
    loop.drain()
    assert child.output[:2] == parent.output[:2] and child.output != parent.output


def test_fork_at_a_page_border_copies_the_state_only():
    loop, parent, child = forked(8, 1)
    assert child.pages == parent.pages and len(child.pages) == 2
    assert child.pending_copy == Copy(parent.slot, child.slot, -1, -1)
    loop.drain()


def test_fork_while_a_step_is_unread_starts_from_the_tokens_that_are_known():
    loop, parent, child = forked(9, 3, depth=1)
    assert loop.unread and parent.num_scheduled > child.num_written == parent.num_tokens - 1
    assert loop.scheduler.counters.forks_copied == 1
    loop.drain()


def test_fork_of_a_fork_reads_the_state_where_it_still_is():
    loop, parent, child = forked(9, 2)
    grandchild = loop.fork(child.request_id)
    assert grandchild.pending_copy == Copy(parent.slot, grandchild.slot, parent.pages[2], grandchild.pages[2])
    loop.abort(parent.request_id)
    loop.abort(child.request_id)
    plan = loop.step()
    assert plan is not None and len(plan.ranks[0].copies) == 1
    loop.drain()
    assert grandchild.finish_reason == "length"


def test_fork_that_ends_before_the_next_step_copies_nothing():
    loop, _, child = forked(9, 2)
    loop.abort(child.request_id)
    plan = loop.step()
    assert plan is not None and plan.num_copies == 0
    loop.drain()


@pytest.mark.parametrize("num_dropped, is_copied", [(0, True), (6, True), (7, False)])
def test_fork_further_back_than_the_rings_reach_is_computed_again(num_dropped, is_copied):
    loop = loop_of(max_num_batched_tokens=16)
    parent = loop.add(9, 30, ignore_eos=True)
    for _ in range(10):
        loop.step()
    child = loop.fork(parent.request_id, num_dropped=num_dropped, max_tokens=12)
    assert (child.slot >= 0) == is_copied
    assert child.num_tokens == parent.num_tokens - num_dropped
    loop.drain()


def test_rejected_rows_count_when_a_fork_goes_back():
    scheduler = Scheduler(config_of(max_decode_rows=6, max_num_batched_tokens=24))
    parent = sequence_of("a", 3, max_tokens=50)
    scheduler.add(parent)
    commit_next(scheduler, {"a": [9]})
    commit_next(scheduler, {"a": [9]})  # rows 3 to 8 were written, row 3 is kept
    assert (parent.num_written, parent.state_end) == (4, 9)
    near = scheduler.fork("a", "b", num_tokens=4)
    assert near.slot >= 0 and near.state_end == 9
    assert scheduler.fork("a", "c", num_tokens=3).slot == -1  # 7 positions back
    scheduler.abort("c")
    assert scheduler.fork("b", "d", num_tokens=3).slot == -1  # its state comes from the same ring


@pytest.mark.parametrize(
    "prompt_len, num_steps, depth",
    [(30, 0, 0), (30, 1, 0), (9, 1, 1)],
    ids=["waiting", "in prefill", "prompt unread"],
)
def test_fork_of_a_request_without_its_prompt_waits_like_any_other(prompt_len, num_steps, depth):
    loop, _, child = forked(prompt_len, num_steps, depth=depth)
    assert child.slot == -1
    assert loop.scheduler.counters.forks_queued == 1
    loop.drain()


def test_slot_of_a_fork_is_in_quarantine_while_its_copy_is_unread():
    loop, _, child = forked(9, 2, prefill_interval=1)
    slot = child.slot
    loop.depth = 1
    loop.add(2, 2)
    plan = loop.step()
    assert plan is not None and plan.num_copies == 1 and "r1" not in [name for name, _, _ in rows_of(plan)]
    loop.abort(child.request_id)
    assert loop.scheduler.ranks[0].states.quarantined == {slot}
    loop.drain()


def test_fork_that_gives_way_before_its_copy_is_computed_from_its_tokens():
    loop = loop_of(num_kv_tokens=40, max_num_batched_tokens=64)
    first, second = (loop.add(prompt_len, 8, ignore_eos=True) for prompt_len in (24, 12))
    loop.step()
    child = loop.fork(first.request_id)
    assert child.pending_copy is not None  # 9 of 10 pages are in use, and both parents need one more
    loop.step()
    assert (child.slot, second.slot) == (-1, -1)
    plans = []
    while loop.unfinished:
        plans.append(loop.step())
    assert [plan.num_copies for plan in plans if plan is not None] == [0] * len(plans)
    assert child.finish_reason == "length"
    loop.drain()


def test_fork_does_not_push_in_front_of_those_that_wait():
    loop = loop_of(max_num_seqs=2)
    parent = loop.add(3, 30, ignore_eos=True)
    loop.step()
    waiting = loop.add(3, 3)
    child = loop.fork(parent.request_id)
    assert list(loop.scheduler.ranks[0].waiting) == [waiting, child]
    loop.drain()


def test_fork_takes_no_memory_that_those_in_front_lack():
    loop = loop_of(num_kv_tokens=40, prefill_interval=1)
    parent = loop.add(7, 20, ignore_eos=True)
    loop.step()
    waiting = loop.add(36, 1)
    assert kinds_of(loop, 2) == "DD"  # the second one was to be a prefill
    assert loop.scheduler.ranks[0].is_blocked and waiting.slot == -1
    child = loop.fork(parent.request_id)
    assert list(loop.scheduler.ranks[0].waiting) == [waiting, child]
    loop.drain()


def test_tail_start_survives_preemption_and_fork():
    loop, parent, child = forked(9, 2, prefill_interval=1)
    assert child.tail_start == parent.tail_start == 3
    plan = loop.step()
    assert plan is not None and plan.num_tail_rows == plan.num_rows == 2
    lose_everything(loop)
    plan = loop.step()
    assert plan is not None and rows_of(plan) == [("r0", 0, 12), ("r1", 0, 4)]
    assert [chunk.num_tail_rows for chunk in plan.chunks] == [9, 1]
    loop.drain()


def test_fork_that_is_already_at_its_limit_ends_at_once():
    loop = loop_of()
    parent = loop.add(3, 30, ignore_eos=True)
    for _ in range(4):
        loop.step()
    child = loop.fork(parent.request_id, max_tokens=2)
    assert (child.finish_reason, len(child.output)) == ("length", 4)
    loop.drain()


def test_fork_refuses_what_is_not_there():
    loop, parent, _ = forked(9, 2)
    with pytest.raises(ValueError, match="request 'x' is not unfinished"):
        loop.scheduler.fork("x", "y")
    for num_tokens in (8, 12):
        with pytest.raises(ValueError, match=rf"num_tokens={num_tokens} must be from 9 \(the prompt\) to 11"):
            loop.scheduler.fork(parent.request_id, "y", num_tokens=num_tokens)
    with pytest.raises(ValueError, match="request 'r1' is unfinished; a new one needs an id of its own"):
        loop.scheduler.fork(parent.request_id, "r1")


# Misuse.


def test_add_refuses_what_it_cannot_keep_apart():
    scheduler = Scheduler(config_of())
    sequence = sequence_of("a")
    scheduler.add(sequence)
    with pytest.raises(ValueError, match="request 'a' is unfinished"):
        scheduler.add(sequence_of("a"))
    scheduler.abort("a")
    with pytest.raises(ValueError, match="was added before; make a new Sequence"):
        scheduler.add(sequence)
    with pytest.raises(ValueError, match="prompt must not be empty"):
        scheduler.add(sequence_of("b", 0))
    with pytest.raises(ValueError, match="rank=1 does not exist; there are 1"):
        scheduler.add(sequence_of("b"), rank=1)
    assert scheduler.num_unfinished == 0


def test_plans_are_committed_in_order_and_whole():
    scheduler = Scheduler(config_of())
    scheduler.add(sequence_of("a"))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    with pytest.raises(ValueError, match=r"step 1 is not the oldest unread one \(0\)"):
        scheduler.commit(second, {"a": [9]})
    for tokens in ({}, {"a": []}, {"a": [9, 9]}):
        with pytest.raises(ValueError, match="step 0 gave . tokens for request 'a'; it must give 1 to 1"):
            scheduler.commit(first, tokens)
    scheduler.commit(first, {"a": [9]})
    scheduler.commit(second, {"a": [9]})
    with pytest.raises(ValueError, match=r"step 1 is not the oldest unread one \(none\)"):
        scheduler.commit(second, {"a": [9]})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_tokens": 3}, "num_kv_tokens=3 is less than one page of 4"),
        ({"max_num_batched_tokens": 3}, r"max_num_batched_tokens=3 is below max_num_seqs=4 \* max_decode_rows=1"),
        ({"chunk_multiple": 9}, "max_num_batched_tokens=8 is below chunk_multiple=9"),
        ({"is_chunked": False}, "max_num_batched_tokens=8 is below max_model_len=100"),
        ({"state_slots_ratio": 0.9}, "state_slots_ratio=0.9 must be at least 1"),
        ({"prefill_interval": 0}, "prefill_interval=0 must be at least 1"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def test_scheduler_imports_no_jax():
    code = "import sys, deepinfer_jax.scheduler.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
