"""Linear layers of decode steps on SM90 in fixed tiles: block-scaled E4M3, and bfloat16 with exact products.

Roofline at 128 rows: the weights of 1280 x 32768 and of 8192 x 5120 are 42 MB, 9.9 us at 4.23 TB/s; 10.7 GFLOP are
7.2 us of FP8 at 1490 TFLOP/s. Memory limits, by little. The grouped output projection (8 groups of 1024 x 4096) has
67 MB of bfloat16, 16 us.

One block for each multiprocessor works through units of 128 weight rows times `row_tile` rows of x in a fixed order, in
which units that read the same weights are neighbours. One warpgroup copies, two multiply. Weights are the left operand
of the tensor cores; both operands come from shared memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Shaped

from deepinfer_jax.kernels.mosaic import GROUP, Interpret, observe_last, scale_of
from deepinfer_jax.kernels.warpgroup import (
    BF16_TRANSFORMS,
    LINE,
    NUM_GROUPS,
    ROWS,
    TILE_TRANSFORMS,
    Bf16Product,
    Fp8Product,
)
from deepinfer_jax.ops.quant import ScaledArray, decode_e8m0, quantize_fp8
from deepinfer_jax.pytree import pytree_dataclass

WARPGROUPS = 2  # that multiply; one more copies
TILE_ROWS = WARPGROUPS * ROWS  # weight rows of a unit; the copy of their scales has 16 bytes for each group
CHUNK_BYTES = 2 * LINE  # of a row, in a stage of the pipeline
REGISTERS, COPY_REGISTERS = 232, 40  # of a thread that multiplies, of one that copies
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment
ROW_BLOCK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes that change speed and no bits."""

    row_tile: int = 128  # rows of x that share one reading of the weights
    sum_registers: int = 64  # see Fp8Product
    most_stages: int = 6

    def __post_init__(self) -> None:
        if self.row_tile % ROW_BLOCK or not ROW_BLOCK <= self.row_tile <= 128:
            raise ValueError(f"row_tile={self.row_tile} must be a multiple of {ROW_BLOCK} from {ROW_BLOCK} to 128")


TILING = Tiling()


def refuses(x: Array, w: ScaledArray | Array) -> str | None:
    """Why `linear` cannot multiply these, None if it can."""
    if x.dtype != jnp.bfloat16:
        return f"rows are {x.dtype}, not bfloat16"
    if not isinstance(w, ScaledArray) or w.form != "fp8" or w.block != (GROUP, GROUP):
        return f"weights are not E4M3 with a scale for each {GROUP} x {GROUP} block"
    rows, columns = w.payload.shape[-2:]
    if w.payload.ndim != 2:
        return f"weights have {w.payload.ndim} axes, not 2"
    return _refuses_shape(rows, columns, CHUNK_BYTES)


