"""Attention of decode and verify rows over packed keys on Hopper; `kernels/attention/api.py` has the reference.

Roofline of the released shape (64 heads x 512, window 128, 512 selected): a row multiplies 64 x 640 x 512 twice, 84
MFLOP, and reads 512 x 288 + 128 x 528 bytes of keys and 128 KiB of queries and results, 0.35 MB. At 128 rows that is
14 us of tensor cores (790 TFLOP/s) against 11 us of memory: the arithmetic is the floor.

A block computes one row. Warpgroup 2 gathers packed rows by index straight into registers, decodes them with integer
operations, and stores a tile of 64 keys in bfloat16 as the products read it; two tiles take turns. Warpgroup 0 makes
the scores of a tile and its softmax; warpgroups 0 and 1 add the values of half of the channels each.

Keys are stored 2^-9 times their value, which changes no rounding, and lets one bfloat16 multiplication apply a scale:
2^126, the distance of the exponents of E2M1 and bfloat16, times the largest scale would be infinite.
"""

import dataclasses
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
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float32, Int

from deepinfer_jax.kernels.attention.keys import KeySources, RowPlaces
from deepinfer_jax.kernels.mosaic import (
    Interpret,
    Register,
    check_registers,
    i32,
    iadd,
    iand,
    imul,
    ixor,
    shared_address,
    shr,
)
from deepinfer_jax.kernels.ptx import (
    array_of,
    global_address,
    inline,
    line_tiles,
    load_shared,
    ptx,
    row_address,
    scalar,
    words_of,
)
from deepinfer_jax.ops import paged
from deepinfer_jax.ops.attention import KEY_BLOCK
from deepinfer_jax.ops.quant import FP8_GROUP, MAIN_KV_GROUP, Form, ScaledArray, dequantize

HEADS = 64  # of a row: the rows of one wgmma tile
WIDTHS = (128, 256, 512)  # of a head
NO_KEY = -1
_MAX_TILES = 256  # of a row, whose index comes in one copy
_FIRST_MAX = -1e30
_KEY_SCALE = 2.0**-9  # of every key in shared memory
# How keys are packed: those of this step, of the ring and of the pages.
_FORMS: tuple[tuple[Form, int], ...] = (("fp8", FP8_GROUP), ("fp8", FP8_GROUP), ("fp4_e4m3", MAIN_KV_GROUP))
_PIECE_KEYS = KEY_BLOCK // 2
_STAGES = 2  # tiles of keys in shared memory
_SCORES, _VALUES, _PRODUCER, _WARPGROUPS = 0, 1, 2, 3
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 200, 104
_AHEAD = 2  # pieces that are loaded before the oldest of them is decoded
_TILED = line_tiles(64, 128)
_BY_HEAD, _BY_KEY = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # of a tile of scores
_COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)

check_registers(_CONSUMER_REGISTERS, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS)


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
    for array, (form, group) in zip(arrays, _FORMS, strict=True):
        if array is not None and (array.scale is None or array.form != form or array.block != (1, group)):
            return f"keys are packed as {array.form} in blocks of {array.block}, not {form} in blocks of (1, {group})"
    return None


def attend(
    q: BFloat16[Array, "T H K"],
    sources: KeySources,
    places: RowPlaces,
    entries: Int[Array, "T N"],
    sink: Float32[Array, " H"],
    num_live: Int[Array, ""],
    *,
    tile: int,
    has_fixed_trips: bool,
    interpret: Interpret = None,
) -> BFloat16[Array, "T H K"]:
    """`api.attend` with one block for each row: a row's bits depend on that row only, whatever the tile.

    Rows of slot -1 have no keys and give zeros.
    """
    del num_live, tile, has_fixed_trips
    return attend_keys(q, sources, key_index(sources, places, entries), sink, interpret=interpret)


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


