"""Rows of a table in pinned host memory, read by the GPU itself over the bus.

Roofline: the bytes of the rows at some 50 GB/s: 16 us for the 3,072 rows of 264 bytes that 128 rows of a step need.
Memory of the host limits.

With JAX's own way the host gathers the rows. It has to wait for the row numbers, and while it does it launches nothing:
the kernels behind the look-up reach the device one by one. Here the host takes no part in a step. Every thread moves
one piece of a row, so that as many reads are under way as the bus takes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Int, UInt8

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.kernels.ptx import global_address, inline, ptx, row_address, scalar

THREADS = 128  # of a block
_WORDS = (4, 2, 1)  # of a piece, the largest that divides a row
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def refuses(table: Array, numbers: Array) -> str | None:
    """Why the kernel cannot read this table; None if it can."""
    if table.ndim != 2 or table.dtype != jnp.uint8:
        return f"the table is {table.dtype} of {table.ndim} axes, not uint8 of two"
    if table.shape[1] % 4:
        return f"rows of {table.shape[1]} bytes are not whole words"
    return None


def take_rows(
    table: UInt8[Array, "R W"], numbers: Int[Array, " N"], *, interpret: Interpret = None
) -> UInt8[Array, "N W"]:
    """`table[numbers]`, zeros for a negative number. The table may lie in host memory that the device can reach."""
    count, width = numbers.shape[0], table.shape[1]
    if not count:
        return jnp.zeros((0, width), jnp.uint8)
    if interpret is not None:
        return jnp.where((numbers >= 0)[:, None], table[jnp.maximum(numbers, 0)], jnp.uint8(0))
    words = next(words for words in _WORDS if width % (4 * words) == 0)
    pieces = width // (4 * words)
    kernel = plgpu.kernel(
        functools.partial(_take_block, words=words, pieces=pieces),
        kernel_name="take_host_rows",
        out_type=jax.ShapeDtypeStruct((count, width), jnp.uint8),
        grid=(-(-count * pieces // THREADS),),
        grid_names=("block",),
        compiler_params=_COMPILER_PARAMS,
    )
    return kernel(table, numbers.astype(jnp.int32))


def _take_block(table: Any, numbers: Any, out: Any, *, words: int, pieces: int) -> None:
    (count, width), ref = out.shape, plgpu.RefType()
    vector = {4: ".v4", 2: ".v2", 1: ""}[words]
    kept = "{" + ", ".join(f"${i}" for i in range(words)) + "}" if words > 1 else "$0"
    given = "{" + ", ".join(f"${i + 1}" for i in range(words)) + "}" if words > 1 else "$1"

    def take(_: Any, table: Any, numbers: Any, out: Any, block: Any) -> None:
        """Neighbouring threads have neighbouring pieces; threads behind the last piece repeat it."""
        index = mosaic.iadd(mosaic.imul(scalar(block), THREADS), mgpu.thread_idx())
        index = arith.minui(index, mosaic.i32(count * pieces - 1))
        row, piece = (op(index, mosaic.i32(pieces)) for op in (arith.divui, arith.remui))
        offset = mosaic.imul(piece, 4 * words)
        number = ptx("ld.global.b32 $0, [$1];", row_address(global_address(numbers), row, 4, mosaic.i32(0)))
        there = arith.maxsi(number, mosaic.i32(0))
        source = row_address(global_address(table), there, width, offset)
        loaded = ptx(f"ld.global{vector}.b32 {kept}, [${words}];", source, count=words)
        # All bits of a number's sign: what is kept of each word.
        mask = arith.xori(arith.shrsi(number, mosaic.i32(31)), mosaic.i32(0xFFFFFFFF))
        moved = [arith.andi(word, mask) for word in (loaded if words > 1 else [loaded])]
        target = row_address(global_address(out), row, width, offset)
        ptx(f"st.global{vector}.b32 [$0], {given};", target, *moved, count=0)

    inline(take, (ref, ref, ref, plgpu.Layout.WG_SPLAT(shape=())))(table, numbers, out, lax.axis_index("block"))
