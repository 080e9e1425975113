"""Packed weights of routed experts on their way to tensor cores: words of nibbles become E5M2 codes in registers."""

from collections.abc import Sequence

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.fp4_codes import code_table, magnitudes
from deepinfer_jax.kernels.mosaic import Register


def decoded(words: Sequence[Register], step: Register) -> list[tuple[Register, Register]]:
    """E5M2 codes of packed words of one group: for each word those of its first four weights and of the others.

    Signs lie apart, as `PackedExperts` has them.
    """
    table, codes = code_table(step), []
    for word in words:
        first, second = magnitudes(word, table)
        signs = mosaic.iand(mosaic.shl(word, 4), 0x80808080), mosaic.iand(word, 0x80808080)
        codes.append((mosaic.ior(first, signs[0]), mosaic.ior(second, signs[1])))
    return codes
