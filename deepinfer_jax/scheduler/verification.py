"""Policies of confidence-scheduled verification: how many drafts of a decode step have a row (spec: dspark 6).

Without a policy every draft is verified. Estimates come with what is read of a step, so a policy looks at
`Sequence.estimates`: (step, survival of each draft) of the last steps that were read, the newest last.
"""

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

from deepinfer_jax.scheduler.budget import CostCurve, best_budget, drafting_pays, paper_lengths
from deepinfer_jax.scheduler.plan import Chunk
from deepinfer_jax.scheduler.sequence import Sequence

ESTIMATES_KEPT = 2
LOOK_AGAIN = 32  # steps after which drafts are made once more although they did not pay


@runtime_checkable
class VerificationPolicy(Protocol):
    """Decides before a decode step is launched; asked once for each rank and step.

    reads_newest: whether it needs the estimates of the step just in front, which asynchronous scheduling has not read.
    """

    reads_newest: bool

    def lengths(self, sequences: Seq[Sequence], most: int) -> Seq[int] | None:
        """Drafts to verify of each request that decodes, at most `most` of each; None: as many as there are."""

    def budget(self, sequences: Seq[Sequence], drafts: Seq[int], step: int) -> int | None:
        """Drafts to verify in all, of so many of each request; the device spreads them. None: all."""

    def proposes(self, sequences: Seq[Sequence], most: int, step: int) -> bool:
        """Whether the requests that decode in this step get drafts, up to `most` each, for the next one to verify."""
        ...


class BudgetPolicy:
    """The number of drafts that gives the most expected tokens for the measured cost of the step.

    Estimates that are newer than two steps are left out, so that a draft's own confidence never decides whether the
    drafts in front of it are verified. A request without an old estimate counts as certain.
    """

    reads_newest = False

    def __init__(self, curve: CostCurve | None) -> None:
        self.curve = curve
        self._drafted_at = 0  # step

    def lengths(self, sequences: Seq[Sequence], most: int) -> Seq[int] | None:
        """No limit of a single request."""
        return None

    def budget(self, sequences: Seq[Sequence], drafts: Seq[int], step: int) -> int | None:
        """Of the total over all requests."""
        survival = [_padded(_older(sequence, step), count) for sequence, count in zip(sequences, drafts, strict=True)]
        return best_budget(survival, len(sequences), self.curve)

    def proposes(self, sequences: Seq[Sequence], most: int, step: int) -> bool:
        """Where the last estimates say that drafts pay, and now and then to see whether that has changed."""
        survival = [_padded(sequence.estimates[-1][1] if sequence.estimates else (), most) for sequence in sequences]
        pays = drafting_pays(survival, len(sequences), self.curve) if sequences else True
        if pays or step - self._drafted_at >= LOOK_AGAIN:
            self._drafted_at = step
            return True
        return False


class PaperPolicy:
    """The algorithm that stops early, on the newest estimates: for engines that read a step before the next one."""

    reads_newest = True

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve

    def lengths(self, sequences: Seq[Sequence], most: int) -> Seq[int] | None:
        """Of each request; one without an estimate counts as certain."""
        counts = [sequence.num_drafts(most) for sequence in sequences]
        survival = [
            _padded(sequence.estimates[-1][1] if sequence.estimates else (), count)
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        return paper_lengths(survival, self.curve).tolist()

    def budget(self, sequences: Seq[Sequence], drafts: Seq[int], step: int) -> int | None:
        """No limit beside that of each request."""
        return None

    def proposes(self, sequences: Seq[Sequence], most: int, step: int) -> bool:
        """Always."""
        return True


def budget_of(chunks: Seq[Chunk], policy: VerificationPolicy | None, *, step: int) -> int | None:
    """Drafts of a rank's chunks that have a row; None: all."""
    if policy is None:
        return None
    drafts = [chunk.num_drafts for chunk in chunks]
    if not any(drafts):
        return None
    return policy.budget([chunk.sequence for chunk in chunks], drafts, step)


def _older(sequence: Sequence, step: int) -> tuple[float, ...]:
    """The newest survival that was made at least two steps before."""
    return next((survival for made, survival in reversed(sequence.estimates) if made <= step - 2), ())


def _padded(survival: tuple[float, ...], count: int) -> tuple[float, ...]:
    """The survival of so many drafts; NaN where there is no estimate."""
    return (survival + (float("nan"),) * count)[:count]
