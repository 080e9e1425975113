"""Checks and times the implementations of an op on the device at hand (`scripts/bench_kernels.py`).

A timed program computes the case once for each of many sets of inputs, as many as it takes that none is still in a
cache when its turn comes. `fraction` is the least time that bytes and arithmetic need, by ceilings that were measured
in the same run, divided by the time that was measured.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.kernels.case import REFERENCE, Case

COLD_BYTES = 256 << 20  # more than any cache holds
MAX_COPIES = 256
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reached in this run."""

    bytes_per_s: float  # of a copy or of reads alone, whichever is faster: no kernel may seem faster than possible
    flops_per_s: dict[str, float]

    def floor_us(self, case: Case) -> tuple[float, str]:
        """The least time of a case in microseconds, and what sets it."""
        moving = 1e6 * case.num_bytes / self.bytes_per_s
        computing = 1e6 * case.flops / self.flops_per_s[case.rate]
        return (moving, "bandwidth") if moving >= computing else (computing, "compute")


def measure_ceilings(*, copy_bytes: int = 4 << 30, side: int = 8192, turns: int = 10) -> Ceilings:
    """Bandwidth of a copy, reads and writes counted, and of reads; rates of square products in bfloat16 and FP8."""
    words = jnp.arange(copy_bytes // 4, dtype=jnp.int32)
    copy_us = _median_us(jax.jit(lambda a: a + 1), (words,), turns=turns)
    read_us = _median_us(jax.jit(lambda a: jnp.max(a.reshape(-1, 1 << 14), axis=1)), (words,), turns=turns)
    del words
    left, right = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (0, 1))
    rates = {}
    for name, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
        product = jax.jit(lambda a, b: jnp.matmul(a, b.T, preferred_element_type=jnp.bfloat16))
        rates[name] = 2 * side**3 / (1e-6 * _median_us(product, (left.astype(dtype), right.astype(dtype)), turns=turns))
    return Ceilings(bytes_per_s=1e6 * copy_bytes * max(2 / copy_us, 1 / read_us), flops_per_s=rates)


def measure(case: Case, names: list[str], ceilings: Ceilings, *, turns: int = 20) -> Iterator[dict[str, Any]]:
    """One record for each named implementation, checked before it is timed.

    Raises ValueError where one is wrong beyond the tolerance, depends on other rows, or seems faster than possible.
    """
    copies = num_copies(case)
    make = _compiled(case.make)
    inputs = [jax.block_until_ready(make(jax.random.key(i))) for i in range(copies)]
    expected = [_compiled(case.implementations[REFERENCE])(*inputs[i]) for i in (0, copies - 1)]
    floor_us, bound = ceilings.floor_us(case)
    for name in names:
        run = jax.jit(case.implementations[name])  # lowered once for all calls of the program: a kernel takes seconds
        alone = _compiled(case.implementations[name])
        wrong = max(relative_error(alone(*inputs[i]), want) for i, want in zip((0, -1), expected, strict=True))
        if wrong > case.tolerance:
            raise ValueError(f"{case.op} {case.name}: {name} is off by {wrong:.2e}; {case.tolerance:.0e} is allowed")
        program = _compiled(lambda sets, run=run: [run(*each) for each in sets])
        median_us = _median_us(program, (inputs,), turns=turns) / copies
        if median_us < floor_us:
            raise ValueError(
                f"{case.op} {case.name}: {name} took {median_us:.2f} us, less than the {floor_us:.2f} us that its "
                f"{case.num_bytes} bytes and {case.flops} operations need; count them again"
            )
        yield {
            "op": case.op,
            "impl": name,
            "case": case.name,
            "median_us": round(median_us, 3),
            "bytes": case.num_bytes,
            "flops": case.flops,
            "bound": bound,
            "fraction": round(floor_us / median_us, 4),
            "rel_err": wrong,
        }


def num_copies(case: Case) -> int:
    """Sets of inputs of which none is still in a cache when its turn comes."""
    return max(2, min(MAX_COPIES, -(-2 * COLD_BYTES // max(case.num_bytes, 1))))


def measure_peers(case: Case, torch: Any, *, turns: int = 20) -> Iterator[dict[str, Any]]:
    """One record for each way in which PyTorch does the same work; `torch` is its module."""
    for name, make in case.peers.items():
        calls = make(torch, num_copies(case))
        times = []
        for _ in range(2 + turns):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for call in calls:
                call()
            stop.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / len(calls))
        yield {"op": case.op, "impl": name, "case": case.name, "median_us": round(statistics.median(times[2:]), 3)}


def dependent_rows(case: Case, name: str, counts: list[int]) -> list[int]:
    """Of the row counts, those at which some row differs in any bit from its value among all rows.

    The count is data of one compiled program. Raises ValueError for a case that has no `keep_rows`.
    """
    if case.keep_rows is None:
        raise ValueError(f"case {case.op} {case.name} has no rows to leave out")
    keep_rows, inputs = case.keep_rows, _compiled(case.make)(jax.random.key(0))
    run = _compiled(lambda count: case.implementations[name](*keep_rows(inputs, count)))
    everything = jax.tree.map(np.asarray, run(jnp.int32(case.num_rows)))

    def differs(count: int) -> bool:
        found = jax.tree.map(np.asarray, run(jnp.int32(count)))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(everything), strict=True)
        return any(a[:count].tobytes() != b[:count].tobytes() for a, b in pairs)

    return [count for count in counts if differs(count)]


def relative_error(found: Any, expected: Any) -> float:
    """|found - expected| / |expected| over all floating outputs; infinite where integers differ or a value is NaN."""
    total, size = 0.0, 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(b.dtype, jnp.floating):
            if not bool(jnp.all(a == b)):
                return float("inf")
            continue
        wide = jnp.asarray(b, jnp.float32)
        total += float(jnp.sum(jnp.square(jnp.asarray(a, jnp.float32) - wide)))
        size += float(jnp.sum(jnp.square(wide)))
    error = (total / size) ** 0.5 if size else total**0.5
    return error if error == error else float("inf")


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


def _median_us(program: Callable[..., Any], args: tuple[Any, ...] | tuple[Array, ...], *, turns: int) -> float:
    jax.block_until_ready(program(*args))  # compiles
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
