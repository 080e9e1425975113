"""Known prefixes and adopted states, promise by promise; the fake device checks what every row looks at."""

import random

import pytest

from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.sequence import Copy, Sequence
from tests.scheduler.checks import check_invariants
from tests.scheduler.device import Loop
from tests.scheduler.test_scheduler import config_of, rows_of

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])


def loop_of(*, depth: int = 0, **changes) -> Loop:
    sizes = {"prefix_mode": "exact", "num_snapshots": 8, "snapshot_interval": 40, "max_num_batched_tokens": 64}
    return Loop(config_of(**(sizes | changes)), depth=depth)


def tokens(count: int, first: int = 5000) -> list[int]:
    return list(range(first, first + count))


def run(loop: Loop, prompt: list[int], max_tokens: int = 3, **changes) -> tuple[Sequence, int]:
    """Serves one request alone; returns it and how many of its positions were taken over."""
    before = loop.num_hit_tokens
    sequence = loop.add(prompt, max_tokens, ignore_eos=True, **changes)
    while loop.unfinished:
        loop.step()
        check_invariants(loop.scheduler)
    loop.flush()
    return sequence, loop.num_hit_tokens - before


# Hits.


@BOTH_DEPTHS
@pytest.mark.parametrize("prompt_len", [7, 8, 9, 30])
def test_the_same_prompt_again_computes_one_row(prompt_len, depth):
    loop = loop_of(depth=depth)
    assert [run(loop, tokens(prompt_len))[1] for _ in range(3)] == [0, prompt_len - 1, prompt_len - 1]
    counters = loop.scheduler.counters
    assert (counters.prefix_lookups, counters.prefix_hits) == (3, 2)
    assert counters.prefix_hit_tokens == 2 * (prompt_len - 1)
    loop.drain()


@BOTH_DEPTHS
@pytest.mark.parametrize("max_decode_rows", [1, 6], ids=["plain", "drafts"])
def test_the_next_turn_goes_on_behind_the_answer(max_decode_rows, depth):
    loop = loop_of(depth=depth, max_decode_rows=max_decode_rows)
    prompt, hits = tokens(9), []
    for turn in range(5):
        first, hit = run(loop, prompt, max_tokens=4)
        hits.append((len(prompt), hit))
        prompt = [*first.prompt, *first.output, *tokens(3, 6000 + 10 * turn)]
    # The last token drawn has no row, or one that may be kept: it was a draft.
    assert all(length - 4 <= hit <= length - 3 for length, hit in hits[1:]) and hits[0][1] == 0
    loop.drain()


def test_copies_of_a_hit_in_the_middle_of_a_page():
    loop = loop_of()
    prompt, pages = tokens(10), loop.scheduler.ranks[0].pages
    loop.add(prompt, 1)
    first = loop.step()
    assert first is not None and first.num_copies == 0
    (snapshot,) = loop.scheduler.ranks[0].prefix.snapshots
    assert snapshot.slot == loop.config.num_slots
    for _ in range(2):
        loop.add(prompt, 1)
    plan = loop.step()  # the save and the next requests come with the same plan: all read the slot of the first
    assert plan is not None and rows_of(plan) == [("r1", 9, 1), ("r2", 9, 1)]
    assert plan.ranks[0].copies == (Copy(0, 1, snapshot.page, 3), Copy(0, 2, snapshot.page, 4), Copy(0, snapshot.slot))
    fourth = loop.add(prompt, 9, ignore_eos=True)
    plan = loop.step()
    assert plan is not None and rows_of(plan) == [("r3", 9, 1)]
    assert plan.ranks[0].copies == (Copy(snapshot.slot, fourth.slot, snapshot.page, fourth.pages[2]),)
    assert [pages.num_holders(page) for page in fourth.pages] == [2, 2, 1]
    loop.drain()


def test_a_state_whose_rows_are_unread_is_not_taken():
    loop = loop_of(depth=1)
    starts = []
    for _ in range(3):
        loop.add(tokens(30), 1)
        plan = loop.step()
        assert plan is not None
        starts.append([chunk.start for chunk in plan.chunks])
    assert starts == [[0], [0], [28, 29]]  # the second one is cut where the known pages end
    loop.drain()


def test_a_branch_point_is_kept_when_it_is_seen_for_the_second_time():
    loop = loop_of()
    hits = [run(loop, [*tokens(22), *tokens(8, 6000 + 10 * i)])[1] for i in range(4)]
    assert hits == [0, 0, 20, 20]  # whole pages: 4 tokens each
    loop.drain()


