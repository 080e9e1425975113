"""Packed keys on their way to tiles in shared memory: gathered by index into registers, decoded, stored as bfloat16."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array

from deepinfer_jax.kernels.attention.block import FORMS, KEY_SCALE, NO_KEY, PIECE_KEYS, Block
from deepinfer_jax.kernels.mosaic import Register, i32, iadd, iand, imul, ixor, shared_address, shr
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
from deepinfer_jax.ops.quant import FP8_GROUP, MAIN_KV_GROUP, ScaledArray, dequantize


@dataclasses.dataclass(frozen=True)
class Piece:
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


def load_interpreted(block: Block, piece: Piece, bases: tuple[Array, Array]) -> Array:
    """What `load_packed` and `store_keys` make together: decoded keys times KEY_SCALE, in bfloat16."""
    index = block.smem.index[piece.tile, pl.ds(piece.keys * PIECE_KEYS, PIECE_KEYS)]
    new, ring, cache = (
        ScaledArray(payload=payload[...], scale=scale[...], form=form, block=(1, group))
        for payload, scale, (form, group) in zip(block.packed[::2], block.packed[1::2], FORMS, strict=True)
    )
    exists = index != NO_KEY
    if piece.half is None:
        rows = paged.take_rows(cache, jnp.where(exists, bases[1] + index, -1))
        return (dequantize(rows, jnp.float32) * KEY_SCALE).astype(jnp.bfloat16)
    old = paged.take_rows(ring, jnp.where(index >= 0, bases[0] + index, -1))
    rows = paged.select_rows(index < NO_KEY, paged.take_rows(new, jnp.where(exists, -2 - index, -1)), old)
    keys = (dequantize(rows, jnp.float32) * KEY_SCALE).astype(jnp.bfloat16)
    return keys[:, piece.half * block.half : (piece.half + 1) * block.half]


def store_interpreted(piece: Piece, keys: Array, tile: Any, line: int) -> None:
    """Stores what `load_interpreted` gave."""
    del line
    columns = keys.shape[1]
    tile[pl.ds(piece.keys * PIECE_KEYS, PIECE_KEYS), pl.ds((piece.half or 0) * columns, columns)] = keys


# How threads share a piece: warp w has keys 8 w .. 8 w + 7 of its 32, lane l key l % 8 of these, and of its row the
# units of 16 bytes l / 8, l / 8 + 4, ...; so 8 lanes that store together fill all banks, and 4 lanes load 64 bytes.


def _window_units(width: int, half: int) -> range:
    """Which units of an FP8 row, of every fourth, a half holds."""
    return range(half * width // 128, (half + 1) * width // 128)


def _register_layout(width: int, half: int | None) -> Any:
    scales = width // 128 if half is None else max(1, width // 256)
    return plgpu.Layout.WG_STRIDED((128 * (width // 32 + scales),), vec_size=1)


def load_packed(block: Block, piece: Piece, bases: tuple[Array, Array]) -> Array:
    """The registers that hold a piece as it is stored; zeros where a key does not exist."""
    width = block.q.shape[-1]
    layout = _register_layout(width, piece.half)
    ref, splat = plgpu.RefType(), plgpu.Layout.WG_SPLAT(shape=())

    def load(_: Any, packed: Any, index: Any, bases: Any, tile: Any) -> Any:
        lane = _Lane.current()
        ring_base, cache_base = (scalar(base) for base in bases)
        first = iadd(imul(scalar(tile), KEY_BLOCK), i32(piece.keys * PIECE_KEYS))
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


def store_keys(piece: Piece, packed: Array, tile: Any, line: int) -> None:
    """Decodes what `load_packed` gave and stores it as keys of the tile, in swizzled lines of so many channels."""
    width, half = tile.shape[-1], piece.half

    def store(_: Any, packed: Any, tile: Any) -> None:
        lane = _Lane.current()
        words = words_of(packed)
        first = iadd(shared_address(tile), i32(piece.keys * PIECE_KEYS * 2 * width))
        row = iadd(first, iadd(imul(lane.warp, 16 * width), imul(lane.key, 2 * line)))
        if half is None:
            _store_entry(words, row, lane, width, line)
        else:
            _store_window(words, row, lane, width, half, line)

    inline(store, (_register_layout(width, half), plgpu.RefType(line_tiles(line, 2 * line))))(packed, tile)


def _store_window(words: list[Register], row: Register, lane: "_Lane", width: int, half: int, line: int) -> None:
    """Unit i of a lane becomes 16 channels: two chunks of 8 among the i-th 64."""
    units = _window_units(width, half)
    scales = dict(zip(sorted({i // 2 for i in units}), words[4 * len(units) :], strict=True))
    row, first = _first_chunk(row, imul(lane.unit, 2), lane, line)
    selector = imul(shr(lane.unit, 1), 0x0101)
    for k, i in enumerate(units):
        scale = ptx(_E8M0_PAIR, scales[i // 2], iadd(selector, i32(0x4040 + i % 2 * 0x0202)))
        for chunk in range(2):
            low, high = words[4 * k + 2 * chunk : 4 * k + 2 * chunk + 2]
            values = [*ptx(_DECODE_FP8, low, scale, count=2), *ptx(_DECODE_FP8, high, scale, count=2)]
            _store_chunk(row, 1024 * i, ixor(first, chunk), values)


def _store_entry(words: list[Register], row: Register, lane: "_Lane", width: int, line: int) -> None:
    """Unit i of a lane becomes 32 channels: four chunks of 8 among the (2 i + unit / 2)-th 64."""
    scales = words[width // 32 :]
    row = iadd(row, imul(shr(lane.unit, 1), 1024))
    row, first = _first_chunk(row, imul(iand(lane.unit, 1), 4), lane, line)
    for i in range(width // 128):
        pair = ptx(_E4M3_PAIRS, scales[i], count=2)
        for chunk in range(4):
            values = ptx(_DECODE_FP4, words[4 * i + chunk], pair[chunk // 2], count=4)
            _store_chunk(row, 2048 * i, ixor(first, chunk), values)


def _first_chunk(row: Register, chunk: Register, lane: "_Lane", line: int) -> tuple[Register, Register]:
    """Where a chunk of 8 channels begins, of the 8 chunks that 64 channels have: its line, and its place in it.

    Eight lines of neighbouring keys lie together. A swizzle exchanges the chunks of a line by bits of its address: of
    lines of 128 bytes by those that number the lines, of lines of 64 bytes by those that number pairs of lines.
    """
    if line == 64:
        return row, arith.xori(chunk, lane.key)
    row = iadd(row, imul(shr(chunk, 2), 8 * 2 * line))
    return row, arith.xori(iand(chunk, 3), iand(shr(lane.key, 1), 3))


def _store_chunk(row: Register, offset: int, chunk: Register, values: Sequence[Register]) -> None:
    """8 channels to a chunk of 16 bytes, at its swizzled place."""
    ptx(f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", iadd(row, imul(chunk, 16)), *values, count=0)


# E2M1 bits at the top of bfloat16's mantissa and the bottom of its exponent are 2^-126 of the value, E4M3 bits 2^-120,
# subnormal codes included. In bfloat16 0x7B80 is 2^120, which makes a scale of its bits; 0x7A00 is 2^(126 - 9) and
# 0x7700 is 2^(120 - 9), with KEY_SCALE in them.
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
