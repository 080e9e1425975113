"""Block-scaled products of one warpgroup on SM90, compiled or interpreted.

The tensor cores multiply 32 columns of E4M3 at a time, and 32 columns are also what shares a scale. So each instruction
makes the sum of one group, and the scales of both operands are applied to these sums in float32, group after group:
acc += sum * (row scale * column scale). Nothing but the 32 products of a group is added inside a tensor core.

Pallas has no such product, and no E2M1 on SM90. What is here is therefore written in the operations of Mosaic GPU, and
has a plain form in `jax.numpy` that interpretation runs in its place.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float32

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import FP4_CODE_FACTOR, GROUP, Register
from deepinfer_jax.ops.quant import FP8_AMAX_FLOOR, FP8_MAX, decode_e4m3, decode_e8m0, decode_fp4, quantize_fp8

ROWS = 64  # of an instruction's left operand
LINE = 128  # bytes of a row of the tiles that tensor cores read, and the bytes that a swizzle spans
TILE_TRANSFORMS = (
    plgpu.TilingTransform((8, LINE)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(LINE),  # pyright: ignore[reportAbstractUsage]
)
# Half of the rows of a product: rows 0 to 7 of each 16, or rows 8 to 15.
HALF_ROWS = ROWS // 2
HALF_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((HALF_ROWS, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


NUM_GROUPS = 8
CHUNK = NUM_GROUPS * GROUP  # columns that are multiplied between two barriers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp4Product:
    """One chunk of 256 columns: 64 rows of packed E2M1 weights times `num_columns` rows of x, for each warpgroup.

    Of every 16 rows of the result, 8 are rows of a first tile of weights and 8 the same rows of a second one.
    weights [2, rows, 128] is the packed chunk of both tiles, TILE_TRANSFORMS; scales [2, lines, 128] the E8M0 bytes of
    all their columns, flat: row r has `scale_bytes` bytes from byte r * scale_bytes on. x [2, T, 128] is E4M3 in the
    order of `split_nibbles`, TILE_TRANSFORMS; x_scales [8, T] float32, with FP4_CODE_FACTOR in them.
    """

    num_columns: int
    scale_bytes: int
    sum_registers: int  # for the sums of groups; as many instructions are in flight as they hold

    def add(
        self,
        acc: Float32[Array, "M N"],
        *,
        weights: Any,
        scales: Any,
        x: Any,
        x_scales: Any,
        chunk: Array,
        warpgroup: Array,
        interpret: mosaic.Interpret,
    ) -> Float32[Array, "M N"]:
        """acc [64, num_columns] with the products of the chunk added; the other operands are in shared memory."""
        if interpret is not None:
            operands = (ref[...] for ref in (weights, scales, x, x_scales))
            total = self._interpreted(acc, *operands, chunk=chunk, warpgroup=warpgroup)
            # What orders these reads before the next copies is a barrier; the race detector also wants a fence.
            plgpu.commit_smem()
            return total
        layout = plgpu.Layout.WGMMA
        result = plgpu.ShapeDtypeStruct((ROWS, self.num_columns), jnp.float32, layout=layout)
        tiled, flat = plgpu.RefType(TILE_TRANSFORMS), plgpu.RefType()
        emit = plgpu.inline_mgpu(
            arg_types=(layout, tiled, flat, tiled, flat, plgpu.Layout.WG_SPLAT(())), return_type=result
        )(self._emit)
        return emit(acc, weights, scales, x, x_scales, chunk)

    def _interpreted(
        self,
        acc: Float32[Array, "M N"],
        weights: Array,
        scales: Array,
        x: Array,
        x_scales: Array,
        *,
        chunk: Array,
        warpgroup: Array,
    ) -> Float32[Array, "M N"]:
        codes = jnp.concatenate([x[0, : self.num_columns], x[1, : self.num_columns]], axis=1)
        columns = decode_e4m3(codes).reshape(self.num_columns, NUM_GROUPS, GROUP)
        column_scales = x_scales[:, : self.num_columns] / FP4_CODE_FACTOR
        first = warpgroup * HALF_ROWS
        halves, half_scales = [], []
        for tile in range(2):
            packed = lax.dynamic_slice_in_dim(weights[tile], first, HALF_ROWS)
            halves.append(mosaic.split_nibbles(decode_fp4(packed)).reshape(HALF_ROWS, NUM_GROUPS, GROUP))
            of_row = scales[tile].reshape(-1, self.scale_bytes)
            at = (first, chunk * NUM_GROUPS)
            half_scales.append(decode_e8m0(lax.dynamic_slice(of_row, at, (HALF_ROWS, NUM_GROUPS))))
        rows, row_scales = join_halves(*halves), join_halves(*half_scales)
        for g in range(NUM_GROUPS):
            sums = lax.dot_general(rows[:, g], columns[:, g], (((1,), (1,)), ((), ())))
            acc = acc + sums * (row_scales[:, g, None] * column_scales[g][None, :])
        return acc

    def _emit(self, ctx: Any, acc: Any, weights: Any, scales: Any, x: Any, x_scales: Any, chunk: Any) -> Any:
        del ctx
        lane = mosaic.Lane.current()
        row = mosaic.iadd(mosaic.imul(lane.warp, 8), lane.row)  # of both tiles
        tile_bytes = ir.MemRefType(weights.type).shape[1] * 8 * LINE
        tile_scale_bytes = ir.MemRefType(scales.type).shape[1] * LINE
        x_line_bytes = ir.MemRefType(x.type).shape[1] * 8 * LINE
        x_scale_bytes = ir.MemRefType(x_scales.type).shape[1] * 4
        # Swizzling exchanges 16-byte pieces within a line: piece p of row r lies at p ^ (r % 8).
        words = mosaic.iadd(mosaic.imul(row, LINE), mosaic.imul(lane.quad, 4))
        words = mosaic.ior(mosaic.iadd(mosaic.shared_address(weights), words), mosaic.shl(lane.row, 4))
        scale_at = mosaic.iadd(mosaic.imul(row, self.scale_bytes), mosaic.imul(chunk.registers.item(), NUM_GROUPS))
        scale_at = mosaic.iadd(mosaic.shared_address(scales), scale_at)
        column_at = mosaic.iadd(mosaic.shared_address(x_scales), mosaic.imul(lane.quad, 8))
        x_at = descriptor(mosaic.shared_address(x))
        row_words = [mosaic.load_pair(scale_at, tile * tile_scale_bytes) for tile in range(2)]
        sums = mosaic.scalars(acc)
        for at_once in batches(self.sum_registers, self.num_columns, NUM_GROUPS):
            operands, descriptors = [], []
            for g in at_once:
                at = mosaic.ixor(words, g * 16)
                pair = [mosaic.fp4_as_e4m3(mosaic.load(at, tile * tile_bytes)) for tile in range(2)]
                operands.append([pair[0][0], pair[1][0], pair[0][1], pair[1][1]])
                line, piece = divmod(g * GROUP, LINE)
                descriptors.append(advance(x_at, line * x_line_bytes + piece))
            for g, part in zip(at_once, multiply(operands, descriptors, self.num_columns), strict=True):
                row_scales = [mosaic.e8m0_as_f32(half[g // 4], g % 4) for half in row_words]
                add_scaled(sums, part, row_scales, column_scales(column_at, g * x_scale_bytes, self.num_columns))
        return mosaic.fragmented(sums, (ROWS, self.num_columns), acc.layout)


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
    words = [w for block in range(num_columns // 8) for w in mosaic.load_pair(address, offset + block * 32)]
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


def multiply_in_turn(
    rows: Sequence[Any], columns: Sequence[Any], num_columns: int, use: Callable[[int, Sequence[Register]], None]
) -> None:
    """`use(i, sums)` for each product of E4M3 operands in shared memory, while the next one is under way.

    As `multiply` otherwise; rows and columns are descriptors. Two products' sums are in registers at a time.
    """
    before: list[Any] = []
    for i, operands in enumerate(zip(rows, columns, strict=True)):
        sums, before = _started(operands, before, num_columns)
        if before:
            use(i - 1, before)
        before = sums
    use(len(rows) - 1, _awaited(before))


def _started(operands: Sequence[Any], before: Sequence[Any], num_columns: int) -> tuple[list[Any], list[Any]]:
    """The sums of a product that is under way, not to be read yet, and those of the one before it, which are there."""
    count, num_before = num_columns // 2, len(before)
    results = ", ".join(f"${r}" for r in range(count))
    first = count + 2 * num_before
    lines = [
        "{",
        ".reg .pred p;",
        "setp.ne.b32 p, 0, 0;",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{num_columns}k32.f32.e4m3.e4m3 "
        f"{{{results}}}, ${first}, ${first + 1}, p, 1, 1;",
        "wgmma.commit_group.sync.aligned;",
        *(["wgmma.wait_group.sync.aligned 1;"] if before else []),
        "}",
    ]
    values = _asm(lines, ["=f"] * (count + num_before), [*before, *operands], first_tied=count, num_tied=num_before)
    return values[:count], values[count:]


def _awaited(sums: Sequence[Any]) -> list[Any]:
    """The sums of the last product, which are there."""
    return _asm(["wgmma.wait_group.sync.aligned 0;"], ["=f"] * len(sums), sums, first_tied=0, num_tied=len(sums))


def _asm(
    lines: Sequence[str], results: Sequence[str], arguments: Sequence[Any], *, first_tied: int, num_tied: int
) -> list[Any]:
    """Assembly with float32 results; the first `num_tied` arguments are in registers of results, others are words."""
    number = ir.F32Type.get()
    tied = [str(first_tied + r) for r in range(num_tied)]
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([number] * len(results)),
        list(arguments),
        "\n".join(lines),
        ",".join([*results, *tied, *["l"] * (len(arguments) - num_tied)]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, struct, [i]) for i in range(len(results))]


def descriptor(address: Register) -> Any:
    """What tells a tensor core where an operand is: swizzled lines of 128 bytes, 8 lines in each 1024 bytes."""
    i64 = ir.IntegerType.get_signless(64)
    fixed = (1 << 62) | ((8 * LINE >> 4) << 32) | (1 << 16)
    return arith.ori(arith.extui(i64, mosaic.shr(address, 4)), arith.constant(i64, ir.IntegerAttr.get(i64, fixed)))


def advance(descriptor: Any, num_bytes: int) -> Any:
    """The descriptor of what lies so many bytes, a multiple of 16, behind."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, arith.constant(i64, ir.IntegerAttr.get(i64, num_bytes >> 4)))


