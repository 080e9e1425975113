"""Routed experts of decode steps on SM100: MXFP4 weights, FP8 activations, bits of a row that depend on no other row.

Roofline of a B200 (8 TB/s, 4.5 PFLOP/s of dense FP8) at 768 pairs over 48 experts of 5120 x 2304: 902 MB of weights and
scales, 113 us; 54 GFLOP and twice that with two terms for each row, 24 us. Memory limits.

Two kernels, each one block for each multiprocessor, which works through units (pairs of one expert times two tiles of
128 rows of its weights) in a fixed order. Weights, codes of rows, schedule and everything around the products are those
of SM90 (`packed`, `rows`, `schedule`, `routed`): both operands are E5M2 with all powers of two in their codes, so that
the plain FP8 instruction does and nothing is scaled before the sums are complete.

One warp copies, one issues instructions. Two warpgroups decode a tile of a unit each, a row in each thread: nibbles
become codes in registers and go to tensor memory, which instructions take their left operand from. The last warpgroup
reads the sums of a unit, scales and rounds them, while the next one is multiplied: tensor memory holds two.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, UInt8

from deepinfer_jax.kernels.experts import routed
from deepinfer_jax.kernels.experts.left_sm100 import HALF, HALVES, decoded_half
from deepinfer_jax.kernels.experts.packed import CHUNK, GROUPS
from deepinfer_jax.kernels.experts.packed import ROW_BLOCK as WEIGHT_BLOCK
from deepinfer_jax.kernels.experts.routed import Weights, weighted_swiglu
from deepinfer_jax.kernels.experts.rows import TERMS
from deepinfer_jax.kernels.experts.schedule import ROW_BLOCK
from deepinfer_jax.kernels.experts.unit_product import SHARED_BYTES, SLOTS, Inputs, Unit, UnitProduct
from deepinfer_jax.kernels.mosaic import Interpret, observe_last
from deepinfer_jax.kernels.ptx import line_tiles

TILE_ROWS = 128  # of weights, and of an instruction's left operand
LINE = 128  # bytes of a row in a stage, and the bytes that a swizzle spans
COPIES_OF_STAGE = 4 + HALVES * TERMS  # two tiles of weights and of their steps; both terms of the halves of x
COPY_WARP, ISSUE_WARP = 0, 1  # of the first warpgroup
ISSUERS, STORERS, DECODERS, WARPGROUPS = 0, 1, 2, 4  # the first of each kind, and how many there are
SUM_SLOTS = 2  # units whose sums are in tensor memory
TENSOR_COLUMNS = 512  # of tensor memory, 4 bytes each
LEFT_COLUMNS = 2 * HALF // 4  # that one half chunk of both tiles takes
NUM_SMS = 148


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes that change speed and no bits."""

    row_tile: int = 40  # pairs of one expert that share one reading of its weights
    most_stages: int = 8
    most_lefts: int = 3

    def __post_init__(self) -> None:
        routed.check_row_tile(self.row_tile)
        if self.lefts < 1:
            raise ValueError(f"row_tile={self.row_tile} leaves no tensor memory for weights; 48 does")

    @property
    def lefts(self) -> int:
        """Half chunks of decoded weights that tensor memory holds beside the sums."""
        sums = SUM_SLOTS * 2 * TERMS * self.row_tile
        return min(self.most_lefts, (TENSOR_COLUMNS - sums) // LEFT_COLUMNS)


TILING = Tiling()


def refuses(u: Array, expert_ids: Array, w1: Weights | Array, w2: Weights | Array) -> str | None:
    """Why these operands cannot be multiplied, None if they can."""
    steps = {"width_step": math.lcm(CHUNK, 2 * TILE_ROWS), "inner_step": math.lcm(CHUNK, TILE_ROWS)}
    return routed.refuses(u, expert_ids, w1, w2, **steps)


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
    num_sms: int = NUM_SMS,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T A D"]:
    """Outputs of the chosen experts, times their routing weights; zeros for rows that are not live and ids below 0.

    Arguments are those of `mosaic_sm90.routed_experts`, in the same forms (spec: backbone 5.2). Differs from the
    reference by the order of sums, and by what the tensor cores' own float32 sums lose. Raises NotImplementedError for
    what `refuses` refuses.
    """
    reason = refuses(u, expert_ids, w1, w2)
    if reason is not None:
        raise NotImplementedError(f"routed_experts on SM100: {reason}; use the reference")
    up = _Product(
        num_rows=w1.payload.shape[-2],
        width=u.shape[1],
        tiling=tiling,
        row_tile=tiling.row_tile,
        limit=limit,
        num_sms=num_sms,
        interpret=interpret,
    )
    down = dataclasses.replace(up, num_rows=up.width, width=up.num_rows, limit=None)
    return routed.run(up, down, u, expert_ids, weights, is_live, w1, w2, w3, layer=layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """Shared memory, tensor memory and barriers of a block. A stage is a chunk of 256 columns."""

    weights: Any  # [stages, 2, 128, line] uint8
    steps: Any  # [stages, 2, 4, 256] uint8
    x: Any  # [stages, halves, 2 row_tile, line] E5M2: first terms of all pairs of the unit, then the second ones
    staged: Any  # [tiles, row_tile, 128] bfloat16
    left: Any  # tensor memory, [128, lefts * 2 tiles * 128] E5M2
    acc: Any  # tensor memory, [128, slots * 2 tiles * 2 row_tile] float32
    row_scales: Any  # [SLOTS, 2, 128] float32
    factors: Any  # [SLOTS, factors, MAX_ROW_TILE] float32
    full: Any  # of each stage: all copies have arrived
    decoded: Any  # of each stage: both decoders have read its weights
    multiplied: Any  # of each stage: the instructions that read its x are done
    left_full: Any  # of each left operand: both tiles are written
    left_free: Any  # of each left operand: the instructions that read it are done
    made: Any  # of each slot of sums: they are complete
    drained: Any  # of each slot of sums: they have been read
    unit_full: Any  # of each slot of scales: all copies have arrived
    unit_free: Any  # of each slot of scales: they have been read


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product(UnitProduct):
    """A kernel: gate and up with SwiGLU where there is a limit, else down."""

    tiling: Tiling

    @property
    def tile_rows(self) -> int:
        return TILE_ROWS

    @property
    def num_warpgroups(self) -> int:
        return WARPGROUPS

    @property
    def out_tiles(self) -> int:
        """Tiles of 128 channels that a unit makes."""
        return self.unit_rows // TILE_ROWS

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        fixed = self.scale_bytes + 2 * self.out_tiles * self.row_tile * TILE_ROWS
        stage = 2 * TILE_ROWS * (LINE + GROUPS) + HALVES * TERMS * self.row_tile * LINE
        return min(self.tiling.most_stages, (SHARED_BYTES - fixed) // stage)

    def operand(self, x: UInt8[Array, "codes K"]) -> Float[Array, "places TK"]:
        """Both terms of a place in one row, as the type that tensor cores are told."""
        return lax.bitcast_convert_type(x, jnp.float8_e5m2).reshape(-1, TERMS * x.shape[1])

    def scratch_types(self) -> dict[str, Any]:
        stages, lefts, codes = self.stages, self.tiling.lefts, TERMS * self.row_tile
        lines = line_tiles(LINE, LINE)
        blocks = TILE_ROWS // WEIGHT_BLOCK
        return {
            "weights": plgpu.SMEM((stages, 2, TILE_ROWS, LINE), jnp.uint8, transforms=lines),
            "steps": plgpu.SMEM((stages, 2, blocks, WEIGHT_BLOCK * GROUPS), jnp.uint8),
            "x": plgpu.SMEM((stages, HALVES, codes, LINE), jnp.float8_e5m2, transforms=lines),
            "staged": plgpu.SMEM((self.out_tiles, self.row_tile, TILE_ROWS), jnp.bfloat16),
            "left": plgpu.TMEM((TILE_ROWS, lefts * 2 * HALF), jnp.float8_e5m2, packed=True),
            "acc": plgpu.TMEM((TILE_ROWS, SUM_SLOTS * 2 * codes), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=COPIES_OF_STAGE, num_barriers=stages),
            "decoded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "multiplied": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
            "left_full": plgpu.Barrier(num_arrivals=2, num_barriers=lefts, orders_tensor_core=True),
            "left_free": plgpu.Barrier(num_arrivals=1, num_barriers=lefts, orders_tensor_core=True),
            "made": plgpu.Barrier(num_arrivals=1, num_barriers=SUM_SLOTS, orders_tensor_core=True),
            "drained": plgpu.Barrier(num_arrivals=1, num_barriers=SUM_SLOTS, orders_tensor_core=True),
            **self.scale_types(num_readers=1),
        }

    def run(self, inputs: Inputs, out: Any, **scratch: Any) -> None:
        shared, warpgroup = _Shared(**scratch), lax.axis_index("warpgroup")
        num_own = self.num_own(inputs)
        num_chunks = num_own * self.num_chunks

        @pl.when(warpgroup == ISSUERS)
        def _() -> None:
            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == COPY_WARP)
                def _() -> None:
                    self.for_units(inputs, num_own, lambda unit: self._copy_unit(unit, inputs, shared))
                    observe_last(shared.decoded, num_chunks, self.stages)
                    observe_last(shared.multiplied, num_chunks, self.stages)
                    observe_last(shared.unit_free, num_own, SLOTS)

                @pl.when(warp == ISSUE_WARP)
                def _() -> None:
                    self.for_units(inputs, num_own, lambda unit: self._multiply_unit(unit, shared))
                    observe_last(shared.drained, num_own, SUM_SLOTS)

        @pl.when(warpgroup == STORERS)
        def _() -> None:
            self.for_units(inputs, num_own, lambda unit: self._store_unit(unit, out, shared))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup >= DECODERS)
        def _() -> None:
            tile = warpgroup - DECODERS
            lax.fori_loop(0, num_chunks, lambda step, _: self._decode_chunk(step, tile, shared), None)
            observe_last(shared.left_free, num_chunks * HALVES, self.tiling.lefts)

    def _copy_unit(self, unit: Unit, inputs: Inputs, shared: _Shared) -> None:
        rows = self.first_rows(unit)
        self.copy_scales(unit, inputs, shared)

        def copy_chunk(chunk: Array, num_rows: int) -> None:
            step = unit.index * self.num_chunks + chunk
            stage = step % self.stages
            full = shared.full.at[stage]

            @pl.when(step >= self.stages)
            def _() -> None:
                plgpu.barrier_wait(shared.decoded.at[stage])
                plgpu.barrier_wait(shared.multiplied.at[stage])

            column = chunk * LINE
            for tile in range(2):
                source = inputs.weights[tile].at[unit.expert, pl.ds(rows[tile], TILE_ROWS), pl.ds(column, LINE)]
                plgpu.copy_gmem_to_smem(source, shared.weights.at[stage, tile], full)
                blocks = pl.ds(rows[tile] // WEIGHT_BLOCK, TILE_ROWS // WEIGHT_BLOCK)
                source = inputs.steps[tile].at[unit.expert, blocks, chunk]
                plgpu.copy_gmem_to_smem(source, shared.steps.at[stage, tile], full)
            for half in range(HALVES):
                for term in range(TERMS):
                    column = term * self.width + chunk * CHUNK + half * HALF
                    source = inputs.x.at[pl.ds(unit.first_place, num_rows), pl.ds(column, HALF)]
                    own = shared.x.at[stage, half, pl.ds(term * num_rows, num_rows)]
                    plgpu.copy_gmem_to_smem(source, own, full)

        def copy(num_rows: int) -> None:
            lax.fori_loop(0, self.num_chunks, lambda chunk, _: copy_chunk(chunk, num_rows), None)

        self.for_blocks(unit, copy)

    def _decode_chunk(self, step: Array, tile: Array, shared: _Shared) -> None:
        """One tile of a chunk to tensor memory, a half after the other."""
        stage = step % self.stages
        plgpu.barrier_wait(shared.full.at[stage])
        for half in range(HALVES):
            half_step = step * HALVES + half
            left = half_step % self.tiling.lefts

            @pl.when(half_step >= self.tiling.lefts)
            def _(left: Array = left) -> None:
                plgpu.barrier_wait(shared.left_free.at[left])

            codes = decoded_half(
                shared.weights.at[stage, tile], shared.steps.at[stage, tile], half=half, interpret=self.interpret
            )
            plgpu.async_store_tmem(self._left(left, tile, shared), codes)
            plgpu.commit_tmem()
            plgpu.barrier_arrive(shared.left_full.at[left])
        plgpu.barrier_arrive(shared.decoded.at[stage])

    def _multiply_unit(self, unit: Unit, shared: _Shared) -> None:
        slot = unit.index % SUM_SLOTS

        @pl.when(unit.index >= SUM_SLOTS)
        def _() -> None:
            plgpu.barrier_wait(shared.drained.at[slot])

        def multiply(num_rows: int) -> None:
            def multiply_chunk(chunk: Array, _: None) -> None:
                step = unit.index * self.num_chunks + chunk
                stage = step % self.stages
                plgpu.barrier_wait(shared.full.at[stage])
                for half in range(HALVES):
                    left = (step * HALVES + half) % self.tiling.lefts
                    plgpu.barrier_wait(shared.left_full.at[left])
                    x = shared.x.at[stage, half, pl.ds(0, TERMS * num_rows)]
                    for tile in range(2):
                        sums = self._sums(slot, tile, 0, TERMS * num_rows, shared)
                        accumulates = True if half else chunk > 0
                        plgpu.tcgen05_mma(sums, self._left(left, tile, shared), x.T, accumulate=accumulates)
                    plgpu.tcgen05_commit_arrive(shared.left_free.at[left])
                plgpu.tcgen05_commit_arrive(shared.multiplied.at[stage])

            lax.fori_loop(0, self.num_chunks, multiply_chunk, None)

        self.for_blocks(unit, multiply)
        plgpu.tcgen05_commit_arrive(shared.made.at[slot])

    def _store_unit(self, unit: Unit, out: Any, shared: _Shared) -> None:
        """Eight pairs after the other: both terms are added, scaled, and for gate and up multiplied."""
        slot, sum_slot = unit.index % SLOTS, unit.index % SUM_SLOTS
        num_blocks = (unit.num_pairs + ROW_BLOCK - 1) // ROW_BLOCK
        plgpu.barrier_wait(shared.unit_full.at[slot])
        plgpu.barrier_wait(shared.made.at[sum_slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def store_block(block: Array, _: None) -> None:
            pairs = pl.ds(block * ROW_BLOCK, ROW_BLOCK)
            scaled, shape = [], (TILE_ROWS, ROW_BLOCK)
            for tile in range(2):
                terms = [
                    plgpu.async_load_tmem(
                        self._sums(sum_slot, tile, (term * num_blocks + block) * ROW_BLOCK, ROW_BLOCK, shared)
                    )
                    for term in range(TERMS)
                ]
                of_rows = lax.broadcast_in_dim(shared.row_scales[slot, tile], shape, (0,))
                of_pairs = lax.broadcast_in_dim(shared.factors[slot, 0, pairs], shape, (1,))
                scaled.append((terms[0] + terms[1]) * (of_rows * of_pairs))
            if self.limit is not None:
                share = lax.broadcast_in_dim(shared.factors[slot, 1, pairs], shape, (1,))
                gate, up = scaled
                scaled = [weighted_swiglu(gate, up, share, limit=self.limit)]
            for tile, values in enumerate(scaled):
                shared.staged.at[tile, pairs].T[...] = values.astype(jnp.bfloat16)
            plgpu.commit_smem()
            rows = pl.ds(unit.first_place + block * ROW_BLOCK, ROW_BLOCK)
            for tile in range(self.out_tiles):
                column = unit.column * self.unit_rows + tile * TILE_ROWS
                plgpu.copy_smem_to_gmem(shared.staged.at[tile, pairs], out.at[rows, pl.ds(column, TILE_ROWS)])

        lax.fori_loop(0, num_blocks, store_block, None)
        plgpu.wait_load_tmem()
        plgpu.barrier_arrive(shared.drained.at[sum_slot])
        plgpu.barrier_arrive(shared.unit_free.at[slot])

    def _left(self, left: Array, tile: int | Array, shared: _Shared) -> Any:
        return shared.left.at[:, pl.ds((2 * left + tile) * HALF, HALF)]

    def _sums(self, slot: Array, tile: int, first: int | Array, count: int, shared: _Shared) -> Any:
        column = (2 * slot + tile) * TERMS * self.row_tile + first
        return shared.acc.at[:, pl.ds(column, count)]
