"""Parts of the products of one warpgroup on SM90 that several kernels share.

The tensor cores multiply 32 columns of E4M3 at a time, and 32 columns are also what shares a scale. So each instruction
makes the sum of one group, and the scales of both operands are applied to these sums in float32, group after group:
acc += sum * (row scale * column scale). Nothing but the 32 products of a group is added inside a tensor core.

Pallas has no such product, and no E2M1 on SM90. What is here is therefore written in the operations of Mosaic GPU, and
has a plain form in `jax.numpy` that interpretation runs in its place.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import Register
from deepinfer_jax.ops.quant import FP8_AMAX_FLOOR, FP8_MAX

ROWS = 64  # of an instruction's left operand
LINE = 128  # bytes of a row of the tiles that tensor cores read, and the bytes that a swizzle spans
TILE_TRANSFORMS = (
    plgpu.TilingTransform((8, LINE)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(LINE),  # pyright: ignore[reportAbstractUsage]
)


def batches(sum_registers: int, num_columns: int, num_groups: int) -> list[range]:
    """The groups of a chunk, as many together as registers hold sums of: a power of two, at most half of the chunk."""
    fitting = max(1, sum_registers // (num_columns // 2))
    at_once = min(num_groups // 2, 1 << (fitting.bit_length() - 1))
    return [range(first, first + at_once) for first in range(0, num_groups, at_once)]


def add_scaled(
    sums: list[Register], part: Sequence[Register], row_scales: Sequence[Register], of_columns: Sequence[Register]
) -> None:
    """sums += part * (row scale * column scale), all float32 and in the order of an instruction's results.

    For each 8 columns a thread holds two columns of its first row and two of its second; `of_columns` has two for
    each 8 columns.
    """
    for i in range(len(sums)):
        block, half, column = i // 4, i // 2 % 2, i % 2
        scale = arith.mulf(row_scales[half], of_columns[2 * block + column])
        sums[i] = llvm.intr_fma(part[i], scale, sums[i])


def column_scales(address: Register, offset: int, num_columns: int) -> list[Register]:
    """The two that `add_scaled` needs for each 8 columns; address: that of the thread's first one in shared memory."""
    words = [w for block in range(num_columns // 8) for w in mosaic.load_words(address, 2, offset + block * 32)]
    return [mosaic.as_f32(word) for word in words]


def multiply(rows: Sequence[Sequence[Register]], columns: Sequence[Any], num_columns: int) -> list[list[Any]]:
    """Products of E4M3 operands, one instruction of 32 columns for each: float32 sums, in the instruction's order.

    rows: the four words of each left operand in registers, or its one descriptor. columns: descriptors. Waits for the
    results: one block of assembly, so that nothing comes between the instructions and the wait.
    """
    count, width = num_columns // 2, len(rows[0])
    num_results, num_words = count * len(rows), width * len(rows)
    lines = ["{", ".reg .pred p;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
    for i in range(len(rows)):
        results = ", ".join(f"${i * count + r}" for r in range(count))
        words = ", ".join(f"${num_results + width * i + r}" for r in range(width))
        left = words if width == 1 else f"{{{words}}}"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{num_columns}k32.f32.e4m3.e4m3 "
            f"{{{results}}}, {left}, ${num_results + num_words + i}, p, 1, 1;"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    constraints = ["=f"] * num_results + ["l" if width == 1 else "r"] * num_words + ["l"] * len(columns)
    number = ir.F32Type.get()
    results = llvm.inline_asm(
        llvm.StructType.get_literal([number] * num_results),
        [word for words in rows for word in words] + list(columns),
        "\n".join(lines),
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    values = [llvm.extractvalue(number, results, [i]) for i in range(num_results)]
    return [values[i * count : (i + 1) * count] for i in range(len(rows))]


def descriptor(address: Register) -> Any:
    """What tells a tensor core where an operand is: swizzled lines of 128 bytes, 8 lines in each 1024 bytes."""
    i64 = ir.IntegerType.get_signless(64)
    fixed = (1 << 62) | ((8 * LINE >> 4) << 32) | (1 << 16)
    return arith.ori(arith.extui(i64, mosaic.shr(address, 4)), arith.constant(i64, ir.IntegerAttr.get(i64, fixed)))


def advance(descriptor: Any, num_bytes: int) -> Any:
    """The descriptor of what lies so many bytes, a multiple of 16, behind."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, arith.constant(i64, ir.IntegerAttr.get(i64, num_bytes >> 4)))


def scale_exponent(amax: Register) -> Register:
    """Biased exponent of the smallest power of two that is at least amax / 448 (see `ops.quant.quantize_fp8`)."""
    bits = mosaic.as_i32(arith.mulf(maximum(amax, mosaic.f32(FP8_AMAX_FLOOR)), mosaic.f32(1.0 / FP8_MAX)))
    return mosaic.shr(mosaic.iadd(bits, mosaic.i32(0x7FFFFF)), 23)


def absolute(x: Register) -> Register:
    """|x|."""
    return mosaic.as_f32(mosaic.iand(mosaic.as_i32(x), 0x7FFFFFFF))


def maximum(x: Register, y: Register) -> Register:
    """The larger one; NaN if either is."""
    return arith.maximumf(x, y)


def e4m3_pair(low: Register, high: Register) -> Register:
    """The E4M3 codes of two float32 in the low half of a word: to nearest even, magnitudes above 448 become 448."""
    text, half = "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", ir.IntegerType.get_signless(16)
    codes = llvm.inline_asm(half, [high, low], text, "=h,f,f", asm_dialect=0)
    return arith.extui(ir.IntegerType.get_signless(32), codes)