def join_halves(first: Float32[Array, "M ..."], second: Float32[Array, "M ..."]) -> Float32[Array, "N ..."]:
    """Rows of two arrays in the order of a product's rows: 8 of the first, 8 of the second, and so on."""
    pairs = jnp.stack([half.reshape(-1, 8, *half.shape[1:]) for half in (first, second)], axis=1)
    return pairs.reshape(2 * first.shape[0], *first.shape[1:])


def split_halves(acc: Float32[Array, "M N"], *, interpret: mosaic.Interpret) -> tuple[Array, Array]:
    """The rows of the first and of the second tile: [64, N] -> two of [32, N] in HALF_LAYOUT."""
    num_columns = acc.shape[1]
    if interpret is not None:
        pairs = acc.reshape(-1, 2, 8, num_columns)
        return pairs[:, 0].reshape(HALF_ROWS, num_columns), pairs[:, 1].reshape(HALF_ROWS, num_columns)
    half = plgpu.ShapeDtypeStruct((HALF_ROWS, num_columns), jnp.float32, layout=HALF_LAYOUT)
    emit = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=(half, half))(_emit_halves)
    return emit(acc)


def _emit_halves(ctx: Any, acc: Any) -> tuple[Any, Any]:
    del ctx
    values = mosaic.scalars(acc)
    halves = [[value for i, value in enumerate(values) if i // 2 % 2 == which] for which in range(2)]
    first, second = (mosaic.fragmented(h, (HALF_ROWS, acc.shape[1]), HALF_LAYOUT.to_mgpu()) for h in halves)
    return first, second


def store_quantized(
    values: Float32[Array, "M N"], codes: Any, scales: Any, scratch: Any, *, interpret: mosaic.Interpret
) -> None:
    """Writes a group of 32 channels as `quantize_fp8` would: values [32, N] in HALF_LAYOUT to shared memory.

    codes [T, 32] uint8, T >= N, in the order of `split_nibbles`; scales [T] float32, with FP4_CODE_FACTOR in them;
    scratch [4, T] float32 of this warpgroup alone.
    """
    num_columns = values.shape[1]
    if interpret is not None:
        packed = quantize_fp8(values.T)
        codes[:num_columns] = mosaic.split_nibbles(packed.payload)
        scales[:num_columns] = decode_e8m0(mosaic.scale_of(packed))[:, 0] * FP4_CODE_FACTOR
        return
    flat = plgpu.RefType()
    plgpu.inline_mgpu(arg_types=(HALF_LAYOUT, flat, flat, flat))(_emit_quantized)(values, codes, scales, scratch)


def _emit_quantized(ctx: Any, values: Any, codes: Any, scales: Any, scratch: Any) -> None:
    del ctx
    lane = mosaic.Lane.current()
    numbers = mosaic.scalars(values)  # two neighbouring columns of each 8
    warp = mosaic.iand(lane.warp, 3)
    row_bytes = ir.MemRefType(scratch.type).shape[1] * 4
    column_at = mosaic.imul(lane.quad, 8)
    own = mosaic.iadd(mosaic.iadd(mosaic.shared_address(scratch), mosaic.imul(warp, row_bytes)), column_at)
    amax = [_maximum_of_rows(absolute(number)) for number in numbers]
    for i, value in enumerate(amax):
        mosaic.store(value, own, _column_offset(i))
    mgpu.utils.warpgroup_barrier()
    everyone = mosaic.iadd(mosaic.shared_address(scratch), column_at)
    scale_at = mosaic.iadd(mosaic.shared_address(scales), column_at)
    # Channel c of the group is row c % 8 of warp c / 8, and goes to place 16 (c % 2) + c / 2.
    place = mosaic.iadd(mosaic.imul(mosaic.iand(lane.row, 1), 16), mosaic.shr(lane.row, 1))
    place = mosaic.iadd(place, mosaic.imul(warp, 4))
    code_at = mosaic.iadd(mosaic.iadd(mosaic.shared_address(codes), mosaic.imul(column_at, GROUP // 4)), place)
    for i, number in enumerate(numbers):
        offset = _column_offset(i)
        parts = [mosaic.as_f32(mosaic.load(everyone, offset + row * row_bytes)) for row in range(4)]
        exponent = scale_exponent(maximum(maximum(parts[0], parts[1]), maximum(parts[2], parts[3])))
        inverse = mosaic.as_f32(mosaic.shl(arith.subi(mosaic.i32(254), exponent), 23))
        mosaic.store(_e4m3_byte(arith.mulf(number, inverse)), code_at, offset * (GROUP // 4))
        scale = arith.mulf(mosaic.as_f32(mosaic.shl(exponent, 23)), mosaic.f32(FP4_CODE_FACTOR))
        mosaic.store(scale, scale_at, offset)


def _column_offset(i: int) -> int:
    """Bytes from a thread's first column to its i-th, in a row of float32."""
    return (i // 2) * 32 + (i % 2) * 4


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


def _maximum_of_rows(x: Register) -> Register:
    """The greatest x of the 8 threads of a warp that hold the same columns."""
    for distance in (4, 8, 16):
        x = maximum(x, mgpu.utils.shfl_bfly(x, distance))
    return x


def _e4m3_byte(x: Register) -> Any:
    """The E4M3 code of a float32, rounded to nearest even; magnitudes above 448 become 448."""
    return arith.trunci(ir.IntegerType.get_signless(8), _e4m3_codes(x, mosaic.f32(0.0)))


def e4m3_pair(low: Register, high: Register) -> Register:
    """The E4M3 codes of two float32 numbers, as `_e4m3_byte` gives them, in the low half of a word."""
    return arith.extui(ir.IntegerType.get_signless(32), _e4m3_codes(low, high))


def _e4m3_codes(low: Register, high: Register) -> Any:
    half = ir.IntegerType.get_signless(16)
    return llvm.inline_asm(half, [high, low], "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f", asm_dialect=0)
