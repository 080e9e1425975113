"""Routed experts of decode steps on SM90: MXFP4 weights, FP8 activations, bits of a row that depend on no other row.

Roofline at 768 pairs over 48 experts of 5120 x 2304: at 4.25 bits each, the weights of gate and up are 602 MB and those
of down 301 MB; 54 GFLOP are 36 us of FP8. Memory limits by far: 142 and 71 us at 4.23 TB/s.

Two kernels, each one block for each multiprocessor, which works through units (pairs of one expert times rows of its
weights) in a fixed order. One warpgroup copies, the others multiply. A unit reads two tiles of weight rows: gate and up
of the same channels, or two neighbouring ranges of down. Weights are the left operand of the tensor cores, 64 rows at a
time, so that few pairs waste nothing; nibbles become E4M3 on their way from shared memory to registers, low ones (even
columns) and high ones (odd columns) apart, and the columns of activations are ordered likewise.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, UInt8

from deepinfer_jax.kernels.linear.packed_sm90 import quantized_rows
from deepinfer_jax.kernels.mosaic import (
    FP4_CODE_FACTOR,
    GROUP,
    Interpret,
    check_registers,
    observe_last,
    scale_of,
    split_nibbles,
)
from deepinfer_jax.kernels.warpgroup import (
    CHUNK,
    HALF_LAYOUT,
    HALF_ROWS,
    LINE,
    ROWS,
    TILE_TRANSFORMS,
    Fp4Product,
    split_halves,
    store_quantized,
)
from deepinfer_jax.ops.quant import FP8_GROUP, ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

ROW_BLOCK = 8  # pairs of one expert are padded to a multiple
MAX_ROW_TILE = 64
MAX_PAIRS = 4096  # the schedule compares all with all
SCALE_SLOTS = 2  # units whose weight scales are in shared memory
COPIES_OF_STAGE = 5  # two tiles of weights, two halves of x, the scales of x
COPIES_OF_UNIT = 3  # the scales of two tiles of weights, the routing weights
SHARED_BYTES = 232448 - 2048  # of a block, less room for barriers and alignment
COPY_REGISTERS = 24  # of a thread that copies; the others share what it leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTiling:
    """Sizes of one kernel that change speed and no bits."""

    warpgroups: int  # that multiply; each has 32 rows of both tiles of a unit
    registers: int  # of a thread that multiplies
    sum_registers: int  # of these for sums of groups, see Fp4Product
    most_stages: int = 8

    def __post_init__(self) -> None:
        check_registers(*[self.registers] * self.warpgroups, COPY_REGISTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of both kernels."""

    row_tile: int = 40  # pairs of one expert that share one reading of its weights
    up: KernelTiling = KernelTiling(warpgroups=3, registers=152, sum_registers=64)
    down: KernelTiling = KernelTiling(warpgroups=4, registers=112, sum_registers=48)

    def __post_init__(self) -> None:
        if self.row_tile % ROW_BLOCK or not ROW_BLOCK <= self.row_tile <= MAX_ROW_TILE:
            raise ValueError(
                f"row_tile={self.row_tile} must be a multiple of {ROW_BLOCK} from {ROW_BLOCK} to {MAX_ROW_TILE}"
            )


TILING = Tiling()


def refuses(
    u: Array, expert_ids: Array, w1: ScaledArray | Array, w2: ScaledArray | Array, *, tiling: Tiling = TILING
) -> str | None:
    """Why these operands cannot be multiplied, None if they can."""
    if u.dtype != jnp.bfloat16:
        return f"rows are {u.dtype}, not bfloat16"
    if expert_ids.size > MAX_PAIRS:
        return f"{expert_ids.size} pairs are more than the {MAX_PAIRS} of a decode step"
    if not (_is_fp4(w1) and _is_fp4(w2)):
        return f"weights are not packed E2M1 with a scale for each {GROUP} columns"
    width, inner = w2.payload.shape[-2], w1.payload.shape[-2]
    steps = {
        "hidden": (width, math.lcm(CHUNK, 2 * HALF_ROWS * tiling.down.warpgroups)),
        "inner": (inner, math.lcm(CHUNK, HALF_ROWS * tiling.up.warpgroups)),
    }
    for name, (size, step) in steps.items():
        if size % step:
            return f"{name} width {size} is not a multiple of {step}"
    return None


def _is_fp4(w: ScaledArray | Array) -> TypeGuard[ScaledArray]:
    return isinstance(w, ScaledArray) and w.form == "fp4" and w.block == (1, GROUP)


