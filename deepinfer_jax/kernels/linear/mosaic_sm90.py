"""Linear layers of decode steps on SM90 in fixed tiles: block-scaled E4M3, and bfloat16 with exact products.

Roofline at 128 rows: the weights of 1280 x 32768 and of 8192 x 5120 are 42 MB, 9.9 us at 4.23 TB/s; 10.7 GFLOP are
7.2 us of FP8 at 1490 TFLOP/s. Memory limits, by little. The grouped output projection (8 groups of 1024 x 4096) has
67 MB of bfloat16, 16 us.

One block for each multiprocessor works through units of 128 weight rows times `row_tile` rows of x in a fixed order, in
which units that read the same weights are neighbours. One warpgroup copies, two multiply. Both operands come from
shared memory; `products_sm90` says which of them is the left one.

Layers with few outputs have fewer units than there are multiprocessors. Their columns are split into runs, as many as
`num_splits` says for the shape of the weights, whatever the number of rows: the sums of the runs leave as float32 and
are added in the order of the columns, so that the bits of a row do not depend on how many there are.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Shaped

from deepinfer_jax.kernels.linear.packed_sm90 import PackedLinear, pack, quantized_rows
from deepinfer_jax.kernels.linear.products_sm90 import (
    BF16_TRANSFORMS,
    TILE_OUTPUTS,
    WARPGROUPS,
    Bf16Product,
    Fp8Product,
    Fp8RowsProduct,
    store_sums,
)
from deepinfer_jax.kernels.mosaic import GROUP, Interpret, check_registers, observe_last
from deepinfer_jax.kernels.warpgroup import LINE, ROWS, TILE_TRANSFORMS
from deepinfer_jax.ops.invariant import ordered_sum, round_to
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

CHUNK_BYTES = 2 * LINE  # of a row: columns are split between such chunks
REGISTERS, COPY_REGISTERS = 216, 72  # of a thread that multiplies, of one that copies
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment
ROW_BLOCK = 8
SCALE_ROOM = 8  # groups of columns in a stage for which there is room
NUM_SMS = 132
# Of `num_splits`, for 128 rows of x and in the time that a multiprocessor's share of the memory's bandwidth needs for
# a chunk of 128 weight rows, 32 KB: writing a unit's bfloat16 results or its float32 sums; starting the kernel that
# adds sums; and reading these, for each split and each multiprocessor's share of the outputs.
OUT_COST, SUMS_COST, ADDING_COST, READING_COST = 0.7, 1.4, 1.5, 1.4
FEWER_SPLITS = 1.1  # how much longer fewer splits may take

check_registers(*[REGISTERS] * WARPGROUPS, COPY_REGISTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes that change speed and no bits."""

    row_tile: int = 128  # rows of x that share one reading of the weights
    sum_registers: int = 64  # see Fp8Product
    rows_sum_registers: int = 128  # see Fp8RowsProduct; with 64 rows half of them
    has_rows_left: bool = True  # for tiles of 64 and 128 rows with scales
    most_stages: int = 6

    def __post_init__(self) -> None:
        if self.row_tile % ROW_BLOCK or not ROW_BLOCK <= self.row_tile <= 128:
            raise ValueError(f"row_tile={self.row_tile} must be a multiple of {ROW_BLOCK} from {ROW_BLOCK} to 128")


