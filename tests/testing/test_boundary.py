from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.quant import quantize_fp8, quantize_index, quantize_main_kv
from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.boundary import CacheInput, Near, Turn, moved_source, near_values, turns_of
from deepinfer_jax.testing.report import Report, lines_of
from deepinfer_jax.testing.verify_whole import Observed, Part, Variant, compare_whole

# quantiser -> channels, size of one unit, a magnitude inside a code's cell, a tie that goes down to the even code
FORMS = {
    "fp8": (quantize_fp8, 64, 2.0**-9, 256.0, 100.0),
    "main": (quantize_main_kv, 32, 0.125, 6.0, 2.5),
    "index": (quantize_index, 64, 0.125, 4.0, 2.5),
}


def _row(form: str, offset: int, sign: float) -> np.ndarray:
    """One row whose channel 5 is `offset` float32 ulp beyond a tie, and whose other values are far from one."""
    _, width, unit, inside, tie = FORMS[form]
    row = np.full((1, width), unit * inside, np.float32)
    row[0, 5] = sign * unit * tie
    row[0, 5] = (row[:, 5].view(np.int32) + offset).view(np.float32)[0]
    return row


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize(
    "offset, move",
    [(0, 1), (1, -1), (-3, 4), (4, -4), (-4, None), (5, None), (1000, None)],
    ids=["tie", "one ulp", "last below", "last above", "too far below", "too far above", "far"],
)
def test_values_are_near_within_the_margin_only(form: str, sign: float, offset: int, move: int | None):
    assert tol.BOUNDARY_ULPS == 4
    found = near_values(_row(form, offset, sign), FORMS[form][0])
    assert [(n.row, n.channel, n.move) for n in found] == ([] if move is None else [(0, 5, move)])


def test_a_scale_on_its_boundary_is_near_as_well():
    row = np.full((2, 32), 1.5 * 0.125, np.float32)
    row[1, 7] = 6 * 0.125  # one ulp more doubles the scale of the group, and 1.5 is no code any more
    assert [(n.row, n.channel, n.move) for n in near_values(row, quantize_index)] == [(1, 7, 1)]


def _cache(weights: np.ndarray) -> CacheInput:
    return CacheInput(
        stage="layers.0.window_kv",
        source="layers.0.attn_in",
        values=lambda x, _: linear(x, jnp.asarray(weights)),
        quantize=quantize_fp8,
    )


@pytest.mark.parametrize("ulps", [5, -5])
def test_one_number_of_the_source_moves_the_value(ulps: int):
    rng = np.random.default_rng(0)
    row = jnp.asarray(rng.standard_normal((1, 32)), jnp.float32)
    cache, position = _cache(rng.standard_normal((64, 32)).astype(np.float32)), jnp.zeros(1, jnp.int32)
    value = float(cache.values(row, position)[0, 3])
    moved = moved_source(cache, row, position, Near(row=0, channel=3, value=value, move=1), ulps=ulps)
    assert int(np.sum(moved != np.asarray(row))) == 1
    change = (float(cache.values(jnp.asarray(moved), position)[0, 3]) - value) / float(np.spacing(np.float32(value)))
    assert abs(change - ulps) <= 3  # the product and the moved number round


def _near_step(offset: int) -> tuple[CacheInput, list[dict[str, np.ndarray]]]:
    """Two steps of a cache that holds its source as it is: the second has a value so far beyond a tie."""
    cache = _cache(np.eye(64, dtype=np.float32))
    return cache, [{cache.source: _row("fp8", 1000, 1.0)}, {cache.source: _row("fp8", offset, 1.0)}]


def test_a_turn_is_offered_both_ways_and_moves_no_further_than_noise():
    cache, steps = _near_step(2)
    turns = list(turns_of([cache], steps, sequence=1, first_position=20, taken=()))
    assert [(t.sequence, t.step, t.position, t.near.channel, t.near.move) for t in turns] == 2 * [(1, 1, 21, 5, -2)]
    moves = [int((t.row[:, 5].view(np.int32) - steps[1][cache.source][:, 5].view(np.int32))[0]) for t in turns]
    assert moves == [-6, 6]
    assert all(t.relative_move <= tol.NOISE_RELATIVE for t in turns)
    text = turns[0].describe("s step01", 0.25, 0.5)
    assert text.startswith("s step01, position 21: layers.0.window_kv channel 5 ") and "2 ulp (allowed 4)" in text


def test_a_value_outside_the_margin_is_not_offered():
    cache, steps = _near_step(5)
    assert not list(turns_of([cache], steps, sequence=0, first_position=20, taken=()))


