"""Attention of decode and verify rows over packed keys, with the products of an architecture as an argument.

A block computes one row. Warpgroup 2 gathers packed rows by index straight into registers, decodes them with integer
operations, and stores a tile of 64 keys in bfloat16 as the products read it; two tiles take turns. Warpgroup 0 makes
the scores of a tile and its softmax; warpgroups 0 and 1 add the values of half of the channels each.

Keys are stored 2^-9 times their value, which changes no rounding, and lets one bfloat16 multiplication apply a scale:
2^126, the distance of the exponents of E2M1 and bfloat16, times the largest scale would be infinite.
"""

import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxtyping import Array, BFloat16, Float32, Int

from deepinfer_jax.kernels.attention.block import FORMS, HEADS, KEY_SCALE, NO_KEY, STAGES, Block, Products
from deepinfer_jax.kernels.attention.keys import KeySources, RowPlaces
from deepinfer_jax.kernels.attention.packed_keys import (
    Piece,
    load_interpreted,
    load_packed,
    store_interpreted,
    store_keys,
)
from deepinfer_jax.kernels.mosaic import REGISTERS, Interpret, check_registers
from deepinfer_jax.kernels.ptx import line_tiles
from deepinfer_jax.ops import paged
from deepinfer_jax.ops.attention import KEY_BLOCK

