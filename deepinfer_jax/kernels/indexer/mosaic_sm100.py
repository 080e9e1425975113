"""Index scores of decode rows over paged keys on Blackwell; `ops.indexer` has the reference.

Roofline of the released shape (32 heads x 128 channels) at 8 TB/s: a key is 64 bytes of E2M1, 4 of scales and 2 of its
score, 114 keys a nanosecond; 8,192 FLOP each are 0.9 PFLOP/s, a fifth of the FP8 rate. The bytes are the floor: 2.5
cycles of a multiprocessor for a key.

A block scores a run of pages of one row, 128 keys at a time, with pages on their way in a ring of stages. Its first
warpgroup decodes, a key in each thread: E2M1 becomes E5M2 with the scales of the key's groups in the codes, relative to
the largest one, and goes to tensor memory, which the instruction takes its left operand from. Queries come as E4M3
times a power of two for each head. The second warpgroup reads the products of the tile before, scales them by the
largest scale of their key, and makes the score. Scores leave as bfloat16, on whose grid they are.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float, Int

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.fp4_codes import BY_ROW, TOP_FACTOR, TOP_STEP, code_table, rows_of_codes, signed_codes
from deepinfer_jax.kernels.indexer import page_scores
from deepinfer_jax.kernels.indexer.keys import EntryKeys
from deepinfer_jax.kernels.indexer.page_scores import (
    GROUPS,
    HEADS,
    WIDTH,
    packed_queries,
    page_operands,
    refuses,
    share,
)
from deepinfer_jax.kernels.mosaic import Interpret, observe_last
from deepinfer_jax.kernels.ptx import inline, line_tiles
from deepinfer_jax.ops.invariant import round_to
from deepinfer_jax.ops.quant import INDEX_GROUP, decode_fp4

__all__ = ["best_entries", "refuses", "scores_of_pages"]

TILE = 128  # keys of one product
_STAGES = 4
_SLOTS = 2  # tiles whose decoded keys and products are in tensor memory
_NUM_BLOCKS = 296  # of the grid at least, where there is work for them: 148 multiprocessors hold 2 each
_DECODER, _SCORER, _WARPGROUPS = 0, 1, 2
_KEY_TILES = line_tiles(WIDTH // 2, WIDTH // 2)
_QUERY_TILES = line_tiles(WIDTH, WIDTH)
_BY_KEY = plgpu.Layout.TCGEN05.reduce(1)  # of a tile of products
_FACTOR_EXPONENT = int(math.log2(TOP_FACTOR))


def scores_of_pages(
    queries: BFloat16[Array, "B I K"],
    weights: BFloat16[Array, "B I"],
    keys: EntryKeys,
    num_visible: Int[Array, " B"],
    *,
    interpret: Interpret = None,
) -> BFloat16[Array, "B N"]:
    """Index scores of all entries that the page lists have room for, -inf from num_visible on.

    Roundings are those of `ops.indexer.score_block`, and sums of heads are as exact as `mosaic_sm90` has them. Dot
    products are exact, as far as the tensor cores' float32 sums are, where the scales of a query head lie within 2^14;
    scales of a key that lie 2^26 below its largest one are raised to that. A visible entry must have a page.
    """
    rows, per_page = queries.shape[0], keys.page_entries
    width = keys.pages.shape[1] * per_page
    payload, scale, pages, first_page = page_operands(keys, TILE)
    num_tiles = -(-width // TILE)
    num_parts = max(1, min(num_tiles, -(-_NUM_BLOCKS // rows)))
    codes, factors = packed_queries(queries, weights, key_factor=1.0)
    ordered = {"num_barriers": _SLOTS, "orders_tensor_core": True}
    scratch = {
        "queries": plgpu.SMEM((HEADS, WIDTH), jnp.float8_e4m3fn, transforms=_QUERY_TILES),
        "weights": plgpu.SMEM((2 * HEADS,), jnp.bfloat16),
        "payload": plgpu.SMEM((_STAGES, TILE, WIDTH // 2), jnp.uint8, transforms=_KEY_TILES),
        "scale": plgpu.SMEM((_STAGES, TILE * GROUPS), jnp.uint8),
        "factors": plgpu.SMEM((_SLOTS, TILE), jnp.float32),  # what the products of a key are multiplied with
        "left": plgpu.TMEM((TILE, _SLOTS * WIDTH), jnp.float8_e5m2, packed=True),
        "products": plgpu.TMEM((TILE, _SLOTS * HEADS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2),  # queries and weights
        "arrived": plgpu.Barrier(num_arrivals=2 * (TILE // math.gcd(per_page, TILE)), num_barriers=_STAGES),
        "decoded": plgpu.Barrier(**ordered),  # of each slot: keys and factors are written,
        "multiplied": plgpu.Barrier(**ordered),  # the products are made,
        "read": plgpu.Barrier(**ordered),  # and factors and products have been read
    }
    scores = plgpu.kernel(
        functools.partial(_score_run, per_page=per_page, num_parts=num_parts, interpret=interpret),
        kernel_name="index_scores",
        out_type=jax.ShapeDtypeStruct((rows, num_tiles, TILE), jnp.bfloat16),
        grid=(num_parts, rows),
        grid_names=("part", "row"),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=False if interpret is None else interpret,
    )(
        lax.bitcast_convert_type(codes, jnp.float8_e4m3fn),
        jnp.concatenate([factors, factors], axis=1),  # a copy has 128 bytes at least
        payload,
        scale,
        pages,
        first_page,
        num_visible,
    )
    return scores.reshape(rows, -1)[:, :width]


best_entries = functools.partial(page_scores.best_entries, score=scores_of_pages)


def _score_run(*refs: Any, per_page: int, num_parts: int, interpret: Interpret, **smem: Any) -> None:
    """One block: the scores of a run of tiles of a row, and -inf for a part of what lies behind the visible entries."""
    queries, weights, payload, scale, pages, first_page, num_visible, out = refs
    scratch = SimpleNamespace(**smem)
    row, part, warpgroup = (lax.axis_index(name) for name in ("row", "part", "warpgroup"))
    visible = num_visible[row]
    num_filled = lax.div(visible + (TILE - 1), TILE)
    first, last = share(num_filled, part, num_parts)

    def fetch(tile: Array) -> None:
        """A tile lies in pages, or in pieces of pages, of as many neighbouring entries as both have."""
        stage, count = lax.rem(tile - first, _STAGES), math.gcd(per_page, TILE)
        for i in range(TILE // count):
            entry = tile * TILE + i * count
            page = jnp.maximum(pages[row, lax.div(entry, per_page)], 0) + first_page[0]
            offset = lax.div(lax.rem(entry, per_page), count)
            for source, into, size in ((payload, scratch.payload, 1), (scale, scratch.scale, GROUPS)):
                plgpu.copy_gmem_to_smem(
                    source.at[page, pl.ds(offset * (count * size), count * size)],
                    into.at[stage, pl.ds(i * count * size, count * size)],
                    scratch.arrived.at[stage],
                )

    @pl.when(warpgroup == _DECODER)
    def _() -> None:
        plgpu.copy_gmem_to_smem(queries.at[row], scratch.queries, scratch.ready)
        plgpu.copy_gmem_to_smem(weights.at[row], scratch.weights, scratch.ready)
        pl.loop(first, jnp.minimum(first + _STAGES, last))(fetch)
        plgpu.barrier_wait(scratch.ready)

        @pl.loop(first, last)
        def _(tile: Array) -> None:
            stage, slot = lax.rem(tile - first, _STAGES), lax.rem(tile - first, _SLOTS)

            @pl.when(tile - first >= _SLOTS)
            def _() -> None:
                plgpu.barrier_wait(scratch.read.at[slot])

            plgpu.barrier_wait(scratch.arrived.at[stage])
            left = scratch.left.at[:, pl.ds(slot * WIDTH, WIDTH)]
            stored = scratch.payload.at[stage], scratch.scale.at[stage], scratch.factors.at[slot]
            plgpu.async_store_tmem(left, _decoded_keys(*stored, interpret=interpret))
            plgpu.commit_tmem()
            plgpu.barrier_arrive(scratch.decoded.at[slot])
            plgpu.barrier_wait(scratch.decoded.at[slot])  # by all threads, one of which starts what follows
            products = scratch.products.at[:, pl.ds(slot * HEADS, HEADS)]
            plgpu.tcgen05_mma(products, left, scratch.queries.T, scratch.multiplied.at[slot], accumulate=False)
            pl.when(tile + _STAGES < last)(lambda: fetch(tile + _STAGES))

        observe_last(scratch.read, last - first, _SLOTS)

    @pl.when(warpgroup == _SCORER)
    def _() -> None:
        plgpu.barrier_wait(scratch.ready)

        @pl.loop(first, last)
        def _(tile: Array) -> None:
            slot = lax.rem(tile - first, _SLOTS)
            plgpu.barrier_wait(scratch.decoded.at[slot])
            plgpu.barrier_wait(scratch.multiplied.at[slot])
            products = plgpu.async_load_tmem(scratch.products.at[:, pl.ds(slot * HEADS, HEADS)])
            given = scratch.factors[slot], scratch.weights[pl.ds(0, HEADS)]
            found = _scores(products, *given, interpret=interpret)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(scratch.read.at[slot])
            entries = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_BY_KEY) + tile * TILE
            out[row, tile] = jnp.where(entries < visible, found, -jnp.inf).astype(jnp.bfloat16)

        first_blank, last_blank = share(out.shape[1] - num_filled, part, num_parts)

        @pl.loop(num_filled + first_blank, num_filled + last_blank)
        def _(tile: Array) -> None:
            out[row, tile] = plgpu.layout_cast(jnp.full((TILE,), -jnp.inf, jnp.bfloat16), _BY_KEY)


def _scores(
    products: Float[Array, "M I"], factors: Float[Array, " M"], weights: BFloat16[Array, " I"], *, interpret: Interpret
) -> Float[Array, " M"]:
    """`ops.indexer.score_block` of scaled products, before the last rounding; heads are added in a fixed order."""

    def rounded(x: Float[Array, "M I"]) -> Float[Array, "M I"]:
        """To bfloat16; interpretation must not leave it out."""
        return (x.astype(jnp.bfloat16) if interpret is None else round_to(x, jnp.bfloat16)).astype(jnp.float32)

    dots = rounded(products * lax.broadcast_in_dim(factors, products.shape, (0,)))
    of_heads = lax.broadcast_in_dim(weights.astype(jnp.float32), products.shape, (1,))
    return jnp.sum(rounded(jnp.maximum(dots, 0.0) * of_heads), axis=1)


def _decoded_keys(payload: Any, scale: Any, factors: Any, *, interpret: Interpret) -> Float[Array, "M K"]:
    """E5M2 codes [128, 128] of a stage, in BY_ROW, with channels in their order; writes the factors of keys."""
    if interpret is not None:
        exponents = scale[...].astype(jnp.int32).reshape(TILE, GROUPS)
        largest = jnp.max(exponents, axis=1)
        values = decode_fp4(payload[...]).reshape(TILE, GROUPS, INDEX_GROUP)
        steps = jnp.maximum(4 * (exponents - largest[:, None]) + TOP_STEP, 0) // 4 - TOP_STEP // 4
        values = values * _pow2(steps + _FACTOR_EXPONENT)[:, :, None]
        factors[...] = _pow2(largest - 127 - _FACTOR_EXPONENT)
        plgpu.commit_smem()  # barriers order these reads before the next copies; the race detector wants a fence
        return values.reshape(TILE, WIDTH).astype(jnp.float8_e5m2)
    result = plgpu.ShapeDtypeStruct((TILE, WIDTH), jnp.float8_e5m2, layout=BY_ROW)
    refs = plgpu.RefType(_KEY_TILES), plgpu.RefType(), plgpu.RefType()
    return inline(_emit_decoded, refs, result)(payload, scale, factors)


def _pow2(exponent: Array) -> Array:
    return lax.bitcast_convert_type(jnp.maximum(exponent + 127, 0) << 23, jnp.float32)


def _emit_decoded(_: Any, payload: Any, scale: Any, factors: Any) -> Any:
    key = mosaic.iand(mgpu.thread_idx(), TILE - 1)
    line = mosaic.iadd(mosaic.shared_address(payload), mosaic.imul(key, WIDTH // 2))
    swizzle = mosaic.imul(mosaic.iand(mosaic.shr(key, 1), 3), 16)
    word = mosaic.load(mosaic.iadd(mosaic.shared_address(scale), mosaic.imul(key, GROUPS)))
    exponents = [mosaic.iand(mosaic.shr(word, 8 * group), 0xFF) for group in range(GROUPS)]
    largest = functools.reduce(arith.maxui, exponents)
    codes = []
    for group, exponent in enumerate(exponents):
        step = mosaic.iadd(mosaic.imul(arith.subi(exponent, largest), 4), mosaic.i32(TOP_STEP))
        table = code_table(arith.maxsi(step, mosaic.i32(0)))
        words = mosaic.load_words(mosaic.iadd(line, mosaic.ixor(swizzle, 16 * group)), 4)
        codes += [half for packed in words for half in signed_codes(packed, table)]
    factor = arith.maxsi(arith.subi(largest, mosaic.i32(_FACTOR_EXPONENT)), mosaic.i32(0))
    factor_at = mosaic.iadd(mosaic.shared_address(factors), mosaic.imul(key, 4))
    mosaic.store(mosaic.as_f32(mosaic.shl(factor, 23)), factor_at)
    return rows_of_codes(codes)