def test_prompts_are_cut_and_kept_at_checkpoints():
    loop = loop_of(snapshot_interval=12, num_snapshots=20)
    loop.add(tokens(30), 1, checkpoints=[7, 24, 29, 99])
    cuts = [rows_of(loop.step()) for _ in range(5)]
    assert cuts == [[("r0", a, b - a)] for a, b in ((0, 7), (7, 12), (12, 24), (24, 29), (29, 30))]
    assert run(loop, [*tokens(7), *tokens(9, 6000)])[1] == 7
    assert run(loop, [*tokens(16), *tokens(9, 6000)])[1] == 12
    assert run(loop, [*tokens(29), *tokens(9, 6000)])[1] == 29
    loop.drain()


def test_cuts_are_multiples_and_whole_prompts_are_not_cut():
    loop = loop_of(snapshot_interval=8, chunk_multiple=3)
    loop.add(tokens(50), 1, checkpoints=[7, 30])
    assert [rows_of(loop.step()) for _ in range(4)] == [
        [("r0", a, b - a)] for a, b in ((0, 24), (24, 30), (30, 48), (48, 50))
    ]
    loop = loop_of(snapshot_interval=8, is_chunked=False, max_model_len=60)
    loop.add(tokens(50), 1, checkpoints=[7, 30])
    assert rows_of(loop.step()) == [("r0", 0, 50)]
    loop = loop_of(snapshot_interval=8, prefix_mode="off")
    loop.add(tokens(50), 1, checkpoints=[7])
    assert [rows_of(loop.step()) for _ in range(2)] == [[("r0", 0, 7)], [("r0", 7, 43)]]
    assert loop.scheduler.gauges.pages_cached == 0


@pytest.mark.parametrize("tail_start, hit", [(0, 0), (10, 0), (11, 11), (12, 12), (17, 12), (24, 24), (99, 29)])
def test_a_hit_ends_where_the_tail_begins(tail_start, hit):
    loop = loop_of(has_tails=True, snapshot_interval=12, rollback_tokens=1)
    run(loop, tokens(30))
    assert run(loop, tokens(30), tail_start=tail_start)[1] == hit
    loop.drain()


def test_a_state_that_has_gone_too_far_is_not_taken():
    loop = loop_of(rollback_tokens=2)
    run(loop, tokens(30))
    assert run(loop, [*tokens(28), 6000])[1] == 28
    assert run(loop, [*tokens(27), *tokens(5, 6100)])[1] == 0
    assert run(loop, [*tokens(27), *tokens(5, 6200)])[1] == 24  # a branch point of the one in front
    loop.drain()


def test_a_request_that_was_preempted_goes_on_from_what_is_known():
    loop = loop_of(num_kv_tokens=60, max_num_seqs=2)
    old, new = loop.add(24, 12, ignore_eos=True), loop.add(24, 25, ignore_eos=True)
    while new.epoch == 0:
        loop.step()
    loop.drain()
    assert (loop.num_hits, loop.num_hit_tokens) == (1, 24)
    assert (old.finish_reason, new.finish_reason) == ("length", "length")


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_only_what_came_to_its_end_is_kept(reason):
    loop = loop_of()
    first = loop.add(tokens(5), 50, ignore_eos=True)
    for _ in range(8):
        loop.step()
    known = [*first.prompt, *first.output]
    loop.scheduler.end(first.request_id, reason)
    assert loop.scheduler.take_ended() == [first]
    loop.expected[first.request_id].has_ended = True
    assert run(loop, [*known, 7000])[1] == (len(known) - 1 if reason == "stop" else 5)
    loop.drain()


@pytest.mark.parametrize("max_tokens", [1, 20], ids=["at its limit", "stopped"])
def test_a_fork_that_ends_before_its_copy_is_not_kept(max_tokens):
    """There is no state in its slot."""
    loop = loop_of()
    parent = loop.add(tokens(9), 30, ignore_eos=True)
    for _ in range(4):
        loop.step()
    num_snapshots = loop.scheduler.gauges.num_snapshots
    child = loop.fork(parent.request_id, max_tokens=max_tokens)
    if max_tokens > 1:
        assert child.pending_copy is not None and loop.scheduler.end(child.request_id, "stop")
        assert loop.scheduler.take_ended() == [child]
        loop.expected[child.request_id].has_ended = True
    assert (child.slot, loop.scheduler.gauges.num_snapshots) == (-1, num_snapshots)
    loop.drain()


