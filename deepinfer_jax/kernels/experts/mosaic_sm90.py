"""Routed experts on SM90: MXFP4 weights, FP8 activations, bits of a row that depend on no other row.

Roofline at 768 pairs over 48 experts of 5120 x 2304: at 4.25 bits each, the weights of gate and up are 602 MB and those
of down 301 MB; 54 GFLOP are 36 us of FP8. Memory limits by far: 142 and 71 us at 4.23 TB/s.

Two kernels, each one block for each multiprocessor, which works through units (pairs of one expert times rows of its
weights) in a fixed order. One warpgroup copies, the others multiply. A unit reads two tiles of weight rows: gate and up
of the same channels, or two neighbouring ranges of down. Weights are the left operand of the tensor cores, 64 rows at a
time, so that few pairs waste nothing; nibbles become E5M2, with the scale of their group in it, on their way from
shared memory to registers. In front of each kernel a small one makes E5M2 codes of bfloat16 rows (`rows`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float32, Int

from deepinfer_jax.kernels.experts import routed
from deepinfer_jax.kernels.experts.packed import CHUNK, GROUPS
from deepinfer_jax.kernels.experts.product_sm90 import (
    HALF_ROWS,
    PIECES,
    FoldedProduct,
    scaled_halves,
    shares_of,
    store_rows,
)
from deepinfer_jax.kernels.experts.routed import Weights, weighted_swiglu
from deepinfer_jax.kernels.experts.rows import TERMS
from deepinfer_jax.kernels.experts.unit_product import SHARED_BYTES, SLOTS, Inputs, Unit, UnitProduct
from deepinfer_jax.kernels.mosaic import Interpret, check_registers, observe_last
from deepinfer_jax.kernels.warpgroup import LINE, ROWS, TILE_TRANSFORMS

COPIES_OF_STAGE = 6  # two tiles of weights and of their steps, two halves of x
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
        routed.check_row_tile(self.row_tile)


TILING = Tiling()
# Decoding weights then costs as many instructions as before and is used by more pairs; the sums fill the registers.
PREFILL_TILING = Tiling(
    row_tile=96,
    up=KernelTiling(warpgroups=2, registers=240, at_once=1),
    down=KernelTiling(warpgroups=2, registers=240, at_once=1),
)


def tiling_for(num_pairs: int, num_experts: int) -> Tiling:
    """What is fastest for so many pairs, most of which go to these experts."""
    return PREFILL_TILING if num_pairs >= PREFILL_TILING.row_tile * num_experts else TILING


def refuses(
    u: Array, expert_ids: Array, w1: Weights | Array, w2: Weights | Array, *, tiling: Tiling | None = None
) -> str | None:
    """Why these operands cannot be multiplied, None if they can."""
    tiling = tiling_for(expert_ids.size, jax.tree.leaves(w1)[0].shape[-3]) if tiling is None else tiling
    return routed.refuses(
        u,
        expert_ids,
        w1,
        w2,
        width_step=math.lcm(CHUNK, 2 * HALF_ROWS * tiling.down.warpgroups),
        inner_step=math.lcm(CHUNK, HALF_ROWS * tiling.up.warpgroups),
    )


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
    tiling: Tiling | None = None,
    interpret: Interpret = None,
) -> BFloat16[Array, "T A D"]:
    """Outputs of the chosen experts, times their routing weights; zeros for rows that are not live and ids below 0.

    u: is quantised by `quantize_fp8`, which is exact on its grid. w1, w3 [(layers,) E, inner, D] and w2 [(layers,) E,
    D, inner]: E2M1 as `pack_experts` leaves it; the stack over layers is read in place. A ScaledArray is packed in
    each call, its own layer of a stack. Differs from the reference by the order of sums, and by what the tensor cores
    lose within 256 columns. tiling: `tiling_for` the numbers of pairs and experts if None; no bits depend on it.
    """
    tiling = tiling_for(expert_ids.size, w1.payload.shape[-3]) if tiling is None else tiling
    reason = refuses(u, expert_ids, w1, w2, tiling=tiling)
    if reason is not None:
        raise NotImplementedError(f"routed_experts on SM90: {reason}; use the reference")
    up = _Product(
        num_rows=w1.payload.shape[-2],
        width=u.shape[1],
        tiling=tiling.up,
        row_tile=tiling.row_tile,
        limit=limit,
        num_sms=num_sms,
        interpret=interpret,
    )
    down = dataclasses.replace(up, num_rows=up.width, width=up.num_rows, tiling=tiling.down, limit=None)
    return routed.run(up, down, u, expert_ids, weights, is_live, w1, w2, w3, layer=layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """Shared memory and barriers of a block."""

    weights: Any  # [stages, 2, tile rows, 128] uint8
    steps: Any  # [stages, 2, warpgroups, 256] uint8
    x: Any  # [stages, 2, 2 row_tile, 128] uint8
    row_scales: Any  # [SLOTS, 2, tile rows] float32
    factors: Any  # [SLOTS, factors, MAX_ROW_TILE] float32
    full: Any  # of each stage: all copies have arrived
    free: Any  # of each stage: all warpgroups have read it
    unit_full: Any  # of each slot, likewise
    unit_free: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product(UnitProduct):
    """A kernel: gate and up with SwiGLU where there is a limit, else down."""

    tiling: KernelTiling

    @property
    def warpgroups(self) -> int:
        return self.tiling.warpgroups

    @property
    def num_warpgroups(self) -> int:
        return self.warpgroups + 1

    @property
    def tile_rows(self) -> int:
        return HALF_ROWS * self.warpgroups

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        stage = 2 * ((self.tile_rows + TERMS * self.row_tile) * LINE + self.tile_rows * GROUPS)
        return min(self.tiling.most_stages, (SHARED_BYTES - self.scale_bytes) // stage)

    def scratch_types(self) -> dict[str, Any]:
        stages, tile_rows, codes = self.stages, self.tile_rows, TERMS * self.row_tile
        return {
            "weights": plgpu.SMEM((stages, 2, tile_rows, LINE), jnp.uint8, transforms=TILE_TRANSFORMS),
            "steps": plgpu.SMEM((stages, 2, self.warpgroups, HALF_ROWS * GROUPS), jnp.uint8),
            "x": plgpu.SMEM((stages, 2, codes, LINE), jnp.uint8, transforms=TILE_TRANSFORMS),
            "full": plgpu.Barrier(num_arrivals=COPIES_OF_STAGE, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=stages),
            **self.scale_types(num_readers=self.warpgroups),
        }

    def run(self, inputs: Inputs, out: Any, **scratch: Any) -> None:
        shared, warpgroup = _Shared(**scratch), lax.axis_index("warpgroup")
        num_own = self.num_own(inputs)

        @pl.when(warpgroup == self.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            self.for_units(inputs, num_own, lambda unit: self._copy_unit(unit, inputs, shared))
            observe_last(shared.free, num_own * self.num_chunks, self.stages)
            observe_last(shared.unit_free, num_own, SLOTS)

        @pl.when(warpgroup < self.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(self.tiling.registers, action="increase")
            self.for_units(inputs, num_own, lambda unit: self._multiply_unit(unit, out, shared))

    def _copy_unit(self, unit: Unit, inputs: Inputs, shared: _Shared) -> None:
        rows = self.first_rows(unit)
        self.copy_scales(unit, inputs, shared)

        def copy_chunk(chunk: Array, num_codes: int) -> None:
            step = unit.index * self.num_chunks + chunk
            stage = step % self.stages
            full = shared.full.at[stage]

            @pl.when(step >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(shared.free.at[stage])

            column = chunk * LINE
            for tile in range(2):
                source = inputs.weights[tile].at[unit.expert, pl.ds(rows[tile], self.tile_rows), pl.ds(column, LINE)]
                plgpu.copy_gmem_to_smem(source, shared.weights.at[stage, tile], full)
                blocks = pl.ds(rows[tile] // HALF_ROWS, self.warpgroups)
                plgpu.copy_gmem_to_smem(
                    inputs.steps[tile].at[unit.expert, blocks, chunk], shared.steps.at[stage, tile], full
                )
            for half in range(2):
                column = chunk * CHUNK + half * LINE
                source = inputs.x.at[pl.ds(TERMS * unit.first_place, num_codes), pl.ds(column, LINE)]
                plgpu.copy_gmem_to_smem(source, shared.x.at[stage, half, pl.ds(0, num_codes)], full)

        def copy(num_rows: int) -> None:
            lax.fori_loop(0, self.num_chunks, lambda chunk, _: copy_chunk(chunk, TERMS * num_rows), None)

        self.for_blocks(unit, copy)

    def _multiply_unit(self, unit: Unit, out: Any, shared: _Shared) -> None:
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
                share = shares_of(factors, num_rows, interpret=self.interpret)
                halves = (weighted_swiglu(*halves, share, limit=self.limit),)
            plgpu.commit_smem()  # orders the reads of this unit before the copies of a later one
            plgpu.barrier_arrive(shared.unit_free.at[slot])
            for tile, half in enumerate(halves):
                column = unit.column * self.unit_rows + tile * self.tile_rows + warpgroup * HALF_ROWS
                store_rows(half, out, unit.start, column, interpret=self.interpret)

        self.for_blocks(unit, run)
