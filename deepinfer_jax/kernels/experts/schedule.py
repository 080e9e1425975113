"""Where the pairs of a step go among the experts: one small kernel, or for many pairs a sort."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Bool, Int

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import Interpret, Register
from deepinfer_jax.kernels.ptx import global_address, inline, ptx, row_address
from deepinfer_jax.pytree import pytree_dataclass, static_field

ROW_BLOCK = 8  # pairs of one expert are padded to a multiple
MAX_ROW_TILE = 96
KERNEL_PAIRS = 4096  # that the kernel places: a thread holds 32
WARP, WARPS = 32, 4
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


@pytree_dataclass
class Schedule:
    """Where pairs (row, choice) go: grouped by expert, each group padded to whole blocks of 8 places."""

    places: Int[Array, " pairs"]  # of each pair; num_places for pairs that have no expert here
    tiles: Int[Array, "tiles three"]  # expert, first place and number of pairs of at most row_tile pairs
    num_tiles: Int[Array, " one"]  # rows of tiles that count; the kernel leaves others as they are
    num_places: int = static_field()


def make_schedule(
    expert_ids: Int[Array, "T A"],
    is_live: Bool[Array, " T"],
    *,
    num_experts: int,
    row_tile: int,
    first_expert: int | Int[Array, ""] = 0,
    interpret: Interpret = None,
) -> Schedule:
    """The places of all pairs of live rows with an id from 0 to num_experts - 1, in the order of pairs.

    first_expert: what is added to ids in tiles. More than KERNEL_PAIRS are sorted by XLA.
    """
    num_pairs = expert_ids.size
    is_here = is_live[:, None] & (expert_ids >= 0) & (expert_ids < num_experts)
    expert = jnp.where(is_here, expert_ids, num_experts).reshape(-1).astype(jnp.int32)
    most_groups = min(num_pairs, num_experts)
    num_places = -(-num_pairs // ROW_BLOCK) * ROW_BLOCK + most_groups * (ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
    num_places += MAX_ROW_TILE  # of which a unit copies all factors, from its first place on
    sizes = {"num_experts": num_experts, "row_tile": row_tile, "num_places": num_places}
    first_expert = jnp.asarray(first_expert, jnp.int32)
    num_tiles = num_pairs // row_tile + most_groups
    if interpret is not None or num_pairs > KERNEL_PAIRS:
        places, tiles, count = _sorted(expert, first_expert, num_tiles, **sizes)
    else:
        bins = -(-(num_experts + 1) // WARP) * WARP
        kernel = plgpu.kernel(
            functools.partial(_schedule_block, bins=bins, **sizes),
            kernel_name="place_pairs",
            out_type=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((num_pairs,), (num_tiles, 3), (1,))],
            scratch_types={
                "counts": plgpu.SMEM((WARPS, bins), jnp.int32),
                "starts": plgpu.SMEM((WARPS, bins), jnp.int32),
            },
            compiler_params=_COMPILER_PARAMS,
        )
        places, tiles, count = kernel(expert, first_expert.reshape(1))
    return Schedule(places=places, tiles=tiles, num_tiles=count, num_places=num_places)


def _sorted(
    expert: Int[Array, " pairs"],
    first_expert: Int[Array, ""],
    num_tiles: int,
    *,
    num_experts: int,
    row_tile: int,
    num_places: int,
) -> tuple[Array, Array, Array]:
    """Places, tiles and their number: what the kernel finds, in memory by pairs and in time little more than that."""
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(expert[order], jnp.arange(num_experts, dtype=jnp.int32), side="right").astype(jnp.int32)
    firsts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])  # of each expert, among the sorted pairs
    counts = ends - firsts
    blocks, tiles_of = -(-counts // ROW_BLOCK), -(-counts // row_tile)
    starts = ROW_BLOCK * (jnp.cumsum(blocks, dtype=jnp.int32) - blocks)
    number = jnp.arange(expert.shape[0], dtype=jnp.int32)
    own = jnp.minimum(expert[order], num_experts - 1)
    place = jnp.where(expert[order] < num_experts, starts[own] + number - firsts[own], num_places)
    places = jnp.zeros_like(number).at[order].set(place, unique_indices=True)
    last, tile = jnp.cumsum(tiles_of, dtype=jnp.int32), jnp.arange(num_tiles, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(last, tile, side="right").astype(jnp.int32), num_experts - 1)
    done = (tile - (last - tiles_of)[owner]) * row_tile
    fields = (owner + first_expert, starts[owner] + done, jnp.minimum(counts[owner] - done, row_tile))
    return places, jnp.stack(fields, axis=1), last[-1:]


def _schedule_block(*refs: Any, counts: Any, starts: Any, bins: int, num_experts: int, **sizes: int) -> None:
    """Four warps with a quarter of the pairs each, neighbouring ones in neighbouring threads."""
    num_pairs = refs[0].shape[0]
    steps = -(-num_pairs // (WARP * WARPS))
    bin_bytes, row_bytes = 4, 4 * bins

    def schedule(_: Any, ids: Any, first_expert: Any, places: Any, tiles: Any, count: Any, *shared: Any) -> None:
        counts_at, starts_at = (mosaic.shared_address(ref) for ref in shared)
        lane, warp = mosaic.iand(mgpu.thread_idx(), WARP - 1), mosaic.shr(mgpu.thread_idx(), 5)
        zero, own = mosaic.i32(0), mosaic.imul(warp, row_bytes)
        pairs = [
            mosaic.iadd(mosaic.iadd(mosaic.imul(warp, steps * WARP), lane), mosaic.i32(i * WARP)) for i in range(steps)
        ]
        experts = [_load_or(global_address(ids), pair, num_pairs, num_experts) for pair in pairs]
        for first in range(0, bins, WARP):
            mosaic.store(
                zero, mosaic.iadd(mosaic.iadd(counts_at, own), mosaic.imul(lane, bin_bytes)), bin_bytes * first
            )
        ptx("bar.warp.sync 0xffffffff;", count=0)
        ranks = [_rank(expert, lane, mosaic.iadd(counts_at, own)) for expert in experts]
        mgpu.utils.warpgroup_barrier()
        # Each warp does all of this: they write the same.
        first, carry = ptx("ld.global.b32 $0, [$1];", global_address(first_expert)), zero
        for chunk in range(0, bins, WARP):
            expert = mosaic.iadd(lane, mosaic.i32(chunk))
            at = mosaic.imul(expert, bin_bytes)
            of_warps = [
                _select_below(expert, num_experts, mosaic.load(mosaic.iadd(counts_at, at), i * row_bytes), zero)
                for i in range(WARPS)
            ]
            *before, total = itertools.accumulate(of_warps, mosaic.iadd, initial=zero)
            start, tile, carry = _in_front(total, carry, lane, sizes["row_tile"])
            for i, others in enumerate(before):
                mosaic.store(mosaic.iadd(start, others), mosaic.iadd(starts_at, at), i * row_bytes)
            place = row_address(global_address(tiles), tile, 3 * 4, zero)
            ptx(_TILES.format(row_tile=sizes["row_tile"]), place, mosaic.iadd(expert, first), start, total, count=0)
        ptx("st.global.b32 [$0], $1;", global_address(count), mosaic.shr(carry, 16), count=0)
        mgpu.utils.warpgroup_barrier()
        for pair, expert, rank in zip(pairs, experts, ranks, strict=True):
            start = mosaic.load(mosaic.iadd(mosaic.iadd(starts_at, own), mosaic.imul(expert, bin_bytes)))
            place = _select_below(expert, num_experts, mosaic.iadd(start, rank), mosaic.i32(sizes["num_places"]))
            target = row_address(global_address(places), pair, 4, zero)
            ptx(
                f"{{ .reg .pred p; setp.lt.s32 p, $2, {num_pairs}; @p st.global.b32 [$0], $1; }}",
                target,
                place,
                pair,
                count=0,
            )

    ref = plgpu.RefType()
    inline(schedule, [ref] * (len(refs) + 2))(*refs, counts, starts)


# Writes expert $1, first place $2 and number of pairs for each row_tile of $3 pairs, 12 bytes each, from $0 on.
_TILES = """{{ .reg .pred p; .reg .b64 at; .reg .b32 start, left, size;
mov.b64 at, $0;  mov.b32 start, $2;  mov.b32 left, $3;
NEXT: setp.le.s32 p, left, 0;  @p bra DONE;
min.s32 size, left, {row_tile};
st.global.b32 [at], $1;  st.global.b32 [at + 4], start;  st.global.b32 [at + 8], size;
add.s64 at, at, 12;  add.s32 start, start, {row_tile};  sub.s32 left, left, {row_tile};
bra NEXT;
DONE: }}"""


def _load_or(address: Any, index: Register, size: int, other: int) -> Register:
    """The word of device memory with this index, `other` from `size` on."""
    at = row_address(address, index, 4, mosaic.i32(0))
    return ptx(
        f"{{ .reg .pred p; setp.lt.s32 p, $2, {size}; mov.b32 $0, {other}; @p ld.global.b32 $0, [$1]; }}", at, index
    )


def _rank(expert: Register, lane: Register, counts: Register) -> Register:
    """How many pairs the expert had in this warp before, in its count and in lower lanes; all are counted.

    The lowest lane with the expert writes its new count, once all have read the old one.
    """
    below = arith.subi(arith.shli(mosaic.i32(1), lane), mosaic.i32(1))
    return ptx(
        "{ .reg .pred p; .reg .b32 same, rank, old, sum;\n"
        "match.any.sync.b32 same, $1, 0xffffffff;\n"
        "and.b32 rank, same, $2;  popc.b32 rank, rank;  popc.b32 sum, same;\n"
        "ld.shared.b32 old, [$3];  add.s32 sum, sum, old;  add.s32 old, old, rank;\n"
        "bar.warp.sync 0xffffffff;\n"
        "setp.eq.s32 p, rank, 0;  @p st.shared.b32 [$3], sum;\n"
        "bar.warp.sync 0xffffffff;\n"
        "mov.b32 $0, old; }",
        expert,
        below,
        mosaic.iadd(counts, mosaic.imul(expert, 4)),
    )


def _in_front(total: Register, carry: Register, lane: Register, row_tile: int) -> tuple[Register, Register, Register]:
    """Places and tiles of all experts in front, and the carry for the next warp of experts.

    total: pairs of the thread's expert. carry: blocks in the lower half of a word and tiles in the upper one.
    """
    blocks = mosaic.shr(mosaic.iadd(total, mosaic.i32(ROW_BLOCK - 1)), 3)
    tiles = arith.divui(mosaic.iadd(total, mosaic.i32(row_tile - 1)), mosaic.i32(row_tile))
    own = mosaic.ior(blocks, mosaic.shl(tiles, 16))
    until = own
    for distance in (1, 2, 4, 8, 16):
        other = ptx(f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;", until)
        until = mosaic.iadd(until, _select_below(lane, distance, mosaic.i32(0), other))
    front = mosaic.iadd(arith.subi(until, own), carry)
    carry = mosaic.iadd(carry, ptx("shfl.sync.idx.b32 $0, $1, 31, 0x1f, 0xffffffff;", until))
    return mosaic.imul(mosaic.iand(front, 0xFFFF), ROW_BLOCK), mosaic.shr(front, 16), carry


def _select_below(x: Register, limit: int, yes: Register, no: Register) -> Register:
    return arith.select(arith.cmpi(arith.CmpIPredicate.slt, x, mosaic.i32(limit)), yes, no)