def test_fork_of_a_request_that_has_hit():
    loop = loop_of()
    run(loop, tokens(30))
    loop.add(tokens(30), 20, ignore_eos=True)
    for _ in range(3):
        loop.step()
    assert loop.fork("r1").slot >= 0
    loop.drain()
    assert loop.num_hits == 1


# Memory.


def test_kept_pages_are_free_for_everyone():
    loop = loop_of(num_kv_tokens=80, max_num_seqs=2)
    run(loop, tokens(60), max_tokens=10)
    gauges = loop.scheduler.gauges
    assert (gauges.num_snapshots, gauges.pages_used, gauges.pages_cached) == (3, 0, 18)
    pair = [loop.add(tokens(30, first), 9, ignore_eos=True) for first in (6000, 7000)]
    loop.step()
    assert [len(sequence.pages) for sequence in pair] == [8, 8]  # in one step: 90 % do not count what is only kept
    loop.drain()
    assert loop.scheduler.counters.preemptions == 0 < loop.scheduler.counters.snapshots_evicted


def test_a_growing_request_evicts_before_it_preempts():
    loop = loop_of(num_kv_tokens=64, max_num_seqs=2)
    run(loop, tokens(20))
    pair = [loop.add(tokens(12, first), 20, ignore_eos=True) for first in (6000, 7000)]
    while loop.unfinished:
        loop.step()
        check_invariants(loop.scheduler)
    assert [sequence.epoch for sequence in pair] == [1, 1]
    assert loop.scheduler.counters.snapshots_evicted > 0
    loop.drain()


def test_a_hit_needs_no_more_memory_than_a_miss():
    loop = loop_of(num_kv_tokens=40)
    run(loop, tokens(39), max_tokens=1)
    assert loop.scheduler.gauges.pages_cached == 10  # all there are
    assert run(loop, tokens(39), max_tokens=1)[1] == 38
    assert run(loop, [*tokens(34), *tokens(5, 6000)], max_tokens=1)[1] == 34
    loop.drain()


def test_the_least_recently_used_goes_first():
    loop = loop_of(num_snapshots=3)
    prompts = [tokens(9, 6000 + 100 * i) for i in range(4)]
    for prompt in prompts[:3]:
        run(loop, prompt, max_tokens=1)
    assert run(loop, prompts[0], max_tokens=1)[1] == 8
    run(loop, prompts[3], max_tokens=1)  # in place of the second one
    assert [run(loop, prompts[i], max_tokens=1)[1] for i in (0, 2, 3)] == [8, 8, 8]
    assert run(loop, prompts[1], max_tokens=1)[1] == 0
    loop.drain()


def test_a_snapshot_whose_copy_is_queued_keeps_its_slot():
    loop = loop_of(num_snapshots=1, max_num_seqs=3)
    for first in (6000, 7000, 8000):
        loop.add(tokens(9, first), 1)
    loop.step()  # three prompts end, one can be kept
    (snapshot,) = loop.scheduler.ranks[0].prefix.snapshots
    assert snapshot.node.parent is not None and snapshot.node.parent.tokens[0] == 6000
    assert loop.scheduler.counters.snapshots_evicted == 0
    loop.drain()


def test_a_queued_copy_is_cancelled_when_its_pages_are_needed():
    loop = loop_of(num_kv_tokens=40)
    loop.add(tokens(38), 1)
    loop.step()
    assert loop.scheduler.ranks[0].prefix.source_slots == {0}
    late = loop.add(tokens(38, 6000), 1)
    plan = loop.step()
    assert plan is not None and plan.num_copies == 0 and rows_of(plan) == [(late.request_id, 0, 38)]
    check_invariants(loop.scheduler)
    loop.drain()
    assert loop.scheduler.counters.snapshots_evicted == 0


def test_clear_forgets_everything_and_cancels_copies():
    loop = loop_of()
    loop.add(tokens(30), 1)
    loop.step()
    loop.scheduler.clear_prefix_cache()
    assert loop.scheduler.gauges.pages_cached == loop.scheduler.gauges.num_snapshots == 0
    plan = loop.step()
    assert plan is None and loop.scheduler.counters.snapshots_saved == 0
    assert run(loop, tokens(30))[1] == 0
    loop.drain()


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_nothing_known_outlives_a_broken_step(mode):
    loop = loop_of(prefix_mode=mode, prefill_interval=1)
    run(loop, tokens(30))
    assert run(loop, tokens(30))[1] > 0
    loop.depth = 1
    loop.add(tokens(9, 6000), 9)
    loop.step()
    loop.fail(state_is_lost=False)
    assert loop.scheduler.gauges.pages_cached == 0
    assert run(loop, tokens(30))[1] == 0
    loop.drain()