def refuses_grouped(x: Array, w: ScaledArray | Array) -> str | None:
    """Why `grouped_linear` and `linear_bf16` cannot multiply these, None if they can. x [T, (groups,) columns]."""
    if x.dtype != jnp.bfloat16 or isinstance(w, ScaledArray) or w.dtype != jnp.bfloat16:
        return f"rows are {x.dtype} and weights not plain bfloat16, or the other way round"
    groups = 1 if x.ndim == 2 else x.shape[1]
    return _refuses_shape(w.shape[0] // groups, w.shape[1], CHUNK_BYTES // 2)


def _refuses_shape(rows: int, columns: int, chunk: int) -> str | None:
    if rows % TILE_ROWS or columns % chunk:
        return f"{rows} x {columns} weights are not multiples of {TILE_ROWS} x {chunk}"
    return None


def linear(
    x: BFloat16[Array, "T K"],
    w: ScaledArray,
    *,
    num_sms: int = 132,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T N"]:
    """x quantised by `quantize_fp8`, times w.T, rounded to bfloat16; exact about x that is on that grid already.

    Differs from the reference by the order of float32 sums over groups of 32 columns, and by what one FP8 instruction
    loses within a group.
    """
    reason = refuses(x, w)
    if reason is not None:
        raise NotImplementedError(f"linear on SM90: {reason}; use the reference")
    if not x.shape[0]:
        return jnp.zeros((0, w.payload.shape[0]), x.dtype)
    padded, row_tile = _padded(x, tiling)
    packed = quantize_fp8(padded)
    product = _Product(
        num_rows=padded.shape[0],
        num_outputs=w.payload.shape[0],
        width=x.shape[1],
        row_tile=row_tile,
        tiling=tiling,
        dtype=jnp.dtype(jnp.uint8),
        out_dtype=jnp.dtype(jnp.bfloat16),
        num_sms=num_sms,
        interpret=interpret,
    )
    scales = [decode_e8m0(scale_of(array)).T for array in (packed, w)]
    return product(packed.payload, w.payload, *scales)[: x.shape[0]]


def linear_bf16(
    x: BFloat16[Array, "T K"],
    w: BFloat16[Array, "N K"],
    *,
    out_dtype: Any = jnp.float32,
    num_sms: int = 132,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> Float[Array, "T N"]:
    """x @ w.T with exact products and float32 sums, in out_dtype: router and head, whose operands are bfloat16."""
    return _multiply_bf16(x, w, 1, out_dtype, num_sms, tiling, interpret)


def grouped_linear(
    x: BFloat16[Array, "T O M"],
    w: BFloat16[Array, "N M"],
    *,
    num_sms: int = 132,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T O R"]:
    """One product for each of the O groups, whose N / O weight rows lie together; see `ops.linear.grouped_linear`."""
    num_rows, groups, width = x.shape
    out = _multiply_bf16(x.reshape(num_rows, groups * width), w, groups, jnp.bfloat16, num_sms, tiling, interpret)
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
        raise NotImplementedError(f"bfloat16 linear on SM90: {reason}; use the reference")
    if not x.shape[0]:
        return jnp.zeros((0, w.shape[0]), out_dtype)
    padded, row_tile = _padded(x, tiling)
    product = _Product(
        num_rows=padded.shape[0],
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
    return product(padded, w)[: x.shape[0]]


def _padded(x: BFloat16[Array, "T K"], tiling: Tiling) -> tuple[BFloat16[Array, "padded K"], int]:
    """x with zeros behind it up to whole tiles, and the rows of a tile."""
    row_tile = min(tiling.row_tile, -(-x.shape[0] // ROW_BLOCK) * ROW_BLOCK)
    return jnp.pad(x, ((0, -x.shape[0] % row_tile), (0, 0))), row_tile


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

    weights: Any  # [stages, 2, 128, line]
    scales: Any  # [stages, 8, 4] float32
    x: Any  # [stages, 2, row_tile, line]
    x_scales: Any  # [stages, 8, row_tile] float32
    out: Any  # [warpgroups, row_tile, 64]
    full: Any  # of each stage: all copies have arrived
    free: Any  # of each stage: all warpgroups have read it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A kernel: E4M3 codes with scales where dtype is uint8, else plain bfloat16."""

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
        return self.dtype == jnp.uint8

    @property
    def line(self) -> int:
        """Columns in 128 bytes."""
        return LINE // self.dtype.itemsize

    @property
    def num_chunks(self) -> int:
        return self.width // (2 * self.line)

    @property
    def row_tiles(self) -> int:
        return self.num_rows // self.row_tile

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        stage = 2 * (TILE_ROWS + self.row_tile) * LINE + NUM_GROUPS * (TILE_ROWS // GROUP + self.row_tile) * 4
        out_bytes = WARPGROUPS * self.row_tile * ROWS * self.out_dtype.itemsize
        return min(self.tiling.most_stages, (SHARED_BYTES - out_bytes) // stage)

    def __call__(self, x: Shaped[Array, "T K"], weights: Shaped[Array, "N M"], *scales: Array) -> Float[Array, "T N"]:
        """x times weights, by groups; scales: those of x and of the weights, [columns / 32, rows or blocks of rows]."""
        operands = _Operands(x=x, weights=weights, x_scales=scales[:1], scales=scales[1:])
        leaves, structure = jax.tree.flatten(operands)

        def body(*refs: Any, **scratch: Any) -> None:
            self._run(jax.tree.unflatten(structure, refs[:-1]), refs[-1], _Shared(**scratch))

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((self.num_rows, self.num_outputs), self.out_dtype),
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            interpret=False if self.interpret is None else self.interpret,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            scratch_types=self._scratch_types(),
        )
        return kernel(*leaves)

    def _scratch_types(self) -> dict[str, Any]:
        transforms = TILE_TRANSFORMS if self.is_scaled else BF16_TRANSFORMS
        num_copies = 6 if self.is_scaled else 4  # two halves of weights and of x, the scales of both
        return {
            "weights": plgpu.SMEM((self.stages, 2, TILE_ROWS, self.line), self.dtype, transforms=transforms),
            "scales": plgpu.SMEM((self.stages, NUM_GROUPS, TILE_ROWS // GROUP), jnp.float32),
            "x": plgpu.SMEM((self.stages, 2, self.row_tile, self.line), self.dtype, transforms=transforms),
            "x_scales": plgpu.SMEM((self.stages, NUM_GROUPS, self.row_tile), jnp.float32),
            "out": plgpu.SMEM((WARPGROUPS, self.row_tile, ROWS), self.out_dtype),
            "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=self.stages),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=self.stages),
        }

    def _run(self, operands: _Operands, out: Any, shared: _Shared) -> None:
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        num_units = self.num_outputs // TILE_ROWS * self.row_tiles
        num_own = lax.max(num_units - sm + self.num_sms - 1, jnp.int32(0)) // self.num_sms

        def starts(index: Array) -> tuple[Array, Array]:
            column, row = jnp.divmod(sm + index * self.num_sms, self.row_tiles)
            return pl.multiple_of(row * self.row_tile, ROW_BLOCK), pl.multiple_of(column * TILE_ROWS, TILE_ROWS)

        def copy_chunk(step: Array, _: None) -> None:
            unit, chunk = jnp.divmod(step, self.num_chunks)

            @pl.when(step >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(shared.free.at[step % self.stages])

            self._copy_chunk(chunk, step % self.stages, *starts(unit), operands, shared)

        def multiply_unit(index: Array, _: None) -> None:
            acc = self._multiply(index, shared)
            first_row, first_output = starts(index)
            own = shared.out.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own.T[...] = acc.astype(self.out_dtype)
            plgpu.commit_smem()
            place = out.at[pl.ds(first_row, self.row_tile), pl.ds(first_output + warpgroup * ROWS, ROWS)]
            plgpu.copy_smem_to_gmem(own, place)

        @pl.when(warpgroup == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            lax.fori_loop(0, num_own * self.num_chunks, copy_chunk, None)
            observe_last(shared.free, num_own * self.num_chunks, self.stages)

        @pl.when(warpgroup < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS, action="increase")
            lax.fori_loop(0, num_own, multiply_unit, None)
            plgpu.wait_smem_to_gmem(0)

    def _copy_chunk(
        self, chunk: Array, stage: Array, first_row: Array, first_output: Array, operands: _Operands, shared: _Shared
    ) -> None:
        full = shared.full.at[stage]
        group = first_output // (self.num_outputs // self.groups)
        rows, outputs = pl.ds(first_row, self.row_tile), pl.ds(first_output, TILE_ROWS)
        for half in range(2):
            column = chunk * (2 * self.line) + half * self.line
            columns = pl.ds(pl.multiple_of(column, self.line), self.line)
            plgpu.copy_gmem_to_smem(operands.weights.at[outputs, columns], shared.weights.at[stage, half], full)
            columns = pl.ds(pl.multiple_of(group * self.width + column, self.line), self.line)
            plgpu.copy_gmem_to_smem(operands.x.at[rows, columns], shared.x.at[stage, half], full)
        groups = pl.ds(chunk * NUM_GROUPS, NUM_GROUPS)
        for source in operands.scales:
            blocks = pl.ds(first_output // GROUP, TILE_ROWS // GROUP)
            plgpu.copy_gmem_to_smem(source.at[groups, blocks], shared.scales.at[stage], full)
        for source in operands.x_scales:
            plgpu.copy_gmem_to_smem(source.at[groups, rows], shared.x_scales.at[stage], full)

    def _multiply(self, index: Array, shared: _Shared) -> Float32[Array, "M N"]:
        """The sums of one unit: 64 weight rows of this warpgroup times row_tile rows of x."""

        def add_chunk(chunk: Array, acc: Array) -> Array:
            stage = (index * self.num_chunks + chunk) % self.stages
            plgpu.barrier_wait(shared.full.at[stage])
            acc = self._add(acc, stage, shared)
            plgpu.barrier_arrive(shared.free.at[stage])
            return acc

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.row_tile), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, self.num_chunks, add_chunk, zeros)

    def _add(self, acc: Array, stage: Array, shared: _Shared) -> Array:
        weights, x, warpgroup = shared.weights.at[stage], shared.x.at[stage], lax.axis_index("warpgroup")
        if not self.is_scaled:
            plain = Bf16Product(num_columns=self.row_tile)
            return plain.add(acc, weights=weights, x=x, warpgroup=warpgroup, interpret=self.interpret)
        scaled = Fp8Product(num_columns=self.row_tile, sum_registers=self.tiling.sum_registers)
        return scaled.add(
            acc,
            weights=weights,
            scales=shared.scales.at[stage],
            x=x,
            x_scales=shared.x_scales.at[stage],
            warpgroup=warpgroup,
            interpret=self.interpret,
        )
