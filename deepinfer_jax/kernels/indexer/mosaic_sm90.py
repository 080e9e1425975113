"""Index scores of decode rows over paged keys on Hopper; `ops.indexer` has the reference.

Roofline of the released shape (32 heads x 128 channels): a key is 64 bytes of E2M1 and 4 of scales, and costs 8,192
FLOP: at 4.2 TB/s 61 keys a nanosecond and 506 TFLOP/s, a third of the FP8 rate. The bytes are the floor, with little
room: an SM has 3.7 cycles for a key.

A block scores a run of pages of one row, 64 keys at a time, with pages on their way in a ring of stages. Keys are the
left operand, from registers, so that they are decoded and used in one place: E2M1 becomes E4M3 by two masked shifts,
and the sum of each group of 32 channels, which is exact, is multiplied by the key's scale in float32. Queries come as
E4M3 times a power of two for each head. Scores leave as bfloat16, whose grid they are on.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, BFloat16, Int

from deepinfer_jax.kernels.indexer import page_scores
from deepinfer_jax.kernels.indexer.keys import EntryKeys
from deepinfer_jax.kernels.indexer.page_scores import (
    GROUPS,
    HEADS,
    TILE,
    WIDTH,
    packed_queries,
    page_operands,
    refuses,
    share,
)
from deepinfer_jax.kernels.mosaic import (
    FP4_CODE_FACTOR,
    Interpret,
    Lane,
    Register,
    as_f32,
    e8m0_as_f32,
    fp4_as_e4m3,
    iadd,
    iand,
    imul,
    ixor,
    shared_address,
    shl,
    shr,
    split_nibbles,
)
from deepinfer_jax.kernels.ptx import array_of, inline, line_tiles, load_shared, ptx
from deepinfer_jax.ops.indexer import score_block
from deepinfer_jax.ops.quant import INDEX_GROUP, decode_e4m3, decode_fp4

__all__ = ["best_entries", "refuses", "scores_of_pages"]

_STAGES = 8
_NUM_BLOCKS = 528  # of the grid at least, where there is work for them: 132 SMs hold 4 each
_KEY_TILES = line_tiles(WIDTH // 2, WIDTH // 2)
_QUERY_TILES = line_tiles(WIDTH, WIDTH)
_BY_KEY = plgpu.Layout.WGMMA.reduce(1)  # of a tile of products
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def scores_of_pages(
    queries: BFloat16[Array, "B I K"],
    weights: BFloat16[Array, "B I"],
    keys: EntryKeys,
    num_visible: Int[Array, " B"],
    *,
    interpret: Interpret = None,
) -> BFloat16[Array, "B N"]:
    """Index scores of all entries that the page lists have room for, -inf from num_visible on.

    Roundings are those of `ops.indexer.score_block`. Terms of heads are added in float32 in an order of its own; they
    are bfloat16, so that the sum is exact and any order the same unless they differ by more than 2^10. Dot products are
    exact, as there, where the scales of one query head lie within 2^14. A visible entry must have a page.
    """
    rows, per_page = queries.shape[0], keys.page_entries
    width = keys.pages.shape[1] * per_page
    payload, scale, pages, first_page = page_operands(keys, TILE)
    num_tiles = pages.shape[1] * per_page // TILE
    num_parts = max(1, min(num_tiles, -(-_NUM_BLOCKS // rows)))
    codes, factors = packed_queries(queries, weights, key_factor=FP4_CODE_FACTOR)
    scratch = {
        "queries": plgpu.SMEM((HEADS, WIDTH), jnp.uint8, transforms=_QUERY_TILES),
        "weights": plgpu.SMEM((2 * HEADS,), jnp.bfloat16),
        "payload": plgpu.SMEM((_STAGES, TILE, WIDTH // 2), jnp.uint8, transforms=_KEY_TILES),
        "scale": plgpu.SMEM((_STAGES, TILE * GROUPS), jnp.uint8),
        "ready": plgpu.Barrier(num_arrivals=2),  # queries and weights
        "arrived": plgpu.Barrier(num_arrivals=2 * max(1, TILE // per_page), num_barriers=_STAGES),
    }
    scores = plgpu.kernel(
        functools.partial(_score_run, per_page=per_page, num_parts=num_parts, interpret=interpret is not None),
        kernel_name="index_scores",
        out_type=jax.ShapeDtypeStruct((rows, num_tiles, TILE), jnp.bfloat16),
        grid=(num_parts, rows),
        grid_names=("part", "row"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
    )(
        split_nibbles(codes),  # in the order of decoded keys
        jnp.concatenate([factors, factors], axis=1),  # a copy has 128 bytes at least
        payload,
        scale,
        pages,
        first_page,
        num_visible,
    )
    return scores.reshape(rows, -1)[:, :width]


best_entries = functools.partial(page_scores.best_entries, score=scores_of_pages)


def _score_run(*refs: Any, per_page: int, num_parts: int, interpret: bool, **smem: Any) -> None:
    """One block: the scores of a run of tiles of a row, and -inf for a part of what lies behind the visible entries."""
    queries, weights, payload, scale, pages, first_page, num_visible, out = refs
    scratch = SimpleNamespace(**smem)
    row, part = lax.axis_index("row"), lax.axis_index("part")
    visible, page_base = num_visible[row], first_page[0]
    num_filled = lax.div(visible + (TILE - 1), TILE)
    first, last = share(num_filled, part, num_parts)
    pieces = range(max(1, TILE // per_page))  # of a tile, from a page each
    count = min(per_page, TILE)

    def pages_of(tile: Array) -> list[Array]:
        return [jnp.maximum(pages[row, lax.div(tile * TILE, per_page) + i], 0) + page_base for i in pieces]

    def fetch(tile: Array, from_pages: list[Array]) -> None:
        stage = lax.rem(tile - first, _STAGES)
        offset = lax.rem(tile * TILE, per_page) if per_page > TILE else 0
        for i, page in zip(pieces, from_pages, strict=True):
            for source, into, size in ((payload, scratch.payload, 1), (scale, scratch.scale, GROUPS)):
                plgpu.copy_gmem_to_smem(
                    source.at[page, pl.ds(offset * size, count * size)],
                    into.at[stage, pl.ds(i * count * size, count * size)],
                    scratch.arrived.at[stage],
                )

    plgpu.copy_gmem_to_smem(queries.at[row], scratch.queries, scratch.ready)
    plgpu.copy_gmem_to_smem(weights.at[row], scratch.weights, scratch.ready)
    pl.loop(first, jnp.minimum(first + _STAGES, last))(lambda tile: fetch(tile, pages_of(tile)))
    plgpu.barrier_wait(scratch.ready)

    @pl.loop(first, last)
    def _(tile: Array) -> None:
        stage = lax.rem(tile - first, _STAGES)
        following = tile + _STAGES
        from_pages = pages_of(jnp.minimum(following, last - 1))  # read long before they are needed
        plgpu.barrier_wait(scratch.arrived.at[stage])
        score = _score_interpreted if interpret else _score_tile
        found = score(scratch.queries, scratch.weights, scratch.payload.at[stage], scratch.scale.at[stage])

        @pl.when(following < last)
        def _():
            fetch(following, from_pages)

        entries = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_BY_KEY) + tile * TILE
        out[row, tile] = jnp.where(entries < visible, found, -jnp.inf).astype(jnp.bfloat16)

    first_blank, last_blank = share(out.shape[1] - num_filled, part, num_parts)

    @pl.loop(num_filled + first_blank, num_filled + last_blank)
    def _(tile: Array) -> None:
        out[row, tile] = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.bfloat16), _BY_KEY)


def _score_interpreted(queries: Any, weights: Any, payload: Any, scale: Any) -> Array:
    """`_score_tile` in plain operations; the commit stands for its barrier."""
    keys = split_nibbles(decode_fp4(payload[...])) / FP4_CODE_FACTOR
    groups = keys.reshape(TILE, GROUPS, INDEX_GROUP)
    keys = groups * lax.bitcast_convert_type(scale[...].astype(jnp.int32) << 23, jnp.float32).reshape(TILE, GROUPS, 1)
    codes = decode_e4m3(queries[...]).astype(jnp.bfloat16)
    factors = weights[:HEADS]
    plgpu.commit_smem()
    return score_block(codes[None], factors[None], keys.reshape(1, TILE, WIDTH).astype(jnp.bfloat16))[0]


def _score_tile(queries: Any, weights: Any, payload: Any, scale: Any) -> Array:
    """Scores of the 64 keys of a stage, float32; not rounded yet."""

    def score(_: Any, queries: Any, weights: Any, payload: Any, scale: Any) -> Any:
        lane = Lane.current()
        key = iadd(imul(lane.warp, 16), lane.row)  # of the tile; the thread also has the eighth one after it
        parts = _products(queries, _decoded_keys(payload, key, lane))
        scale_at = iadd(shared_address(scale), imul(key, GROUPS))
        weight_at = iadd(shared_address(weights), imul(lane.quad, 4))
        pairs = [load_shared(weight_at, 16 * block) for block in range(HEADS // 8)]
        sums = []
        for eighth in range(2):
            word = load_shared(scale_at, 8 * GROUPS * eighth)
            factors = [e8m0_as_f32(word, group) for group in range(GROUPS)]
            # A thread has two heads of each eight, for one key and then for the other.
            places = [4 * block + 2 * eighth for block in range(HEADS // 8)]
            dots = [[_scaled_sum(parts, factors, place + i) for i in range(2)] for place in places]
            sums.append(_sum_of_heads(dots, pairs))
        mgpu_utils.warpgroup_barrier()  # the stage may be filled again
        return array_of(sums, (TILE,), _BY_KEY)

    refs = plgpu.RefType(_QUERY_TILES), plgpu.RefType(), plgpu.RefType(_KEY_TILES), plgpu.RefType()
    run = inline(score, refs, plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=_BY_KEY))
    return run(queries, weights, payload, scale)


def _decoded_keys(payload: Any, key: Register, lane: Lane) -> list[list[Register]]:
    """The left operand of each group of channels: E4M3 bytes of a word of both keys, even channels, then odd ones."""
    line = iadd(shared_address(payload), iadd(imul(key, WIDTH // 2), imul(lane.quad, 4)))
    swizzle = imul(iand(shr(lane.row, 1), 3), 16)
    operands = []
    for group in range(GROUPS):
        at = iadd(line, ixor(swizzle, 16 * group))
        low, high = fp4_as_e4m3(load_shared(at))
        low_of_eighth, high_of_eighth = fp4_as_e4m3(load_shared(at, 8 * WIDTH // 2))
        operands.append([low, low_of_eighth, high, high_of_eighth])
    return operands


def _products(queries: Any, operands: list[list[Register]]) -> list[list[Register]]:
    """Sums over each group of channels, for 64 keys times all heads: a thread has 16 of each group.

    For every 8 heads two of a key, then two of the eighth key after it. One block of assembly, so that nothing can come
    between the instructions and the wait for their results.
    """
    i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
    count = HEADS // 2
    # Lines of 128 bytes, swizzled, and 1024 bytes from eight lines to the next eight.
    fixed = ir.IntegerAttr.get(i64, (1 << 62) | ((1024 >> 4) << 32) | (1 << 16))
    start = arith.extui(i64, shr(shared_address(queries), 4))
    start = arith.ori(start, arith.constant(i64, fixed))
    lines = ["{", ".reg .pred p;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
    inputs: list[Any] = [word for words in operands for word in words]
    for group in range(GROUPS):
        results = ", ".join(f"${count * group + i}" for i in range(count))
        words = ", ".join(f"${count * GROUPS + 4 * group + i}" for i in range(4))
        descriptor = count * GROUPS + 4 * GROUPS + group
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{HEADS}k{INDEX_GROUP}.f32.e4m3.e4m3 "
            f"{{{results}}}, {{{words}}}, ${descriptor}, p, 1, 1;"
        )
        inputs.append(arith.addi(start, arith.constant(i64, ir.IntegerAttr.get(i64, INDEX_GROUP * group >> 4))))
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    flat = mgpu_utils.inline_ptx(
        "\n".join(lines), *inputs, result_types=[f32] * count * GROUPS, has_side_effects=True, convergent=True
    )
    return [list(flat[count * group : count * (group + 1)]) for group in range(GROUPS)]


def _scaled_sum(parts: list[list[Register]], factors: list[Register], place: int) -> Register:
    """The sum over groups of one register of each times its factor, in order."""
    total = arith.mulf(parts[0][place], factors[0])
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        total = llvm.intr_fma(part[place], factor, total)
    return total


def _sum_of_heads(dots: list[list[Register]], pairs: list[Register]) -> Register:
    """relu, weight and sum of all heads of one key, with the roundings of the reference; the same for four threads."""
    sums = []
    for (first, second), pair in zip(dots, pairs, strict=True):
        terms = ptx(_WEIGHTED_TERMS, first, second, pair)
        sums.append(arith.addf(as_f32(shl(terms, 16)), as_f32(iand(terms, 0xFFFF0000))))
    total = functools.reduce(arith.addf, sums)
    for distance in (1, 2):
        total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
    return total


_WEIGHTED_TERMS = """{
.reg .b32 t, z;
mov.b32 z, 0;  cvt.rn.bf16x2.f32 t, $2, $1;  max.bf16x2 t, t, z;  mul.rn.bf16x2 $0, t, $3;
}"""