# Replay.


@pytest.mark.parametrize(
    "prompt_len, replay_rows, hit",
    [(30, 0, 28), (29, 0, 28), (28, 0, 24), (30, 1, 24), (30, 4, 24), (30, 5, 20), (30, 28, 0), (30, 99, 0)],
)
def test_replay_takes_pages_and_computes_the_rows_that_fill_the_rings(prompt_len, replay_rows, hit):
    loop = loop_of(prefix_mode="replay", num_snapshots=0, replay_rows=replay_rows)
    run(loop, tokens(30))
    sequence = loop.add(tokens(prompt_len), 20, ignore_eos=True)
    plan = loop.step()
    assert plan is not None and plan.num_copies == 0
    assert rows_of(plan) == [("r1", hit, prompt_len - hit)]
    assert sequence.window_start == hit
    child = loop.fork("r1")
    assert child.slot >= 0 and child.window_start == hit
    loop.drain()
    assert sequence.window_start == 0


def test_replay_shares_no_page_whose_rows_are_unread():
    loop = loop_of(depth=1, prefix_mode="replay")
    hits = []
    for _ in range(3):
        loop.add(tokens(30), 1)
        plan = loop.step()
        assert plan is not None
        hits.append(plan.chunks[0].start)
    assert hits == [0, 0, 28]
    loop.drain()


def test_replay_forgets_the_least_recently_used_leaves():
    loop = loop_of(prefix_mode="replay", num_kv_tokens=80)
    run(loop, tokens(40), max_tokens=1)
    run(loop, tokens(20, 6000), max_tokens=1)
    run(loop, tokens(40, 7000), max_tokens=1)  # 5 pages are free, the end of the first prompt goes
    assert run(loop, tokens(20, 6000), max_tokens=1)[1] == 16
    assert run(loop, tokens(40), max_tokens=1)[1] == 16  # one more went for the one in front
    loop.drain()


# Adoption.


@BOTH_DEPTHS
@pytest.mark.parametrize(
    "num_drawn, num_written, kind, rows",
    [
        (4, 12, False, ("r0", 12, 1)),
        (0, 8, False, ("r0", 8, 1)),
        (4, 8, True, ("r0", 8, 5)),
        (0, 3, True, ("r0", 3, 6)),
    ],
)
def test_an_adopted_request_goes_on_where_its_state_is(num_drawn, num_written, kind, rows, depth):
    loop = loop_of(depth=depth)
    sequence, has_state = loop.adopt(tokens(9), num_drawn, num_written)
    assert has_state and sequence.num_written == num_written
    assert len(sequence.pages) == loop.config.pages_of(9 + num_drawn)
    plan = loop.step()
    assert plan is not None and plan.is_prefill == kind and rows_of(plan) == [rows]
    loop.drain()
    assert (len(sequence.output), loop.scheduler.counters.adopted) == (20, 1)


def test_an_adoption_waits_like_any_other_where_it_would_push_in_front():
    loop = loop_of(max_num_seqs=1)
    first, has_state = loop.adopt(tokens(9), 2, 10)
    second, has_other = loop.adopt(tokens(9), 2, 10)
    assert (has_state, has_other, second.slot) == (True, False, -1)
    assert loop.scheduler.counters.adoptions_queued == 1
    loop.drain()
    assert (first.finish_reason, second.finish_reason) == ("length", "length")


def test_an_adopted_prompt_does_not_overtake_one_that_waits():
    loop = loop_of()
    loop.add(6, 2)
    loop.adopt(tokens(9), 0, 4)
    assert rows_of(loop.step()) == [("r0", 0, 6), ("r1", 4, 5)]
    loop.drain()


def test_an_adoption_evicts_what_is_only_kept():
    loop = loop_of(num_kv_tokens=40)
    run(loop, tokens(36), max_tokens=1)
    assert loop.adopt(tokens(30, 6000), 2, 31)[1]
    check_invariants(loop.scheduler)
    loop.drain()


