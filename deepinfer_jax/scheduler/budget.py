"""How many drafts to verify: what a step costs, the total, and its split over requests (spec: dspark 6).

The survival of a draft is the estimated chance that it is accepted together with those before it, so the expected
tokens of a step are one for each request and the survival of each draft that is verified.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64

type Survival = np.ndarray | Sequence[Sequence[float]]  # [R, G], or the drafts of each request; NaN: no estimate

_JSON_KEYS = frozenset({"platform", "mesh", "dtype", "points", "row_slope_ms", "draft_points"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Milliseconds of a decode step by its rows, and of making drafts in it by its requests.

    Up to the largest compiled size a step costs what the next size does, for it is padded; above, the last slope goes
    on. More rows never cost less: a size that was measured faster than a smaller one counts as that one.
    """

    points: tuple[tuple[int, float], ...]  # (rows, ms) of each compiled size, rows rising
    platform: str = ""
    mesh: tuple[int, ...] = (1, 1)
    dtype: str = ""
    row_slope_ms: float = 0.0  # added for each row: what grows with the live rows of one compiled size
    draft_points: tuple[tuple[int, float], ...] = ()  # (requests, ms of their drafts), rising; none: they cost nothing

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("points is empty; give (rows, ms) of at least one compiled size")
        sizes = [size for size, _ in self.points]
        if sizes[0] < 1 or any(b <= a for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"points has rows {sizes}; they must rise from at least 1")
        for size, ms in self.points:
            if not (ms > 0 and np.isfinite(ms)):
                raise ValueError(f"points has {ms} ms for {size} rows; a step takes a positive time")
        requests = [count for count, _ in self.draft_points]
        if any(b <= a for a, b in itertools.pairwise([0, *requests])):
            raise ValueError(f"draft_points has requests {requests}; they must rise from at least 1")
        if any(not (ms >= 0 and np.isfinite(ms)) for _, ms in self.draft_points):
            raise ValueError(f"draft_points={self.draft_points} has a time that is negative or not finite")
        if not (self.row_slope_ms >= 0 and np.isfinite(self.row_slope_ms)):
            raise ValueError(f"row_slope_ms={self.row_slope_ms} must be finite and not negative")

    def cost(self, rows: int) -> float:
        """Milliseconds of a step with so many rows."""
        return float(self.costs(np.array([rows]))[0])

    def costs(self, rows: Int[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Milliseconds of a step, for each number of rows."""
        sizes, ms = self._table
        padded = ms[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        if len(sizes) == 1:
            slope = ms[0] / sizes[0]
        else:
            slope = (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2])
        return padded + slope * np.maximum(rows - sizes[-1], 0) + self.row_slope_ms * rows

    def draft_cost(self, num_requests: int) -> float:
        """Milliseconds of making drafts for so many requests: between two points on a line, in front of the first one
        as much as there, behind the last one in proportion.
        """
        if not self.draft_points:
            return 0.0
        counts, ms = zip(*self.draft_points, strict=True)
        return float(np.interp(num_requests, counts, ms)) * max(1.0, num_requests / counts[-1])

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON's types; `from_json` reads it."""
        return {
            "platform": self.platform,
            "mesh": list(self.mesh),
            "dtype": self.dtype,
            "points": [[size, ms] for size, ms in self.points],
            "row_slope_ms": self.row_slope_ms,
            "draft_points": [[count, ms] for count, ms in self.draft_points],
        }

    @classmethod
    def from_json(cls, record: Any) -> "CostCurve":
        """The curve of a dict like that of `to_json`, in which all but "points" may be left out.

        Raises ValueError for anything else.
        """
        if not isinstance(record, Mapping) or not set(record) <= _JSON_KEYS or "points" not in record:
            raise ValueError(f"{record!r} is no cost curve; its keys are {', '.join(sorted(_JSON_KEYS))}")
        try:
            return cls(
                points=tuple((int(size), float(ms)) for size, ms in record["points"]),
                platform=str(record.get("platform", "")),
                mesh=tuple(int(size) for size in record.get("mesh", (1, 1))),
                dtype=str(record.get("dtype", "")),
                row_slope_ms=float(record.get("row_slope_ms", 0.0)),
                draft_points=tuple((int(count), float(ms)) for count, ms in record.get("draft_points", ())),
            )
        except TypeError as error:
            raise ValueError(f"{record!r} is no cost curve: {error}; write it with to_json") from error

    @functools.cached_property
    def _table(self) -> tuple[Int64[np.ndarray, " B"], Float64[np.ndarray, " B"]]:
        sizes = np.array([size for size, _ in self.points], np.int64)
        return sizes, np.maximum.accumulate(np.array([ms for _, ms in self.points], np.float64))


def best_budget(
    survival: Survival,
    num_requests: int,
    curve: CostCurve | None,
    *,
    available: Int[np.ndarray, " R"] | None = None,
) -> int:
    """Returns for how many drafts in all the expected tokens of a step are most for its cost; all without a curve.

    num_requests: those that get a token, with drafts or without. available: drafts of each request, all of
    `survival` by default. Ties go to fewer rows. Every total is compared, so a total may lie behind a step of the
    cost; that is exact only while the estimates are older than the drafts that they decide about (spec: dspark 6.3).
    """
    estimates, is_draft = _estimates(survival, available)
    _check_requests(num_requests, is_draft)
    ranked = np.sort(estimates[is_draft])[::-1]
    if curve is None:
        return len(ranked)
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(ranked)])
    return int(np.argmax(tokens / curve.costs(num_requests + np.arange(len(tokens)))))


