"""The walk of a block through the units of a linear layer on SM90: what `mosaic_sm90` starts, for either product.

One block for each multiprocessor works through units of 128 weight rows times `row_tile` rows of x in a fixed order, in
which units that read the same weights are neighbours. One warpgroup copies, two multiply.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Shaped

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
from deepinfer_jax.pytree import pytree_dataclass

CHUNK_BYTES = 2 * LINE  # of a row: columns are split between such chunks
REGISTERS, COPY_REGISTERS = 216, 72  # of a thread that multiplies, of one that copies
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment
ROW_BLOCK = 8
SCALE_ROOM = 8  # groups of columns in a stage for which there is room

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
class Product:
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
        """Whether operands are E4M3 codes with scales."""
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
        """Tiles of the rows of x."""
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
            kernel_name=f"linear_{self.num_outputs}x{self.width}",
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
