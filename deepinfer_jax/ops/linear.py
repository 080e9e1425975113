"""Linear layers over packed weights (spec: backbone 7.2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from deepinfer_jax.ops.invariant import map_rows, round_to, row_product
from deepinfer_jax.ops.quant import ScaledArray, dequantize


def linear(x: Float[Array, "T K"], w: ScaledArray | Array, *, tile: int | None) -> Float[Array, "T N"]:
    """x @ w.T with w dequantised to x.dtype (exact), accumulated in float32, rounded to x.dtype.

    With x on the grid of `quantize_fp8` this equals the block-scaled W8A8 product up to summation order.
    """
    return round_to(row_product(x, dequantize(w, x.dtype), tile=tile), x.dtype)


def linear_f32(x: Float[Array, "T K"], w: ScaledArray | Array, *, tile: int | None) -> Float32[Array, "T N"]:
    """x @ w.T with both operands and the result in float32: router, mHC, ratio-2 compressor."""
    return row_product(x.astype(jnp.float32), dequantize(w, jnp.dtype(jnp.float32)), tile=tile)


def grouped_linear(x: Float[Array, "T O M"], w: ScaledArray | Array, *, tile: int | None) -> Float[Array, "T O R"]:
    """One product for each of the O output groups: w holds [O * R, M] rows, group-major."""
    groups = x.shape[1]
    weights = dequantize(w, x.dtype)
    weights = weights.reshape(groups, weights.shape[0] // groups, weights.shape[1])

    def products(rows: Float[Array, "B O M"]) -> Float[Array, "B O R"]:
        parts = [row_product(rows[:, g], weights[g], tile=None) for g in range(groups)]
        return round_to(jnp.stack(parts, axis=1), x.dtype)

    return map_rows(products, x, tile=tile)
