"""Operands of linear layers as the kernel for SM90 reads them: E4M3 codes, and float32 scales group by group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float, Float32, UInt8

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import GROUP, Interpret, Register, scale_of
from deepinfer_jax.kernels.ptx import global_address, inline, ptx, row_address, scalar
from deepinfer_jax.kernels.warpgroup import absolute, e4m3_pair, maximum, scale_exponent
from deepinfer_jax.ops.quant import ScaledArray, decode_e4m3, decode_e8m0, quantize_fp8
from deepinfer_jax.pytree import pytree_dataclass

THREADS = 128  # of a block of the quantising kernel; each has one group of one row
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


@pytree_dataclass
class PackedLinear:
    """E4M3 weights with a scale for each 32 x 32 block, made once from a ScaledArray by `pack`."""

    payload: UInt8[Array, "*B N K"]
    scales: Float32[Array, "*B K_blocks N_blocks"]


def pack(w: ScaledArray) -> PackedLinear:
    """The weights in the form that no call has to change; leading axes, as of layers, stay."""
    return PackedLinear(payload=w.payload, scales=jnp.swapaxes(decode_e8m0(scale_of(w)), -1, -2))


def unpack(w: PackedLinear, dtype: Any) -> Float[Array, "N K"]:
    """The values of `pack`, which bfloat16 and float32 hold exactly."""
    values = decode_e4m3(w.payload).reshape(w.payload.shape[0] // GROUP, GROUP, -1, GROUP)
    return (values * w.scales.T[:, None, :, None]).reshape(w.payload.shape).astype(dtype)


def quantized_rows(
    x: BFloat16[Array, "T K"], *, num_rows: int, interpret: Interpret = None
) -> tuple[UInt8[Array, "rows K"], Float32[Array, "K_groups rows"]]:
    """x as `quantize_fp8` packs it, by one kernel; rows behind the last one, up to `num_rows`, repeat it."""
    groups = x.shape[1] // GROUP
    if interpret is not None:
        packed = quantize_fp8(x[jnp.minimum(jnp.arange(num_rows), x.shape[0] - 1)])
        return packed.payload, decode_e8m0(scale_of(packed)).T

    def store_scale(scales: Any, group: Register, row: Register, bits: Register) -> None:
        place = row_address(global_address(scales), group, 4 * num_rows, mosaic.imul(row, 4))
        ptx("st.global.b32 [$0], $1;", place, bits, count=0)

    return quantize(x, jax.ShapeDtypeStruct((groups, num_rows), jnp.float32), num_rows, store_scale)


def quantize(
    x: BFloat16[Array, "T K"],
    scales: jax.ShapeDtypeStruct,
    num_rows: int,
    store_scale: Callable[[Any, Register, Register, Register], None],
) -> tuple[UInt8[Array, "rows K"], Array]:
    """Codes of `quantized_rows`, and scales in a form that one thread writes from group, row and float32 bits."""
    kernel = plgpu.kernel(
        functools.partial(_quantize_block, num_rows=num_rows, store_scale=store_scale),
        kernel_name="quantize_rows",
        out_type=(jax.ShapeDtypeStruct((num_rows, x.shape[1]), jnp.uint8), scales),
        grid=(-(-x.shape[1] // GROUP * num_rows // THREADS),),
        grid_names=("block",),
        compiler_params=_COMPILER_PARAMS,
    )
    codes, made = kernel(x)
    return codes, made


def _quantize_block(x: Any, codes: Any, scales: Any, *, num_rows: int, store_scale: Callable[..., None]) -> None:
    (rows, width), ref = x.shape, plgpu.RefType()

    def quantize(_: Any, x: Any, codes: Any, scales: Any, block: Any) -> None:
        """Neighbouring threads have neighbouring rows; threads behind the last group repeat it."""
        index = mosaic.iadd(mosaic.imul(scalar(block), THREADS), mgpu.thread_idx())
        index = arith.minui(index, mosaic.i32(num_rows * (width // GROUP) - 1))
        group, row = (op(index, mosaic.i32(num_rows)) for op in (arith.divui, arith.remui))
        source = arith.minui(row, mosaic.i32(rows - 1))
        source = row_address(global_address(x), source, 2 * width, mosaic.imul(group, 2 * GROUP))
        codes_at = row_address(global_address(codes), row, width, mosaic.imul(group, GROUP))
        words = [
            word
            for i in range(4)
            for word in ptx(f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4 + {16 * i}];", source, count=4)
        ]
        packed, scale = quantized_group(words)
        for i in range(2):
            ptx(f"st.global.v4.b32 [$0 + {16 * i}], {{$1, $2, $3, $4}};", codes_at, *packed[4 * i : 4 * i + 4], count=0)
        store_scale(scales, group, row, scale)

    inline(quantize, (ref, ref, ref, plgpu.Layout.WG_SPLAT(shape=())))(x, codes, scales, lax.axis_index("block"))


def quantized_group(words: list[Register]) -> tuple[list[Register], Register]:
    """E4M3 codes of 32 bfloat16 numbers in 16 words, in 8 words, and the bits of their float32 scale."""
    pairs = [(mosaic.as_f32(mosaic.shl(word, 16)), mosaic.as_f32(mosaic.iand(word, 0xFFFF0000))) for word in words]
    amax = [maximum(absolute(low), absolute(high)) for low, high in pairs]
    while len(amax) > 1:
        amax = [maximum(a, b) for a, b in zip(amax[::2], amax[1::2], strict=True)]
    exponent = scale_exponent(amax[0])
    inverse = mosaic.as_f32(mosaic.shl(arith.subi(mosaic.i32(254), exponent), 23))
    halves = [e4m3_pair(arith.mulf(low, inverse), arith.mulf(high, inverse)) for low, high in pairs]
    codes = [mosaic.ior(low, mosaic.shl(high, 16)) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    return codes, mosaic.shl(exponent, 23)
