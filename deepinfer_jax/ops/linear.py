"""Linear layers over packed or plain weights (spec: backbone 7.2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from deepinfer_jax.ops.invariant import round_to, row_product
from deepinfer_jax.ops.quant import ScaledArray, dequantize


def linear(x: Float[Array, "T K"], w: ScaledArray | Array) -> Float[Array, "T N"]:
    """x @ w.T with w dequantised to x.dtype (exact), accumulated in float32, rounded to x.dtype.

    With x on the grid of `quantize_fp8` this equals the block-scaled W8A8 product up to summation order.
    """
    return round_to(row_product(x, dequantize(w, x.dtype)), x.dtype)


def linear_f32(x: Float[Array, "T K"], w: ScaledArray | Array) -> Float32[Array, "T N"]:
    """x @ w.T with both operands and the result in float32: router, mHC, ratio-2 compressor."""
    return row_product(x.astype(jnp.float32), dequantize(w, jnp.dtype(jnp.float32)))


def grouped_linear(x: Float[Array, "T O M"], w: ScaledArray | Array) -> Float[Array, "T O R"]:
    """One product for each of the O output groups: w holds [O * R, M] rows, group-major."""
    groups = x.shape[1]
    weights = dequantize(w, x.dtype)
    weights = weights.reshape(groups, weights.shape[0] // groups, weights.shape[1])
    parts = [row_product(x[:, g], weights[g]) for g in range(groups)]
    return round_to(jnp.stack(parts, axis=1), x.dtype)
