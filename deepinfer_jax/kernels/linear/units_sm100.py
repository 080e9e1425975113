"""The kernel of linear layers on SM100: units of weight rows times rows of x, by one block for each multiprocessor.

It works through units of 128 weight rows times `row_tile` rows of x in a fixed order, in which units that read the same
weights are neighbours. The weights are the 128 rows of an instruction, rows of x its columns, so that few of them waste
nothing. One warp copies, one issues instructions, and a warpgroup reads, rounds and stores the sums of a unit while the
next one is multiplied: tensor memory holds two.

The scales of 32 columns are operands of the instructions. All columns of a unit are summed in their order in the same
float32 accumulators, so that the bits of a row do not depend on others or on how many there are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Shaped

from deepinfer_jax.kernels.linear.packed_sm100 import TILE, rows_of_tile
from deepinfer_jax.kernels.mosaic import GROUP, Interpret, observe_last
from deepinfer_jax.ops.quant import decode_e8m0
from deepinfer_jax.pytree import pytree_dataclass

TILE_OUTPUTS = 128  # weight rows of a unit and of an instruction
ROW_BLOCK = 16  # of rows of x: what instructions of 128 weight rows take with plain operands; scaled ones take 8
LINE = 128  # bytes of a row in a stage, and the bytes that a swizzle spans
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment
COPY_WARP, ISSUE_WARP = 0, 1  # of the first warpgroup
ISSUERS, STORERS = 0, 1  # warpgroups
SLOTS = 2  # accumulators in tensor memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes that change speed and no bits."""

    row_tile: int = 128  # rows of x that share one reading of the weights
    most_stages: int = 10

    def __post_init__(self) -> None:
        if self.row_tile % ROW_BLOCK or not ROW_BLOCK <= self.row_tile <= TILE:
            raise ValueError(f"row_tile={self.row_tile} must be a multiple of {ROW_BLOCK} from {ROW_BLOCK} to {TILE}")


TILING = Tiling()


