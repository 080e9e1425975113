"""Rows of activations as the experts' products read them: two rows of E5M2 codes and one float32 scale each.

A row is quantised as `ops.quant.quantize_fp8` does it. An E4M3 code has four significant bits: the first three and the
last one are two E5M2 numbers, also after the power of two between its group's scale and the row's largest one is
multiplied in. So products of E5M2 are those of the quantised row, and have one scale for all columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.experts.packed import CHUNK
from deepinfer_jax.kernels.mosaic import GROUP, Interpret, Register, scale_of
from deepinfer_jax.kernels.ptx import global_address, inline, ptx, row_address, scalar
from deepinfer_jax.kernels.warpgroup import absolute, maximum, scale_exponent
from deepinfer_jax.ops.quant import decode_e4m3, quantize_fp8

TERMS = 2  # rows of codes of a row
TOP = 7  # 448 * 2^7 is the largest finite E5M2 number: the power of two that codes of the largest scale are given
THREADS = 128  # of the block that makes one row
PIECE = 8  # columns that a thread takes together; a warp takes a chunk
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
# Two numbers $3, $4, already divided by their scale: E4M3 codes of both, times $2 as half numbers. $0 has the E5M2
# codes of the first three significant bits in its odd bytes, which are the upper halves of half numbers; $1 those of
# the rest in its two low bytes.
_SPLIT = """{ .reg .b16 c; .reg .b32 r;
cvt.rn.satfinite.e4m3x2.f32 c, $4, $3;  cvt.rn.f16x2.e4m3x2 r, c;  mul.rn.f16x2 r, r, $2;
and.b32 $0, r, 0xFF00FF00;  sub.rn.f16x2 r, r, $0;  cvt.rn.satfinite.e5m2x2.f16x2 c, r;  cvt.u32.u16 $1, c; }"""


def column_order(x: Array) -> Array:
    """The last axis in the order of the products: natural columns to places; see `FoldedProduct`.

    Of a chunk, column 32 (2 q + j) + 8 i + 4 h + t goes to place 128 j + 32 i + 16 h + 4 q + t.
    """
    chunks = x.reshape(*x.shape[:-1], x.shape[-1] // CHUNK, 4, 2, 4, 2, 4)  # q, j, i, h, t
    return jnp.moveaxis(chunks, -5, -2).reshape(x.shape)


def natural_order(x: Array) -> Array:
    """The inverse of `column_order`."""
    chunks = x.reshape(*x.shape[:-1], x.shape[-1] // CHUNK, 2, 4, 2, 4, 4)  # j, i, h, q, t
    return jnp.moveaxis(chunks, -2, -5).reshape(x.shape)


def folded_rows(
    x: BFloat16[Array, "R K"],
    places: Int32[Array, " pairs"] | None = None,
    shares: Float32[Array, " pairs"] | None = None,
    *,
    num_places: int,
    interpret: Interpret = None,
) -> tuple[UInt8[Array, "codes K"], Float32[Array, "factors P"]]:
    """E5M2 codes and factors of the rows at `num_places` places: codes of place p are rows 2 p and 2 p + 1.

    places: of each pair (row, choice), as many for each row, each place of one pair only but for the last one, which
    any number may have and nobody reads; None: row r has place r. Places that no pair has are left as they are. Columns
    are in `column_order`. factors: the scale of the row at each place, and the share of its pair where there are
    shares. What lies 2^-30 below a row's largest scale may be lost.
    """
    if interpret is not None:
        return _interpreted(x, places, shares, num_places)
    num_pairs = x.shape[0] if places is None else places.shape[0]
    given = [array for array in (places, shares) if array is not None]
    kernel = plgpu.kernel(
        functools.partial(_fold_block, num_given=len(given), per_row=num_pairs // x.shape[0]),
        kernel_name="fold_rows",
        out_type=(
            jax.ShapeDtypeStruct((TERMS * num_places, x.shape[1]), jnp.uint8),
            jax.ShapeDtypeStruct((1 if shares is None else 2, num_places), jnp.float32),
        ),
        grid=(num_pairs,),
        grid_names=("block",),
        scratch_types={"scratch": plgpu.SMEM((4,), jnp.float32)},
        compiler_params=_COMPILER_PARAMS,
    )
    codes, factors = kernel(x, *given)
    return codes, factors


def _interpreted(
    x: Array, places: Array | None, shares: Array | None, num_places: int
) -> tuple[UInt8[Array, "codes K"], Float32[Array, "factors P"]]:
    packed = quantize_fp8(x)
    exponents = scale_of(packed).astype(jnp.int32)
    largest = jnp.max(exponents, axis=1, keepdims=True)
    values = decode_e4m3(packed.payload).reshape(*exponents.shape, GROUP)
    values = (values * _pow2(exponents - largest + TOP)[:, :, None]).reshape(x.shape).astype(jnp.float16)
    bits = lax.bitcast_convert_type(values, jnp.uint16) & 0xFF00
    rest = (values - lax.bitcast_convert_type(bits, jnp.float16)).astype(jnp.float8_e5m2)
    terms = jnp.stack([(bits >> 8).astype(jnp.uint8), lax.bitcast_convert_type(rest, jnp.uint8)], axis=1)
    terms, scales = column_order(terms), _pow2(largest[:, 0] - 127 - TOP)
    if places is None:
        places = jnp.arange(x.shape[0], dtype=jnp.int32)
    row = jnp.arange(places.shape[0], dtype=jnp.int32) // (places.shape[0] // x.shape[0])
    factors = [scales[row]] if shares is None else [scales[row], shares]
    codes = jnp.zeros((num_places, TERMS, x.shape[1]), jnp.uint8).at[places].set(terms[row])
    factors = jnp.zeros((len(factors), num_places), jnp.float32).at[:, places].set(jnp.stack(factors))
    return codes.reshape(TERMS * num_places, x.shape[1]), factors


def _pow2(exponent: Array) -> Array:
    return lax.bitcast_convert_type(jnp.maximum(exponent + 127, 0) << 23, jnp.float32)


def _fold_block(*refs: Any, scratch: Any, num_given: int, per_row: int) -> None:
    x, given, (codes, factors) = refs[0], refs[1 : 1 + num_given], refs[1 + num_given :]
    width, num_places = x.shape[1], factors.shape[1]

    def fold(_: Any, x: Any, codes: Any, factors: Any, scratch: Any, block: Any, *given: Any) -> None:
        pair, thread = scalar(block), mgpu.thread_idx()
        row = arith.divui(pair, mosaic.i32(per_row))
        zero, own = mosaic.i32(0), mosaic.imul(pair, 4)
        here = [ptx("ld.global.b32 $0, [$1];", row_address(global_address(ref), zero, 0, own)) for ref in given]
        place = here[0] if here else pair
        # Neighbouring threads have neighbouring pieces; whole warps behind the last one begin again.
        pieces = [mosaic.iadd(thread, mosaic.i32(first)) for first in range(0, width // PIECE, THREADS)]
        pieces[-1] = arith.remui(pieces[-1], mosaic.i32(width // PIECE))
        sources = [row_address(global_address(x), row, 2 * width, mosaic.imul(piece, 2 * PIECE)) for piece in pieces]
        words = [ptx("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", source, count=4) for source in sources]
        numbers = [[half for word in four for half in _halves(word)] for four in words]
        amax = [_maximum(functools.reduce(maximum, map(absolute, eight)), (1, 2)) for eight in numbers]
        largest = _maximum_of_block(_maximum(functools.reduce(maximum, amax), (4, 8, 16)), scratch)
        top = scale_exponent(largest)
        offset, first_row = _place_in_chunk(thread), mosaic.imul(place, TERMS)
        for piece, eight, of_group in zip(pieces, numbers, amax, strict=True):
            exponent = scale_exponent(of_group)
            inverse = mosaic.as_f32(mosaic.shl(arith.subi(mosaic.i32(254), exponent), 23))
            factor = arith.addi(arith.subi(exponent, top), mosaic.i32(127 + TOP))
            factor = mosaic.as_f32(mosaic.shl(arith.maxsi(factor, mosaic.i32(0)), 23))
            factor = ptx("cvt.rn.f16x2.f32 $0, $1, $1;", factor)
            scaled = [arith.mulf(number, inverse) for number in eight]
            column = mosaic.iadd(mosaic.imul(mosaic.shr(piece, 5), CHUNK), offset)
            target = row_address(global_address(codes), first_row, width, column)
            for four in range(2):
                terms = [ptx(_SPLIT, factor, *scaled[4 * four + two : 4 * four + two + 2], count=2) for two in (0, 2)]
                upper = ptx("prmt.b32 $0, $1, $2, 0x7531;", terms[0][0], terms[1][0])
                lower = mosaic.ior(terms[0][1], mosaic.shl(terms[1][1], 16))
                for term, word in enumerate((upper, lower)):
                    ptx(f"st.global.b32 [$0 + {term * width + 16 * four}], $1;", target, word, count=0)
        values = [mosaic.shl(arith.subi(top, mosaic.i32(TOP)), 23), *here[1:]]
        for i, value in enumerate(values):
            target = row_address(global_address(factors), mosaic.i32(i), 4 * num_places, mosaic.imul(place, 4))
            ptx("st.global.b32 [$0], $1;", target, value, count=0)

    ref = plgpu.RefType()
    types = (ref, ref, ref, ref, plgpu.Layout.WG_SPLAT(shape=()), *(ref for _ in given))
    inline(fold, types)(x, codes, factors, scratch, lax.axis_index("block"), *given)


def _halves(word: Register) -> tuple[Register, Register]:
    """Two bfloat16 numbers of a word as float32."""
    return mosaic.as_f32(mosaic.shl(word, 16)), mosaic.as_f32(mosaic.iand(word, 0xFFFF0000))


def _place_in_chunk(thread: Register) -> Register:
    """Where the first four of a thread's columns go, in bytes; the others go 16 bytes behind. See `column_order`."""
    i, group = mosaic.iand(thread, 3), mosaic.iand(mosaic.shr(thread, 2), 7)
    j, q = mosaic.iand(group, 1), mosaic.shr(group, 1)
    return mosaic.iadd(mosaic.imul(j, 128), mosaic.iadd(mosaic.imul(i, 32), mosaic.imul(q, 4)))


def _maximum(x: Register, distances: tuple[int, ...]) -> Register:
    """The greatest x of threads of a warp that differ in these bits of their numbers."""
    for distance in distances:
        x = maximum(x, mgpu.utils.shfl_bfly(x, distance))
    return x


def _maximum_of_block(x: Register, scratch: Any) -> Register:
    """The greatest of the four warps' x."""
    start = mosaic.shared_address(scratch)
    mosaic.store(x, mosaic.iadd(start, mosaic.imul(mosaic.shr(mgpu.thread_idx(), 5), 4)))
    mgpu.utils.warpgroup_barrier()
    return functools.reduce(maximum, [mosaic.as_f32(mosaic.load(start, 4 * warp)) for warp in range(4)])
