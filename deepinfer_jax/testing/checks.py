"""Comparison of computed with recorded stages, row by row, and what may excuse a row."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from deepinfer_jax.testing import tolerances as tol

Stages = Mapping[str, np.ndarray]

_CACHE = "final_cache."
_CHOSEN_FROM = {"greedy_tokens": "logits", "router_ids": "ffn_in"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One stage of one sequence against its recording."""

    name: str  # full stage name, with the step in front for decode
    sequence: str
    rule: tol.Rule
    num_values: int
    num_different: int  # values, those of turned rows left out
    num_rows: int
    rows_bad: int  # beyond the tolerance and neither forced nor excused
    rows_forced: int  # other ids than recorded, at a tie or boundary: the recorded ids were used from there on
    rows_turned: int  # beyond one ulp, but within what one turned rounding inside the sublayer does
    rows_excused: int  # moved beyond the tolerance by float32 noise on the inputs
    max_error: float  # of the rows that are not forced, turned or excused
    first_bad_row: int  # -1 for none


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What one sequence gave. moved: stage name -> how far noise on the inputs moved each row, in units of the
    stage's own rule; empty where that was not tried.
    """

    sequence: str
    got: Stages
    want: Stages
    moved: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    has_tied_steps: bool = False  # a tie may be followed by other values, since no ids were recorded to force


def check_all(comparison: Comparison, *, feeding: tol.Feeding, candidate_block: int) -> list[Check]:
    """Every recorded stage of one sequence."""
    checks, tied = [], False
    for name in comparison.want:
        leaf = tol.leaf_of(name)
        if leaf == "step_margin":
            tied |= comparison.has_tied_steps and float(comparison.want[name][0]) == 0.0
            continue
        checks.append(
            check_stage(comparison, name, feeding=feeding, candidate_block=candidate_block, is_after_tie=tied)
        )
    return checks


def check_stage(
    comparison: Comparison, name: str, *, feeding: tol.Feeding, candidate_block: int, is_after_tie: bool
) -> Check:
    """One recorded stage of one sequence."""
    recorded = comparison.want[name]
    rule = tol.rule_of(name, recorded, feeding=feeding)
    computed = comparison.got[name]
    if _CACHE in name:
        computed = computed[: len(recorded)]  # the later rows may have no recording to be compared with
    got, want = tol.aligned(name, computed, recorded, candidate_block=candidate_block)
    errors = tol.row_errors(rule, got, want, _scale_of(comparison.got, name))

    def explains(row: int) -> bool:
        return _is_explained(comparison, name, row, feeding=feeding, candidate_block=candidate_block)

    is_bad = errors > rule.tolerance
    forced = np.asarray([bool(bad) and explains(row) for row, bad in enumerate(is_bad)], np.bool_)
    is_open = is_bad & ~forced & np.isfinite(errors)
    turned = is_open & (rule.measure == "ulp") & (tol.relative_errors(got, want) <= tol.TURNED_RELATIVE)
    excused = is_open & ~turned & (_is_moved(comparison, name, rule, errors) | is_after_tie)
    held = is_bad & ~forced & ~turned & ~excused
    return Check(
        name=name,
        sequence=comparison.sequence,
        rule=rule,
        num_values=want.size,
        num_different=int(np.sum((got != want)[~turned])),
        num_rows=len(errors),
        rows_bad=int(held.sum()),
        rows_forced=int(forced.sum()),
        rows_turned=int(turned.sum()),
        rows_excused=int(excused.sum()),
        max_error=float(np.max(errors[~forced & ~turned & ~excused], initial=0.0)),
        first_bad_row=int(np.argmax(held)) if held.any() else -1,
    )


def movements(base: Stages, trials: Sequence[Stages]) -> dict[str, np.ndarray]:
    """How far noise moved each row of every stage: the largest error of a trial against the unmoved run."""
    moved: dict[str, np.ndarray] = {}
    for name in base:
        rule = tol.rule_of(name, base[name], feeding="none")
        scale = _scale_of(base, name)
        still = tol.by_rows(base[name])
        errors = [tol.row_errors(rule, tol.by_rows(trial[name]), still, scale) for trial in trials]
        moved[name] = np.max(errors, axis=0) if errors else np.zeros(len(still))
    return moved


def canonical(stages: Stages) -> dict[str, np.ndarray]:
    """The stages with every row's experts in ascending order: their order carries no meaning."""
    result = dict(stages)
    for name in stages:
        if tol.leaf_of(name) != "router_ids":
            continue
        order = np.argsort(stages[name], axis=1)
        result[name] = np.take_along_axis(stages[name], order, axis=1)
        weights = name.replace("router_ids", "router_weights")
        if weights in stages:
            result[weights] = np.take_along_axis(stages[weights], order, axis=1)
    return result


