import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.checks import Check, Comparison, canonical, check_all, check_stage, movements
from deepinfer_jax.testing.fixtures import DecodeStep, Decoding, Recorded
from deepinfer_jax.testing.report import Report, lines_of
from deepinfer_jax.testing.verify_whole import full_prefill, live_rows

TOPK, SCORE, MARGIN = "layers.4.topk_idxs", "layers.4.index_score", "layers.4.topk_margin"


def _check(comparison: Comparison, name: str, feeding: tol.Feeding = "none", *, is_after_tie: bool = False) -> Check:
    return check_stage(comparison, name, feeding=feeding, candidate_block=2, is_after_tie=is_after_tie)


def _selection(got: list[int], want: list[int], *, margin: float, moved: float = 0.0) -> Comparison:
    scores = np.array([[0.5, 0.25, 0.0, 0.0, 0.1, -np.inf]], np.float32)
    return Comparison(
        sequence="s",
        got={TOPK: np.array([got]), SCORE: scores},
        want={TOPK: np.array([want]), MARGIN: np.array([margin])},
        moved={SCORE: np.array([moved])},
    )


@pytest.mark.parametrize(
    "got, want, margin, moved, is_forced",
    [
        ([0, 1, 2], [0, 1, 3], 0.0, 0.0, True),
        ([0, 1, 2], [0, 1, 3], 1e-3, 0.0, False),
        ([0, 1, 2], [0, 1, 4], 0.0, 0.0, False),
        ([0, 1, 2], [0, 1, -1], 0.0, 0.0, False),
        ([0, 1, 2], [0, 1, 5], 0.0, 0.0, False),
        ([0, 1, 4], [0, 1, 2], 0.04, 1e-3, True),
        ([0, 1, 4], [0, 1, 2], 0.04, 1e-6, False),
        ([0, 1, 4], [0, 1, 2], 0.06, 1e-3, False),
    ],
    ids=["tie", "recorded as no tie", "scores differ", "fewer", "invisible", "boundary", "stable", "margin too wide"],
)
def test_other_ids_are_forced_at_ties_and_boundaries_only(got, want, margin, moved, is_forced):
    check = _check(_selection(got, want, margin=margin, moved=moved), TOPK)
    assert (check.rows_forced, check.rows_bad) == ((1, 0) if is_forced else (0, 1))


def test_candidate_blocks_are_compared_by_their_best_score():
    scores = np.array([[0.1, 0.5, 0.5, 0.2, 0.9, 0.3]], np.float32)
    mask = "layers.4.candidate_mask"
    comparison = Comparison(
        sequence="s",
        got={mask: np.array([[1, 1, 0, 0, 1, 1]], bool), SCORE: scores},
        want={mask: np.array([[0, 0, 1, 1, 1, 1]], np.uint8), "layers.4.candidate_margin": np.array([0.0])},
    )
    assert _check(comparison, mask).rows_forced == 1


@pytest.mark.parametrize("spilled, is_bad", [([1, 0], False), ([0, 1], True)], ids=["same block", "next block"])
def test_candidates_may_reach_to_the_end_of_their_block(spilled: list[int], is_bad: bool):
    mask = "layers.4.candidate_mask"
    got = np.array([[1, 1, 1, *spilled]], bool)
    comparison = Comparison(
        sequence="s", got={mask: got, SCORE: np.zeros((1, 5))}, want={mask: np.ones((1, 3), np.uint8)}
    )
    assert bool(_check(comparison, mask).rows_bad) == is_bad


def test_entries_beyond_the_recorded_width_must_be_blank():
    comparison = Comparison(
        sequence="s", got={TOPK: np.array([[0, 1, 2]]), SCORE: np.zeros((1, 4))}, want={TOPK: np.array([[0, 1]])}
    )
    assert _check(comparison, TOPK).rows_bad == 1


def test_moved_rows_are_excused_and_others_are_not():
    want = np.ones((3, 4), np.float32)
    comparison = Comparison(
        sequence="s", got={"x": want * 1.001}, want={"x": want}, moved={"x": np.array([0.0, 1e-6, 1e-3])}
    )
    check = _check(comparison, "x")
    assert (check.rows_bad, check.rows_excused, check.first_bad_row) == (2, 1, 0)


def test_a_row_that_moved_less_than_it_is_off_is_not_excused():
    want = np.ones((2, 4), np.float32)
    comparison = Comparison(sequence="s", got={"x": want * 1.01}, want={"x": want}, moved={"x": np.array([1e-3, 5e-3])})
    check = _check(comparison, "x")
    assert (check.rows_bad, check.rows_excused, check.first_bad_row) == (1, 1, 0)


def test_nan_is_never_excused():
    comparison = Comparison(
        sequence="s", got={"x": np.full((1, 2), np.nan)}, want={"x": np.ones((1, 2))}, moved={"x": np.array([np.inf])}
    )
    assert _check(comparison, "x", is_after_tie=True).rows_bad == 1


def test_infinities_must_stand_at_the_same_places():
    want = np.array([[1.0, -np.inf], [1.0, 2.0]])
    got = np.array([[1.0, -np.inf], [-np.inf, 2.0]])
    check = _check(Comparison(sequence="s", got={"x": got}, want={"x": want}), "x")
    assert (check.rows_bad, check.first_bad_row) == (1, 1)