def test_a_turn_starts_from_the_row_that_an_earlier_turn_left():
    cache, steps = _near_step(2)
    first = next(iter(turns_of([cache], steps, sequence=0, first_position=0, taken=())))
    assert not list(turns_of([cache], steps, sequence=0, first_position=0, taken=[first]))


def test_a_source_that_would_have_to_move_by_more_than_noise_is_not_offered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tol, "NOISE_RELATIVE", 1e-9)
    cache, steps = _near_step(2)
    assert not list(turns_of([cache], steps, sequence=0, first_position=0, taken=()))


NUM_STEPS = 4
CODE = "layers.0.window_kv"


def _turn(sequence: int, step: int) -> Turn:
    return Turn(
        sequence=sequence,
        step=step,
        position=step,
        stage=CODE,
        source="layers.0.attn_in",
        near=Near(row=0, channel=0, value=1.0, move=1),
        row=np.zeros((1, 4)),
        relative_move=1e-7,
    )


def _part(
    off_by: Callable[[tuple[Turn, ...], int, int], float], turns: Iterable[Turn], *, has_other_codes: bool = True
) -> Part:
    """Two sequences of four steps. off_by: turns, sequence, step -> what is added to the recorded logits."""
    offered = list(turns)
    recorded = {f"step{i:02d}.logits": np.zeros((1, 4)) for i in range(NUM_STEPS)}

    def observe(variant: Variant) -> Observed:
        return [
            {f"step{i:02d}.logits": np.full((1, 4), off_by(variant.turns, s, i)) for i in range(NUM_STEPS)}
            | {
                f"step{i:02d}.{CODE}": np.full((1, 4), float(has_other_codes * len(variant.turns)))
                for i in range(NUM_STEPS)
            }
            | {f"step{i:02d}.layers.0.stream_in": np.zeros((1, 4)) for i in range(NUM_STEPS)}
            for s in range(2)
        ]

    def near(_: Observed, sequence: int, num_steps: int, taken: tuple[Turn, ...]) -> list[Turn]:
        return [t for t in offered if t.sequence == sequence and t.step < num_steps and t not in taken]

    return Part(name="decode", sequences=["a", "b"], wants=[recorded, recorded], observe=observe, near=near)


def _compare(part: Part) -> tuple[bool, int, tuple[str, ...]]:
    checks, remarks = compare_whole(part, candidate_block=2, tick=lambda _: None)
    lines = lines_of("decode", [c for c in checks if not c.name.endswith("stream_in")])
    report = Report(directory="d", mode="fp32", lines=tuple(lines), remarks=remarks, not_covered=())
    return report.is_ok, report.rows_forced, remarks


def test_a_turn_that_makes_all_later_steps_agree_is_kept_and_named():
    good = _turn(0, 1)
    is_ok, forced, remarks = _compare(
        _part(lambda turns, s, i: 1e-3 if s == 0 and i >= 1 and good not in turns else 0.0, [_turn(0, 0), good])
    )
    assert is_ok and forced == 1
    assert len(remarks) == 1 and "a step01, position 1: layers.0.window_kv channel 0" in remarks[0]


@pytest.mark.parametrize(
    "off_by",
    [
        lambda turns, s, i: 1e-3 if s == 0 and i >= 1 else 0.0,
        lambda turns, s, i: 1e-3 if s == 0 and i >= (3 if turns else 1) else 0.0,
        lambda turns, s, i: 1e-3 if s == (1 if turns else 0) and i >= 1 else 0.0,
        lambda turns, s, i: 1e-3 if i >= 1 and not (turns and s == 0) else 0.0,
    ],
    ids=["no help", "a later fault", "another sequence breaks", "another sequence is broken"],
)
def test_a_fault_is_found_whatever_can_be_turned(off_by: Callable[[tuple[Turn, ...], int, int], float]):
    assert not _compare(_part(off_by, [_turn(0, 1)]))[0]


def test_a_turn_that_leaves_the_cache_as_it_was_is_not_kept():
    part = _part(
        lambda turns, s, i: 1e-3 if s == 0 and i >= 1 and not turns else 0.0, [_turn(0, 1)], has_other_codes=False
    )
    assert _compare(part) == (False, 0, ())


def test_no_more_values_are_turned_than_allowed():
    turns = [_turn(0, i) for i in range(NUM_STEPS)]
    is_ok, forced, remarks = _compare(_part(lambda t, s, i: 1e-3 if s == 0 and turns[i] not in t else 0.0, turns))
    assert not is_ok and forced == len(remarks) == tol.MAX_BOUNDARY_VALUES < NUM_STEPS
