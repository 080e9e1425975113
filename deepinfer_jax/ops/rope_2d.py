"""Rotary positions of patches in a plane: half-split pairs, the first half of them by row (spec: vision 5)."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.ops.invariant import round_to
from deepinfer_jax.ops.rope import angles


def angles_2d(
    rows: Int[Array, " T"], columns: Int[Array, " T"], freqs: Float32[Array | np.ndarray, " F"]
) -> tuple[Float32[Array, "T F2"], Float32[Array, "T F2"]]:
    """Cosine and sine of F row angles, then of F column angles, for each patch (F2 = 2 F)."""
    row_cos, row_sin = angles(rows, freqs)
    column_cos, column_sin = angles(columns, freqs)
    return jnp.concatenate([row_cos, column_cos], axis=1), jnp.concatenate([row_sin, column_sin], axis=1)


def rotate_halves(
    x: Float[Array, "T H K"], cos: Float32[Array, "T F2"], sin: Float32[Array, "T F2"]
) -> Float[Array, "T H K"]:
    """x with channels j and j + K / 2 rotated as a pair by angle j, in float32; rounded to x.dtype (K = 2 F2)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    # The barrier keeps a compiler from contracting a product and a sum into one fused operation.
    a_cos, b_sin, a_sin, b_cos = lax.optimization_barrier((a * cos, b * sin, a * sin, b * cos))
    return round_to(jnp.concatenate([a_cos - b_sin, b_cos + a_sin], axis=-1), x.dtype)
