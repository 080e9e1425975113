"""Products of rows with the FP4 weights of their experts by aclnnGroupedMatmulWeightNz.

The operator takes weights in CANN's fractal form. `pack_experts` makes it by our reading: blocks of 16 rows and 64
columns, block columns outermost. No hardware has confirmed that reading.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, result
from deepinfer_jax.ops.quant import INDEX_GROUP, ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

TARGET = "deepinfer.cann.expert_products.v1"
FRACTAL_ROWS = 16
FRACTAL_COLS = 64


@pytree_dataclass
class ExpertWeights:
    """Weights [E, N, K] of all experts: uint8 [E, K / 64, N / 16, 16, 32] (E2M1, even column in the low half) with
    scales uint8 [E, N, K / 64, 2] (E8M0).
    """

    fractals: Operand
    scale: Operand


def pack_experts(w: ScaledArray) -> ExpertWeights:
    """The checkpoint's FP4 weights [E, N, K] in fractals; ValueError for another form or other sizes."""
    if w.form != "fp4" or w.scale is None or w.block != (1, INDEX_GROUP):
        raise ValueError(f"the weights have form {w.form} in blocks of {w.block}; CANN takes fp4 in blocks of (1, 32)")
    experts, rows, cols = w.payload.shape[0], w.payload.shape[1], w.payload.shape[2] * 2
    if rows % FRACTAL_ROWS or cols % FRACTAL_COLS:
        raise ValueError(f"N={rows} and K={cols} must be multiples of {FRACTAL_ROWS} and {FRACTAL_COLS}")
    blocks = w.payload.reshape(experts, rows // FRACTAL_ROWS, FRACTAL_ROWS, cols // FRACTAL_COLS, FRACTAL_COLS // 2)
    return ExpertWeights(
        fractals=blocks.transpose(0, 3, 1, 2, 4), scale=w.scale.reshape(experts, rows, cols // FRACTAL_COLS, 2)
    )


def count_words(counts: Int32[Array, " E"]) -> Int32[Array, "E two"]:
    """Rows of each expert as the 64-bit integers that CANN reads: low word, high word."""
    return jnp.stack([counts, jnp.zeros_like(counts)], axis=1)


def expert_products(codes: Operand, scale: Operand, weights: ExpertWeights, counts: Operand) -> Operand:
    """bfloat16 [M, N]: row m times the transposed weight of its expert.

    codes [M, K] and scale [M, K / 64, 2] are rows as `linear.cann.quantize_fp8` makes them, sorted by expert; counts
    [E, 2] are the words of `count_words`. Rows behind the last group give zeros.
    """
    shape = result((codes.shape[0], weights.scale.shape[1]), jnp.bfloat16)
    return ascend_call(TARGET, (codes, scale, weights.fractals, weights.scale, counts), [shape])[0]