def attend_keys(
    q: BFloat16[Array, "T H K"],
    sources: KeySources,
    index: Int[Array, "T M"],
    sink: Float32[Array, " H"],
    *,
    interpret: Interpret = None,
) -> BFloat16[Array, "T H K"]:
    """Attention over the keys of `key_index`: blocks of 64 in that order, running maximum and sum in float32.

    Products, maximum, sum and the rounding of probabilities are those of `attend_blocks`; exponentials are the
    approximate ones of the device, 2 ulp.
    """
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
    scratch = {
        "q": plgpu.SMEM((2, heads, width // 2), jnp.bfloat16, transforms=_TILED),  # two halves; at the end the result
        "keys": plgpu.SMEM((_STAGES, KEY_BLOCK, width), jnp.bfloat16, transforms=_TILED),
        "weights": plgpu.SMEM((heads, KEY_BLOCK), jnp.bfloat16, transforms=_TILED),
        "index": plgpu.SMEM((num_tiles, KEY_BLOCK), jnp.int32),
        "factors": plgpu.SMEM((heads,), jnp.float32),  # of the sums so far, for each tile; at the end the whole weight
        "arrived": plgpu.Barrier(num_arrivals=3),  # the halves of the queries and the index
        "full": plgpu.Barrier(num_barriers=_STAGES),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "weighed": plgpu.Barrier(),  # weights and factors are written,
        "added": plgpu.Barrier(),  # and were read by the other warpgroup
    }
    return plgpu.kernel(
        functools.partial(_row, num_window=sources.window, interpret=interpret is not None),
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


@dataclasses.dataclass(frozen=True)
class _Block:
    """What the warpgroups of one block work on: arrays in device memory, shared memory and barriers."""

    row: Array
    q: Any
    packed: tuple[Any, ...]  # payload and scales of this step's rows, of the ring, of the pages
    index: Any
    bases: Any
    sink: Any
    out: Any
    smem: SimpleNamespace
    num_window: int
    interpret: bool

    @property
    def half(self) -> int:
        """Channels whose values one warpgroup adds."""
        return self.q.shape[-1] // 2

    @property
    def num_tiles(self) -> int:
        """Tiles of keys."""
        return self.index.shape[1]


def _row(*refs: Any, num_window: int, interpret: bool, **smem: Any) -> None:
    """One block: the attention of one row."""
    q, *packed, index, bases, sink, out = refs
    block = _Block(
        row=lax.axis_index("row"),
        q=q,
        packed=tuple(packed),
        index=index,
        bases=bases,
        sink=sink,
        out=out,
        smem=SimpleNamespace(**smem),
        num_window=num_window,
        interpret=interpret,
    )
    group = lax.axis_index("warpgroup")

    @pl.when(group == _SCORES)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        _score(block)

    @pl.when(group == _VALUES)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        _add_values(block)

    @pl.when(group == _PRODUCER)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        _produce(block)


def _score(block: _Block) -> None:
    """Scores and softmax of every tile, and the values of the first half of the channels."""
    smem, half = block.smem, block.half
    for part in range(2):
        columns = pl.ds(part * half, half)
        plgpu.copy_gmem_to_smem(block.q.at[block.row, :, columns], smem.q.at[part], smem.arrived)
    plgpu.copy_gmem_to_smem(block.index.at[block.row], smem.index, smem.arrived)
    plgpu.barrier_wait(smem.arrived)
    scale = jnp.float32((2 * half) ** -0.5 / _KEY_SCALE)

    def step(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, sums = carry
        stage = lax.rem(tile, _STAGES)
        plgpu.barrier_wait(smem.full.at[stage])
        scores = _scores_of(block, stage) * scale
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
        _no_sums(block),
    )
    peak, total, sums = lax.fori_loop(0, block.num_tiles, step, first)
    total = total + jnp.exp(plgpu.load(block.sink, layout=_BY_HEAD, optimized=False) - peak)
    plgpu.barrier_wait(smem.added)
    smem.factors[...] = total
    plgpu.barrier_arrive(smem.weighed)
    _write(block, sums, total, 0)


def _add_values(block: _Block) -> None:
    """The values of the second half of the channels."""
    smem = block.smem

    def step(tile: Array, sums: Array) -> Array:
        plgpu.barrier_wait(smem.weighed)
        shrink = plgpu.load(smem.factors, layout=_BY_HEAD, optimized=False)
        sums = _add_tile(block, sums, shrink, tile, 1)
        plgpu.barrier_arrive(smem.added)
        return sums

    sums = lax.fori_loop(0, block.num_tiles, step, _no_sums(block))
    plgpu.barrier_wait(smem.weighed)
    _write(block, sums, plgpu.load(smem.factors, layout=_BY_HEAD, optimized=False), 1)


def _no_sums(block: _Block) -> Array:
    return plgpu.layout_cast(jnp.zeros((HEADS, block.half), jnp.float32), plgpu.Layout.WGMMA)


def _add_tile(block: _Block, sums: Array, shrink: Array, tile: Array, half: int) -> Array:
    """The sums of values with one more tile; gives the tile free for a later one."""
    smem, stage = block.smem, lax.rem(tile, _STAGES)
    values = smem.keys.at[stage, :, pl.ds(half * block.half, block.half)]
    sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [0])
    if block.interpret:
        sums = sums + _dot(smem.weights, values)
    else:
        sums = _add_product(sums, smem.weights, values)

    @pl.when(tile < block.num_tiles - _STAGES)
    def _():
        plgpu.barrier_arrive(smem.free.at[stage])

    return sums


def _add_product(sums: Array, a: Any, b: Any) -> Any:
    """sums + a @ b of two arrays in shared memory, in float32."""
    return pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.WGMMAAccumulatorRef.init(sums))


def _write(block: _Block, sums: Array, total: Array, half: int) -> None:
    """A half of the result to device memory, through the queries' place: they were read before the last weights."""
    staged = block.smem.q.at[half]
    scale = jnp.float32(1 / _KEY_SCALE) / total
    staged[...] = (sums * lax.broadcast_in_dim(scale, sums.shape, [0])).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, block.out.at[block.row, :, pl.ds(half * block.half, block.half)])
    plgpu.wait_smem_to_gmem(0)


