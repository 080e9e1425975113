"""Packed weights of routed experts as the left operand of instructions on SM100; compiled or interpreted."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.experts.nibbles import decoded
from deepinfer_jax.kernels.experts.packed import CHUNK, GROUPS, decode_chunk
from deepinfer_jax.kernels.experts.rows import column_order
from deepinfer_jax.kernels.fp4_codes import BY_ROW, ROWS, rows_of_codes
from deepinfer_jax.kernels.ptx import inline, line_tiles

HALVES = 2  # of a chunk
HALF = CHUNK // HALVES  # columns, in the order of `rows.column_order`
LINE = HALF  # bytes of a packed row of a chunk
QUADS, WORDS = 4, 4  # groups of a half, and words of a group


def decoded_half(weights: Any, steps: Any, *, half: int, interpret: mosaic.Interpret) -> Float[Array, "M K"]:
    """E5M2 codes [128, 128] of a half of a packed chunk, in BY_ROW.

    weights [128, 128] uint8, in swizzled lines, and steps [4, 256] uint8, as in `PackedExperts`, are in shared memory.
    Half j has groups 2 q + j of every row, q from 0 to 3; `word_place` says where their codes go.
    """
    if interpret is not None:
        values = column_order(decode_chunk(weights[...], steps[...].reshape(ROWS, GROUPS)))
        plgpu.commit_smem()  # a barrier orders these reads before the next copies; the race detector wants a fence
        return values[:, half * HALF : (half + 1) * HALF].astype(jnp.float8_e5m2)
    result = plgpu.ShapeDtypeStruct((ROWS, HALF), jnp.float8_e5m2, layout=BY_ROW)

    def emit(_: Any, weights: Any, steps: Any) -> Any:
        row = mosaic.iand(mgpu.thread_idx(), ROWS - 1)
        line = mosaic.iadd(mosaic.shared_address(weights), mosaic.imul(row, LINE))
        swizzle = mosaic.shl(mosaic.iand(row, 7), 4)
        steps_at = mosaic.iadd(mosaic.shared_address(steps), mosaic.imul(row, GROUPS))
        codes = {}
        for q in range(QUADS):
            group = HALVES * q + half
            at = mosaic.iadd(line, mosaic.ixor(swizzle, 16 * group))
            words = decoded(mosaic.load_words(at, WORDS), mosaic.load_byte(steps_at, group))
            codes |= {word_place(q, i, h): words[i][h] for i in range(WORDS) for h in range(2)}
        return rows_of_codes([codes[place] for place in range(len(codes))])

    return inline(emit, (plgpu.RefType(line_tiles(LINE, LINE)), plgpu.RefType()), result)(weights, steps)


def word_place(q: int, i: int, h: int) -> int:
    """Which word of a row of a half has the codes of four weights h of word i of its group of number q."""
    return 8 * i + 4 * h + q
