"""Kernels for SM100 assemble without spills into the instructions that they are written for; no GPU takes part."""

import functools

import pytest

from deepinfer_jax.testing import assembly

# One size of each kernel, or a few: an op with cases, and the name of the case.
CASES = [
    ("experts", "decode_128_rows"),
    ("linear", "wo_b_128_rows"),
    ("linear", "wo_a_128_rows"),
    ("linear", "router_16_rows"),
    ("attention", "decode_128_rows"),
    ("indexer", "decode_16_rows_of_65536"),
    ("indexer", "best_512_of_128_rows_of_8192"),
    ("indexer", "best_512_of_16_rows_of_1048576"),
    ("host_rows", "codes_128_rows"),
    ("hyper", "expand_and_mix_128_rows"),
    ("hyper", "mix_8_rows"),
    ("hyper", "expand_128_rows"),
]
# More sizes, some of them in other forms.
SLOW_CASES = [
    ("linear", "wq_b_1_rows"),
    ("linear", "wo_b_512_rows"),
    ("linear", "head_16_rows"),
    ("host_rows", "scales_1_rows"),
]

# What one call of a linear layer starts: quantising rows and the product; for a number of rows that is no multiple of
# 16 also cutting what is not returned.
LAUNCHES = {
    "wq_b_1_rows": 3,
    "wo_b_128_rows": 2,
    "wo_b_512_rows": 2,
    "wo_a_128_rows": 1,
    "head_16_rows": 1,
    "router_16_rows": 1,
}

needs_assembler = pytest.mark.skipif(assembly.why_not() is not None, reason=str(assembly.why_not()))


@functools.cache
def assembled(is_slow: bool) -> list[assembly.Assembled]:
    """A process compiles all of them."""
    return assembly.assemble("b200", SLOW_CASES if is_slow else CASES)


EVERY_CASE = [
    pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW_CASES else [], id=" ".join(case))
    for case in CASES + SLOW_CASES
]


@needs_assembler
@pytest.mark.parametrize("op, case", EVERY_CASE)
def test_kernel_assembles(op, case):
    kernels = [kernel for kernel in assembled((op, case) in SLOW_CASES) if (kernel.op, kernel.case) == (op, case)]
    assert kernels
    for kernel in kernels:
        assert kernel.spill_bytes == 0
        assert not kernel.missing
    if case in LAUNCHES:
        assert {kernel.launches for kernel in kernels} == {LAUNCHES[case]}