def bad_share(checks: Sequence[Check]) -> float:
    """Share of the compared rows that are beyond their tolerance."""
    rows = sum(check.num_rows for check in checks)
    return sum(check.rows_bad for check in checks) / max(rows, 1)


def _is_moved(comparison: Comparison, name: str, rule: tol.Rule, errors: np.ndarray) -> np.ndarray:
    """Rows that noise moved beyond the tolerance, and as far as they are off; or what their ids are chosen from."""
    moved = comparison.moved.get(name)
    if moved is None or tol.leaf_of(name) in tol.SELECTION_LEAVES:
        return np.zeros(len(comparison.want[name]), np.bool_)
    moved = moved[: len(errors)]
    result = (moved > rule.tolerance) & (errors <= tol.MOVED_FACTOR * moved)
    chosen_from = _CHOSEN_FROM.get(tol.leaf_of(name))
    if chosen_from and (basis := comparison.moved.get(_sibling(name, chosen_from))) is not None:
        result |= basis > tol.rule_of(_sibling(name, chosen_from), basis, feeding="none").tolerance
    return result


def _sibling(name: str, leaf: str) -> str:
    """The name of another stage of the same layer and step."""
    head = name.rsplit(".", 1)[0]
    return f"{head}.{leaf}"


def _scale_of(got: Stages, name: str) -> np.ndarray | None:
    if tol.leaf_of(name) not in tol.MARGIN_LEAVES:
        return None
    return tol.score_scale(got[_sibling(name, "index_score")])


def _is_explained(comparison: Comparison, name: str, row: int, *, feeding: tol.Feeding, candidate_block: int) -> bool:
    """Whether a row that chooses other entries or experts than recorded stands at a tie or on a boundary.

    A tie: the recorded margin and the computed scores of the exchanged entries say so. A boundary: float32 noise on
    the inputs moves this row's scores beyond the tolerance, and the recorded margin is small enough for one code.
    Ids of experts may be exchanged where recorded ones are fed anyway; with nothing fed, only noise can excuse them.
    """
    leaf = tol.leaf_of(name)
    if leaf == "router_ids" and feeding != "none":
        choice = comparison.got[_sibling(name, "router_choice")][row]
        return tol.is_router_tie(comparison.got[name][row], comparison.want[name][row], choice, feeding=feeding)
    if leaf not in tol.SELECTION_LEAVES:
        return False
    scores = comparison.got[_sibling(name, "index_score")][row].astype(np.float64)
    margin = _margin_of(comparison.want, name, row)
    if leaf == "candidate_mask":
        scores = _block_best(scores, candidate_block)
    got = tol.selection_mask(name, comparison.got[name][row], len(scores))
    want = tol.selection_mask(name, comparison.want[name][row], len(scores))
    if not (got & ~want).any() or not (want & ~got).any():
        return False  # more or fewer than recorded: no exchange
    fraction = tol.TIE_FRACTION_BF16 if feeding != "none" else tol.TIE_FRACTION
    if tol.is_tie(got, want, scores, margin=margin, fraction=fraction):
        return True
    moved = comparison.moved.get(_sibling(name, "index_score"))
    bound = tol.CROSSING_FRACTION * float(tol.score_scale(scores[None])[0])
    return moved is not None and bool(moved[row] > tol.STAGE_RELATIVE) and margin <= bound


def _margin_of(want: Stages, name: str, row: int) -> float:
    """The recorded margin of a selection; that of the whole step where a step has no other."""
    leaf = "candidate_margin" if tol.leaf_of(name) == "candidate_mask" else "topk_margin"
    if _sibling(name, leaf) in want:
        return float(want[_sibling(name, leaf)][row])
    step = name.split(".", 1)[0] + ".step_margin"
    return float(want[step][0]) if step in want else np.inf


def _block_best(scores: np.ndarray, block: int) -> np.ndarray:
    """Each entry's score replaced by the best one of its block of entries: what blocks are chosen by."""
    padded = np.pad(scores, (0, -len(scores) % block), constant_values=-np.inf).reshape(-1, block)
    return np.repeat(padded.max(axis=1), block)[: len(scores)]
