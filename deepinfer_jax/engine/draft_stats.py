"""What became of drafts (a part of `stats.py`).

| field | meaning |
|---|---|
| rounds | steps of single requests that verified at least one draft |
| drafts_verified, drafts_accepted | drafts that had a row; those that were kept |
| wasted_rows | drafts_verified - drafts_accepted |
| acceptance | for each place: of the rounds that verified it, the share that accepted it and all before it |
| accepted_len_mean | tokens that a round gives: its accepted drafts and one more |
| verified_lens | number of verified drafts -> rounds |
| confidence_ece | for each place: calibration error of the chance that it and all before it are kept |
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from deepinfer_jax.sampling.calibration import expected_calibration_error, survival_of

RECORDS = 10_000  # rounds kept with their confidences
# Raw confidences, verified and accepted drafts of each round.
type DraftRecords = tuple[Float64[np.ndarray, "N G"], Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]


class DraftStats:
    """Counts rounds by (verified, accepted), and keeps the confidences of the last ones."""

    def __init__(self) -> None:
        self._records: deque[tuple[Sequence[float], int, int]] = deque(maxlen=RECORDS)

    def add(self, confidence: Sequence[float], verified: int, accepted: int) -> None:
        """A round; confidence: raw, of all drafts that were proposed."""
        self._records.append((confidence, verified, accepted))

    def records(self) -> DraftRecords:
        """Raw confidences, verified and accepted drafts of the last rounds, for `sampling/calibration.py`."""
        if not self._records:
            return np.zeros((0, 0)), np.zeros(0, np.int64), np.zeros(0, np.int64)
        confidence, verified, accepted = zip(*self._records, strict=True)
        return np.array(confidence, np.float64), np.array(verified, np.int64), np.array(accepted, np.int64)

    def report(self, rounds: Mapping[tuple[int, int], int]) -> dict[str, Any]:
        """The fields of the table above; rounds: (verified, accepted) -> how many."""
        count = sum(rounds.values())
        verified = sum(length * number for (length, _), number in rounds.items())
        accepted = sum(length * number for (_, length), number in rounds.items())
        lens: Counter[int] = Counter()
        for (length, _), number in rounds.items():
            lens[length] += number
        places = range(1, 1 + max(lens, default=0))
        tried = [sum(number for length, number in lens.items() if length >= place) for place in places]
        kept = [sum(number for (_, length), number in rounds.items() if length >= place) for place in places]
        return {
            "rounds": count,
            "drafts_verified": verified,
            "drafts_accepted": accepted,
            "wasted_rows": verified - accepted,
            "acceptance": [k / t for k, t in zip(kept, tried, strict=True)],
            "accepted_len_mean": 1 + accepted / count if count else None,
            "verified_lens": dict(sorted(lens.items())),
            "confidence_ece": self._calibration_errors(),
        }

    def _calibration_errors(self) -> list[float]:
        confidence, verified, accepted = self.records()
        chances = survival_of(confidence, np.ones(confidence.shape[1]))
        errors = []
        for place in range(chances.shape[1]):
            seen = verified > place
            if seen.any():
                errors.append(expected_calibration_error(chances[seen, place], accepted[seen] > place))
        return errors
