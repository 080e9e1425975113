"""How many drafts of each request are verified: the budget's split over requests, on the device (spec: dspark 6.3)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

_LAST = np.int32(2**31 - 1)  # sorts behind every draft


def allocate_lengths(
    confidence: Float32[Array, "R G"], available: Int32[Array, " R"], budget: Int32[Array, ""]
) -> Int32[Array, " R"]:
    """Returns how many drafts each request verifies: the `budget` likeliest ones of all, 0..available for each.

    confidence: estimated chance that a draft is accepted together with those before it; NaN counts as 0. Ties go to
    the lower request, then to the earlier draft. Lengths are prefixes even where an estimate rises with the place: it
    counts as the lowest so far. `scheduler.budget.allocate` is the same in numpy, bit for bit.
    """
    survival = jnp.where(confidence > 0.0, confidence, 0.0)
    keys = -jax.lax.cummin(jax.lax.bitcast_convert_type(survival, jnp.int32), axis=1)  # bits order like the numbers
    places = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None, :]
    keys = jnp.where(places < available[:, None], keys, _LAST).reshape(-1)
    ranks = jnp.argsort(jnp.argsort(keys, stable=True))
    is_admitted = (ranks < budget) & (keys < _LAST)
    return jnp.sum(is_admitted.reshape(confidence.shape), axis=1, dtype=jnp.int32)