WIDTHS = (128, 256, 512)  # of a head
_MAX_TILES = 256  # of a row, whose index comes in one copy
_FIRST_MAX = -1e30
_SCORES, _VALUES, _PRODUCER, _WARPGROUPS = 0, 1, 2, 3
_AHEAD = 2  # pieces that are loaded before the oldest of them is decoded
_BY_HEAD, _BY_KEY = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # of a tile of scores
_COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def refuses(
    q: Array, sources: KeySources, places: RowPlaces, entries: Array, sink: Array, num_live: Array, **_: Any
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    if q.dtype != jnp.bfloat16:
        return f"queries are {q.dtype}, not bfloat16"
    if q.shape[1] != HEADS or q.shape[2] not in WIDTHS:
        return f"queries have {q.shape[1]} heads of {q.shape[2]}, not {HEADS} of {', '.join(map(str, WIDTHS))}"
    if sources.window % KEY_BLOCK or not sources.window:
        return f"the window of {sources.window} is no multiple of {KEY_BLOCK}"
    if sources.window + entries.shape[1] > _MAX_TILES * KEY_BLOCK:
        return f"a window of {sources.window} and {entries.shape[1]} entries are above {_MAX_TILES * KEY_BLOCK} keys"
    arrays = (sources.new, sources.ring, sources.cache)
    for array, (form, group) in zip(arrays, FORMS, strict=True):
        if array is not None and (array.scale is None or array.form != form or array.block != (1, group)):
            return f"keys are packed as {array.form} in blocks of {array.block}, not {form} in blocks of (1, {group})"
    return None


def key_index(sources: KeySources, places: RowPlaces, entries: Int[Array, "T N"]) -> Int[Array, "T M"]:
    """Where the keys of each row lie: the window in order of positions, then the entries; M keys.

    A window key is a row of the flattened ring of one layer (slot * ring_len + row), or -2 - row for a row of this
    step; an entry is a row of the flattened pages of one source. NO_KEY does not exist; M is a multiple of 64. Layers
    that share a selection and a floor share this.
    """
    oldest = jnp.maximum(places.positions - (sources.window - 1), 0)
    position = oldest[:, None] + jnp.arange(sources.window, dtype=jnp.int32)[None, :]
    exists = (position <= places.positions[:, None]) & (places.slots >= 0)[:, None]
    exists = exists & (position >= places.floor[:, None])
    old = places.slots[:, None] * sources.ring_len + position % sources.ring_len
    new = -2 - (places.first_row[:, None] + position - places.first_position[:, None])
    window = jnp.where(exists, jnp.where(position >= places.first_position[:, None], new, old), NO_KEY)
    if sources.cache is None:
        return window
    pages = paged.pages_of(sources.page_table, places.slots)
    page, offset = paged.entry_place(entries, pages, page_entries=sources.page_entries)
    others = jnp.where(page >= 0, page * sources.page_entries + offset, NO_KEY)
    others = jnp.pad(others, ((0, 0), (0, -others.shape[1] % KEY_BLOCK)), constant_values=NO_KEY)
    return jnp.concatenate([window, others], axis=1)


def attend(
    q: BFloat16[Array, "T H K"],
    sources: KeySources,
    places: RowPlaces,
    entries: Int[Array, "T N"],
    sink: Float32[Array, " H"],
    num_live: Int[Array, ""],
    *,
    products: Products,
    tile: int,
    has_fixed_trips: bool,
    interpret: Interpret = None,
) -> BFloat16[Array, "T H K"]:
    """`api.attend` over the keys of `key_index`: blocks of 64 in that order, running maximum and sum in float32.

    One block for each row: a row's bits depend on that row only, whatever the tile. Rows of slot -1 have no keys and
    give zeros. Products, maximum, sum and the rounding of probabilities are those of `attend_blocks`; exponentials are
    the approximate ones of the device, 2 ulp.
    """
    del num_live, tile, has_fixed_trips
    index = key_index(sources, places, entries)
    check_registers(products.consumer_registers, products.consumer_registers, products.producer_registers)
    rows, heads, width = q.shape
    num_tiles = index.shape[1] // KEY_BLOCK
    new, ring = sources.new, sources.ring
    cache = ring if sources.cache is None else sources.cache  # without entries nothing reads it
    slots, pages = ring.payload.shape[1], cache.payload.shape[1]
    bases = jnp.stack(
        [
            jnp.asarray(sources.layer, jnp.int32) * (slots * sources.ring_len),
            jnp.asarray(sources.source, jnp.int32) * (pages * sources.page_entries),
        ]
    )
    operands = [flat for array in (new, ring, cache) for flat in (_rows_of(array.payload), _rows_of(array.scale))]
    lines = line_tiles(products.line, 2 * products.line)
    scratch = {
        "q": plgpu.SMEM((2, heads, width // 2), jnp.bfloat16, transforms=lines),  # two halves; at the end the result
        "keys": plgpu.SMEM((STAGES, KEY_BLOCK, width), jnp.bfloat16, transforms=lines),
        "weights": plgpu.SMEM((heads, KEY_BLOCK), jnp.bfloat16, transforms=lines),
        "index": plgpu.SMEM((num_tiles, KEY_BLOCK), jnp.int32),
        "factors": plgpu.SMEM((heads,), jnp.float32),  # of the sums so far, for each tile; at the end the whole weight
        "arrived": plgpu.Barrier(num_arrivals=3),  # the halves of the queries and the index
        "full": plgpu.Barrier(num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "weighed": plgpu.Barrier(),  # weights and factors are written,
        "added": plgpu.Barrier(),  # and were read by the other warpgroup
        **products.scratch_types(width),
    }
    return plgpu.kernel(
        functools.partial(_row, num_window=sources.window, products=products, interpret=interpret is not None),
        kernel_name="attend",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(rows,),
        grid_names=("row",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
    )(q, *operands, index.reshape(rows, num_tiles, KEY_BLOCK), bases, sink)


def _rows_of(array: Array | None) -> Array:
    assert array is not None
    return array.reshape(-1, array.shape[-1])


def _row(*refs: Any, num_window: int, products: Products, interpret: bool, **smem: Any) -> None:
    """One block: the attention of one row."""
    q, *packed, index, bases, sink, out = refs
    block = Block(
        row=lax.axis_index("row"),
        q=q,
        packed=tuple(packed),
        index=index,
        bases=bases,
        sink=sink,
        out=out,
        smem=SimpleNamespace(**smem),
        num_window=num_window,
        products=products,
        interpret=interpret,
    )
    group = lax.axis_index("warpgroup")

    @pl.when(group == _SCORES)
    def _():
        _set_registers(products.consumer_registers)
        _score(block)

    @pl.when(group == _VALUES)
    def _():
        _set_registers(products.consumer_registers)
        _add_values(block)

    @pl.when(group == _PRODUCER)
    def _():
        _set_registers(products.producer_registers)
        _produce(block)


def _set_registers(count: int) -> None:
    """Of each thread of the warpgroup; all begin with equal shares."""
    plgpu.set_max_registers(count, action="increase" if count > REGISTERS // (128 * _WARPGROUPS) else "decrease")


def _score(block: Block) -> None:
    """Scores and softmax of every tile, and the values of the first half of the channels."""
    smem, half = block.smem, block.half
    for part in range(2):
        columns = pl.ds(part * half, half)
        plgpu.copy_gmem_to_smem(block.q.at[block.row, :, columns], smem.q.at[part], smem.arrived)
    plgpu.copy_gmem_to_smem(block.index.at[block.row], smem.index, smem.arrived)
    plgpu.barrier_wait(smem.arrived)
    scale = jnp.float32((2 * half) ** -0.5 / KEY_SCALE)

    def step(tile: Array, carry: tuple[Array, Array, Sequence[Array]]) -> tuple[Array, Array, Sequence[Array]]:
        peak, total, sums = carry
        stage = lax.rem(tile, STAGES)
        plgpu.barrier_wait(smem.full.at[stage])
        scores = block.products.scores(block, stage) * scale
        index = plgpu.load(smem.index.at[tile], layout=_BY_KEY, optimized=False)
        exists = lax.broadcast_in_dim(index != NO_KEY, scores.shape, [1])
        scores = jnp.where(exists, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
        total = total * shrink + jnp.sum(weights, axis=1)

        @pl.when(tile > 0)
        def _():
            plgpu.barrier_wait(smem.added)

        smem.weights[...] = weights.astype(jnp.bfloat16)
        smem.factors[...] = shrink
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.weighed)
        return new_peak, total, _add_tile(block, sums, shrink, tile, 0)

    first = (
        plgpu.layout_cast(jnp.full((HEADS,), _FIRST_MAX, jnp.float32), _BY_HEAD),
        plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _BY_HEAD),
        block.products.no_sums(block.half),
    )
    peak, total, sums = lax.fori_loop(0, block.num_tiles, step, first)
    total = total + jnp.exp(plgpu.load(block.sink, layout=_BY_HEAD, optimized=False) - peak)
    plgpu.barrier_wait(smem.added)
    smem.factors[...] = total
    plgpu.barrier_arrive(smem.weighed)
    _write(block, sums, total, 0)


def _add_values(block: Block) -> None:
    """The values of the second half of the channels."""
    smem = block.smem

    def step(tile: Array, sums: Sequence[Array]) -> Sequence[Array]:
        plgpu.barrier_wait(smem.weighed)
        shrink = plgpu.load(smem.factors, layout=_BY_HEAD, optimized=False)
        sums = _add_tile(block, sums, shrink, tile, 1)
        plgpu.barrier_arrive(smem.added)
        return sums

    sums = lax.fori_loop(0, block.num_tiles, step, block.products.no_sums(block.half))
    plgpu.barrier_wait(smem.weighed)
    _write(block, sums, plgpu.load(smem.factors, layout=_BY_HEAD, optimized=False), 1)


def _add_tile(block: Block, sums: Sequence[Array], shrink: Array, tile: Array, half: int) -> Sequence[Array]:
    """The sums of values with one more tile; gives the tile free for a later one."""
    sums = block.products.add_values(block, sums, shrink, tile, half)

    @pl.when(tile < block.num_tiles - STAGES)
    def _():
        plgpu.barrier_arrive(block.smem.free.at[lax.rem(tile, STAGES)])

    return sums


def _write(block: Block, sums: Sequence[Array], total: Array, half: int) -> None:
    """A half of the result to device memory, through the queries' place: they were read before the last weights."""
    staged = block.smem.q.at[half]
    scale = jnp.float32(1 / KEY_SCALE) / total
    first = 0
    for piece in block.products.results(block, sums, half):
        scaled = piece * lax.broadcast_in_dim(scale, piece.shape, [0])
        staged[:, pl.ds(first, piece.shape[1])] = scaled.astype(jnp.bfloat16)
        first += piece.shape[1]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, block.out.at[block.row, :, pl.ds(half * block.half, block.half)])
    plgpu.wait_smem_to_gmem(0)


def _produce(block: Block) -> None:
    """Fills the tiles, those of the window first. While a piece is decoded the next ones are on their way."""
    smem = block.smem
    plgpu.barrier_wait(smem.arrived)
    bases = block.bases[0], block.bases[1]
    load, store = (load_interpreted, store_interpreted) if block.interpret else (load_packed, store_keys)

    def fill(piece: Piece, packed: Array) -> None:
        stage = lax.rem(piece.tile, STAGES)
        if piece.is_first:

            @pl.when(piece.tile >= STAGES)
            def _():
                plgpu.barrier_wait(smem.free.at[stage])

        store(piece, packed, smem.keys.at[stage], block.products.line)
        if piece.is_last:
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.full.at[stage])

    num_window = block.num_window // KEY_BLOCK
    pieces = [
        Piece(tile=jnp.int32(tile), keys=keys, half=half)
        for tile, keys, half in itertools.product(range(num_window), range(2), range(2))
    ]
    has_entries = block.num_tiles > num_window
    queue = pieces + [Piece(tile=jnp.int32(num_window), keys=keys) for keys in range(2) if has_entries]
    ahead = [load(block, piece, bases) for piece in queue[:_AHEAD]]
    for i, piece in enumerate(pieces):
        ahead += [load(block, following, bases) for following in queue[i + _AHEAD : i + _AHEAD + 1]]
        fill(piece, ahead.pop(0))

    def step(tile: Array, ahead: list[Array]) -> list[Array]:
        following = jnp.minimum(tile + 1, block.num_tiles - 1)
        for keys in range(2):
            ahead = [*ahead, load(block, Piece(tile=following, keys=keys), bases)]
            fill(Piece(tile=tile, keys=keys), ahead[0])
            ahead = ahead[1:]
        return ahead

    if has_entries:
        lax.fori_loop(num_window, block.num_tiles, step, ahead)
