"""Products of one warpgroup for linear layers on SM90: which operand lies left, what is scaled, what is stored.

The left operand of an instruction has 64 rows, the right one 8 to 128, and the result is spread over the threads by
rows. Few rows of x are the right operand, so that nothing is wasted (`Fp8Product`, `Bf16Product`). 64 or 128 rows of x
are the left one (`Fp8RowsProduct`): scales of weights are shared by 32 outputs, so that a thread needs 8 products of
scales for 64 sums of a group instead of 32, and 4 loads instead of 17.

All have the same interface: `shape` of the sums, [rows of x, outputs] or the other way round if `is_transposed`, where
they belong in the unit (`first_row`, `first_output`), and `add`. Interpretation runs a plain form.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Float32

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import GROUP, Register
from deepinfer_jax.kernels.ptx import global_address, row_address
from deepinfer_jax.kernels.warpgroup import (
    LINE,
    ROWS,
    TILE_TRANSFORMS,
    add_scaled,
    advance,
    batches,
    column_scales,
    descriptor,
    multiply,
)
from deepinfer_jax.ops.quant import decode_e4m3

BF16_TRANSFORMS = (
    plgpu.TilingTransform((8, LINE // 2)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(LINE),  # pyright: ignore[reportAbstractUsage]
)
WARPGROUPS = 2  # that share a unit
TILE_OUTPUTS = WARPGROUPS * ROWS  # of a unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Product:
    """One chunk of columns: 64 rows of E4M3 weights times `row_tile` rows of x, for each warpgroup.

    weights [lines, 128, 128] and x [lines, T, 128] are E4M3, the chunk's lines of 128 columns, TILE_TRANSFORMS; scales
    [4 lines, 4] and x_scales [4 lines, T] float32.
    """

    row_tile: int
    sum_registers: int  # for the sums of groups; as many instructions are in flight as they hold
    is_transposed = True

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: outputs, rows of x."""
        return ROWS, self.row_tile

    def first_row(self, warpgroup: Array) -> Array:
        """Of x, in the unit."""
        return 0 * warpgroup

    def first_output(self, warpgroup: Array) -> Array:
        """In the unit."""
        return warpgroup * ROWS

    def add(
        self,
        acc: Float32[Array, "M N"],
        *,
        weights: Any,
        scales: Any,
        x: Any,
        x_scales: Any,
        warpgroup: Array,
        interpret: mosaic.Interpret,
    ) -> Float32[Array, "M N"]:
        """acc with the products of the chunk added; the other operands are in shared memory."""
        if interpret is not None:
            made = _interpreted_groups(self, weights, scales, x, x_scales, warpgroup)
            for sums, row_scales, output_scales in made:
                acc = acc + sums.T * (output_scales[:, None] * row_scales[None, :])
            return acc
        return _emitted(self.shape, self._emit)(acc, weights, scales, x, x_scales)

    def _emit(self, ctx: Any, acc: Any, weights: Any, scales: Any, x: Any, x_scales: Any) -> Any:
        del ctx
        lane = mosaic.Lane.current()
        line_bytes, x_line_bytes = (ir.MemRefType(ref.type).shape[1] * 8 * LINE for ref in (weights, x))
        num_groups = ir.MemRefType(scales.type).shape[0]
        scale_row_bytes, x_scale_bytes = (ir.MemRefType(ref.type).shape[1] * 4 for ref in (scales, x_scales))
        # Two warps multiply 32 rows, which share a scale.
        block = mosaic.shr(lane.warp, 1)
        scale_at = mosaic.iadd(mosaic.shared_address(scales), mosaic.imul(block, 4))
        column_at = mosaic.iadd(mosaic.shared_address(x_scales), mosaic.imul(lane.quad, 8))
        first_row = mosaic.imul(mosaic.shr(lane.warp, 2), ROWS * LINE)
        left = descriptor(mosaic.iadd(mosaic.shared_address(weights), first_row))
        right = descriptor(mosaic.shared_address(x))
        sums = mosaic.scalars(acc)
        for at_once in batches(self.sum_registers, self.row_tile, num_groups):
            places = [divmod(g * GROUP, LINE) for g in at_once]
            rows = [[advance(left, line * line_bytes + piece)] for line, piece in places]
            columns = [advance(right, line * x_line_bytes + piece) for line, piece in places]
            for g, part in zip(at_once, multiply(rows, columns, self.row_tile), strict=True):
                row_scale = mosaic.as_f32(mosaic.load(scale_at, g * scale_row_bytes))
                add_scaled(
                    sums, part, (row_scale, row_scale), column_scales(column_at, g * x_scale_bytes, self.row_tile)
                )
        return mosaic.fragmented(sums, self.shape, acc.layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8RowsProduct:
    """One chunk of columns: 64 rows of x times E4M3 weights, for each warpgroup; operands as for `Fp8Product`.

    Of 128 rows of x a warpgroup has half and all 128 outputs; of 64 rows all, and half of the outputs.
    """

    row_tile: int
    sum_registers: int
    is_transposed = False

    def __post_init__(self) -> None:
        if self.row_tile not in (ROWS, WARPGROUPS * ROWS):
            raise ValueError(f"row_tile={self.row_tile} must be {ROWS} or {WARPGROUPS * ROWS}")

    @property
    def has_all_outputs(self) -> bool:
        """Of the unit, in each warpgroup."""
        return self.row_tile > ROWS

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: rows of x, outputs."""
        return ROWS, TILE_OUTPUTS if self.has_all_outputs else ROWS

    def first_row(self, warpgroup: Array) -> Array:
        """Of x, in the unit."""
        return warpgroup * ROWS if self.has_all_outputs else 0 * warpgroup

    def first_output(self, warpgroup: Array) -> Array:
        """In the unit."""
        return 0 * warpgroup if self.has_all_outputs else warpgroup * ROWS

    def add(
        self,
        acc: Float32[Array, "M N"],
        *,
        weights: Any,
        scales: Any,
        x: Any,
        x_scales: Any,
        warpgroup: Array,
        interpret: mosaic.Interpret,
    ) -> Float32[Array, "M N"]:
        """acc with the products of the chunk added; the other operands are in shared memory."""
        if interpret is not None:
            made = _interpreted_groups(self, weights, scales, x, x_scales, warpgroup)
            for sums, row_scales, output_scales in made:
                acc = acc + sums * (row_scales[:, None] * output_scales[None, :])
            return acc
        return _emitted(self.shape, self._emit)(acc, weights, scales, x, x_scales)

    def _emit(self, ctx: Any, acc: Any, weights: Any, scales: Any, x: Any, x_scales: Any) -> Any:
        del ctx
        lane, num_outputs = mosaic.Lane.current(), self.shape[1]
        line_bytes, x_line_bytes = (ir.MemRefType(ref.type).shape[1] * 8 * LINE for ref in (weights, x))
        num_groups = ir.MemRefType(scales.type).shape[0]
        scale_row_bytes, x_scale_bytes = (ir.MemRefType(ref.type).shape[1] * 4 for ref in (scales, x_scales))
        half = mosaic.shr(lane.warp, 2)  # which warpgroup this is
        x_at, weights_at = (mosaic.shared_address(ref) for ref in (x, weights))
        # Rows of the thread among the 64 of its warpgroup: this one and the eighth after it.
        row = mosaic.iadd(mosaic.imul(mosaic.iand(lane.warp, 3), 16), lane.row)
        row_at, scale_at = (mosaic.shared_address(ref) for ref in (x_scales, scales))
        if self.has_all_outputs:
            x_at = mosaic.iadd(x_at, mosaic.imul(half, ROWS * LINE))
            row = mosaic.iadd(row, mosaic.imul(half, ROWS))
        else:
            weights_at = mosaic.iadd(weights_at, mosaic.imul(half, ROWS * LINE))
            scale_at = mosaic.iadd(scale_at, mosaic.imul(half, 4 * ROWS // GROUP))
        row_at = mosaic.iadd(row_at, mosaic.imul(row, 4))
        left, right = descriptor(x_at), descriptor(weights_at)
        sums = mosaic.scalars(acc)
        for at_once in batches(self.sum_registers, num_outputs, num_groups):
            places = [divmod(g * GROUP, LINE) for g in at_once]
            rows = [[advance(left, line * x_line_bytes + piece)] for line, piece in places]
            columns = [advance(right, line * line_bytes + piece) for line, piece in places]
            for g, part in zip(at_once, multiply(rows, columns, num_outputs), strict=True):
                row_scales = [mosaic.as_f32(mosaic.load(row_at, g * x_scale_bytes + 32 * i)) for i in range(2)]
                of_outputs = [
                    mosaic.as_f32(word)
                    for pair in range(num_outputs // GROUP // 2)
                    for word in mosaic.load_words(scale_at, 2, g * scale_row_bytes + 8 * pair)
                ]
                factors = [[arith.mulf(row_scale, scale) for scale in of_outputs] for row_scale in row_scales]
                for i in range(len(sums)):
                    # Results come in blocks of 8 columns: two of the first row, two of the second.
                    sums[i] = llvm.intr_fma(part[i], factors[i // 2 % 2][i // 4 * 8 // GROUP], sums[i])
        return mosaic.fragmented(sums, self.shape, acc.layout)


def _emitted(shape: tuple[int, int], emit: Any) -> Any:
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    tiled, flat = plgpu.RefType(TILE_TRANSFORMS), plgpu.RefType()
    return plgpu.inline_mgpu(arg_types=(layout, tiled, flat, tiled, flat), return_type=result)(emit)


def _interpreted_groups(
    product: Fp8Product | Fp8RowsProduct, weights: Any, scales: Any, x: Any, x_scales: Any, warpgroup: Array
) -> list[tuple[Array, Array, Array]]:
    """For each group: products [rows of x, outputs] of one warpgroup, scales of the rows, scales of the outputs."""
    first_row, first_output = product.first_row(warpgroup), product.first_output(warpgroup)
    num_outputs, num_rows = product.shape if product.is_transposed else reversed(product.shape)
    rows = lax.dynamic_slice_in_dim(jnp.concatenate(list(x[...]), axis=1), first_row, num_rows)
    outputs = lax.dynamic_slice_in_dim(jnp.concatenate(list(weights[...]), axis=1), first_output, num_outputs)
    row_scales = lax.dynamic_slice_in_dim(x_scales[...], first_row, num_rows, axis=1)
    blocks = lax.dynamic_slice_in_dim(scales[...], first_output // GROUP, num_outputs // GROUP, axis=1)
    plgpu.commit_smem()  # see FoldedProduct.add
    rows, outputs = (decode_e4m3(codes).reshape(codes.shape[0], -1, GROUP) for codes in (rows, outputs))
    output_scales = jnp.repeat(blocks, GROUP, axis=1)
    products = [
        lax.dot_general(rows[:, g], outputs[:, g], (((1,), (1,)), ((), ()))) for g in range(row_scales.shape[0])
    ]
    return list(zip(products, row_scales, output_scales, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bf16Product:
    """One chunk of columns: 64 rows of bfloat16 weights times `row_tile` rows of x, for each warpgroup.

    weights [lines, 128, 64] and x [lines, T, 64] are the chunk's lines of 64 columns, BF16_TRANSFORMS. Sums stay in the
    tensor cores' float32 accumulators from chunk to chunk.
    """

    row_tile: int
    is_transposed = True

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: outputs, rows of x."""
        return ROWS, self.row_tile

    def first_row(self, warpgroup: Array) -> Array:
        """Of x, in the unit."""
        return 0 * warpgroup

    def first_output(self, warpgroup: Array) -> Array:
        """In the unit."""
        return warpgroup * ROWS

    def add(
        self,
        acc: Float32[Array, "M N"],
        *,
        weights: Any,
        scales: Any,
        x: Any,
        x_scales: Any,
        warpgroup: Array,
        interpret: mosaic.Interpret,
    ) -> Float32[Array, "M N"]:
        """acc with the products of the chunk added; the other operands are in shared memory, scales are not read."""
        del scales, x_scales
        if interpret is not None:
            rows, columns = (jnp.concatenate(list(ref[...]), axis=1) for ref in (weights, x))
            plgpu.commit_smem()  # see FoldedProduct.add
            rows = lax.dynamic_slice_in_dim(rows, warpgroup * ROWS, ROWS)
            contract = (((1,), (1,)), ((), ()))
            return acc + lax.dot_general(rows, columns, contract, preferred_element_type=jnp.float32)
        layout, tiled = plgpu.Layout.WGMMA, plgpu.RefType(BF16_TRANSFORMS)
        result = plgpu.ShapeDtypeStruct(self.shape, jnp.float32, layout=layout)
        return plgpu.inline_mgpu(arg_types=(layout, tiled, tiled), return_type=result)(self._emit)(acc, weights, x)

    def _emit(self, ctx: Any, acc: Any, weights: Any, x: Any) -> Any:
        del ctx
        lane = mosaic.Lane.current()
        line_bytes, x_line_bytes = (ir.MemRefType(ref.type).shape[1] * 8 * LINE for ref in (weights, x))
        num_lines = ir.MemRefType(x.type).shape[0]
        first_row = mosaic.imul(mosaic.shr(lane.warp, 2), ROWS * LINE)
        left = descriptor(mosaic.iadd(mosaic.shared_address(weights), first_row))
        right = descriptor(mosaic.shared_address(x))
        places = [(line, piece) for line in range(num_lines) for piece in range(0, LINE, 32)]  # 16 columns each
        rows = [advance(left, line * line_bytes + piece) for line, piece in places]
        columns = [advance(right, line * x_line_bytes + piece) for line, piece in places]
        sums = _accumulate(mosaic.scalars(acc), rows, columns, self.row_tile)
        return mosaic.fragmented(sums, self.shape, acc.layout)


def _accumulate(sums: Sequence[Register], rows: Sequence[Any], columns: Sequence[Any], num_columns: int) -> list[Any]:
    """sums + products of bfloat16 operands, one instruction of 16 columns for each pair of descriptors; waits."""
    count = len(sums)
    results = ", ".join(f"${r}" for r in range(count))
    lines = ["{", ".reg .pred p;", "setp.ne.b32 p, 1, 0;", "wgmma.fence.sync.aligned;"]
    lines += [
        f"wgmma.mma_async.sync.aligned.m64n{num_columns}k16.f32.bf16.bf16 "
        f"{{{results}}}, ${2 * count + i}, ${2 * count + len(rows) + i}, p, 1, 1, 0, 0;"
        for i in range(len(rows))
    ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    constraints = ["=f"] * count + [str(r) for r in range(count)] + ["l"] * (len(rows) + len(columns))
    number = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([number] * count),
        [*sums, *rows, *columns],
        "\n".join(lines),
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, struct, [i]) for i in range(count)]


