"""Linear layers of decode steps on SM90 in fixed tiles: block-scaled E4M3, and bfloat16 with exact products.

Roofline at 128 rows: the weights of 1280 x 32768 and of 8192 x 5120 are 42 MB, 9.9 us at 4.23 TB/s; 10.7 GFLOP are
7.2 us of FP8 at 1490 TFLOP/s. Memory limits, by little. The grouped output projection (8 groups of 1024 x 4096) has
67 MB of bfloat16, 16 us.

A kernel is a `units_sm90.Product`. Both operands come from shared memory; `products_sm90` says which is the left one.

Layers with few outputs have fewer units than there are multiprocessors. Their columns are split into runs, as many as
`num_splits` says for the shape of the weights, whatever the number of rows: the sums of the runs leave as float32 and
are added in the order of the columns, so that the bits of a row do not depend on how many there are.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float

from deepinfer_jax.kernels.linear.packed_sm90 import PackedLinear, pack, quantized_rows
from deepinfer_jax.kernels.linear.products_sm90 import TILE_OUTPUTS
from deepinfer_jax.kernels.linear.units_sm90 import CHUNK_BYTES, ROW_BLOCK, TILING, Product, Tiling
from deepinfer_jax.kernels.mosaic import GROUP, Interpret
from deepinfer_jax.kernels.warpgroup import ROWS
from deepinfer_jax.ops.quant import ScaledArray

NUM_SMS = 132
# Of `num_splits`, for 128 rows of x and in the time that a multiprocessor's share of the memory's bandwidth needs for
# a chunk of 128 weight rows, 32 KB: writing a unit's bfloat16 results or its float32 sums; starting the kernel that
# adds sums; and reading these, for each split and each multiprocessor's share of the outputs.
OUT_COST, SUMS_COST, ADDING_COST, READING_COST = 0.7, 1.4, 1.5, 1.4
FEWER_SPLITS = 1.1  # how much longer fewer splits may take


def num_splits(num_outputs: int, num_chunks: int) -> int:
    """Runs of columns whose sums are made apart: what fills 132 multiprocessors best, by the weights' shape alone."""
    tiles = num_outputs // TILE_OUTPUTS

    def cost(splits: int) -> float:
        rounds = -(-tiles * splits // NUM_SMS)
        chunks = -(-num_chunks // splits)
        if splits == 1:
            return rounds * (chunks + OUT_COST)
        return rounds * (chunks + SUMS_COST) + ADDING_COST + splits * READING_COST * tiles / NUM_SMS

    costs = [cost(splits) for splits in range(1, min(num_chunks, NUM_SMS) + 1)]
    return next(i + 1 for i, each in enumerate(costs) if each <= FEWER_SPLITS * min(costs))


def is_split(w: ScaledArray | PackedLinear) -> bool:
    """Whether `linear` makes the sums of several runs of columns."""
    num_outputs, width = w.payload.shape
    return num_splits(num_outputs, width // CHUNK_BYTES) > 1


def refuses(x: Array, w: ScaledArray | PackedLinear | Array) -> str | None:
    """Why `linear` cannot multiply these, None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    is_fitting = isinstance(w, ScaledArray) and w.form == "fp8" and w.block == (GROUP, GROUP) and w.scale is not None
    if not isinstance(w, PackedLinear) and not (isinstance(w, ScaledArray) and is_fitting):
        return f"weights are not E4M3 with a scale for each {GROUP} x {GROUP} block"
    rows, columns = w.payload.shape[-2:]
    if w.payload.ndim != 2:
        return f"weights have {w.payload.ndim} axes, not 2"
    return _refuses_shape(rows, columns, CHUNK_BYTES)


def refuses_grouped(x: Array, w: ScaledArray | Array) -> str | None:
    """Why `grouped_linear` and `linear_bf16` cannot multiply these, None if they can. x [T, (groups,) columns]."""
    if x.dtype != jnp.bfloat16 or isinstance(w, ScaledArray | PackedLinear) or w.dtype != jnp.bfloat16:
        return f"rows are {x.dtype} and weights not plain bfloat16, or the other way round"
    groups = 1 if x.ndim == 2 else x.shape[1]
    return _refuses_shape(w.shape[0] // groups, w.shape[1], CHUNK_BYTES // 2)


def _refuses_shape(rows: int, columns: int, chunk: int) -> str | None:
    if rows % TILE_OUTPUTS or columns % chunk:
        return f"{rows} x {columns} weights are not multiples of {TILE_OUTPUTS} x {chunk}"
    return None


def linear(
    x: BFloat16[Array, "T K"],
    w: ScaledArray | PackedLinear,
    *,
    num_sms: int = NUM_SMS,
    splits: int | None = None,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T N"]:
    """x quantised by `quantize_fp8`, times w.T, rounded to bfloat16; exact about x that is on that grid already.

    Differs from the reference by the order of float32 sums over groups of 32 columns, and by what one FP8 instruction
    loses within a group. A ScaledArray is packed anew in each call. splits: `num_splits` of the shape if None; another
    number gives other bits.
    """
    reason = refuses(x, w)
    if reason is not None:
        raise NotImplementedError(f"linear on SM90: {reason}; use the reference")
    weights = w if isinstance(w, PackedLinear) else pack(w)
    num_outputs, width = weights.payload.shape
    if not x.shape[0]:
        return jnp.zeros((0, num_outputs), x.dtype)
    num_rows, row_tile = _tiled(x.shape[0], tiling, is_scaled=True)
    codes, scales = quantized_rows(x, num_rows=num_rows, interpret=interpret)
    product = Product(
        num_rows=num_rows,
        num_outputs=num_outputs,
        width=width,
        splits=num_splits(num_outputs, width // CHUNK_BYTES) if splits is None else splits,
        row_tile=row_tile,
        tiling=tiling,
        dtype=jnp.dtype(jnp.uint8),
        out_dtype=jnp.dtype(jnp.bfloat16),
        num_sms=num_sms,
        interpret=interpret,
    )
    return product(codes, weights.payload, scales, weights.scales)[: x.shape[0]]


def linear_bf16(
    x: BFloat16[Array, "T K"],
    w: BFloat16[Array, "N K"],
    *,
    out_dtype: Any = jnp.float32,
    num_sms: int = NUM_SMS,
    splits: int | None = None,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> Float[Array, "T N"]:
    """x @ w.T with exact products and float32 sums, in out_dtype: router and head, whose operands are bfloat16."""
    return _multiply_bf16(x, w, 1, out_dtype, num_sms, splits, tiling, interpret)


def grouped_linear(
    x: BFloat16[Array, "T O M"],
    w: BFloat16[Array, "N M"],
    *,
    num_sms: int = NUM_SMS,
    splits: int | None = None,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T O R"]:
    """One product for each of the O groups, whose N / O weight rows lie together; see `ops.linear.grouped_linear`."""
    num_rows, groups, width = x.shape
    x = x.reshape(num_rows, groups * width)
    out = _multiply_bf16(x, w, groups, jnp.bfloat16, num_sms, splits, tiling, interpret)
    return out.reshape(num_rows, groups, w.shape[0] // groups)


def _multiply_bf16(
    x: BFloat16[Array, "T K"],
    w: BFloat16[Array, "N M"],
    groups: int,
    out_dtype: Any,
    num_sms: int,
    splits: int | None,
    tiling: Tiling,
    interpret: Interpret,
) -> Float[Array, "T N"]:
    reason = refuses_grouped(x.reshape(x.shape[0], groups, w.shape[1]), w)
    if reason is not None:
        raise NotImplementedError(f"bfloat16 linear on SM90: {reason}; use the reference")
    if not x.shape[0]:
        return jnp.zeros((0, w.shape[0]), out_dtype)
    num_rows, row_tile = _tiled(x.shape[0], tiling, is_scaled=False)
    product = Product(
        num_rows=num_rows,
        num_outputs=w.shape[0],
        width=w.shape[1],
        groups=groups,
        splits=num_splits(w.shape[0], 2 * w.shape[1] // CHUNK_BYTES) if splits is None else splits,
        row_tile=row_tile,
        tiling=tiling,
        dtype=jnp.dtype(jnp.bfloat16),
        out_dtype=jnp.dtype(out_dtype),
        num_sms=num_sms,
        interpret=interpret,
    )
    padded = jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)))
    return product(padded, w)[: x.shape[0]]


def _tiled(num_rows: int, tiling: Tiling, *, is_scaled: bool) -> tuple[int, int]:
    """The rows up to whole tiles, and the rows of a tile: with scales and more than 64 rows, 128 (see `Product`)."""
    block = 2 * ROWS if is_scaled and tiling.has_rows_left and num_rows > ROWS else ROW_BLOCK
    row_tile = min(tiling.row_tile, -(-num_rows // block) * block)
    return -(-num_rows // row_tile) * row_tile, row_tile