def test_movement_is_the_largest_of_the_trials():
    base = {"x": np.ones((2, 4), np.float32)}
    trials = [{"x": base["x"] * np.array([[1.0], [1 + e]], np.float32)} for e in (1e-3, 1e-2)]
    np.testing.assert_allclose(movements(base, trials)["x"], [0.0, 1e-2], rtol=1e-3)


def _ulp_comparison(errors: np.ndarray) -> Comparison:
    """256 values of size 1 with some of them off by so many ulps of bf16."""
    want = np.ones((4, 64), ml_dtypes.bfloat16)
    got = (want.astype(np.float32) + errors.astype(np.float32) * 2.0**-7).astype(ml_dtypes.bfloat16)
    return Comparison(sequence="s", got={"attn_out": got}, want={"attn_out": want})


@pytest.mark.parametrize(
    "num_off, ulps, is_ok",
    [(0, 0, True), (1, 1, True), (2, 1, False), (1, 2, True), (64, 16, False)],
    ids=["equal", "one value", "too many values", "a turned code", "a wrong row"],
)
def test_bf16_stages_may_be_off_by_few_roundings(num_off: int, ulps: int, is_ok: bool):
    errors = np.zeros(256)
    errors[:num_off] = ulps
    check = _check(_ulp_comparison(errors.reshape(4, 64)), "attn_out", "sublayer")
    assert lines_of("part", [check])[0].is_ok == is_ok


def test_codes_must_be_equal_when_inputs_are_fed():
    value = np.ones((1, 4), ml_dtypes.bfloat16)
    comparison = Comparison(sequence="s", got={"window_kv": value * value}, want={"window_kv": value})
    assert _check(comparison, "window_kv", "sublayer").rows_bad == 0
    other = Comparison(sequence="s", got={"window_kv": value + value}, want={"window_kv": value})
    assert _check(other, "window_kv", "sublayer").rows_bad == 1


@pytest.mark.parametrize("gap, is_forced", [(1e-6, True), (1e-3, False)])
def test_fed_router_ids_may_differ_at_equal_scores_only(gap: float, is_forced: bool):
    choice = np.array([[0.9, 0.5, 0.5 + gap]])
    ids = "layers.2.router_ids"
    comparison = Comparison(
        sequence="s",
        got={ids: np.array([[0, 1]]), "layers.2.router_choice": choice},
        want={ids: np.array([[0, 2]])},
    )
    assert _check(comparison, ids, "sublayer").rows_forced == int(is_forced)


def test_experts_are_compared_in_ascending_order():
    stages = {"layers.2.router_ids": np.array([[3, 1]]), "layers.2.router_weights": np.array([[0.3, 0.1]])}
    ordered = canonical(stages)
    np.testing.assert_array_equal(ordered["layers.2.router_ids"], [[1, 3]])
    np.testing.assert_array_equal(ordered["layers.2.router_weights"], [[0.1, 0.3]])


def test_steps_behind_a_tie_are_excused_only_where_no_ids_were_recorded():
    want = {f"step0{i}.{k}": v for i in (0, 1) for k, v in (("step_margin", np.zeros(1)), ("logits", np.ones((1, 3))))}
    want["step00.step_margin"] = np.ones(1)
    got = {name: value + 1.0 for name, value in want.items()}
    comparison = Comparison(sequence="s", got=got, want=want, has_tied_steps=True)
    bad = {c.name: c.rows_bad for c in check_all(comparison, feeding="none", candidate_block=2)}
    assert bad == {"step00.logits": 1, "step01.logits": 0}


def test_report_fails_when_most_rows_are_excused():
    want = np.ones((4, 2))
    moved = np.array([1.0, 1.0, 1.0, 0.0])  # three rows are off by as much as noise moves them
    got = want + np.array([[1.0], [1.0], [1.0], [0.0]])
    check = _check(Comparison(sequence="s", got={"x": got}, want={"x": want}, moved={"x": moved}), "x")
    lines = lines_of("part", [check])
    assert lines[0].is_ok
    assert not Report(directory="d", mode="fp32", lines=tuple(lines), remarks=(), not_covered=()).is_ok


def _decoding(full: np.ndarray, decoded: np.ndarray) -> Decoding:
    return Decoding(
        prompt=Recorded(name="s", tokens=(5, 6, 7), stages={}),
        greedy=(1, 2, 3),
        logits=decoded,
        steps=(DecodeStep(stages={}, margin=1.0),) * 2,
        full_logits=full,
        final_cache={},
    )


@pytest.mark.parametrize("first_difference, limit", [(None, 5), (1, 3), (0, 2)])
def test_one_prefill_is_compared_up_to_where_the_recordings_part(first_difference: int | None, limit: int):
    full, decoded = np.zeros((5, 4)), np.zeros((3, 4))
    if first_difference is not None:
        decoded[first_difference:] = 0.01
    recorded = full_prefill(_decoding(full, decoded))
    assert recorded is not None
    assert recorded.tokens == (5, 6, 7, 1, 2)[:limit]
    assert len(recorded.stages["logits"]) == limit


@pytest.mark.parametrize(
    "name, length, rows",
    [
        ("window_kv", 6, [2, 3, 0, 1]),
        ("window_kv", 3, [0, 1, 2]),
        ("kv_state", 6, [0, 1]),
        ("compress_kv", 2, [0, 1, 2, 3]),
    ],
)
def test_live_rows_are_those_of_the_last_positions(name: str, length: int, rows: list[int]):
    np.testing.assert_array_equal(live_rows(np.arange(4), f"layers.1.{name}", length), rows)
