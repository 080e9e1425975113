"""Small things that Mosaic GPU kernels share: operations on 32-bit registers, and reading packed forms with them.

Functions that take and give `Register` are for the bodies of `plgpu.inline_mgpu`: they emit operations of one thread.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Shaped, UInt8

from deepinfer_jax.ops.quant import ScaledArray

REGISTERS = 65536  # of a multiprocessor
GROUP = 32  # columns that share a scale, and columns of one FP8 instruction
# E2M1 bits moved into E4M3 mean 2^-6 of their value: the exponent biases are 1 and 7.
FP4_CODE_FACTOR = 2.0**6

Register = Any  # an MLIR value: int32, or float32 where a function says so
Interpret = plgpu.InterpretGPUParams | None  # None: compiled for the GPU


def split_nibbles(x: Shaped[Array, "*B K"]) -> Shaped[Array, "*B K"]:
    """Columns of each group of 32 in the order of E2M1 products: the 16 even columns, then the 16 odd ones."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP // 2, 2)
    return jnp.swapaxes(pairs, -1, -2).reshape(x.shape)


def scale_of(w: ScaledArray) -> UInt8[Array, "..."]:
    """The scale bytes of a packed array. Raises ValueError for plain values."""
    if w.scale is None:
        raise ValueError("the array has plain values and no scales; pack it with a function of ops.quant")
    return w.scale


def check_registers(*wanted: int) -> None:
    """Checks what the warpgroups of a block set their threads' registers to, one number for each warpgroup.

    A block starts with equal shares, in steps of 8, of a multiprocessor's registers. A warpgroup that asks for more
    than others have given back waits for ever, so together they may ask for no more than that. Raises ValueError.
    """
    start = REGISTERS // (128 * len(wanted)) // 8 * 8
    if sum(wanted) > start * len(wanted) or any(count % 8 for count in wanted):
        raise ValueError(
            f"registers of {len(wanted)} warpgroups are {wanted}, together {sum(wanted)}; they must be multiples of 8 "
            f"and at most {start * len(wanted)} together, {start} for each as a block starts"
        )


def observe_last(barriers: Any, total: Array, count: int) -> None:
    """Waits for the last phases of a ring of `count` barriers that completed `total` phases, one after the other.

    For the one who refills a ring: it has waited for all phases but these, and every phase must be observed.
    """

    def wait(step: Array, _: None) -> None:
        plgpu.barrier_wait(barriers.at[step % count])

    lax.fori_loop(lax.max(total - count, jnp.int32(0)), total, wait, None)


@dataclasses.dataclass(frozen=True)
class Lane:
    """Where a thread stands in the registers of tensor core operands."""

    warp: Register  # of the block
    row: Register  # 0 to 7
    quad: Register  # 0 to 3: which of the threads that share a row

    @staticmethod
    def current() -> "Lane":
        """That of the thread."""
        thread = mgpu.thread_idx()
        lane = iand(thread, 31)
        return Lane(warp=shr(thread, 5), row=shr(lane, 2), quad=iand(lane, 3))


def fp4_as_e4m3(word: Register) -> tuple[Register, Register]:
    """E4M3 bytes of the four low and of the four high nibbles of a word, as 2^-6 of their values."""
    magnitude, sign = 0x1C1C1C1C, 0x80808080
    low = ior(iand(shl(word, 2), magnitude), iand(shl(word, 4), sign))
    high = ior(iand(shr(word, 2), magnitude), iand(word, sign))
    return low, high


def e8m0_as_f32(word: Register, byte: int) -> Register:
    """2^(code - 127) of one byte of a word, float32; code 0 gives 0."""
    shift = 23 - 8 * byte
    return as_f32(iand(shl(word, shift) if shift > 0 else shr(word, -shift), 0xFF << 23))


def scalars(array: mgpu.FragmentedArray) -> list[Register]:
    """The float32 values that a thread holds of an array whose registers are pairs, in order."""
    return [llvm.extractelement(pair, i32(i)) for pair in array.registers.flat for i in range(2)]


def fragmented(values: Sequence[Register], shape: tuple[int, int], layout: Any) -> mgpu.FragmentedArray:
    """An array of `shape` in a layout whose registers are pairs, from what `scalars` would give."""
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for i, index in enumerate(np.ndindex(registers.shape)):
        vector = llvm.mlir_undef(pair)
        for j in range(2):
            vector = llvm.insertelement(vector, values[2 * i + j], i32(j))
        registers[index] = vector
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def shared_address(ref: ir.Value) -> Register:
    """Where a memref in shared memory begins."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def load(address: Register, offset: int = 0) -> Register:
    """A word of shared memory."""
    return llvm.load(ir.IntegerType.get_signless(32), _pointer(address, offset))


def load_words(address: Register, count: int, offset: int = 0) -> list[Register]:
    """`count` words of shared memory at a multiple of as many bytes, in one access; count 2 or 4."""
    words = ir.VectorType.get((count,), ir.IntegerType.get_signless(32))
    vector = llvm.load(words, _pointer(address, offset), alignment=4 * count)
    return [llvm.extractelement(vector, i32(i)) for i in range(count)]


def load_byte(address: Register, offset: int = 0) -> Register:
    """A byte of shared memory, zeros above it."""
    byte = llvm.load(ir.IntegerType.get_signless(8), _pointer(address, offset))
    return arith.extui(ir.IntegerType.get_signless(32), byte)


def store(value: ir.Value, address: Register, offset: int = 0) -> None:
    """Writes to shared memory."""
    llvm.store(value, _pointer(address, offset))


def _pointer(address: Register, offset: int) -> ir.Value:
    shared = llvm.PointerType.get(3)
    return llvm.inttoptr(shared, iadd(address, i32(offset)))


def i32(value: int) -> Register:
    """A constant; bits above 2^31 - 1 are those of a negative number."""
    word = ir.IntegerType.get_signless(32)
    return arith.constant(word, ir.IntegerAttr.get(word, value - (1 << 32) if value >> 31 else value))


def iadd(x: Register, y: Register) -> Register:
    """x + y."""
    return arith.addi(x, y)


def imul(x: Register, y: int) -> Register:
    """x * y."""
    return arith.muli(x, i32(y))


def iand(x: Register, y: int) -> Register:
    """x & y."""
    return arith.andi(x, i32(y))


def ior(x: Register, y: Register) -> Register:
    """x | y."""
    return arith.ori(x, y)


def ixor(x: Register, y: int) -> Register:
    """x ^ y."""
    return arith.xori(x, i32(y))


def shl(x: Register, y: int) -> Register:
    """x << y."""
    return arith.shli(x, i32(y))


def shr(x: Register, y: int) -> Register:
    """x >> y, zeros from above."""
    return arith.shrui(x, i32(y))


def prmt(low: Register, high: Register, selector: Register) -> Register:
    """Four of the eight bytes of two registers, chosen by the low four nibbles of the selector, 0 to 7."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [low, high, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", asm_dialect=0)


def as_f32(x: Register) -> Register:
    """The float32 of these bits."""
    return arith.bitcast(ir.F32Type.get(), x)


def as_i32(x: Register) -> Register:
    """The bits of a float32."""
    return arith.bitcast(ir.IntegerType.get_signless(32), x)


def f32(value: float) -> Register:
    """A float32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get_f32(value))
