"""Packed weights of routed experts on their way to tensor cores: words of nibbles become E5M2 codes in registers."""

from collections.abc import Sequence

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.experts.packed import CODES_HIGH, CODES_LOW
from deepinfer_jax.kernels.mosaic import Register


def decoded(words: Sequence[Register], step: Register) -> list[tuple[Register, Register]]:
    """E5M2 codes of packed words of one group: for each word those of its first four weights and of the others.

    The nibbles choose among the eight codes of a table, which PRMT holds in two registers; it reads four of them.
    """
    low = mosaic.iadd(mosaic.imul(step, 0x01010100), mosaic.i32(CODES_LOW))  # zero stays zero
    high = mosaic.iadd(mosaic.imul(step, 0x01010101), mosaic.i32(CODES_HIGH))
    codes = []
    for word in words:
        chosen = mosaic.iand(word, 0x77777777)
        first = mosaic.prmt(low, high, chosen)
        second = mosaic.prmt(low, high, mosaic.shr(chosen, 16))
        signs = mosaic.iand(mosaic.shl(word, 4), 0x80808080), mosaic.iand(word, 0x80808080)
        codes.append((mosaic.ior(first, signs[0]), mosaic.ior(second, signs[1])))
    return codes
