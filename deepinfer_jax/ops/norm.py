"""Root-mean-square norm (spec: backbone 3.4)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.ops.invariant import round_to


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], *, eps: float) -> Float[Array, "*T D"]:
    """Root-mean-square norm over D, computed in float32 and rounded once to x.dtype."""
    x32 = x.astype(jnp.float32)
    w32 = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    inv_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return round_to(w32 * (x32 * inv_rms), x.dtype)