def drafting_pays(survival: Survival, num_requests: int, curve: CostCurve | None) -> bool:
    """Whether steps that make drafts and verify the best number of them give more expected tokens for their cost than
    steps without any, for so many requests; True without a curve.

    survival: of the drafts that each request would have. A tie is no gain.
    """
    if curve is None or not curve.draft_points:
        return True
    estimates, is_draft = _estimates(survival, None)
    _check_requests(num_requests, is_draft)
    ranked = np.sort(estimates[is_draft])[::-1]
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(ranked)])
    costs = curve.costs(num_requests + np.arange(len(tokens)))
    return bool(np.max(tokens / (costs + curve.draft_cost(num_requests))) > num_requests / costs[0])


def paper_lengths(
    survival: Survival,
    curve: CostCurve | None,
    *,
    num_requests: int | None = None,
    available: Int[np.ndarray, " R"] | None = None,
) -> Int32[np.ndarray, " R"]:
    """Returns the drafts to verify of each request, by the algorithm that stops early (spec: dspark 6.2).

    Drafts are admitted one at a time, the likeliest first (ties: the earlier place, then the lower request), until one
    does not raise the expected tokens for the cost. What lies behind it is not looked at, so `survival` may be the
    newest estimates. num_requests: those that get a token, all rows of `survival` by default; without a curve all
    drafts are admitted.
    """
    estimates, is_draft = _estimates(survival, available)
    num_requests = len(estimates) if num_requests is None else num_requests
    _check_requests(num_requests, is_draft)
    lengths = np.zeros(len(estimates), np.int32)
    if curve is None:
        return is_draft.sum(axis=1, dtype=np.int32)
    request, place = np.nonzero(is_draft)
    order = np.lexsort((request, place, -estimates[request, place]))
    tokens = float(num_requests)
    costs = curve.costs(num_requests + np.arange(len(order) + 1))
    best = tokens / costs[0]
    for admitted, index in enumerate(order, start=1):
        tokens += estimates[request[index], place[index]]
        if not tokens / costs[admitted] > best:
            break
        best = tokens / costs[admitted]
        lengths[request[index]] += 1
    return lengths


def allocate(
    survival: Float32[np.ndarray, "R G"], budget: int, available: Int[np.ndarray, " R"]
) -> Int32[np.ndarray, " R"]:
    """Returns how many drafts each request verifies: the `budget` likeliest ones of all, 0..available for each.

    NaN counts as 0: of a request without an estimate nothing is known here. Ties go to the lower request, then to the
    earlier draft. Lengths are prefixes even where survival rises with the place: it counts as the lowest so far. On
    the device this is `sampling.schedule.allocate_lengths`.
    """
    lowest = np.minimum.accumulate(np.where(survival > 0, survival, np.float32(0)), axis=1)
    request, place = np.nonzero(np.arange(survival.shape[1])[None, :] < available[:, None])
    ranked = np.argsort(-lowest[request, place], kind="stable")[: max(budget, 0)]
    return np.bincount(request[ranked], minlength=len(survival)).astype(np.int32)


def _estimates(
    survival: Survival, available: Int[np.ndarray, " R"] | None
) -> tuple[Float64[np.ndarray, "R G"], Bool[np.ndarray, "R G"]]:
    """Survival without gaps and never rising along a request, and which of it belongs to a draft."""
    if isinstance(survival, np.ndarray):
        values = survival.astype(np.float64)
        lengths = np.full(len(values), values.shape[1])
    else:
        lengths = np.array([len(row) for row in survival], np.int64)
        values = np.full((len(survival), max(lengths, default=0)), np.nan)
        for request, row in enumerate(survival):
            values[request, : len(row)] = row
    if available is not None:
        lengths = np.minimum(lengths, available)
    is_draft = np.arange(values.shape[1])[None, :] < lengths[:, None]
    return np.minimum.accumulate(np.where(np.isnan(values), 1.0, values), axis=1), is_draft


def _check_requests(num_requests: int, is_draft: Bool[np.ndarray, "R G"]) -> None:
    num_drafting = int(is_draft.any(axis=1).sum())
    if num_requests < num_drafting:
        raise ValueError(
            f"num_requests={num_requests} is below the {num_drafting} requests with drafts; count every request that "
            "gets a token"
        )
