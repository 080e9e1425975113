"""Routed experts of decode steps on SM90: MXFP4 weights, FP8 activations, bits of a row that depend on no other row.

Roofline at 768 pairs over 48 experts of 5120 x 2304: at 4.25 bits each, the weights of gate and up are 602 MB and those
of down 301 MB; 54 GFLOP are 36 us of FP8. Memory limits by far: 142 and 71 us at 4.23 TB/s.

Two kernels, each one block for each multiprocessor, which works through units (pairs of one expert times rows of its
weights) in a fixed order. One warpgroup copies, the others multiply. A unit reads two tiles of weight rows: gate and up
of the same channels, or two neighbouring ranges of down. Weights are the left operand of the tensor cores, 64 rows at a
time, so that few pairs waste nothing; nibbles become E5M2, with the scale of their group in it, on their way from
shared memory to registers. In front of each kernel a small one makes E5M2 codes of bfloat16 rows (`rows_sm90`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float32, Int, UInt8

from deepinfer_jax.kernels.experts import packed_sm90
from deepinfer_jax.kernels.experts.packed_sm90 import CHUNK, GROUPS, PackedExperts, pack_experts
from deepinfer_jax.kernels.experts.product_sm90 import (
    HALF_ROWS,
    PIECES,
    FoldedProduct,
    scaled_halves,
    shares_of,
    store_rows,
)
from deepinfer_jax.kernels.experts.rows_sm90 import TERMS, folded_rows
from deepinfer_jax.kernels.experts.schedule_sm90 import MAX_PAIRS, MAX_ROW_TILE, ROW_BLOCK, Schedule, make_schedule
from deepinfer_jax.kernels.mosaic import Interpret, check_registers, observe_last
from deepinfer_jax.kernels.warpgroup import LINE, ROWS, TILE_TRANSFORMS
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

SLOTS = 2  # units whose row scales and factors are in shared memory
COPIES_OF_STAGE = 6  # two tiles of weights and of their steps, two halves of x
COPIES_OF_UNIT = 3  # the row scales of two tiles of weights, the factors of x
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment
COPY_REGISTERS = 24  # of a thread that copies; the others share what it leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTiling:
    """Sizes of one kernel that change speed and no bits."""

    warpgroups: int  # that multiply; each has 32 rows of both tiles of a unit
    registers: int  # of a thread that multiplies
    at_once: int = PIECES  # see FoldedProduct
    most_stages: int = 8

    def __post_init__(self) -> None:
        check_registers(*[self.registers] * self.warpgroups, COPY_REGISTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of both kernels."""

    row_tile: int = 40  # pairs of one expert that share one reading of its weights
    up: KernelTiling = KernelTiling(warpgroups=3, registers=160)
    down: KernelTiling = KernelTiling(warpgroups=4, registers=112, at_once=1)

    def __post_init__(self) -> None:
        if self.row_tile % ROW_BLOCK or not ROW_BLOCK <= self.row_tile <= MAX_ROW_TILE:
            raise ValueError(
                f"row_tile={self.row_tile} must be a multiple of {ROW_BLOCK} from {ROW_BLOCK} to {MAX_ROW_TILE}"
            )


TILING = Tiling()


Weights = ScaledArray | PackedExperts


def refuses(
    u: Array, expert_ids: Array, w1: Weights | Array, w2: Weights | Array, *, tiling: Tiling = TILING
) -> str | None:
    """Why these operands cannot be multiplied, None if they can."""
    if u.dtype != jnp.bfloat16:
        return f"rows are {u.dtype}, not bfloat16"
    if expert_ids.size > MAX_PAIRS:
        return f"{expert_ids.size} pairs are more than the {MAX_PAIRS} of a decode step"
    reason = packed_sm90.refuses(w1) or packed_sm90.refuses(w2)
    if reason is not None:
        return reason
    assert isinstance(w1, Weights) and isinstance(w2, Weights)
    if type(w1) is not type(w2):
        return "some of the weights are in the kernel's own form and some are not"
    width, inner = w2.payload.shape[-2], w1.payload.shape[-2]
    steps = {
        "hidden": (width, math.lcm(CHUNK, 2 * HALF_ROWS * tiling.down.warpgroups)),
        "inner": (inner, math.lcm(CHUNK, HALF_ROWS * tiling.up.warpgroups)),
    }
    for name, (size, step) in steps.items():
        if size % step:
            return f"{name} width {size} is not a multiple of {step}"
    return None