def routed_experts(
    u: BFloat16[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    weights: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    w1: ScaledArray,
    w2: ScaledArray,
    w3: ScaledArray,
    *,
    limit: float,
    layer: int | Int[Array, ""] = 0,
    num_sms: int = 132,
    tiling: Tiling = TILING,
    interpret: Interpret = None,
) -> BFloat16[Array, "T A D"]:
    """Outputs of the chosen experts, times their routing weights; zeros for rows that are not live and ids below 0.

    u: is quantised by `quantize_fp8`, which is exact on its grid. w1, w3 [(layers,) E, inner, D] and w2 [(layers,) E,
    D, inner]: packed E2M1; the stack over layers is read in place. Differs from the reference by the order of float32
    sums over groups of 32 columns, and by what one FP8 instruction loses within a group.
    """
    reason = refuses(u, expert_ids, w1, w2, tiling=tiling)
    if reason is not None:
        raise NotImplementedError(f"routed_experts on SM90: {reason}; use the reference")
    num_experts, inner, width = w1.payload.shape[-3], w1.payload.shape[-2], u.shape[1]
    if not expert_ids.size:
        return jnp.zeros((*expert_ids.shape, width), u.dtype)
    schedule = make_schedule(expert_ids, is_live, num_experts=num_experts, row_tile=tiling.row_tile)
    tiles = schedule.tiles.at[:, 0].add(jnp.asarray(layer, jnp.int32) * num_experts)
    codes, scales = _operands(u, schedule.pair_at // expert_ids.shape[1], interpret)
    shares = weights.reshape(-1).at[schedule.pair_at].get(mode="fill", fill_value=0)
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
    hidden, hidden_scales = up(tiles, schedule.num_tiles, codes, scales, shares, w1, w3)
    (out,) = down(tiles, schedule.num_tiles, hidden, hidden_scales, shares, w2, w2)
    out = out.at[schedule.places].get(mode="fill", fill_value=0)
    return out.reshape(*expert_ids.shape, width)


@pytree_dataclass
class Schedule:
    """Where pairs (row, choice) go: grouped by expert, each group padded to whole blocks of 8 places."""

    places: Int[Array, " pairs"]  # of each pair; the number of places for pairs that have no expert here
    pair_at: Int[Array, " places"]  # the inverse; the number of pairs where there is none
    tiles: Int[Array, "tiles three"]  # expert, first place and number of pairs of at most row_tile pairs
    num_tiles: Int[Array, " one"]


def make_schedule(
    expert_ids: Int[Array, "T A"], is_live: Bool[Array, " T"], *, num_experts: int, row_tile: int
) -> Schedule:
    """The places of all pairs of live rows with an id from 0 to num_experts - 1, in the order of pairs."""
    num_pairs = expert_ids.size
    is_here = is_live[:, None] & (expert_ids >= 0) & (expert_ids < num_experts)
    expert = jnp.where(is_here, expert_ids, num_experts).reshape(-1).astype(jnp.int32)
    pairs, experts = jnp.arange(num_pairs, dtype=jnp.int32), jnp.arange(num_experts, dtype=jnp.int32)
    # Comparisons of all with all: one small kernel each, where a sort or a running sum is a dozen.
    is_before = (expert[None, :] == expert[:, None]) & (pairs[None, :] < pairs[:, None])
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    counts = jnp.sum(expert[None, :] == experts[:, None], axis=1, dtype=jnp.int32)
    starts, tiles_of = _starts(-(-counts // ROW_BLOCK) * ROW_BLOCK), -(-counts // row_tile)
    first_tile = _starts(tiles_of)
    most_groups = min(num_pairs, num_experts)
    # A tile copies the scales of row_tile places, also of those behind its own.
    num_places = -(-num_pairs // ROW_BLOCK) * ROW_BLOCK + most_groups * (ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
    num_places += ROW_BLOCK + row_tile
    places = starts.at[expert].get(mode="fill", fill_value=0) + rank
    places = jnp.where(expert < num_experts, places, num_places)
    pair_at = jnp.full(num_places, num_pairs, jnp.int32).at[places].set(pairs, mode="drop")
    tile = jnp.arange(num_pairs // row_tile + most_groups, dtype=jnp.int32)
    tile_expert = jnp.sum(tile[:, None] >= (first_tile + tiles_of)[None, :], axis=1, dtype=jnp.int32)
    tile_expert = jnp.minimum(tile_expert, num_experts - 1)
    done = (tile - first_tile[tile_expert]) * row_tile
    size = jnp.minimum(counts[tile_expert] - done, row_tile)
    tiles = jnp.stack([tile_expert, starts[tile_expert] + done, size], axis=1)
    return Schedule(places=places, pair_at=pair_at, tiles=tiles, num_tiles=jnp.sum(tiles_of, keepdims=True))


def _starts(sizes: Int[Array, " E"]) -> Int[Array, " E"]:
    """The sum of all sizes in front of each."""
    index = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None, :] < index[:, None], sizes[None, :], 0), axis=1, dtype=jnp.int32)


def _operands(
    u: Float[Array, "T D"], row_at: Int[Array, " places"], interpret: Interpret
) -> tuple[UInt8[Array, "places D"], Float32[Array, "groups places"]]:
    """Codes and scales of the rows at all places; zeros where there is no row.

    The shared expert quantises the same rows, for whole blocks of them: a compiler may let one kernel do it for both.
    """
    num_rows = u.shape[0]
    codes, scales = quantized_rows(u, num_rows=-(-num_rows // ROW_BLOCK) * ROW_BLOCK, interpret=interpret)
    codes = split_nibbles(codes[:num_rows]).at[row_at].get(mode="fill", fill_value=0)
    scales = scales[:, :num_rows] * FP4_CODE_FACTOR
    return codes, scales.at[:, row_at].get(mode="fill", fill_value=0)


@pytree_dataclass
class _Inputs:
    """Operands of a kernel, in device memory."""

    tiles: Any
    num_tiles: Any
    x: Any
    x_scales: Any
    shares: Any
    weights: tuple[Any, Any]  # of the first and of the second tile of a unit, [experts, rows, bytes]
    scales: tuple[Any, Any]  # their scales, [experts, lines, 128]


@pytree_dataclass
class _Shared:
    """Shared memory and barriers of a block."""

    weights: Any  # [stages, 2, tile rows, 128] uint8
    x: Any  # [stages, 2, row_tile, 128] uint8
    x_scales: Any  # [stages, 8, row_tile] float32
    scales: Any  # [SCALE_SLOTS, 2, lines, 128] uint8
    shares: Any  # [SCALE_SLOTS, MAX_ROW_TILE] float32, so that each copy begins at a multiple of 128 bytes
    out: Any  # [warpgroups, 2, row_tile, 32] bfloat16, or [warpgroups, row_tile, 32] uint8
    out_scales: Any  # [warpgroups, row_tile] float32
    scratch: Any  # [warpgroups, 4, row_tile] float32
    full: Any  # of each stage: all copies have arrived
    free: Any  # of each stage: all warpgroups have read it
    scales_full: Any  # of each slot, likewise
    scales_free: Any


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
    """A kernel: gate and up with SwiGLU and quantisation where there is a limit, else down."""

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
    def scale_bytes(self) -> int:
        return self.width // GROUP

    @property
    def scale_lines(self) -> int:
        """Of one tile."""
        return self.tile_rows * self.scale_bytes // LINE

    @property
    def stages(self) -> int:
        """Of the pipeline: as many as shared memory holds."""
        out_bytes = 2 * self.warpgroups * self.row_tile * HALF_ROWS * 2 + self.warpgroups * 5 * self.row_tile * 4
        fixed = SCALE_SLOTS * 2 * self.scale_lines * LINE + out_bytes
        stage = 2 * (self.tile_rows + self.row_tile) * LINE + CHUNK // FP8_GROUP * self.row_tile * 4
        return min(self.tiling.most_stages, (SHARED_BYTES - fixed) // stage)

    def __call__(
        self,
        tiles: Int[Array, "tiles three"],
        num_tiles: Int[Array, " one"],
        x: UInt8[Array, "places K"],
        x_scales: Float32[Array, "groups places"],
        shares: Float32[Array, " places"],
        first: ScaledArray,
        second: ScaledArray,
    ) -> list[Array]:
        """Results at all places that tiles name: codes and scales, or bfloat16."""
        num_places = x.shape[0]

        def payload(w: ScaledArray) -> Array:
            return w.payload.reshape(-1, self.num_rows, self.width // 2)

        def scales(w: ScaledArray) -> Array:
            return scale_of(w).reshape(-1, self.num_rows * self.scale_bytes // LINE, LINE)

        inputs = _Inputs(
            tiles=tiles,
            num_tiles=num_tiles,
            x=x,
            x_scales=x_scales,
            shares=shares,
            weights=(payload(first), payload(second)),
            scales=(scales(first), scales(second)),
        )
        if self.limit is None:
            out_type = [jax.ShapeDtypeStruct((num_places, self.num_rows), jnp.bfloat16)]
        else:
            out_type = [
                jax.ShapeDtypeStruct((num_places, self.num_rows), jnp.uint8),
                jax.ShapeDtypeStruct((self.num_rows // FP8_GROUP, num_places), jnp.float32),
            ]
        leaves, structure = jax.tree.flatten(inputs)

        def body(*refs: Any, **scratch: Any) -> None:
            self._run(jax.tree.unflatten(structure, refs[: len(leaves)]), refs[len(leaves) :], _Shared(**scratch))

        kernel = plgpu.kernel(
            body,
            out_type=out_type,
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
        row_tile = self.row_tile
        wide = (self.warpgroups, 2, row_tile, HALF_ROWS)
        return {
            "weights": plgpu.SMEM((self.stages, 2, self.tile_rows, LINE), jnp.uint8, transforms=TILE_TRANSFORMS),
            "x": plgpu.SMEM((self.stages, 2, row_tile, LINE), jnp.uint8, transforms=TILE_TRANSFORMS),
            "x_scales": plgpu.SMEM((self.stages, CHUNK // FP8_GROUP, row_tile), jnp.float32),
            "scales": plgpu.SMEM((SCALE_SLOTS, 2, self.scale_lines, LINE), jnp.uint8),
            "shares": plgpu.SMEM((SCALE_SLOTS, MAX_ROW_TILE), jnp.float32),
            "out": plgpu.SMEM(wide, jnp.bfloat16) if self.limit is None else plgpu.SMEM(wide[:1] + wide[2:], jnp.uint8),
            "out_scales": plgpu.SMEM((self.warpgroups, row_tile), jnp.float32),
            "scratch": plgpu.SMEM((self.warpgroups, 4, row_tile), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=COPIES_OF_STAGE, num_barriers=self.stages),
            "free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages),
            "scales_full": plgpu.Barrier(num_arrivals=COPIES_OF_UNIT, num_barriers=SCALE_SLOTS),
            "scales_free": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=SCALE_SLOTS),
        }

    def _run(self, inputs: _Inputs, outputs: tuple[Any, ...], shared: _Shared) -> None:
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
            observe_last(shared.scales_free, num_own, SCALE_SLOTS)

        @pl.when(warpgroup < self.warpgroups)
        def _() -> None:
            plgpu.set_max_registers(self.tiling.registers, action="increase")
            for_units(lambda unit: self._multiply_unit(unit, outputs, shared))
            plgpu.wait_smem_to_gmem(0)

    def _for_blocks(self, unit: _Unit, run: Callable[[int], None]) -> None:
        """run(rows) for the padded number of rows, which is then a constant."""
        num_blocks = (unit.num_pairs + ROW_BLOCK - 1) // ROW_BLOCK
        for blocks in range(1, self.row_tile // ROW_BLOCK + 1):
            pl.when(num_blocks == blocks)(lambda blocks=blocks: run(blocks * ROW_BLOCK))

    def _copy_unit(self, unit: _Unit, inputs: _Inputs, shared: _Shared) -> None:
        slot, start = unit.index % SCALE_SLOTS, pl.multiple_of(unit.start, ROW_BLOCK)
        first_row = pl.multiple_of(unit.column * self.unit_rows, HALF_ROWS)
        second_row = pl.multiple_of(first_row + self.tile_rows, HALF_ROWS) if self.limit is None else first_row
        rows = (first_row, second_row)

        @pl.when(unit.index >= SCALE_SLOTS)
        def _() -> None:
            plgpu.barrier_wait(shared.scales_free.at[slot])

        scales_full = shared.scales_full.at[slot]
        for tile in range(2):
            line = rows[tile] // self.tile_rows * self.scale_lines
            source = inputs.scales[tile].at[unit.expert, pl.ds(line, self.scale_lines)]
            plgpu.copy_gmem_to_smem(source, shared.scales.at[slot, tile], scales_full)
        shares = shared.shares.at[slot, pl.ds(0, self.row_tile)]
        plgpu.copy_gmem_to_smem(inputs.shares.at[pl.ds(start, self.row_tile)], shares, scales_full)

        def copy_chunk(chunk: Array, num_rows: int) -> None:
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
            for half in range(2):
                column = pl.multiple_of(chunk * CHUNK + half * LINE, LINE)
                source = inputs.x.at[pl.ds(start, num_rows), pl.ds(column, LINE)]
                plgpu.copy_gmem_to_smem(source, shared.x.at[stage, half, pl.ds(0, num_rows)], full)
            groups = CHUNK // FP8_GROUP
            source = inputs.x_scales.at[pl.ds(chunk * groups, groups), pl.ds(start, self.row_tile)]
            plgpu.copy_gmem_to_smem(source, shared.x_scales.at[stage], full)

        self._for_blocks(unit, lambda n: lax.fori_loop(0, self.num_chunks, lambda c, _: copy_chunk(c, n), None))

    def _multiply_unit(self, unit: _Unit, outputs: tuple[Any, ...], shared: _Shared) -> None:
        slot = unit.index % SCALE_SLOTS
        warpgroup = lax.axis_index("warpgroup")
        plgpu.barrier_wait(shared.scales_full.at[slot])

        def run(num_rows: int) -> None:
            product = Fp4Product(
                num_columns=num_rows, scale_bytes=self.scale_bytes, sum_registers=self.tiling.sum_registers
            )

            def add_chunk(chunk: Array, acc: Array) -> Array:
                stage = (unit.index * self.num_chunks + chunk) % self.stages
                plgpu.barrier_wait(shared.full.at[stage])
                acc = product.add(
                    acc,
                    weights=shared.weights.at[stage],
                    scales=shared.scales.at[slot],
                    x=shared.x.at[stage],
                    x_scales=shared.x_scales.at[stage],
                    chunk=chunk,
                    warpgroup=warpgroup,
                    interpret=self.interpret,
                )
                plgpu.barrier_arrive(shared.free.at[stage])
                return acc

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, num_rows), jnp.float32), plgpu.Layout.WGMMA)
            halves = split_halves(lax.fori_loop(0, self.num_chunks, add_chunk, zeros), interpret=self.interpret)
            if self.limit is not None:
                halves = (self._swiglu(*halves, shared.shares.at[slot, pl.ds(0, num_rows)]),)
            plgpu.commit_smem()  # orders the reads of this unit before the copies of a later one
            plgpu.barrier_arrive(shared.scales_free.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            write = self._write_rows if self.limit is None else self._write_hidden
            write(halves, unit, outputs, shared)

        self._for_blocks(unit, run)

    def _swiglu(self, gate: Float32[Array, "M N"], up: Float32[Array, "M N"], shares: Any) -> Float32[Array, "M N"]:
        """As `ops.moe.swiglu` of bfloat16 products, rounded to bfloat16."""
        assert self.limit is not None
        gate, up = lax.min(_rounded(gate), jnp.float32(self.limit)), jnp.clip(_rounded(up), -self.limit, self.limit)
        share = plgpu.load(shares, layout=HALF_LAYOUT.reduce(0), optimized=False)
        share = plgpu.layout_cast(lax.broadcast_in_dim(share, gate.shape, (1,)), HALF_LAYOUT)
        return _rounded(jax.nn.silu(gate) * up * share)

    def _write_rows(self, halves: tuple[Array, ...], unit: _Unit, outputs: tuple[Any, ...], shared: _Shared) -> None:
        warpgroup, num_rows = lax.axis_index("warpgroup"), halves[0].shape[1]
        out = shared.out.at[warpgroup]
        for tile, half in enumerate(halves):
            out.at[tile, pl.ds(0, num_rows)].T[...] = half.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for tile in range(len(halves)):
            first = unit.column * self.unit_rows + tile * self.tile_rows + warpgroup * HALF_ROWS
            place = outputs[0].at[pl.ds(unit.start, num_rows), pl.ds(first, HALF_ROWS)]
            plgpu.copy_smem_to_gmem(out.at[tile, pl.ds(0, num_rows)], place)

    def _write_hidden(self, hidden: tuple[Array, ...], unit: _Unit, outputs: tuple[Any, ...], shared: _Shared) -> None:
        (value,) = hidden
        warpgroup, num_rows = lax.axis_index("warpgroup"), value.shape[1]
        out, out_scales = shared.out.at[warpgroup], shared.out_scales.at[warpgroup]
        store_quantized(value, out, out_scales, shared.scratch.at[warpgroup], interpret=self.interpret)
        plgpu.commit_smem()
        group = unit.column * self.warpgroups + warpgroup
        rows = pl.ds(unit.start, num_rows)
        place = outputs[0].at[rows, pl.ds(group * FP8_GROUP, FP8_GROUP)]
        plgpu.copy_smem_to_gmem(out.at[pl.ds(0, num_rows)], place)
        plgpu.copy_smem_to_gmem(out_scales.at[pl.ds(0, num_rows)], outputs[1].at[group, rows])


def _rounded(x: Float32[Array, "M N"]) -> Float32[Array, "M N"]:
    return x.astype(jnp.bfloat16).astype(jnp.float32)
