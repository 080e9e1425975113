"""Operands of linear layers as block-scaled instructions of SM100 read them: E4M3 codes, E8M0 scales of 32 columns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float, Shaped, UInt8

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.linear import packed_sm90
from deepinfer_jax.kernels.mosaic import GROUP, Interpret, Register, scale_of
from deepinfer_jax.kernels.ptx import global_address, ptx, row_address
from deepinfer_jax.ops.quant import ScaledArray, quantize_fp8
from deepinfer_jax.pytree import pytree_dataclass

TILE = 128  # rows of a tile of scales, and columns of codes that it covers


@pytree_dataclass
class PackedLinear:
    """E4M3 weights with a scale for each row and 32 columns, made once from a ScaledArray by `pack`.

    scales: E8M0 in tiles as `scale_tiles` arranges them, a 32nd of the payload's bytes.
    """

    payload: UInt8[Array, "*B N K"]
    scales: UInt8[Array, "*B N_tiles K_tiles 32 16"]


def pack(w: ScaledArray) -> PackedLinear:
    """The weights in the form that no call has to change; leading axes, as of layers, stay."""
    scales = jnp.repeat(scale_of(w), GROUP, axis=-2)
    return PackedLinear(payload=w.payload, scales=scale_tiles(scales, TILE))


def scale_tiles(scales: UInt8[Array, "*B N G"], row_tile: int) -> UInt8[Array, "*B N_tiles K_tiles 32 16"]:
    """E8M0 codes of `row_tile` rows in each tile, at most 128, for the copy to tensor memory; the rest of a tile is 0.

    A tile is for 128 columns; of row r it has the four codes together, in line r % 32 from 4 * (r // 32) on.
    """
    *batch, rows, groups = scales.shape
    tiles = scales.reshape(*batch, rows // row_tile, row_tile, groups)
    tiles = jnp.pad(tiles, [(0, 0)] * (tiles.ndim - 2) + [(0, TILE - row_tile), (0, 0)])
    tiles = tiles.reshape(*batch, rows // row_tile, 4, GROUP, groups // 4, 4)
    tiles = jnp.moveaxis(jnp.moveaxis(tiles, -2, -4), -3, -2)  # [tiles, columns, 32, 4, 4]
    return tiles.reshape(*batch, rows // row_tile, groups // 4, GROUP, 16)


def rows_of_tile(tile: UInt8[Array, "32 16"], num_rows: int) -> UInt8[Array, "rows 4"]:
    """What `scale_tiles` put into one tile."""
    return jnp.swapaxes(tile.reshape(GROUP, 4, 4), 0, 1).reshape(TILE, 4)[:num_rows]


def quantized_rows(
    x: BFloat16[Array, "T K"], *, num_rows: int, row_tile: int, interpret: Interpret = None
) -> tuple[UInt8[Array, "rows K"], UInt8[Array, "tiles K_tiles 32 16"]]:
    """x as `quantize_fp8` packs it, by one kernel; rows behind the last one, up to `num_rows`, repeat it.

    Scales are those of `scale_tiles`, but what a tile has for more than `row_tile` rows is not written: no instruction
    reads it.
    """
    if interpret is not None:
        packed = quantize_fp8(x[jnp.minimum(jnp.arange(num_rows), x.shape[0] - 1)])
        return packed.payload, scale_tiles(scale_of(packed), row_tile)
    tiles = jax.ShapeDtypeStruct((num_rows // row_tile, x.shape[1] // TILE, GROUP, 16), jnp.uint8)

    def store_scale(scales: Any, group: Register, row: Register, bits: Register) -> None:
        tile, row = (op(row, mosaic.i32(row_tile)) for op in (arith.divui, arith.remui))
        line = mosaic.ior(mosaic.shl(mosaic.iand(row, GROUP - 1), 4), mosaic.shl(mosaic.shr(row, 5), 2))
        byte = mosaic.ior(line, mosaic.iand(group, 3))
        offset = mosaic.iadd(mosaic.shl(mosaic.shr(group, 2), 9), byte)
        place = row_address(global_address(scales), tile, 4 * TILE * tiles.shape[1], offset)
        ptx("st.global.b8 [$0], $1;", place, mosaic.shr(bits, 23), count=0)

    return packed_sm90.quantize(x, tiles, num_rows, store_scale)


def as_e4m3(codes: UInt8[Array, "*B"]) -> Float[Array, "*B"]:
    """The same bytes as the type that tensor cores are told."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)


def as_e8m0(codes: UInt8[Array, "*B"]) -> Shaped[Array, "*B"]:
    """The same bytes as the type of scales that tensor cores are told."""
    return lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu)
