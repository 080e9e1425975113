"""Products of residual streams with float32 weights, by tensor cores (`mma.sync`) and as exact as those of float32.

A weight is cut into three numbers of 8 bits each, which add up to its 24. Tensor cores multiply these with the streams'
bfloat16 exactly and add in float32. So 24 outputs cost 72 columns, a fraction of what float32 takes on ordinary cores.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, BFloat16, Float32

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import Interpret, Register
from deepinfer_jax.kernels.ptx import inline

WARPS = 4
ROWS = 16  # of an instruction
CHANNELS = 128  # that a block multiplies at once
OUTPUTS = 24
SUMS = 32  # numbers of a row: the outputs, then in every other place a sum of squares, and zeros between these
QUAD, QUAD_CHANNELS = 4, 8  # threads that share a row, and the neighbouring channels of each
WARP_CHANNELS = QUAD * QUAD_CHANNELS
# Lines of 128 channels: a warp has 32 of them, a thread 8 neighbours in every eighth line.
LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((8, CHANNELS), (8, WARP_CHANNELS), (QUAD_CHANNELS,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# A row of 32 numbers, one in each thread of every warp; and a number for each line.
NUMBERS = plgpu.Layout.TILED(
    plgpu.Tiling(((1, SUMS), (1,))), warp_dims=(plgpu.Replicated(WARPS),), lane_dims=(-2,), vector_dim=-1
)
OF_LINES = LINES.reduce(1)
_HIGH_HALF = 0xFFFF0000


def no_sums() -> Float32[Array, "M N"]:
    """What `add_products` begins with: for each warp the numbers of 16 rows."""
    return plgpu.layout_cast(jnp.zeros((WARPS * ROWS, SUMS), jnp.float32), plgpu.Layout.WGMMA)


def add_products(
    sums: Float32[Array, "M N"], x: BFloat16[Array, "R K"], w: Float32[Array, "O K"], *, interpret: Interpret
) -> Float32[Array, "M N"]:
    """sums [4 * 16, 32] with those of 128 channels added; each warp has sums of its own, of its 32 channels.

    x [8 or 16, 128], w [24, 128] in LINES. The numbers of a row are x @ w.T, and sums of squares of x.
    """
    if interpret is not None:
        return sums + _interpreted(x, w)
    wgmma = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=wgmma)
    return inline(_emit, (wgmma, LINES, LINES), result)(sums, x, w)


def _interpreted(x: Array, w: Array) -> Array:
    rows = x.shape[0]
    of_warps = x.astype(jnp.float32).reshape(rows, WARPS, WARP_CHANNELS)
    products = lax.dot_general(
        of_warps,
        w.reshape(OUTPUTS, WARPS, WARP_CHANNELS),
        (((2,), (2,)), ((1,), (1,))),
        precision=lax.Precision.HIGHEST,
    )
    squares = jnp.sum(jnp.square(of_warps.reshape(rows, WARPS, QUAD, QUAD_CHANNELS)), axis=3)
    spaced = jnp.stack([squares, jnp.zeros_like(squares)], axis=3).reshape(rows, WARPS, 2 * QUAD)
    numbers = jnp.concatenate([products, jnp.swapaxes(spaced, 0, 1)], axis=2)
    return jnp.pad(numbers, ((0, 0), (0, ROWS - rows), (0, 0))).reshape(WARPS * ROWS, SUMS)


def _emit(_: Any, sums: Any, x: Any, w: Any) -> Any:
    """A thread has two rows of x, and one of each 8 rows of w; order of channels within a warp is that of threads."""
    numbers = mosaic.scalars(sums)  # of each 8: two of the first row, two of the second
    lines = [_words(line) for line in x.registers.flat]
    for half, line in enumerate(lines):
        place = 4 * (OUTPUTS // 8) + 2 * half
        for value in (value for word in line for value in _values(word)):
            numbers[place] = llvm.intr_fma(value, value, numbers[place])
    first, second = lines if len(lines) == 2 else (lines[0], [mosaic.i32(0)] * len(lines[0]))
    for tile, line in enumerate(w.registers.flat):
        parts = _cut([vector.extract(line, [], [i]) for i in range(QUAD_CHANNELS)])
        of_tile = slice(4 * tile, 4 * tile + 4)
        for i in range(0, QUAD_CHANNELS // 2, 2):
            rows = [first[i], second[i], first[i + 1], second[i + 1]]
            for part in parts:
                numbers[of_tile] = _multiply(numbers[of_tile], rows, part[i : i + 2])
    return mosaic.fragmented(numbers, sums.shape, sums.layout)


def _words(line: ir.Value) -> list[Register]:
    """The words of 8 bfloat16 numbers."""
    words = vector.bitcast(ir.VectorType.get((QUAD_CHANNELS // 2,), ir.IntegerType.get_signless(32)), line)
    return [vector.extract(words, [], [i]) for i in range(QUAD_CHANNELS // 2)]


def _values(word: Register) -> tuple[Register, Register]:
    """The two bfloat16 numbers of a word as float32."""
    return mosaic.as_f32(mosaic.shl(word, 16)), mosaic.as_f32(mosaic.iand(word, _HIGH_HALF))


def _cut(values: list[Register]) -> list[list[Register]]:
    """float32 numbers as sums of three bfloat16 ones, largest first; each as words of two neighbours."""
    parts = []
    for _ in range(3):
        bits = [mosaic.as_i32(value) for value in values]
        parts.append([_high_halves(low, high) for low, high in zip(bits[::2], bits[1::2], strict=True)])
        heads = [mosaic.as_f32(mosaic.iand(word, _HIGH_HALF)) for word in bits]
        values = [arith.subf(value, head) for value, head in zip(values, heads, strict=True)]
    return parts


def _high_halves(low: Register, high: Register) -> Register:
    """The upper halves of two words in one."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [low, high], "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", asm_dialect=0)


def _multiply(sums: list[Register], rows: list[Register], columns: list[Register]) -> list[Register]:
    """sums + rows @ columns: 16 rows times 8 columns, over 16 bfloat16 numbers of each."""
    number = ir.F32Type.get()
    results = llvm.inline_asm(
        llvm.StructType.get_literal([number] * len(sums)),
        [*rows, *columns, *sums],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
        asm_dialect=0,
    )
    return [llvm.extractvalue(number, results, [i]) for i in range(len(sums))]