def test_an_adoption_gets_no_slot_or_page_that_a_copy_still_reads():
    """The caller writes at once, the copies come with the next plan."""
    loop = loop_of(max_num_seqs=2, state_slots_ratio=1.0, num_kv_tokens=40)
    parent = loop.add(tokens(10), 9, ignore_eos=True)
    for _ in range(2):
        loop.step()
    child = loop.fork(parent.request_id)
    assert child.pending_copy is not None
    source_slot, source_page = parent.slot, parent.pages[2]
    loop.scheduler.clear_prefix_cache()
    loop.abort(parent.request_id)
    for _ in range(3):  # the free slots and pages take turns
        adopted, has_state = loop.adopt(tokens(15, 6000), 1, 15)
        assert has_state and adopted.slot != source_slot and source_page not in adopted.pages
        loop.abort(adopted.request_id)
    loop.drain()
    assert child.finish_reason == "length"
    loop = loop_of(max_num_seqs=1, state_slots_ratio=1.0)
    run(loop, tokens(9), max_tokens=1)
    (source_slot,) = loop.scheduler.ranks[0].prefix.source_slots
    for _ in range(2):  # the free slots take turns
        adopted, has_state = loop.adopt(tokens(9, 6000), 1, 9)
        assert has_state and adopted.slot != source_slot
        loop.abort(adopted.request_id)
    assert run(loop, tokens(9))[1] == 8  # the save comes with the same plan
    loop.drain()


@pytest.mark.parametrize(
    "prompt_len, num_drawn, reason",
    [(101, 0, "prompt_length_exceeded"), (99, 2, "length"), (9, 20, "length")],
)
def test_an_adoption_that_is_at_its_end_ends_at_once(prompt_len, num_drawn, reason):
    loop = loop_of()
    sequence, has_state = loop.adopt(tokens(prompt_len), num_drawn, prompt_len - 1)
    assert (sequence.finish_reason, has_state) == (reason, False)
    assert loop.scheduler.take_ended() == []
    loop.drain()


def test_adopt_refuses_what_cannot_be():
    loop = loop_of()
    for num_written in (0, 11):
        with pytest.raises(ValueError, match=f"num_written={num_written} must be from 1 to 10, all but one"):
            loop.adopt(tokens(9), 2, num_written)
    for num_ahead in (-1, 7):
        with pytest.raises(ValueError, match=rf"state_end={5 + num_ahead} must be from 5 to 11"):
            loop.adopt(tokens(9), 2, 5, num_ahead=num_ahead)
    assert loop.scheduler.num_unfinished == 0


# Settings.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prefix_mode": "exact"}, "keeps nothing with num_snapshots=0"),
        ({"prefix_mode": "replay", "snapshot_interval": 6}, "snapshot_interval=6 must be a multiple of page_tokens=4"),
        ({"num_snapshots": -1}, "num_snapshots=-1 must be at least 0"),
        ({"replay_rows": -1}, "replay_rows=-1 must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("max_decode_rows", [1, 6], ids=["plain", "drafts"])
@BOTH_DEPTHS
def test_conversations_under_overload(depth: int, max_decode_rows: int, mode: str, seed_from_name: int):
    """Turns of conversations with few beginnings, in memory that is never enough: nothing is lost or mixed up."""
    rng = random.Random(seed_from_name)
    config = SchedulerConfig(
        num_kv_tokens=160,
        page_tokens=4,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=36,
        max_decode_rows=max_decode_rows,
        prefill_interval=3,
        prefix_mode=mode,  # pyright: ignore[reportArgumentType]
        num_snapshots=6,
        snapshot_interval=16,
        replay_rows=4,
    )
    loop = Loop(config, depth=depth, seed=seed_from_name)
    for _ in range(250):
        if rng.random() < 0.3 and len(loop.unfinished) < 12:
            ended = [expected.sequence for expected in list(loop.expected.values())[-9:] if expected.has_ended]
            known = tokens(rng.randint(8, 24), rng.choice([5000, 6000]))
            if ended and rng.random() < 0.6:
                earlier = rng.choice(ended)
                known = [*earlier.prompt, *earlier.output][:56]
            loop.add([*known, *rng.choices(range(9000, 9100), k=3)], rng.randint(1, 8), ignore_eos=True)
        if rng.random() < 0.03:
            loop.adopt(tokens(24), 2, rng.randint(20, 25))
        if rng.random() < 0.03 and loop.unfinished:
            loop.fork(rng.choice(loop.unfinished))
        if rng.random() < 0.01 and loop.unread:
            loop.fail(state_is_lost=False)
        loop.step()
        check_invariants(loop.scheduler)
    loop.drain()
    assert loop.num_hits > 15 and loop.scheduler.counters.adopted > 0