def store_sums(
    acc: Float32[Array, "M N"],
    out: Any,
    row: Array,
    column: Array,
    *,
    is_transposed: bool,
    interpret: mosaic.Interpret,
) -> None:
    """Writes acc, or acc.T, to device memory from out[row, column] on, float32, without staging it.

    A warp writes pieces of 32 bytes, the least that memory is written by.
    """
    if interpret is not None:
        values = acc.T if is_transposed else acc
        out[pl.ds(row, values.shape[0]), pl.ds(column, values.shape[1])] = values
        return
    splat = plgpu.Layout.WG_SPLAT(())
    emit = _emit_transposed if is_transposed else _emit_plain
    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), splat, splat))(emit)(acc, out, row, column)


def _emit_transposed(ctx: Any, acc: Any, out: Any, row: Any, column: Any) -> None:
    """Of each 8 rows of the output a thread has two neighbours, in two columns that are 8 apart."""
    del ctx
    lane, row_bytes = mosaic.Lane.current(), 4 * ir.MemRefType(out.type).shape[1]
    own_row = mosaic.imul(lane.quad, 2)
    own_column = mosaic.iadd(mosaic.imul(mosaic.iand(lane.warp, 3), 16), lane.row)
    start = _place(out, row, column, own_row, own_column)
    for i, value in enumerate(mosaic.scalars(acc)):
        _store(value, start, (i // 4 * 8 + i % 2) * row_bytes + i // 2 % 2 * 32)


def _emit_plain(ctx: Any, acc: Any, out: Any, row: Any, column: Any) -> None:
    """Of each 8 columns of the output a thread has two neighbours, in two rows that are 8 apart."""
    del ctx
    lane, row_bytes = mosaic.Lane.current(), 4 * ir.MemRefType(out.type).shape[1]
    own_row = mosaic.iadd(mosaic.imul(mosaic.iand(lane.warp, 3), 16), lane.row)
    start = _place(out, row, column, own_row, mosaic.imul(lane.quad, 2))
    for i, pair in enumerate(acc.registers.flat):
        _store(pair, start, i % 2 * 8 * row_bytes + i // 2 * 32)


def _place(out: Any, row: Any, column: Any, own_row: Register, own_column: Register) -> Any:
    own_row = mosaic.iadd(row.registers.item(), own_row)
    own_column = mosaic.iadd(column.registers.item(), own_column)
    row_bytes = 4 * ir.MemRefType(out.type).shape[1]
    return row_address(global_address(out), own_row, row_bytes, mosaic.imul(own_column, 4))


def _store(value: Any, start: Any, offset: int) -> None:
    i64 = ir.IntegerType.get_signless(64)
    place = arith.addi(start, arith.constant(i64, ir.IntegerAttr.get(i64, offset)))
    llvm.store(value, llvm.inttoptr(llvm.PointerType.get(1), place))
