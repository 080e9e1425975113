"""PTX inside Mosaic GPU kernels, and arrays as the words that single threads hold.

For the bodies of `plgpu.inline_mgpu`, like the operations on registers in `mosaic.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from deepinfer_jax.kernels.mosaic import Register


def line_tiles(columns: int, line_bytes: int) -> Any:
    """Transforms of shared memory arrays that tensor cores read: lines of so many columns in tiles of 8, swizzled."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(line_bytes)  # pyright: ignore[reportAbstractUsage]


def inline(function: Callable[..., Any], arg_types: Sequence[Any], return_type: Any = None) -> Callable[..., Any]:
    """`function`, which gets a context and then its arguments in the terms of MLIR, to be called in a kernel's body."""
    return plgpu.inline_mgpu(arg_types=tuple(arg_types), return_type=return_type)(function)


def ptx(text: str, *args: Any, count: int = 1) -> Any:
    """PTX with `count` words as results, $0 and following, and args after these; never moved or merged.

    One result comes as it is, several as a tuple, none as None. Results must not be written before all args were read.
    """
    if count == 0:
        return mgpu_utils.inline_ptx(text, *args, has_side_effects=True)
    word = ir.IntegerType.get_signless(32)
    types = [word] * count if count > 1 else word
    return mgpu_utils.inline_ptx(text, *args, result_types=types, has_side_effects=True)


def load_shared(address: Register, offset: int = 0) -> Register:
    """A word of shared memory, read at this place of the program."""
    return ptx(f"ld.shared.b32 $0, [$1 + {offset}];", address)


def global_address(ref: Any) -> Any:
    """Where a reference into device memory begins, in 64 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def row_address(address: Any, row: Register, row_bytes: int, offset: Register) -> Any:
    """address + row * row_bytes + offset, in 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    start = arith.muli(arith.extsi(i64, row), arith.constant(i64, row_bytes))
    return arith.addi(arith.addi(address, start), arith.extui(i64, offset))


def scalar(array: Any) -> Register:
    """The value of an argument that every thread has."""
    return array.registers.item()


def words_of(array: Any) -> list[Register]:
    """The words of this thread in an argument whose registers hold one each."""
    return [vector.extract(word, [], [0]) for word in array.registers.flat]


def array_of(words: Sequence[Register], shape: tuple[int, ...], layout: Any) -> Any:
    """An array result of a shape in `layout` whose registers hold one value each, from those of this thread."""
    registers = [vector.from_elements(ir.VectorType.get((1,), word.type), [word]) for word in words]
    is_signed = True if isinstance(words[0].type, ir.IntegerType) else None
    form = layout.to_mgpu()
    grid = np.array(registers, dtype=object).reshape(form.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=grid, _layout=form, _is_signed=is_signed)