@pytree_dataclass
class _Operands:
    """Both sides of a product in device memory; `scales` are those of x and of the weights, or none."""

    x: Any  # [rows, groups * columns]
    weights: Any  # [outputs, columns]
    scales: tuple[Any, ...]  # [tiles of rows or outputs, columns / 128, 32, 16] E8M0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """Shared memory, tensor memory and barriers of a block. A line has 128 bytes."""

    weights: Any  # [stages, 128, line]
    x: Any  # [stages, row_tile, line]
    out: Any  # [row_tile, 128]
    acc: Any  # tensor memory, [128, slots * row_tile] float32
    full: Any  # of each stage: all copies have arrived
    free: Any  # of each stage: the instructions that read it are done
    made: Any  # of each slot: its sums are complete
    drained: Any  # of each slot: its sums have been read
    x_scales: Any = None  # [stages, 1, 1, 32, 16]
    scales: Any = None  # [stages, 1, 1, 32, 16]
    x_scales_tmem: Any = None  # tensor memory, [128, stages * 4]: what a stage has there is read until it is free
    scales_tmem: Any = None  # as for x
    plain_x: Any = None  # interpreted only: x with its scales, [stages, row_tile, line] float32
    plain_weights: Any = None  # interpreted only: weights with their scales, [stages, 128, line] float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A kernel: E4M3 codes with scales where dtype is E4M3, else plain bfloat16."""

    num_rows: int  # of x, a multiple of row_tile
    num_outputs: int
    width: int  # columns of the weights
    groups: int = 1  # ranges of outputs, each with columns of x of its own
    row_tile: int
    tiling: Tiling
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    num_sms: int
    interpret: Interpret

    @property
    def is_scaled(self) -> bool:
        """Whether both sides have scales."""
        return self.dtype == jnp.float8_e4m3fn

    @property
    def line(self) -> int:
        """Columns in 128 bytes: those of a stage."""
        return LINE // self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        """Stages that the columns of a unit fill."""
        return self.width // self.line

    @property
    def row_tiles(self) -> int:
        """Tiles of rows of x."""
        return self.num_rows // self.row_tile

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        stage = (TILE_OUTPUTS + self.row_tile) * LINE + (2 * 4 * TILE if self.is_scaled else 0)
        out_bytes = self.row_tile * TILE_OUTPUTS * self.out_dtype.itemsize
        return min(self.tiling.most_stages, (SHARED_BYTES - out_bytes) // stage)

    def __call__(self, x: Shaped[Array, "T K"], weights: Shaped[Array, "N M"], *scales: Array) -> Float[Array, "T N"]:
        """x times weights, by groups; scales: those of x and of the weights, in tiles."""
        leaves, structure = jax.tree.flatten(_Operands(x=x, weights=weights, scales=scales))

        def body(*refs: Any, **scratch: Any) -> None:
            self._run(jax.tree.unflatten(structure, refs[:-1]), refs[-1], _Shared(**scratch))

        kernel = plgpu.kernel(
            body,
            kernel_name=f"linear_{self.num_outputs}x{self.width}",
            out_type=jax.ShapeDtypeStruct((self.num_rows, self.num_outputs), self.out_dtype),
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=2,
            thread_name="warpgroup",
            interpret=False if self.interpret is None else self.interpret,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            scratch_types=self._scratch_types(),
        )
        return kernel(*leaves)

    def _scratch_types(self) -> dict[str, Any]:
        transforms = (
            plgpu.TilingTransform((8, self.line)),  # pyright: ignore[reportAbstractUsage]
            plgpu.SwizzleTransform(LINE),  # pyright: ignore[reportAbstractUsage]
        )
        types = {
            "weights": plgpu.SMEM((self.stages, TILE_OUTPUTS, self.line), self.dtype, transforms=transforms),
            "x": plgpu.SMEM((self.stages, self.row_tile, self.line), self.dtype, transforms=transforms),
            "out": plgpu.SMEM((self.row_tile, TILE_OUTPUTS), self.out_dtype),
            "acc": plgpu.TMEM((TILE_OUTPUTS, SLOTS * self.row_tile), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=4 if self.is_scaled else 2, num_barriers=self.stages),
            "free": plgpu.Barrier(num_arrivals=1, num_barriers=self.stages, orders_tensor_core=True),
            "made": plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS, orders_tensor_core=True),
            "drained": plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS, orders_tensor_core=True),
        }
        if self.is_scaled:
            tile = plgpu.SMEM((self.stages, 1, 1, GROUP, 16), jnp.float8_e8m0fnu)
            types |= {"scales": tile, "x_scales": tile}
        if self.is_scaled and self.interpret is None:
            tile = plgpu.TMEM((TILE, 4 * self.stages), jnp.float8_e8m0fnu, layout=plgpu.TMEMLayout.SCALES_LAYOUT)
            types |= {"scales_tmem": tile, "x_scales_tmem": tile}
        if self.is_scaled and self.interpret is not None:
            types |= {
                "plain_weights": plgpu.SMEM((self.stages, TILE_OUTPUTS, self.line), jnp.float32),
                "plain_x": plgpu.SMEM((self.stages, self.row_tile, self.line), jnp.float32),
            }
        return types

    def _run(self, operands: _Operands, out: Any, shared: _Shared) -> None:
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        num_units = self.num_outputs // TILE_OUTPUTS * self.row_tiles
        num_own = lax.max(num_units - sm + self.num_sms - 1, jnp.int32(0)) // self.num_sms

        def unit(index: Array) -> tuple[Array, Array]:
            """Its tile of the outputs and its tile of the rows."""
            return jnp.divmod(sm + index * self.num_sms, self.row_tiles)

        def copy_unit(index: Array, _: None) -> None:
            column, row = unit(index)

            def copy_chunk(chunk: Array, _: None) -> None:
                step = index * self.num_chunks + chunk
                stage = step % self.stages

                @pl.when(step >= self.stages)
                def _() -> None:
                    plgpu.barrier_wait(shared.free.at[stage])

                self._copy_chunk(chunk, stage, column, row, operands, shared)

            lax.fori_loop(0, self.num_chunks, copy_chunk, None)

        def multiply_unit(index: Array, _: None) -> None:
            slot = index % SLOTS

            @pl.when(index >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(shared.drained.at[slot])

            def multiply_chunk(chunk: Array, _: None) -> None:
                stage = (index * self.num_chunks + chunk) % self.stages
                plgpu.barrier_wait(shared.full.at[stage])
                self._multiply(stage, self._sums(slot, shared), chunk > 0, shared)

            lax.fori_loop(0, self.num_chunks, multiply_chunk, None)
            plgpu.tcgen05_commit_arrive(shared.made.at[slot])

        def store_unit(index: Array, _: None) -> None:
            column, row = unit(index)
            slot = index % SLOTS
            plgpu.barrier_wait(shared.made.at[slot])
            sums = plgpu.async_load_tmem(self._sums(slot, shared))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.out.T[...] = sums.astype(self.out_dtype)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(shared.drained.at[slot])
            plgpu.commit_smem()
            rows = pl.ds(pl.multiple_of(row * self.row_tile, ROW_BLOCK), self.row_tile)
            outputs = pl.ds(pl.multiple_of(column * TILE_OUTPUTS, TILE_OUTPUTS), TILE_OUTPUTS)
            plgpu.copy_smem_to_gmem(shared.out, out.at[rows, outputs])

        @pl.when(warpgroup == ISSUERS)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == COPY_WARP)
                def _() -> None:
                    lax.fori_loop(0, num_own, copy_unit, None)
                    observe_last(shared.free, num_own * self.num_chunks, self.stages)

                @pl.when(warp == ISSUE_WARP)
                def _() -> None:
                    lax.fori_loop(0, num_own, multiply_unit, None)
                    observe_last(shared.drained, num_own, SLOTS)

        @pl.when(warpgroup == STORERS)
        def _() -> None:
            lax.fori_loop(0, num_own, store_unit, None)
            plgpu.wait_smem_to_gmem(0)

    def _sums(self, slot: Array, shared: _Shared) -> Any:
        return shared.acc.at[:, pl.ds(slot * self.row_tile, self.row_tile)]

    def _copy_chunk(
        self, chunk: Array, stage: Array, column: Array, row: Array, operands: _Operands, shared: _Shared
    ) -> None:
        full = shared.full.at[stage]
        first_output = column * TILE_OUTPUTS
        rows = pl.ds(row * self.row_tile, self.row_tile)
        columns = pl.ds(chunk * self.line, self.line)
        weights = operands.weights.at[pl.ds(first_output, TILE_OUTPUTS), columns]
        plgpu.copy_gmem_to_smem(weights, shared.weights.at[stage], full)
        group = first_output // (self.num_outputs // self.groups)
        columns = pl.ds(group * self.width + chunk * self.line, self.line)
        plgpu.copy_gmem_to_smem(operands.x.at[rows, columns], shared.x.at[stage], full)
        if self.is_scaled:
            of_rows, of_outputs = operands.scales
            plgpu.copy_gmem_to_smem(of_rows.at[pl.ds(row, 1), pl.ds(chunk, 1)], shared.x_scales.at[stage], full)
            plgpu.copy_gmem_to_smem(of_outputs.at[pl.ds(column, 1), pl.ds(chunk, 1)], shared.scales.at[stage], full)

    def _multiply(self, stage: Array, sums: Any, accumulates: Array, shared: _Shared) -> None:
        """Adds the products of a stage to the sums, and frees it when they are made.

        The one warp that calls this issues the copies of scales and the instructions that read them, in this order.
        Interpretation has no block-scaled instruction: it multiplies what the codes and scales in shared memory mean.
        """
        weights, x, free = shared.weights.at[stage], shared.x.at[stage], shared.free.at[stage]
        if not self.is_scaled:
            plgpu.tcgen05_mma(sums, weights, x.T, free, accumulate=accumulates)
        elif self.interpret is None:
            own = pl.ds(4 * stage, 4)
            scales, x_scales = shared.scales_tmem.at[:, own], shared.x_scales_tmem.at[:, own]
            plgpu.async_copy_scales_to_tmem(shared.scales.at[stage], scales)
            plgpu.async_copy_scales_to_tmem(shared.x_scales.at[stage], x_scales)
            plgpu.tcgen05_mma(
                sums,
                weights,
                x.T,
                free,
                a_scale=scales,
                b_scale=x_scales,
                accumulate=accumulates,
            )
        else:
            plain_weights, plain_x = shared.plain_weights.at[stage], shared.plain_x.at[stage]
            plain_weights[...] = _scaled(weights[...], shared.scales[stage, 0, 0])
            plain_x[...] = _scaled(x[...], shared.x_scales[stage, 0, 0])
            plgpu.commit_smem()
            plgpu.tcgen05_mma(sums, plain_weights, plain_x.T, free, accumulate=accumulates)


def _scaled(codes: Float[Array, "N K"], tile: Shaped[Array, "32 16"]) -> Float32[Array, "N K"]:
    """What E4M3 codes mean with the E8M0 scales of their tile."""
    scales = rows_of_tile(lax.bitcast_convert_type(tile, jnp.uint8), codes.shape[0])
    return codes.astype(jnp.float32) * jnp.repeat(decode_e8m0(scales), GROUP, axis=1)
