"""E2M1 as E5M2 with a power of two in its codes, and such codes as rows of tensor memory on SM100.

E2M1 times a power of two is exact in E5M2 for 27 neighbouring exponents. The nibbles choose from a table of the codes
of eight magnitudes, to which a step is added: a byte for each group of columns that share a scale.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import Register

# E5M2 codes of the magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6, first in the lowest byte, where 0.5 is the least normal
# number, 2^-14. A step of 4 doubles all but the zero.
CODES_LOW, CODES_HIGH = 0x0A080400, 0x12100E0C
STEPS = 26  # doublings; 6 then becomes 1.5 * 2^15, which is the largest number with such a mantissa
TOP_STEP = 4 * STEPS
TOP_FACTOR = 2.0 ** (STEPS - 13)  # what codes with that step mean, as a multiple of their value
MAGNITUDES = 0x77777777  # of the eight nibbles of a word
ROWS = 128  # of tensor memory; a thread of a warpgroup has one
# What tensor memory takes from registers: a row for each thread, four codes in each word.
BY_ROW = plgpu.Layout.TILED(plgpu.Tiling(((ROWS, 4), (32, 4))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)


def code_table(step: Register) -> tuple[Register, Register]:
    """The codes of eight magnitudes with a step, as PRMT reads them."""
    low = mosaic.iadd(mosaic.imul(step, 0x01010100), mosaic.i32(CODES_LOW))  # zero stays zero
    return low, mosaic.iadd(mosaic.imul(step, 0x01010101), mosaic.i32(CODES_HIGH))


def magnitudes(word: Register, table: tuple[Register, Register]) -> tuple[Register, Register]:
    """Codes without signs of the low and of the high four nibbles of a word."""
    chosen = mosaic.iand(word, MAGNITUDES)
    return mosaic.prmt(*table, chosen), mosaic.prmt(*table, mosaic.shr(chosen, 16))


def signed_codes(word: Register, table: tuple[Register, Register]) -> tuple[Register, Register]:
    """Codes of the low and of the high four nibbles of a word, each of which has its own sign."""
    signs = mosaic.iand(mosaic.shr(word, 3), 0x11111111)  # chooses between bytes 0x00 and 0x80
    zero, bytes_of_signs = mosaic.i32(0), mosaic.i32(0x8000)
    found = (mosaic.prmt(bytes_of_signs, zero, half) for half in (signs, mosaic.shr(signs, 16)))
    first, second = (mosaic.ior(*pair) for pair in zip(magnitudes(word, table), found, strict=True))
    return first, second


def rows_of_codes(words: Sequence[Register]) -> Any:
    """E5M2 codes [128, 4 * words] in BY_ROW, from the words of the row of this thread."""
    codes = ir.VectorType.get((4,), ir.Float8E5M2Type.get())
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    registers = [vector.bitcast(codes, vector.from_elements(one, [word])) for word in words]
    layout = BY_ROW.to_mgpu()
    grid = np.array(registers, dtype=object).reshape(layout.registers_shape((ROWS, 4 * len(words))))
    return mgpu.FragmentedArray(_registers=grid, _layout=layout, _is_signed=None)