def routed_experts(
    u: BFloat16[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    weights: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    w1: Weights,
    w2: Weights,
    w3: Weights,
    *,
    limit: float,
    layer: int | Int[Array, ""] = 0,
    num_sms: int = 132,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T A D"]:
    """Outputs of the chosen experts, times their routing weights; zeros for rows that are not live and ids below 0.

    u: is quantised by `quantize_fp8`, which is exact on its grid. w1, w3 [(layers,) E, inner, D] and w2 [(layers,) E,
    D, inner]: E2M1 as `pack_experts` leaves it; the stack over layers is read in place. A ScaledArray is packed in
    each call, its own layer of a stack. Differs from the reference by the order of sums, and by what the tensor cores
    lose within 256 columns.
    """
    reason = refuses(u, expert_ids, w1, w2, tiling=tiling)
    if reason is not None:
        raise NotImplementedError(f"routed_experts on SM90: {reason}; use the reference")
    num_experts, inner, width = w1.payload.shape[-3], w1.payload.shape[-2], u.shape[1]
    if not expert_ids.size:
        return jnp.zeros((*expert_ids.shape, width), u.dtype)
    gate_up_down = [_packed(w, layer) for w in (w1, w3, w2)]
    layer = layer if isinstance(w1, PackedExperts) else 0
    schedule = make_schedule(
        expert_ids,
        is_live,
        num_experts=num_experts,
        row_tile=tiling.row_tile,
        first_expert=layer * num_experts,
        interpret=interpret,
    )
    up = _Product(
        num_rows=inner,
        width=width,
        tiling=tiling.up,
        row_tile=tiling.row_tile,
        limit=limit,
        num_sms=num_sms,
        interpret=interpret,
    )
    down = dataclasses.replace(up, num_rows=width, width=inner, tiling=tiling.down, limit=None)
    # Pairs without an expert here have the first place behind those of the products, which all of them write.
    codes, factors = folded_rows(
        u, schedule.places, weights.reshape(-1), num_places=schedule.num_places + ROW_BLOCK, interpret=interpret
    )
    hidden = up(schedule, codes, factors, *gate_up_down[:2])
    codes, factors = folded_rows(hidden, num_places=schedule.num_places, interpret=interpret)
    out = down(schedule, codes, factors, *gate_up_down[2:] * 2)
    # A gather that clips and a select are one operation to a compiler, with whatever reads them; one that fills is two.
    is_here = (schedule.places < schedule.num_places)[:, None]
    out = jnp.where(is_here, out.at[schedule.places].get(mode="clip"), jnp.zeros((), out.dtype))
    return out.reshape(*expert_ids.shape, width)


def _packed(w: Weights, layer: int | Int[Array, ""]) -> PackedExperts:
    if isinstance(w, PackedExperts):
        return w
    return pack_experts(jax.tree.map(lambda a: a if a.ndim == 3 else a[layer], w))


@pytree_dataclass
class _Inputs:
    """Operands of a kernel, in device memory."""

    tiles: Any
    num_tiles: Any
    x: Any
    factors: Any
    weights: tuple[Any, Any]  # of the first and of the second tile of a unit, [experts, rows, bytes]
    steps: tuple[Any, Any]  # [experts, blocks, chunks, 256]
    row_scales: tuple[Any, Any]  # [experts, rows]


@pytree_dataclass
class _Shared:
    """Shared memory and barriers of a block."""

    weights: Any  # [stages, 2, tile rows, 128] uint8
    steps: Any  # [stages, 2, warpgroups, 256] uint8
    x: Any  # [stages, 2, 2 row_tile, 128] uint8
    row_scales: Any  # [SLOTS, 2, tile rows] float32
    factors: Any  # [SLOTS, factors, MAX_ROW_TILE] float32, so that each copy begins at a multiple of 128 bytes
    full: Any  # of each stage: all copies have arrived
    free: Any  # of each stage: all warpgroups have read it
    unit_full: Any  # of each slot, likewise
    unit_free: Any


@pytree_dataclass
class _Unit:
    """One piece of work: pairs of one expert times rows of its weights."""

    index: Array  # among those of the block
    expert: Array
    start: Array  # place of the first pair
    num_pairs: Array
    column: Array  # which rows of the weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A kernel: gate and up with SwiGLU where there is a limit, else down."""

    num_rows: int  # of the weights
    width: int  # columns of the weights
    tiling: KernelTiling
    row_tile: int
    limit: float | None
    num_sms: int
    interpret: Interpret

    @property
    def warpgroups(self) -> int:
        return self.tiling.warpgroups

    @property
    def tile_rows(self) -> int:
        return HALF_ROWS * self.warpgroups

    @property
    def unit_rows(self) -> int:
        """Of the result: those of gate and of up make the same ones."""
        return self.tile_rows * (2 if self.limit is None else 1)

    @property
    def units_of_tile(self) -> int:
        return self.num_rows // self.unit_rows

    @property
    def num_chunks(self) -> int:
        return self.width // CHUNK

    @property
    def num_factors(self) -> int:
        return 1 if self.limit is None else 2

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        fixed = SLOTS * 4 * (2 * self.tile_rows + self.num_factors * MAX_ROW_TILE)
        stage = 2 * ((self.tile_rows + TERMS * self.row_tile) * LINE + self.tile_rows * GROUPS)
        return min(self.tiling.most_stages, (SHARED_BYTES - fixed) // stage)

    def __call__(
        self,
        schedule: Schedule,
        x: UInt8[Array, "codes K"],
        factors: Float32[Array, "factors P"],
        first: PackedExperts,
        second: PackedExperts,
    ) -> BFloat16[Array, "places N"]:
        """Results at all places that tiles name."""

        def of_experts(one: Array, other: Array) -> tuple[Array, Array]:
            """Layers and experts become one axis."""
            shape = (-1, *one.shape[first.payload.ndim - 2 :])
            return one.reshape(shape), other.reshape(shape)

        inputs = _Inputs(
            tiles=schedule.tiles,
            num_tiles=schedule.num_tiles,
            x=x,
            factors=factors,
            weights=of_experts(first.payload, second.payload),
            steps=of_experts(first.steps, second.steps),
            row_scales=of_experts(first.row_scales, second.row_scales),
        )
        leaves, structure = jax.tree.flatten(inputs)

        def body(*refs: Any, **scratch: Any) -> None:
            self._run(jax.tree.unflatten(structure, refs[:-1]), refs[-1], _Shared(**scratch))

        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((schedule.num_places, self.num_rows), jnp.bfloat16),
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=self.warpgroups + 1,
            thread_name="warpgroup",
            interpret=False if self.interpret is None else self.interpret,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
            scratch_types=self._scratch_types(),
        )
        return kernel(*leaves)

    def _scratch_types(self) -> dict[str, Any]:
        stages, tile_rows, codes = self.stages, self.tile_rows, TERMS * self.row_tile
        return {
            "weights": plgpu.SMEM((stages, 2, tile_rows, LINE), jnp.uint8, transforms=TILE_TRANSFORMS),
            "steps": plgpu.SMEM((stages, 2, self.warpgroups, HALF_ROWS * GROUPS), jnp.uint8),
            "x": plgpu.SMEM((stages, 2, codes, LINE), jnp.uint8, transforms=TILE_TRANSFORMS),
            "row_scales": plgpu.SMEM((SLOTS, 2, tile_rows), jnp.float32),
            "factors": plgpu.SMEM((SLOTS, self.num_factors, MAX_ROW_TILE), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=COPIES_OF_STAGE, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=stages),
            "unit_full": plgpu.Barrier(num_arrivals=COPIES_OF_UNIT, num_barriers=SLOTS),
            "unit_free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=SLOTS),
        }

    def _run(self, inputs: _Inputs, out: Any, shared: _Shared) -> None:
        sm, warpgroup = lax.axis_index("sm"), lax.axis_index("warpgroup")
        num_units = inputs.num_tiles[0] * self.units_of_tile
        num_own = lax.max(num_units - sm + self.num_sms - 1, jnp.int32(0)) // self.num_sms

        def unit_at(index: Array) -> _Unit:
            tile, column = jnp.divmod(sm + index * self.num_sms, self.units_of_tile)
            tile = lax.min(tile, inputs.tiles.shape[0] - 1)
            expert, start, size = (inputs.tiles[tile, i] for i in range(3))
            return _Unit(index=index, expert=expert, start=start, num_pairs=size, column=column)

        def for_units(run: Callable[[_Unit], None]) -> None:
            def step(index: Array, unit: _Unit) -> _Unit:
                following = unit_at(index + 1)  # read early: device memory is far
                run(unit)
                return following

            lax.fori_loop(0, num_own, step, unit_at(jnp.int32(0)))

        @pl.when(warpgroup == self.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            for_units(lambda unit: self._copy_unit(unit, inputs, shared))
            observe_last(shared.free, num_own * self.num_chunks, self.stages)
            observe_last(shared.unit_free, num_own, SLOTS)

        @pl.when(warpgroup < self.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(self.tiling.registers, action="increase")
            for_units(lambda unit: self._multiply_unit(unit, out, shared))

    def _for_blocks(self, unit: _Unit, run: Callable[[int], None]) -> None:
        """run(rows) for the padded number of rows, which is then a constant."""
        num_blocks = (unit.num_pairs + ROW_BLOCK - 1) // ROW_BLOCK
        for blocks in range(1, self.row_tile // ROW_BLOCK + 1):
            pl.when(num_blocks == blocks)(lambda blocks=blocks: run(blocks * ROW_BLOCK))

    def _copy_unit(self, unit: _Unit, inputs: _Inputs, shared: _Shared) -> None:
        slot, start = unit.index % SLOTS, pl.multiple_of(unit.start, ROW_BLOCK)
        first_row = pl.multiple_of(unit.column * self.unit_rows, HALF_ROWS)
        second_row = pl.multiple_of(first_row + self.tile_rows, HALF_ROWS) if self.limit is None else first_row
        rows = (first_row, second_row)

        @pl.when(unit.index >= SLOTS)
        def _() -> None:
            plgpu.barrier_wait(shared.unit_free.at[slot])

        unit_full = shared.unit_full.at[slot]
        for tile in range(2):
            source = inputs.row_scales[tile].at[unit.expert, pl.ds(rows[tile], self.tile_rows)]
            plgpu.copy_gmem_to_smem(source, shared.row_scales.at[slot, tile], unit_full)
        source = inputs.factors.at[:, pl.ds(start, MAX_ROW_TILE)]
        plgpu.copy_gmem_to_smem(source, shared.factors.at[slot], unit_full)

        def copy_chunk(chunk: Array, num_codes: int) -> None:
            step = unit.index * self.num_chunks + chunk
            stage = step % self.stages
            full = shared.full.at[stage]

            @pl.when(step >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(shared.free.at[stage])

            column = pl.multiple_of(chunk * LINE, LINE)
            for tile in range(2):
                source = inputs.weights[tile].at[unit.expert, pl.ds(rows[tile], self.tile_rows), pl.ds(column, LINE)]
                plgpu.copy_gmem_to_smem(source, shared.weights.at[stage, tile], full)
                blocks = pl.ds(rows[tile] // HALF_ROWS, self.warpgroups)
                plgpu.copy_gmem_to_smem(
                    inputs.steps[tile].at[unit.expert, blocks, chunk], shared.steps.at[stage, tile], full
                )
            for half in range(2):
                column = pl.multiple_of(chunk * CHUNK + half * LINE, LINE)
                source = inputs.x.at[pl.ds(TERMS * start, num_codes), pl.ds(column, LINE)]
                plgpu.copy_gmem_to_smem(source, shared.x.at[stage, half, pl.ds(0, num_codes)], full)

        def copy(num_rows: int) -> None:
            lax.fori_loop(0, self.num_chunks, lambda chunk, _: copy_chunk(chunk, TERMS * num_rows), None)

        self._for_blocks(unit, copy)

    def _multiply_unit(self, unit: _Unit, out: Any, shared: _Shared) -> None:
        slot = unit.index % SLOTS
        warpgroup = lax.axis_index("warpgroup")
        plgpu.barrier_wait(shared.unit_full.at[slot])

        def run(num_rows: int) -> None:
            product = FoldedProduct(num_pairs=num_rows, at_once=self.tiling.at_once)

            def add_chunk(chunk: Array, acc: Array) -> Array:
                stage = (unit.index * self.num_chunks + chunk) % self.stages
                plgpu.barrier_wait(shared.full.at[stage])
                acc = product.add(
                    acc,
                    weights=shared.weights.at[stage],
                    steps=shared.steps.at[stage],
                    x=shared.x.at[stage],
                    warpgroup=warpgroup,
                    interpret=self.interpret,
                )
                plgpu.barrier_arrive(shared.free.at[stage])
                return acc

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, product.num_columns), jnp.float32), plgpu.Layout.WGMMA)
            acc = lax.fori_loop(0, self.num_chunks, add_chunk, zeros)
            factors = shared.factors.at[slot]
            halves = scaled_halves(
                acc, shared.row_scales.at[slot], factors, warpgroup=warpgroup, interpret=self.interpret
            )
            if self.limit is not None:
                halves = (self._swiglu(*halves, shares_of(factors, num_rows, interpret=self.interpret)),)
            plgpu.commit_smem()  # orders the reads of this unit before the copies of a later one
            plgpu.barrier_arrive(shared.unit_free.at[slot])
            for tile, half in enumerate(halves):
                column = unit.column * self.unit_rows + tile * self.tile_rows + warpgroup * HALF_ROWS
                store_rows(half, out, unit.start, column, interpret=self.interpret)

        self._for_blocks(unit, run)

    def _swiglu(
        self, gate: Float32[Array, "M N"], up: Float32[Array, "M N"], share: Float32[Array, "M N"]
    ) -> Float32[Array, "M N"]:
        """As `ops.moe.swiglu` of bfloat16 products."""
        assert self.limit is not None
        gate, up = lax.min(_rounded(gate), jnp.float32(self.limit)), jnp.clip(_rounded(up), -self.limit, self.limit)
        return jax.nn.silu(gate) * up * share


def _rounded(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
