"""How far a computed stage may be from a recorded one, and how the distance is measured."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import ml_dtypes
import numpy as np

type Feeding = Literal["none", "layer", "sublayer"]  # whose recorded inputs were put in place of computed ones
type Measure = Literal["equal", "relative", "absolute", "ulp", "margin", "boundary"]

# Float32 modes: a float32 sum in another order moves a stage by 1e-7 to 1e-6 of a row's norm; a wrong formula by 1e-3
# and more.
STAGE_RELATIVE = 1e-5
# Logits are of size 1 and end a longer chain; two faithful implementations reach 2e-6.
LOGIT_ABSOLUTE = 2e-5
# bf16 modes, each sublayer from its recorded inputs: a float32 sum in another order may turn one rounding to bf16.
# The ulp is that of the value or of the row's root mean square, whichever is larger: a sum that cancels keeps the
# absolute error of its terms.
STAGE_ULPS = 1.0
MAX_DIFFERENT = 0.005  # share of a stage's values that may be off by that one ulp
# Inside a sublayer a turned rounding may turn an FP8 code in front of the next product (6 % of one of its inputs),
# which moves a whole row by more than one ulp: rare rows may be off by this much of their norm.
TURNED_RELATIVE = 2e-2
MAX_TURNED = 0.005  # share of a stage's rows, and at least one row
# A whole layer in bf16 mode from its recorded streams: roundings inside the layer are not pinned to recorded values,
# and one turned rounding is amplified by the next quantiser (the oracle's own table allows the same).
LAYER_RELATIVE = 2e-2
# Two float32 scores nearer than the tolerance of the stage itself may come in either order.
TIE_FRACTION = STAGE_RELATIVE
# bf16 scores: one ulp.
TIE_FRACTION_BF16 = 2.0**-7
# Expert choices have no recorded margin; scores with bias are of size 1 and float32 in every mode. Behind a whole bf16
# layer the router's input itself is off by a turned rounding.
ROUTER_TIE = 1e-5
ROUTER_TIE_LAYER = 5e-3
# One FP4 code of one index query or key that turned moves a score by at most this share of the row's largest one.
CROSSING_FRACTION = 0.1
# Float32 noise put on the first streams to find rows that stand on a boundary: a few times what another order of sums
# gives (6e-7), since each trial must reach as far as the recording may be off; stable rows stay below the tolerance.
NOISE_RELATIVE = 2e-6
NUM_TRIALS = 12  # each turns a boundary within reach with a chance of up to one half
# An excused row may be off by so many times as much as noise moved it: the recording stands on one side of the same
# boundary, perhaps together with others that no single trial turned.
MOVED_FACTOR = 4.0
# A value in front of a cache's quantiser may be rounded to either side if it is no more float32 ulp than this from the
# boundary: sums in another order move it by as much (2e-7 to 5e-7 of itself; the sublayers in front agree to 6e-7).
BOUNDARY_ULPS = 4
# Values of one decoding that may be turned in this way, each of them named: in 40 steps of the recorded model, some
# 30,000 values, 0.3 are expected within the margin.
MAX_BOUNDARY_VALUES = 2
# Rows that no implementation can be held to must stay the exception, or nothing has been shown.
MAX_EXCUSED = 0.5

EQUAL_LEAVES = frozenset({"topk_idxs", "candidate_mask", "router_ids", "engram_rows", "greedy_tokens", "token_map"})
TOKEN_LEAVES = frozenset({"engram_rows"})  # depend on the tokens alone
SELECTION_LEAVES = frozenset({"topk_idxs", "candidate_mask"})
MARGIN_LEAVES = frozenset({"topk_margin", "candidate_margin"})
LOGIT_LEAVES = frozenset({"logits", "prefill_logits", "full_prefill_logits"})
CODE_LEAVES = frozenset({"window_kv", "compress_kv", "index_k"})
STREAM_MEAN_LEAVES = frozenset({"main_hidden"})  # computed from nothing but recorded streams
SCORE_LEAVES = frozenset({"index_score"})
# Recorded in the width of their own context, computed in that of the step; the surplus must hold nothing.
_BLANKS: Mapping[str, float] = {"topk_idxs": -1, "candidate_mask": 0, "index_score": -np.inf}
# A row smaller than this share of a typical one is measured against that share of it. Scores are sums over heads with
# weights of both signs: a row whose few scores cancel keeps the absolute error of its terms.
_ROW_FLOOR = 1e-3
_SCORE_FLOOR = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """How a stage is compared: the measure of a row's error, and the largest allowed one."""

    measure: Measure
    tolerance: float
    row_floor: float = _ROW_FLOOR


def leaf_of(name: str) -> str:
    """The stage of a full name such as "step03.layers.4.topk_idxs"."""
    return name.rsplit(".", 1)[-1]


