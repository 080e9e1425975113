"""How far confidences are from what is accepted, and temperatures that bring them closer (spec: dspark 6.5; no JAX)."""

import numpy as np
from jaxtyping import Bool, Float, Float64, Int

NUM_BINS = 15
# Temperatures that are tried, those nearest to 1 first: of equally good ones the first is taken.
_GRID = np.array(sorted(np.logspace(-1, 1, 41), key=lambda t: abs(np.log(t))))


def expected_calibration_error(
    confidences: Float[np.ndarray, " N"], outcomes: Bool[np.ndarray, " N"], *, num_bins: int = NUM_BINS
) -> float:
    """Mean distance between confidence and frequency over bins of equal width, each counted by what is in it.

    Raises ValueError for no data, and for confidences outside 0..1.
    """
    if not len(confidences):
        raise ValueError("there are no confidences; give at least one")
    if not ((confidences >= 0) & (confidences <= 1)).all():
        raise ValueError("confidences has numbers outside 0..1, or NaN; pass chances, not logits")
    bins = np.minimum((confidences * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.bincount(bins, weights=confidences.astype(np.float64) - outcomes, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(confidences))


def survival_of(z: Float[np.ndarray, "N G"], temperatures: Float[np.ndarray, " G"]) -> Float64[np.ndarray, "N G"]:
    """Estimated chance that a draft is accepted with all those before it, from the head's logits."""
    halved = z.astype(np.float64) / temperatures[None, :] / 2
    return np.cumprod(0.5 * (1 + np.tanh(halved)), axis=1)  # the sigmoid, without overflow


def fit_temperatures(z: Float[np.ndarray, "N G"], accepted: Int[np.ndarray, " N"]) -> Float64[np.ndarray, " G"]:
    """Returns one temperature for each place of a block: sequential temperature scaling.

    z: the confidence head's logits of N blocks all of whose drafts were verified, so that `accepted`, 0..G, is what
    the drafts deserved. From the first place on, each temperature is the one of 41 in 0.1..10 with the least
    calibration error of the survival up to there; those before stay. Raises ValueError for data that do not fit.
    """
    if not len(z):
        raise ValueError("there are no blocks; give the logits and accepted drafts of at least one")
    if not np.isfinite(z).all():
        raise ValueError("z has numbers that are not finite; leave those blocks out")
    if accepted.min() < 0 or accepted.max() > z.shape[1]:
        raise ValueError(f"accepted has {accepted.min()}..{accepted.max()}; a block has 0..{z.shape[1]} drafts")
    temperatures = np.ones(z.shape[1])
    before = np.ones(len(z))
    for place in range(z.shape[1]):
        outcomes = accepted > place
        column = z[:, place : place + 1]
        survivals = [before * survival_of(column, np.array([t]))[:, 0] for t in _GRID]
        errors = [expected_calibration_error(survival, outcomes) for survival in survivals]
        best = int(np.argmin(errors))
        temperatures[place], before = _GRID[best], survivals[best]
    return temperatures