TILING = Tiling()


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
    product = _Product(
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
    product = _Product(
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
    """The rows up to whole tiles, and the rows of a tile: with scales and more than 64 rows, 128 (see `_Product`)."""
    block = 2 * ROWS if is_scaled and tiling.has_rows_left and num_rows > ROWS else ROW_BLOCK
    row_tile = min(tiling.row_tile, -(-num_rows // block) * block)
    return -(-num_rows // row_tile) * row_tile, row_tile


@pytree_dataclass
class _Operands:
    """Both sides of a product in device memory; without scales, these are empty."""

    x: Any  # [rows, groups * columns]
    weights: Any  # [outputs, columns]
    x_scales: tuple[Any, ...]  # [columns / 32, rows] float32
    scales: tuple[Any, ...]  # [columns / 32, outputs / 32] float32


@pytree_dataclass
class _Shared:
    """Shared memory and barriers of a block. A line has 128 bytes; without scales, theirs are not read."""

    weights: Any  # [stages, lines, 128, line]
    scales: Any  # [stages, 8, 4] float32, of which the first 4 lines are used: a copy begins at a multiple of 128 bytes
    x: Any  # [stages, lines, row_tile, line]
    x_scales: Any  # [stages, 4 lines, row_tile] float32
    out: Any  # [warpgroups, rows of x, outputs] of a warpgroup; not used for float32
    full: Any  # of each stage: all copies have arrived
    free: Any  # of each stage: all warpgroups have read it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unit:
    """What a block makes at once: a tile of the rows times a tile of the outputs, over one run of columns."""

    row: Array
    column: Array
    split: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A kernel: E4M3 codes with scales where dtype is uint8, else plain bfloat16."""

    num_rows: int  # of x, a multiple of row_tile
    num_outputs: int
    width: int  # columns of the weights
    groups: int = 1  # ranges of outputs, each with columns of x of its own
    splits: int  # runs of columns with sums of their own
    row_tile: int
    tiling: Tiling
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    num_sms: int
    interpret: Interpret

    @property
    def is_scaled(self) -> bool:
        return self.dtype == jnp.uint8

    @property
    def line(self) -> int:
        """Columns in 128 bytes."""
        return LINE // self.dtype.itemsize

    @property
    def lines(self) -> int:
        """Of a stage: with many rows of x one, so that there are more stages; no bits depend on it."""
        return 1 if self.row_tile > ROWS else 2

    @property
    def groups_each(self) -> int:
        """Groups of columns with a scale, in a stage."""
        return self.lines * LINE // GROUP

    @property
    def num_stages(self) -> int:
        """Stages that the columns of a unit fill if they are not split."""
        return self.width // (self.lines * self.line)

    @property
    def row_tiles(self) -> int:
        return self.num_rows // self.row_tile

    @property
    def made_dtype(self) -> jnp.dtype:
        """Of what the kernel writes."""
        return self.out_dtype if self.splits == 1 else jnp.dtype(jnp.float32)

    @property
    def is_staged(self) -> bool:
        """Whether results go through shared memory; float32 ones are written as they are."""
        return self.made_dtype != jnp.float32

    @property
    def product(self) -> Fp8Product | Fp8RowsProduct | Bf16Product:
        """What each warpgroup multiplies."""
        if not self.is_scaled:
            return Bf16Product(row_tile=self.row_tile)
        if self.tiling.has_rows_left and self.row_tile in (ROWS, 2 * ROWS):
            sum_registers = self.tiling.rows_sum_registers * self.row_tile // (2 * ROWS)
            return Fp8RowsProduct(row_tile=self.row_tile, sum_registers=sum_registers)
        return Fp8Product(row_tile=self.row_tile, sum_registers=self.tiling.sum_registers)

    @property
    def staged_shape(self) -> tuple[int, int]:
        """Rows of x and outputs of a warpgroup's results in shared memory."""
        if not self.is_staged:
            return ROW_BLOCK, ROWS
        first, second = self.product.shape
        return (second, first) if self.product.is_transposed else (first, second)

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        stage = (
            self.lines * (TILE_OUTPUTS + self.row_tile) * LINE
            + (SCALE_ROOM * (TILE_OUTPUTS // GROUP) + self.groups_each * self.row_tile) * 4
        )
        out_bytes = WARPGROUPS * math.prod(self.staged_shape) * self.made_dtype.itemsize
        return min(self.tiling.most_stages, (SHARED_BYTES - out_bytes) // stage)

    def __call__(self, x: Shaped[Array, "T K"], weights: Shaped[Array, "N M"], *scales: Array) -> Float[Array, "T N"]:
        """x times weights, by groups; scales: those of x and of the weights, [columns / 32, rows or blocks of rows]."""
        operands = _Operands(x=x, weights=weights, x_scales=scales[:1], scales=scales[1:])
        leaves, structure = jax.tree.flatten(operands)

        def body(*refs: Any, **scratch: Any) -> None:
            self._run(jax.tree.unflatten(structure, refs[:-1]), refs[-1], _Shared(**scratch))

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((self.splits * self.num_rows, self.num_outputs), self.made_dtype),
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            interpret=False if self.interpret is None else self.interpret,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            scratch_types=self._scratch_types(),
        )
        made = kernel(*leaves)
        if self.splits == 1:
            return made
        sums = made.reshape(self.splits, self.num_rows, self.num_outputs)
        return round_to(ordered_sum(list(sums)), self.out_dtype)

    def _scratch_types(self) -> dict[str, Any]:
        transforms = TILE_TRANSFORMS if self.is_scaled else BF16_TRANSFORMS
        num_copies = 2 * self.lines + (2 if self.is_scaled else 0)  # weights and x, the scales of both
        shape = (self.stages, self.lines)
        # Rows of results, if these come by rows, as a swizzle spans them: no two threads write to one bank.
        out_transforms = BF16_TRANSFORMS if self.is_staged and not self.product.is_transposed else ()
        return {
            "weights": plgpu.SMEM((*shape, TILE_OUTPUTS, self.line), self.dtype, transforms=transforms),
            "scales": plgpu.SMEM((self.stages, SCALE_ROOM, TILE_OUTPUTS // GROUP), jnp.float32),
            "x": plgpu.SMEM((*shape, self.row_tile, self.line), self.dtype, transforms=transforms),
            "x_scales": plgpu.SMEM((self.stages, self.groups_each, self.row_tile), jnp.float32),
            "out": plgpu.SMEM((WARPGROUPS, *self.staged_shape), self.made_dtype, transforms=out_transforms),
            "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=self.stages),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.stages),
        }

    def _run(self, operands: _Operands, out: Any, shared: _Shared) -> None:
        sm, warpgroup, product = lax.axis_index("sm"), lax.axis_index("warpgroup"), self.product
        num_units = self.num_outputs // TILE_OUTPUTS * self.splits * self.row_tiles
        num_own = lax.max(num_units - sm + self.num_sms - 1, jnp.int32(0)) // self.num_sms

        def unit(index: Array) -> _Unit:
            rest, row = jnp.divmod(sm + index * self.num_sms, self.row_tiles)
            column, split = jnp.divmod(rest, self.splits)
            return _Unit(row=row, column=column, split=split)

        def copy_unit(index: Array, step: Array) -> Array:
            own = unit(index)

            def copy_chunk(chunk: Array, step: Array) -> Array:
                @pl.when(step >= self.stages)
                def _() -> None:
                    plgpu.barrier_wait(shared.free.at[step % self.stages])

                self._copy_chunk(chunk, step % self.stages, own, operands, shared)
                return step + 1

            return lax.fori_loop(*self._chunks(own), copy_chunk, step)

        def multiply_unit(index: Array, step: Array) -> Array:
            own = unit(index)
            first, last = self._chunks(own)
            acc = self._multiply(last - first, step, shared)
            row = own.split * self.num_rows + own.row * self.row_tile + product.first_row(warpgroup)
            output = own.column * TILE_OUTPUTS + product.first_output(warpgroup)
            if self.is_staged:
                self._store_staged(acc, out, pl.multiple_of(row, ROW_BLOCK), pl.multiple_of(output, ROWS), shared)
            else:
                is_transposed = product.is_transposed
                store_sums(acc, out, row, output, is_transposed=is_transposed, interpret=self.interpret)
            return step + last - first

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            num_steps = lax.fori_loop(0, num_own, copy_unit, jnp.int32(0))
            observe_last(shared.free, num_steps, self.stages)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            lax.fori_loop(0, num_own, multiply_unit, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def _chunks(self, unit: _Unit) -> tuple[Array, Array]:
        """The first chunk of a unit's run and the one behind its last; runs begin at whole multiples of CHUNK_BYTES."""
        each = 2 // self.lines
        num_wide = self.num_stages // each
        first, last = (jnp.int32(each) * (split * num_wide // self.splits) for split in (unit.split, unit.split + 1))
        return first, last

    def _copy_chunk(self, chunk: Array, stage: Array, unit: _Unit, operands: _Operands, shared: _Shared) -> None:
        full = shared.full.at[stage]
        first_output = pl.multiple_of(unit.column * TILE_OUTPUTS, TILE_OUTPUTS)
        rows = pl.ds(pl.multiple_of(unit.row * self.row_tile, ROW_BLOCK), self.row_tile)
        outputs = pl.ds(first_output, TILE_OUTPUTS)
        group = first_output // (self.num_outputs // self.groups)
        for line in range(self.lines):
            column = (chunk * self.lines + line) * self.line
            columns = pl.ds(pl.multiple_of(column, self.line), self.line)
            plgpu.copy_gmem_to_smem(operands.weights.at[outputs, columns], shared.weights.at[stage, line], full)
            columns = pl.ds(pl.multiple_of(group * self.width + column, self.line), self.line)
            plgpu.copy_gmem_to_smem(operands.x.at[rows, columns], shared.x.at[stage, line], full)
        groups = pl.ds(chunk * self.groups_each, self.groups_each)
        for source in operands.scales:
            blocks = pl.ds(first_output // GROUP, TILE_OUTPUTS // GROUP)
            plgpu.copy_gmem_to_smem(source.at[groups, blocks], self._scales(stage, shared), full)
        for source in operands.x_scales:
            plgpu.copy_gmem_to_smem(source.at[groups, rows], shared.x_scales.at[stage], full)

    def _scales(self, stage: Array, shared: _Shared) -> Any:
        return shared.scales.at[stage, pl.ds(0, self.groups_each)]

    def _multiply(self, num_chunks: Array, first_step: Array, shared: _Shared) -> Float32[Array, "M N"]:
        """The sums of one unit that belong to this warpgroup."""
        product, warpgroup = self.product, lax.axis_index("warpgroup")

        def add_chunk(chunk: Array, acc: Array) -> Array:
            stage = (first_step + chunk) % self.stages
            plgpu.barrier_wait(shared.full.at[stage])
            acc = product.add(
                acc,
                weights=shared.weights.at[stage],
                scales=self._scales(stage, shared),
                x=shared.x.at[stage],
                x_scales=shared.x_scales.at[stage],
                warpgroup=warpgroup,
                interpret=self.interpret,
            )
            plgpu.barrier_arrive(shared.free.at[stage])
            return acc

        zeros = plgpu.layout_cast(jnp.zeros(product.shape, jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, num_chunks, add_chunk, zeros)

    def _store_staged(self, acc: Array, out: Any, row: Array, output: Array, shared: _Shared) -> None:
        staged = shared.out.at[lax.axis_index("warpgroup")]
        rows, outputs = self.staged_shape
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        (staged.T if self.product.is_transposed else staged)[...] = acc.astype(self.made_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(row, rows), pl.ds(output, outputs)])