def rule_of(name: str, recorded: np.ndarray, *, feeding: Feeding) -> Rule:
    """The rule of a stage."""
    leaf = leaf_of(name)
    is_fed = feeding != "none"
    if leaf in EQUAL_LEAVES or (is_fed and leaf in CODE_LEAVES):
        return Rule(measure="equal", tolerance=0.0)
    if leaf in LOGIT_LEAVES:
        return Rule(measure="absolute", tolerance=LOGIT_ABSOLUTE)
    if leaf in MARGIN_LEAVES:
        return Rule(measure="margin", tolerance=TIE_FRACTION_BF16 if is_fed else STAGE_RELATIVE)
    if feeding == "layer" and leaf not in STREAM_MEAN_LEAVES:
        return Rule(measure="relative", tolerance=LAYER_RELATIVE)
    if is_fed and recorded.dtype == ml_dtypes.bfloat16:
        return Rule(measure="ulp", tolerance=STAGE_ULPS)
    floor = _SCORE_FLOOR if leaf in SCORE_LEAVES else _ROW_FLOOR
    return Rule(measure="relative", tolerance=STAGE_RELATIVE, row_floor=floor)


def aligned(name: str, got: np.ndarray, recorded: np.ndarray, *, candidate_block: int) -> tuple[np.ndarray, np.ndarray]:
    """Both as [rows, values]; a row of `got` with something outside the recorded width is made to differ.

    Only the last candidate block may reach beyond the width, since blocks are kept as a whole.
    """
    got2, want2 = by_rows(got), by_rows(recorded)
    width = want2.shape[1]
    blank = _BLANKS.get(leaf_of(name))
    if blank is not None and got2.shape[1] > width:
        end = -(-width // candidate_block) * candidate_block if leaf_of(name) == "candidate_mask" else width
        is_spilled = np.any(got2[:, end:] != blank, axis=1)
        got2 = np.where(is_spilled[:, None], np.nan, got2[:, :width])
    if got2.shape != want2.shape:
        raise ValueError(f"{name} is recorded with shape {list(recorded.shape)}; computed is {list(got.shape)}")
    return got2, want2


def row_errors(rule: Rule, got: np.ndarray, want: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Error of each row of two [rows, values] arrays; inf where infinities stand at other places or for NaN.

    scale: for margins, the size of each row's scores.
    """
    if rule.measure == "equal":
        return np.any(got != want, axis=1).astype(np.float64)
    is_same_infinity = np.isinf(want) & (got == want)
    errors = np.where(is_same_infinity, 0.0, got - np.where(is_same_infinity, 0.0, want))
    errors = np.abs(np.where(is_same_infinity, 0.0, errors))
    finite = np.where(np.isfinite(want), want, 0.0)
    norms = np.linalg.norm(finite, axis=1)
    if rule.measure == "relative":
        floor = rule.row_floor * float(np.sqrt(np.mean(norms**2))) if len(norms) else 0.0
        sizes = np.maximum(norms, max(floor, np.finfo(np.float64).tiny))
        result = np.linalg.norm(errors, axis=1) / sizes
    elif rule.measure == "absolute":
        result = np.max(errors, axis=1, initial=0.0)
    elif rule.measure == "ulp":
        rms = norms / max(want.shape[1], 1) ** 0.5
        result = np.max(errors / _bf16_ulp(np.maximum(np.abs(finite), rms[:, None])), axis=1, initial=0.0)
    else:
        assert scale is not None
        result = np.max(errors, axis=1, initial=0.0) / np.maximum(scale, np.finfo(np.float64).tiny)
    return np.where(np.isnan(result), np.inf, result)


def relative_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Each row's error as a share of its norm."""
    return row_errors(Rule(measure="relative", tolerance=0.0), got, want)


def score_scale(scores: np.ndarray) -> np.ndarray:
    """The size of each row's index scores: the largest visible one."""
    return np.max(np.abs(np.where(np.isfinite(scores), scores, 0.0)), axis=1, initial=0.0)


def is_tie(got: np.ndarray, want: np.ndarray, scores: np.ndarray, *, margin: float, fraction: float) -> bool:
    """Whether two selections of one row differ by entries that may come in either order.

    got, want: masks over the entries. The recorded margin must be below `fraction` of the row's scores, and the
    exchanged entries must have equal computed scores in the same sense.
    """
    bound = fraction * float(score_scale(scores[None])[0])
    exchanged = scores[got != want]
    if not len(exchanged) or not np.isfinite(exchanged).all():
        return False
    return margin <= bound and float(np.ptp(exchanged)) <= bound


def is_router_tie(got: np.ndarray, want: np.ndarray, choice: np.ndarray, *, feeding: Feeding) -> bool:
    """Whether one row's expert ids differ only by experts whose computed scores are equal within float32 noise."""
    exchanged = np.setxor1d(got, want).astype(np.int64)
    bound = ROUTER_TIE_LAYER if feeding == "layer" else ROUTER_TIE
    return len(exchanged) > 0 and float(np.ptp(choice[exchanged].astype(np.float64))) <= bound


def selection_mask(name: str, row: np.ndarray, width: int) -> np.ndarray:
    """One row of topk_idxs or candidate_mask as a mask over `width` entries."""
    mask = np.zeros(width, np.bool_)
    if leaf_of(name) == "topk_idxs":
        mask[row[row >= 0].astype(np.int64)] = True
    else:
        mask[: len(row)] = row != 0
    return mask


def by_rows(array: np.ndarray) -> np.ndarray:
    """An array as float64 [rows, values]."""
    flat = array.reshape(array.shape[0], -1) if array.size else np.zeros((array.shape[0], 0))
    return flat.astype(np.float64)


def _bf16_ulp(size: np.ndarray) -> np.ndarray:
    tiny = float(np.finfo(np.float32).tiny)
    return 2.0 ** (np.floor(np.log2(np.maximum(size, tiny))) - 7)
