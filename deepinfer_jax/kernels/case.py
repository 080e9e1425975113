"""One size of one op: what its tests and benchmarks run, and what it costs at least."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxtyping import Array

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An op at one size, with every way to compute it.

    implementations: by name, functions of the inputs that `make` gives; `reference` is what all are compared with.
    tolerance: greatest relative error, |out - reference| / |reference| over all elements of all floating outputs;
    integer outputs must be equal.
    keep_rows: the inputs of as many rows, of which only the first n are live. cut_rows: those of a call with n rows.
    num_bytes: of all inputs read once and all outputs written once. flops: multiplications and additions.
    has_target: docs/kernels.md states what its time should be; benchmarks begin with these.
    reference_calls: how often one timed program computes the reference at most: 1 where that is long to compile.
    families: by name of an implementation, PTX instructions that its compiled kernels must contain.
    """

    op: str
    name: str
    make: Callable[[Array], tuple[Any, ...]]  # inputs from a PRNG key: same shapes, other values for another key
    implementations: Mapping[str, Callable[..., Any]]
    num_bytes: int
    flops: int
    rate: Literal["bf16", "fp8"] = "bf16"  # the arithmetic whose measured rate bounds the case
    tolerance: float = 5e-3
    keep_rows: Callable[[tuple[Any, ...], Array], tuple[Any, ...]] | None = None
    cut_rows: Callable[[tuple[Any, ...], int], tuple[Any, ...]] | None = None
    num_rows: int = 0  # rows of the outputs, where `keep_rows` is given
    has_target: bool = False
    reference_calls: int = 8
    families: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # The same work by PyTorch, for comparison: the torch module and a number of copies -> one call for each copy.
    peers: Mapping[str, Callable[[Any, int], list[Callable[[], Any]]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if REFERENCE not in self.implementations:
            raise ValueError(f"case {self.op} {self.name} has no implementation called {REFERENCE}")
        if unknown := sorted(self.families.keys() - self.implementations.keys()):
            raise ValueError(
                f"case {self.op} {self.name} has instructions for {unknown[0]}, but no such implementation"
            )
        if (self.keep_rows is None) != (self.num_rows == 0):
            raise ValueError(f"case {self.op} {self.name}: keep_rows and num_rows belong together")
