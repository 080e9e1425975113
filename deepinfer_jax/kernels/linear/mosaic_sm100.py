"""Linear layers of decode steps on SM100 in fixed tiles: block-scaled E4M3, and bfloat16 with exact products.

Roofline of a B200 (8 TB/s, 4.5 PFLOP/s of dense FP8) at 128 rows: the weights of 1280 x 32768 and of 8192 x 5120 are
42 MB with 1.3 MB of scales, 5.4 us; 10.7 GFLOP are 2.4 us. The grouped output projection (8 groups of 1024 x 4096) has
67 MB of bfloat16, 8.4 us. Memory limits everywhere. The kernel is in `units_sm100.py`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from deepinfer_jax.kernels.linear.packed_sm100 import PackedLinear, as_e4m3, as_e8m0, pack, quantized_rows
from deepinfer_jax.kernels.linear.units_sm100 import LINE, ROW_BLOCK, TILE_OUTPUTS, TILING, Product, Tiling
from deepinfer_jax.kernels.mosaic import GROUP, Interpret
from deepinfer_jax.ops.quant import ScaledArray

NUM_SMS = 148


def refuses(x: Array, w: ScaledArray | PackedLinear | Array) -> str | None:
    """Why `linear` cannot multiply these, None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    is_fitting = isinstance(w, ScaledArray) and w.form == "fp8" and w.block == (GROUP, GROUP) and w.scale is not None
    if not isinstance(w, PackedLinear) and not (isinstance(w, ScaledArray) and is_fitting):
        return f"weights are not E4M3 with a scale for each {GROUP} x {GROUP} block"
    if w.payload.ndim != 2:
        return f"weights have {w.payload.ndim} axes, not 2"
    return _refuses_shape(w.payload.shape[0], w.payload.shape[1], LINE)


def refuses_grouped(x: Array, w: Any) -> str | None:
    """Why `grouped_linear` and `linear_bf16` cannot multiply these, None if they can. x [T, (groups,) columns]."""
    if x.dtype != jnp.bfloat16 or not isinstance(w, Array) or w.dtype != jnp.bfloat16:
        return f"rows are {x.dtype} and weights not plain bfloat16, or the other way round"
    groups = 1 if x.ndim == 2 else x.shape[1]
    return _refuses_shape(w.shape[0] // groups, w.shape[1], LINE // 2)


def _refuses_shape(rows: int, columns: int, line: int) -> str | None:
    if rows % TILE_OUTPUTS or columns % line:
        return f"{rows} x {columns} weights are not multiples of {TILE_OUTPUTS} x {line}"
    return None


def linear(
    x: BFloat16[Array, "T K"],
    w: ScaledArray | PackedLinear,
    *,
    num_sms: int = NUM_SMS,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T N"]:
    """x quantised by `quantize_fp8`, times w.T, rounded to bfloat16; exact about x that is on that grid already.

    Differs from the reference by the order of sums, and by what the tensor cores' own sums lose. A ScaledArray is
    packed anew in each call.
    """
    reason = refuses(x, w)
    if reason is not None:
        raise NotImplementedError(f"linear on SM100: {reason}; use the reference")
    weights = w if isinstance(w, PackedLinear) else pack(w)
    num_outputs, width = weights.payload.shape
    if not x.shape[0]:
        return jnp.zeros((0, num_outputs), x.dtype)
    num_rows, row_tile = _tiled(x.shape[0], tiling)
    codes, scales = quantized_rows(x, num_rows=num_rows, row_tile=row_tile, interpret=interpret)
    product = Product(
        num_rows=num_rows,
        num_outputs=num_outputs,
        width=width,
        row_tile=row_tile,
        tiling=tiling,
        dtype=jnp.dtype(jnp.float8_e4m3fn),
        out_dtype=jnp.dtype(jnp.bfloat16),
        num_sms=num_sms,
        interpret=interpret,
    )
    out = product(as_e4m3(codes), as_e4m3(weights.payload), as_e8m0(scales), as_e8m0(weights.scales))
    return out[: x.shape[0]]


def linear_bf16(
    x: BFloat16[Array, "T K"],
    w: BFloat16[Array, "N K"],
    *,
    out_dtype: Any = jnp.float32,
    num_sms: int = NUM_SMS,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> Float[Array, "T N"]:
    """x @ w.T with exact products and float32 sums, in out_dtype: router and head, whose operands are bfloat16."""
    return _multiply_bf16(x, w, 1, out_dtype, num_sms, tiling, interpret)


def grouped_linear(
    x: BFloat16[Array, "T O M"],
    w: BFloat16[Array, "N M"],
    *,
    num_sms: int = NUM_SMS,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T O R"]:
    """One product for each of the O groups, whose N / O weight rows lie together; see `ops.linear.grouped_linear`."""
    num_rows, groups, width = x.shape
    x = x.reshape(num_rows, groups * width)
    out = _multiply_bf16(x, w, groups, jnp.bfloat16, num_sms, tiling, interpret)
    return out.reshape(num_rows, groups, w.shape[0] // groups)


def _multiply_bf16(
    x: BFloat16[Array, "T K"],
    w: BFloat16[Array, "N M"],
    groups: int,
    out_dtype: Any,
    num_sms: int,
    tiling: Tiling,
    interpret: Interpret,
) -> Float[Array, "T N"]:
    reason = refuses_grouped(x.reshape(x.shape[0], groups, w.shape[1]), w)
    if reason is not None:
        raise NotImplementedError(f"bfloat16 linear on SM100: {reason}; use the reference")
    if not x.shape[0]:
        return jnp.zeros((0, w.shape[0]), out_dtype)
    num_rows, row_tile = _tiled(x.shape[0], tiling)
    product = Product(
        num_rows=num_rows,
        num_outputs=w.shape[0],
        width=w.shape[1],
        groups=groups,
        row_tile=row_tile,
        tiling=tiling,
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(out_dtype),
        num_sms=num_sms,
        interpret=interpret,
    )
    padded = jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)))
    return product(padded, w)[: x.shape[0]]


def _tiled(num_rows: int, tiling: Tiling) -> tuple[int, int]:
    """The rows up to whole tiles, and the rows of a tile."""
    row_tile = min(tiling.row_tile, -(-num_rows // ROW_BLOCK) * ROW_BLOCK)
    return -(-num_rows // row_tile) * row_tile, row_tile
