"""Linear layers with a bias (spec: vision 5)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from deepinfer_jax.ops.invariant import round_to, row_product


def affine(x: Float[Array, "T K"], weight: Float[Array, "N K"], bias: Float[Array, " N"]) -> Float[Array, "T N"]:
    """x @ weight.T + bias: the weight in x.dtype, sum and bias in float32, rounded once to x.dtype."""
    total = row_product(x, weight.astype(x.dtype)) + bias.astype(jnp.float32)[None, :]
    return round_to(total, x.dtype)