def _scores_of(block: _Block, stage: Array) -> Array:
    """q . k for the keys of a tile, in float32."""
    smem, half = block.smem, block.half
    pairs = [(smem.q.at[part], smem.keys.at[stage, :, pl.ds(part * half, half)].T) for part in range(2)]
    if block.interpret:
        return _dot(*pairs[0]) + _dot(*pairs[1])

    def run(acc: Any) -> Array:
        for q, keys in pairs:
            plgpu.wgmma(acc, q, keys)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((HEADS, KEY_BLOCK), jnp.float32))


def _dot(a: Any, b: Any) -> Array:
    return jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32), precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What the producer decodes at a time: 32 keys of a tile of entries, or half of the channels of 32 window keys."""

    tile: Array
    keys: int  # 0 or 1: which 32
    half: int | None = None  # None: a tile of entries

    @property
    def is_first(self) -> bool:
        """Whether it begins its tile."""
        return self.keys == 0 and self.half != 1

    @property
    def is_last(self) -> bool:
        """Whether it ends its tile."""
        return self.keys == 1 and self.half != 0


def _produce(block: _Block) -> None:
    """Fills the tiles, those of the window first. While a piece is decoded the next ones are on their way."""
    smem = block.smem
    plgpu.barrier_wait(smem.arrived)
    bases = block.bases[0], block.bases[1]
    load, store = (_load_interpreted, _store_interpreted) if block.interpret else (_load_packed, _store_keys)

    def fill(piece: _Piece, packed: Array) -> None:
        stage = lax.rem(piece.tile, _STAGES)
        if piece.is_first:

            @pl.when(piece.tile >= _STAGES)
            def _():
                plgpu.barrier_wait(smem.free.at[stage])

        store(piece, packed, smem.keys.at[stage])
        if piece.is_last:
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.full.at[stage])

    num_window = block.num_window // KEY_BLOCK
    pieces = [
        _Piece(tile=jnp.int32(tile), keys=keys, half=half)
        for tile, keys, half in itertools.product(range(num_window), range(2), range(2))
    ]
    has_entries = block.num_tiles > num_window
    queue = pieces + [_Piece(tile=jnp.int32(num_window), keys=keys) for keys in range(2) if has_entries]
    ahead = [load(block, piece, bases) for piece in queue[:_AHEAD]]
    for i, piece in enumerate(pieces):
        ahead += [load(block, following, bases) for following in queue[i + _AHEAD : i + _AHEAD + 1]]
        fill(piece, ahead.pop(0))

    def step(tile: Array, ahead: list[Array]) -> list[Array]:
        following = jnp.minimum(tile + 1, block.num_tiles - 1)
        for keys in range(2):
            ahead = [*ahead, load(block, _Piece(tile=following, keys=keys), bases)]
            fill(_Piece(tile=tile, keys=keys), ahead[0])
            ahead = ahead[1:]
        return ahead

    if has_entries:
        lax.fori_loop(num_window, block.num_tiles, step, ahead)


def _load_interpreted(block: _Block, piece: _Piece, bases: tuple[Array, Array]) -> Array:
    """What `_load_packed` and `_store_keys` make together: decoded keys times _KEY_SCALE, in bfloat16."""
    index = block.smem.index[piece.tile, pl.ds(piece.keys * _PIECE_KEYS, _PIECE_KEYS)]
    new, ring, cache = (
        ScaledArray(payload=payload[...], scale=scale[...], form=form, block=(1, group))
        for payload, scale, (form, group) in zip(block.packed[::2], block.packed[1::2], _FORMS, strict=True)
    )
    exists = index != NO_KEY
    if piece.half is None:
        rows = paged.take_rows(cache, jnp.where(exists, bases[1] + index, -1))
        return (dequantize(rows, jnp.float32) * _KEY_SCALE).astype(jnp.bfloat16)
    old = paged.take_rows(ring, jnp.where(index >= 0, bases[0] + index, -1))
    rows = paged.select_rows(index < NO_KEY, paged.take_rows(new, jnp.where(exists, -2 - index, -1)), old)
    keys = (dequantize(rows, jnp.float32) * _KEY_SCALE).astype(jnp.bfloat16)
    return keys[:, piece.half * block.half : (piece.half + 1) * block.half]


def _store_interpreted(piece: _Piece, keys: Array, tile: Any) -> None:
    columns = keys.shape[1]
    tile[pl.ds(piece.keys * _PIECE_KEYS, _PIECE_KEYS), pl.ds((piece.half or 0) * columns, columns)] = keys


# How threads share a piece: warp w has keys 8 w .. 8 w + 7 of its 32, lane l key l % 8 of these, and of its row the
# units of 16 bytes l / 8, l / 8 + 4, ...; so 8 lanes that store together fill all banks, and 4 lanes load 64 bytes.


def _window_units(width: int, half: int) -> range:
    """Which units of an FP8 row, of every fourth, a half holds."""
    return range(half * width // 128, (half + 1) * width // 128)


def _register_layout(width: int, half: int | None) -> Any:
    scales = width // 128 if half is None else max(1, width // 256)
    return plgpu.Layout.WG_STRIDED((128 * (width // 32 + scales),), vec_size=1)


def _load_packed(block: _Block, piece: _Piece, bases: tuple[Array, Array]) -> Array:
    """The registers that hold a piece as it is stored; zeros where a key does not exist."""
    width = block.q.shape[-1]
    layout = _register_layout(width, piece.half)
    ref, splat = plgpu.RefType(), plgpu.Layout.WG_SPLAT(shape=())

    def load(_: Any, packed: Any, index: Any, bases: Any, tile: Any) -> Any:
        lane = _Lane.current()
        ring_base, cache_base = (scalar(base) for base in bases)
        first = iadd(imul(scalar(tile), KEY_BLOCK), i32(piece.keys * _PIECE_KEYS))
        key = iadd(first, iadd(imul(lane.warp, 8), lane.key))
        place = load_shared(iadd(shared_address(index), imul(key, 4)))
        if piece.half is None:
            words = _load_entry(packed[4:], place, cache_base, lane, width)
        else:
            words = _load_window(packed[:4], place, ring_base, lane, width, piece.half)
        return array_of(words, layout.args[0], layout)

    result = plgpu.ShapeDtypeStruct(layout.args[0], jnp.int32, layout=layout)
    run = inline(load, ((ref,) * 6, ref, (splat, splat), splat), result)
    return run(block.packed, block.smem.index, bases, piece.tile)


def _load_window(
    refs: Sequence[Any], place: Register, base: Register, lane: "_Lane", width: int, half: int
) -> list[Register]:
    """Words of the units of half an FP8 row, then of its scales."""
    new, new_scale, ring, ring_scale = (global_address(ref) for ref in refs)
    is_new = arith.cmpi(arith.CmpIPredicate.slt, place, i32(NO_KEY))
    row = arith.select(is_new, arith.subi(i32(-2), place), iadd(base, place))
    payload = row_address(arith.select(is_new, new, ring), row, width, imul(lane.unit, 16))
    scale = row_address(arith.select(is_new, new_scale, ring_scale), row, width // FP8_GROUP, i32(0))
    units = _window_units(width, half)
    words = [word for i in units for word in _load_words(payload, 64 * i, place, 4)]
    return words + [word for i in sorted({i // 2 for i in units}) for word in _load_words(scale, 4 * i, place, 1)]


def _load_entry(refs: Sequence[Any], place: Register, base: Register, lane: "_Lane", width: int) -> list[Register]:
    """Words of the units of an FP4 row, then the two scales of each unit."""
    payload, scale = (global_address(ref) for ref in refs)
    row = iadd(base, place)
    payload = row_address(payload, row, width // 2, imul(lane.unit, 16))
    scale = row_address(scale, row, width // MAIN_KV_GROUP, imul(lane.unit, 2))
    words = [word for i in range(width // 128) for word in _load_words(payload, 64 * i, place, 4)]
    return words + [_load_pair(scale, 8 * i, place) for i in range(width // 128)]


def _store_keys(piece: _Piece, packed: Array, tile: Any) -> None:
    """Decodes what `_load_packed` gave and stores it as keys of the tile."""
    width, half = tile.shape[-1], piece.half

    def store(_: Any, packed: Any, tile: Any) -> None:
        lane = _Lane.current()
        words = words_of(packed)
        first = iadd(shared_address(tile), i32(piece.keys * _PIECE_KEYS * 2 * width))
        row = iadd(first, iadd(imul(lane.warp, 16 * width), imul(lane.key, 128)))
        if half is None:
            _store_entry(words, row, lane, width)
        else:
            _store_window(words, row, lane, width, half)

    inline(store, (_register_layout(width, half), plgpu.RefType(_TILED)))(packed, tile)


def _store_window(words: list[Register], row: Register, lane: "_Lane", width: int, half: int) -> None:
    """Unit i of a lane becomes 16 channels: two chunks of 8 among the i-th 64."""
    units = _window_units(width, half)
    scales = dict(zip(sorted({i // 2 for i in units}), words[4 * len(units) :], strict=True))
    first = arith.xori(imul(lane.unit, 2), lane.key)
    selector = imul(shr(lane.unit, 1), 0x0101)
    for k, i in enumerate(units):
        scale = ptx(_E8M0_PAIR, scales[i // 2], iadd(selector, i32(0x4040 + i % 2 * 0x0202)))
        for chunk in range(2):
            low, high = words[4 * k + 2 * chunk : 4 * k + 2 * chunk + 2]
            values = [*ptx(_DECODE_FP8, low, scale, count=2), *ptx(_DECODE_FP8, high, scale, count=2)]
            _store_chunk(row, 1024 * i, ixor(first, chunk), values)


def _store_entry(words: list[Register], row: Register, lane: "_Lane", width: int) -> None:
    """Unit i of a lane becomes 32 channels: four chunks of 8 among the (2 i + unit / 2)-th 64."""
    scales = words[width // 32 :]
    row = iadd(row, imul(shr(lane.unit, 1), 1024))
    first = arith.xori(imul(iand(lane.unit, 1), 4), lane.key)
    for i in range(width // 128):
        pair = ptx(_E4M3_PAIRS, scales[i], count=2)
        for chunk in range(4):
            values = ptx(_DECODE_FP4, words[4 * i + chunk], pair[chunk // 2], count=4)
            _store_chunk(row, 2048 * i, ixor(first, chunk), values)


def _store_chunk(row: Register, offset: int, chunk: Register, values: Sequence[Register]) -> None:
    """8 channels to a chunk of 16 bytes, at its swizzled place."""
    ptx(f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", iadd(row, imul(chunk, 16)), *values, count=0)


# E2M1 bits at the top of bfloat16's mantissa and the bottom of its exponent are 2^-126 of the value, E4M3 bits 2^-120,
# subnormal codes included. In bfloat16 0x7B80 is 2^120, which makes a scale of its bits; 0x7A00 is 2^(126 - 9) and
# 0x7700 is 2^(120 - 9), with _KEY_SCALE in them.
_DECODE_FP4 = """{
.reg .b32 t, a, b, c, d;
shl.b32 t, $4, 6;  and.b32 a, t, 0x01C001C0;  shl.b32 t, $4, 12;  lop3.b32 a, t, 0x80008000, a, 0xEA;
shl.b32 t, $4, 2;  and.b32 b, t, 0x01C001C0;  shl.b32 t, $4, 8;  lop3.b32 b, t, 0x80008000, b, 0xEA;
shr.u32 t, $4, 2;  and.b32 c, t, 0x01C001C0;  shl.b32 t, $4, 4;  lop3.b32 c, t, 0x80008000, c, 0xEA;
shr.u32 t, $4, 6;  and.b32 d, t, 0x01C001C0;  lop3.b32 d, $4, 0x80008000, d, 0xEA;
mul.rn.bf16x2 a, a, $5;  mul.rn.bf16x2 b, b, $5;  mul.rn.bf16x2 c, c, $5;  mul.rn.bf16x2 d, d, $5;
prmt.b32 $0, a, b, 0x5410;  prmt.b32 $1, c, d, 0x5410;  prmt.b32 $2, a, b, 0x7632;  prmt.b32 $3, c, d, 0x7632;
}"""
_DECODE_FP8 = """{
.reg .b32 t, a, b, s;
mov.b32 s, 0x77007700;
prmt.b32 t, $2, 0, 0x1404;  shr.u32 a, t, 4;  and.b32 a, a, 0x07F007F0;  lop3.b32 a, t, 0x80008000, a, 0xEA;
prmt.b32 t, $2, 0, 0x3424;  shr.u32 b, t, 4;  and.b32 b, b, 0x07F007F0;  lop3.b32 b, t, 0x80008000, b, 0xEA;
mul.rn.bf16x2 a, a, s;  mul.rn.bf16x2 b, b, s;
mul.rn.bf16x2 a, a, $3;  mul.rn.bf16x2 b, b, $3;
mov.b32 $0, a;  mov.b32 $1, b;
}"""
_E4M3_PAIRS = """{
.reg .b32 t, s;
prmt.b32 t, $2, 0, 0x4140;  shl.b32 t, t, 4;
mov.b32 s, 0x7B807B80;  mul.rn.bf16x2 t, t, s;
mov.b32 s, 0x7A007A00;  mul.rn.bf16x2 t, t, s;
prmt.b32 $0, t, t, 0x1010;  prmt.b32 $1, t, t, 0x3232;
}"""
_E8M0_PAIR = """{
.reg .b32 t;
prmt.b32 t, $1, 0, $2;  shl.b32 $0, t, 7;
}"""


@dataclasses.dataclass(frozen=True)
class _Lane:
    """What a thread has of each tile: its warp's 8 keys, its key of these, and its first unit of the row."""

    warp: Register
    key: Register
    unit: Register

    @staticmethod
    def current() -> "_Lane":
        """That of the thread."""
        thread = iand(mgpu.thread_idx(), 127)
        return _Lane(warp=shr(thread, 5), key=iand(thread, 7), unit=iand(shr(thread, 3), 3))


def _load_words(address: Any, offset: int, place: Register, count: int) -> list[Register]:
    """Words in a row from device memory, zeros for NO_KEY."""
    results = [f"${i}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {result}, 0;" for result in results)
    vector_type = f".v{count}" if count > 1 else ""
    into = f"{{{', '.join(results)}}}" if count > 1 else results[0]
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, {NO_KEY}; {zeros} "
        f"@p ld.global.nc{vector_type}.b32 {into}, [${count} + {offset}]; }}"
    )
    words = ptx(text, address, place, count=count)
    return list(words) if count > 1 else [words]


def _load_pair(address: Any, offset: int, place: Register) -> Register:
    """Two bytes from device memory, zeros for NO_KEY."""
    return ptx(
        f"{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, {NO_KEY}; mov.b16 h, 0; "
        f"@p ld.global.nc.b16 h, [$1 + {offset}]; cvt.u32.u16 $0, h; }}",
        address,
        place,
    )
