"""The product of one warpgroup of the routed experts on SM90, and what it does with the sums; compiled or interpreted.

Both operands of an instruction are E5M2 with all powers of two in their codes (`packed`, `rows`), so nothing
is scaled between instructions. The tensor cores' own sums keep about 14 bits: they run over one chunk of 256 columns,
and chunks are added in float32.
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
from deepinfer_jax.kernels.experts.nibbles import decoded
from deepinfer_jax.kernels.experts.packed import CHUNK, GROUPS, decode_chunk
from deepinfer_jax.kernels.experts.rows import TERMS, natural_order
from deepinfer_jax.kernels.mosaic import Register
from deepinfer_jax.kernels.ptx import array_of, global_address, inline, row_address, scalar, words_of
from deepinfer_jax.kernels.warpgroup import LINE, ROWS, TILE_TRANSFORMS, advance, descriptor

# Half of the rows of a product: rows 0 to 7 of each 16, or rows 8 to 15.
HALF_ROWS = ROWS // 2
# Half of the rows, pairs in place of columns: a thread has one row, and every fourth pair.
HALF_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((HALF_ROWS, 4), (8, 4), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
PIECES = 2  # of 16 bytes, that a thread reads of a row of a chunk
WORDS = 4  # of a piece; each is one instruction's


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedProduct:
    """One chunk of 256 columns: 64 rows of packed weights times the codes of `num_pairs` rows of x.

    Of every 16 rows of the result, 8 are rows of a first tile of weights and 8 the same rows of a second one; columns
    2 p and 2 p + 1 are of both terms of pair p. weights [2, rows, 128] is the packed chunk of both tiles,
    TILE_TRANSFORMS; steps [2, blocks, 256] as in `PackedExperts`; x [2, 2 T, 128] is E5M2 in `column_order`,
    TILE_TRANSFORMS.

    A thread takes whole groups of its rows: the one of number 2 q + j in a chunk, 16 bytes in one reading, where q is
    its place among the four that share a row and j is 0, then 1. Rows that are read together then lie in different
    banks. Word i of these is for instruction 4 j + i, which therefore multiplies eight columns of each of four groups.
    """

    num_pairs: int
    at_once: int  # pieces whose codes are in registers together: 1 or 2

    @property
    def num_columns(self) -> int:
        """Of an instruction."""
        return TERMS * self.num_pairs

    def add(
        self,
        acc: Float32[Array, "M N"],
        *,
        weights: Any,
        steps: Any,
        x: Any,
        warpgroup: Array,
        interpret: mosaic.Interpret,
    ) -> Float32[Array, "M N"]:
        """acc [64, num_columns] with the products of the chunk added; the other operands are in shared memory."""
        if interpret is not None:
            total = acc + self._interpreted(weights[...], steps[...], x[...], warpgroup)
            # What orders these reads before the next copies is a barrier; the race detector also wants a fence.
            plgpu.commit_smem()
            return total
        layout = plgpu.Layout.WGMMA
        result = plgpu.ShapeDtypeStruct((ROWS, self.num_columns), jnp.float32, layout=layout)
        tiled = plgpu.RefType(TILE_TRANSFORMS)
        return inline(self._emit, (layout, tiled, plgpu.RefType(), tiled), result)(acc, weights, steps, x)

    def _interpreted(self, weights: Array, steps: Array, x: Array, warpgroup: Array) -> Float32[Array, "M N"]:
        codes = natural_order(jnp.concatenate([x[0, : self.num_columns], x[1, : self.num_columns]], axis=1))
        columns = lax.bitcast_convert_type(codes, jnp.float8_e5m2).astype(jnp.float32)
        first, halves = warpgroup * HALF_ROWS, []
        for tile in range(2):
            packed = lax.dynamic_slice_in_dim(weights[tile], first, HALF_ROWS)
            of_row = lax.dynamic_slice_in_dim(steps[tile].reshape(-1, GROUPS), first, HALF_ROWS)
            halves.append(decode_chunk(packed, of_row).reshape(-1, 8, CHUNK))
        rows = jnp.stack(halves, axis=1).reshape(ROWS, CHUNK)
        return lax.dot_general(rows, columns, (((1,), (1,)), ((), ())))

    def _emit(self, ctx: Any, acc: Any, weights: Any, steps: Any, x: Any) -> Any:
        del ctx
        lane = mosaic.Lane.current()
        row = mosaic.iadd(mosaic.imul(lane.warp, 8), lane.row)  # of both tiles
        tile_bytes, x_line_bytes = (ir.MemRefType(ref.type).shape[1] * 8 * LINE for ref in (weights, x))
        tile_steps = ir.MemRefType(steps.type).shape[1] * CHUNK
        # Swizzling exchanges 16-byte pieces within a line: piece p of row r lies at p ^ (r % 8).
        piece = arith.xori(mosaic.shl(lane.quad, 1), lane.row)
        codes_at = mosaic.iadd(mosaic.imul(row, LINE), mosaic.shl(piece, 4))
        codes_at = mosaic.iadd(mosaic.shared_address(weights), codes_at)
        steps_at = mosaic.iadd(mosaic.imul(row, GROUPS), mosaic.shl(lane.quad, 1))
        steps_at = mosaic.iadd(mosaic.shared_address(steps), steps_at)
        x_at = descriptor(mosaic.shared_address(x))
        part = None
        for first in range(0, PIECES, self.at_once):
            operands, descriptors = [], []
            for j in range(first, first + self.at_once):
                at = mosaic.ixor(codes_at, j * 16)
                halves = [
                    decoded(
                        mosaic.load_words(at, WORDS, tile * tile_bytes),
                        mosaic.load_byte(steps_at, tile * tile_steps + j),
                    )
                    for tile in range(2)
                ]
                for i, (upper, lower) in enumerate(zip(*halves, strict=True)):
                    operands.append([upper[0], lower[0], upper[1], lower[1]])
                    descriptors.append(advance(x_at, j * x_line_bytes + i * 32))
            part = chained(part, operands, descriptors, self.num_columns)
        assert part is not None
        sums = [arith.addf(a, b) for a, b in zip(mosaic.scalars(acc), part, strict=True)]
        return mosaic.fragmented(sums, (ROWS, self.num_columns), acc.layout)


def chained(
    sums: Sequence[Register] | None, rows: Sequence[Sequence[Register]], columns: Sequence[Any], num_columns: int
) -> list[Register]:
    """sums, or zeros for None, + products of E5M2 operands, one instruction of 32 columns each, in this order.

    rows: the four words of each left operand. columns: descriptors. Waits for the results: one block of assembly, so
    that nothing comes between the instructions and the wait.
    """
    count = num_columns // 2
    start = count if sums is None else 2 * count  # of the operands behind the sums
    results = ", ".join(f"${r}" for r in range(count))
    lines = ["{", ".reg .pred p, q;", "setp.ne.b32 p, 0, 0;", "setp.ne.b32 q, 1, 0;", "wgmma.fence.sync.aligned;"]
    for i in range(len(rows)):
        words = ", ".join(f"${start + 4 * i + r}" for r in range(4))
        is_added = "p" if sums is None and i == 0 else "q"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{num_columns}k32.f32.e5m2.e5m2 "
            f"{{{results}}}, {{{words}}}, ${start + 4 * len(rows) + i}, {is_added}, 1, 1;"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    tied = [] if sums is None else [str(r) for r in range(count)]
    constraints = ["=f"] * count + tied + ["r"] * (4 * len(rows)) + ["l"] * len(columns)
    number = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([number] * count),
        [*(sums or ()), *(word for words in rows for word in words), *columns],
        "\n".join(lines),
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(number, struct, [i]) for i in range(count)]


def scaled_halves(
    acc: Float32[Array, "M N"], row_scales: Any, factors: Any, *, warpgroup: Array, interpret: mosaic.Interpret
) -> tuple[Array, Array]:
    """Products of rows and pairs, of the first and of the second tile: [64, 2 N] -> two of [32, N] in HALF_LAYOUT.

    The terms of a pair are added and multiplied with both scales. row_scales [2, rows] of both tiles and factors
    [.., T], whose first row has the scales of pairs, are in shared memory.
    """
    num_pairs = acc.shape[1] // TERMS
    if interpret is not None:
        sums = (acc[:, 0::TERMS] + acc[:, 1::TERMS]).reshape(-1, 2, 8, num_pairs)
        of_pairs, halves = factors[0, pl.ds(0, num_pairs)], []
        for tile in range(2):
            of_rows = row_scales[tile, pl.ds(warpgroup * HALF_ROWS, HALF_ROWS)]
            scales = of_rows[:, None] * of_pairs[None, :]
            halves.append(sums[:, tile].reshape(HALF_ROWS, num_pairs) * scales)
        return halves[0], halves[1]
    half, ref = _half(num_pairs), plgpu.RefType()
    return inline(_emit_halves, (plgpu.Layout.WGMMA, ref, ref), (half, half))(acc, row_scales, factors)


def _emit_halves(ctx: Any, acc: Any, row_scales: Any, factors: Any) -> tuple[Any, Any]:
    del ctx
    lane, values, num_pairs = mosaic.Lane.current(), mosaic.scalars(acc), acc.shape[1] // TERMS
    row_at = mosaic.imul(mosaic.iadd(mosaic.imul(lane.warp, 8), lane.row), 4)
    row_at = mosaic.iadd(mosaic.shared_address(row_scales), row_at)
    tile_bytes = ir.MemRefType(row_scales.type).shape[1] * 4
    of_rows = [mosaic.as_f32(mosaic.load(row_at, tile * tile_bytes)) for tile in range(2)]
    halves: list[list[Register]] = [[], []]
    for block, of_pair in enumerate(_of_pairs(factors, 0, num_pairs)):
        for tile in range(2):
            # Of each 8 columns a thread has two neighbours, which are the terms of a pair, in a row of either tile.
            first, second = values[4 * block + 2 * tile : 4 * block + 2 * tile + 2]
            scale = arith.mulf(of_rows[tile], of_pair)
            halves[tile].append(arith.mulf(arith.addf(first, second), scale))
    upper, lower = (array_of(half, (HALF_ROWS, num_pairs), HALF_LAYOUT) for half in halves)
    return upper, lower


def shares_of(factors: Any, num_pairs: int, *, interpret: mosaic.Interpret) -> Float32[Array, "M N"]:
    """The second row of factors [2, T] in shared memory for each of 32 rows, in HALF_LAYOUT."""
    if interpret is not None:
        return jnp.broadcast_to(factors[1, pl.ds(0, num_pairs)][None, :], (HALF_ROWS, num_pairs))

    def emit(_: Any, factors: Any) -> Any:
        return array_of(_of_pairs(factors, 1, num_pairs), (HALF_ROWS, num_pairs), HALF_LAYOUT)

    return inline(emit, (plgpu.RefType(),), _half(num_pairs))(factors)


def store_rows(
    values: Float32[Array, "M N"],
    out: Any,
    row: Array,
    column: Array,
    *,
    interpret: mosaic.Interpret,
) -> None:
    """Writes values.T, [N, 32], to device memory from out[row, column] on, rounded to bfloat16, without staging it.

    values are in HALF_LAYOUT. Two neighbouring warps write the 32 bytes that memory is written by.
    """
    if interpret is not None:
        out[pl.ds(row, values.shape[1]), pl.ds(column, HALF_ROWS)] = values.T.astype(jnp.bfloat16)
        return
    splat = plgpu.Layout.WG_SPLAT(())
    inline(_emit_rows, (HALF_LAYOUT, plgpu.RefType(), splat, splat))(values, out, row, column)


def _emit_rows(ctx: Any, values: Any, out: Any, row: Any, column: Any) -> None:
    del ctx
    lane, row_bytes = mosaic.Lane.current(), 2 * ir.MemRefType(out.type).shape[1]
    own_row = mosaic.iadd(scalar(row), lane.quad)
    own_column = mosaic.iadd(mosaic.imul(mosaic.iand(lane.warp, 3), 8), lane.row)
    own_column = mosaic.iadd(scalar(column), own_column)
    start = row_address(global_address(out), own_row, row_bytes, mosaic.imul(own_column, 2))
    i64 = ir.IntegerType.get_signless(64)
    for block, value in enumerate(words_of(values)):
        rounded = arith.truncf(ir.BF16Type.get(), value)
        place = arith.addi(start, arith.constant(i64, ir.IntegerAttr.get(i64, 4 * block * row_bytes)))
        llvm.store(rounded, llvm.inttoptr(llvm.PointerType.get(1), place))


def _half(num_pairs: int) -> Any:
    return plgpu.ShapeDtypeStruct((HALF_ROWS, num_pairs), jnp.float32, layout=HALF_LAYOUT)


def _of_pairs(factors: Any, row: int, num_pairs: int) -> list[Register]:
    """A row of factors for the pairs of a thread, float32."""
    at = mosaic.iadd(mosaic.shared_address(factors), mosaic.imul(mosaic.Lane.current().quad, 4))
    row_bytes = ir.MemRefType(factors.type).shape[1] * 4
    return [mosaic.as_f32(mosaic.load(at, row * row_bytes + 16 * block)) for block in range(num_pairs // 4)]
