"""Checks and times the implementations of an op on the device at hand (`scripts/bench_kernels.py`).

What is timed is the device, not the host that dispatches: see `device_us`. Programs go round over so many sets of
inputs that none is still in a cache when its turn comes. `fraction` is the least time that bytes and arithmetic need,
by ceilings that were measured in the same run, divided by the time that was measured.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.kernels.registry import COMPUTE_CAPABILITIES

COLD_BYTES = 256 << 20  # more than any cache holds
MAX_COPIES = 256
MAX_CALLS = 8  # of an implementation in one program: enough to hide what lies between programs, quick to compile
MORE = 8  # programs by which the long run exceeds the short one
MOST_US = 3e6  # for all turns of one measurement, unless three turns take longer
HELD_BYTES = 512 << 20
MAX_HOLDS = 64
MAX_PEER_CALLS = 64
PEER_SLEEP_CYCLES = 20_000_000  # about 11 ms
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one program on the device."""

    median_us: float
    is_host_bound: bool  # the device waited for programs in every long run: the time may be that of dispatching


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case with its inputs on the device, and what the reference makes of the first and of the last set."""

    case: Case
    inputs: list[tuple[Any, ...]]
    expected: tuple[Any, Any]
    programs: dict[str, Callable[[Sequence[tuple[Any, ...]]], list[Any]]]  # by implementation; compiled once each

    def calls(self, name: str) -> int:
        """How often one program of an implementation computes the case."""
        most = self.case.reference_calls if name == REFERENCE else MAX_CALLS
        return min(most, len(self.inputs))


def measure_ceilings(*, copy_bytes: int = 4 << 30, side: int = 8192, turns: int = 10) -> Ceilings:
    """Bandwidth of a copy, reads and writes counted, and of reads; rates of square products in bfloat16 and FP8.

    A product is timed with its right operand as it is and transposed, and the faster one counts: a ceiling that is too
    low would flatter every fraction.
    """
    words = jnp.arange(copy_bytes // 4, dtype=jnp.int32)
    copy, read = (jax.jit(lambda a: a + 1), jax.jit(lambda a: jnp.max(a.reshape(-1, 1 << 14), axis=1)))
    copy_us = device_us(lambda _: copy(words), turns=turns).median_us
    read_us = device_us(lambda _: read(words), turns=turns).median_us
    words.delete()
    left, right = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (0, 1))
    rates = {}
    for name, dtype in (("bf16", jnp.bfloat16), ("fp8", jnp.float8_e4m3fn)):
        operands = left.astype(dtype), right.astype(dtype)
        times = []
        for contracted in (0, 1):
            axes = (((1,), (contracted,)), ((), ()))
            product = jax.jit(functools.partial(_product, axes=axes))
            times.append(device_us(lambda _, run=product, of=operands: run(*of), turns=turns).median_us)
        rates[name] = 2 * side**3 / (1e-6 * min(times))
    return Ceilings(bytes_per_s=1e6 * copy_bytes * max(2 / copy_us, 1 / read_us), flops_per_s=rates)


def _product(a: Array, b: Array, *, axes: Any) -> Array:
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.bfloat16)


def runnable(case: Case, compute_capability: str) -> Case:
    """The case with those of its implementations that such a GPU can run."""
    runs = {
        name: run
        for name, run in case.implementations.items()
        if COMPUTE_CAPABILITIES.get(name, compute_capability) == compute_capability
    }
    families = {name: wanted for name, wanted in case.families.items() if name in runs}
    return dataclasses.replace(case, implementations=runs, families=families)


def prepare(case: Case) -> Prepared:
    """Makes the inputs of a case and runs its reference."""
    make = _compiled(case.make)
    inputs = [jax.block_until_ready(make(jax.random.key(i))) for i in range(num_copies(case))]
    programs = {name: _program(run) for name, run in case.implementations.items()}
    prepared = Prepared(case=case, inputs=inputs, expected=(None, None), programs=programs)
    return dataclasses.replace(prepared, expected=_first_and_last(prepared, REFERENCE))


def measure(
    prepared: Prepared, name: str, ceilings: Ceilings, *, turns: int = 20, held_bytes: int = HELD_BYTES
) -> dict[str, Any]:
    """One record for an implementation, which is checked before it is timed.

    Raises ValueError where it is wrong beyond the tolerance or seems faster than possible.
    """
    case, calls, program = prepared.case, prepared.calls(name), prepared.programs[name]
    found = _first_and_last(prepared, name)
    wrong = max(relative_error(a, b) for a, b in zip(found, prepared.expected, strict=True))
    if wrong > case.tolerance:
        raise ValueError(f"{case.op} {case.name}: {name} is off by {wrong:.2e}; {case.tolerance:.0e} is allowed")
    groups = _groups(prepared.inputs, calls)
    timing = device_us(lambda i: program(groups[i % len(groups)]), turns=turns, held_bytes=held_bytes)
    median_us = timing.median_us / calls
    floor_us, bound = ceilings.floor_us(case)
    if median_us < floor_us:
        raise ValueError(
            f"{case.op} {case.name}: {name} took {median_us:.2f} us, less than the {floor_us:.2f} us that its "
            f"{case.num_bytes} bytes and {case.flops} operations need; count them again"
        )
    return {
        "op": case.op,
        "impl": name,
        "case": case.name,
        "median_us": round(median_us, 3),
        "is_host_bound": timing.is_host_bound,
        "bytes": case.num_bytes,
        "flops": case.flops,
        "bound": bound,
        "fraction": round(floor_us / median_us, 4),
        "rel_err": wrong,
    }


def device_us(dispatch: Callable[[int], Any], *, turns: int, more: int = MORE, held_bytes: int = HELD_BYTES) -> Timing:
    """Time of one program on the device, microseconds; `dispatch(i)` starts the i-th program and does not wait.

    Waiting for each program would add what the host needs to dispatch it and to notice its end, 100 to 400 us, which
    is more than most kernels take. So a turn dispatches one program and waits, then `more` programs beyond that and
    waits once; the difference, divided by `more`, is the time of a program. In front of both runs the device gets
    copies to do, as many as it takes that the host has dispatched the last program while the device is still busy with
    them: then nothing of the host is in the difference. Devices run programs in the order of dispatch. The median is
    over turns. Raises RuntimeError where the long run was not longer than the short one.
    """
    words = jnp.zeros(held_bytes // 4, jnp.int32)
    hold = jax.jit(lambda a: a + 1)
    jax.block_until_ready((hold(words), dispatch(0)))  # compiles
    started = time.perf_counter()
    jax.block_until_ready(dispatch(0))
    rough_us = 1e6 * (time.perf_counter() - started)
    more = max(1, min(more, int(MOST_US / 20 / rough_us)))
    number, holds, is_ahead = itertools.count(1), 1, False

    def wall_us(count: int) -> tuple[float, bool]:
        begun = time.perf_counter()
        held, made = words, None
        for _ in range(holds):
            held = hold(words)
        for _ in range(count):
            made = dispatch(next(number))
        still_held = not held.is_ready()  # type: ignore[attr-defined]
        jax.block_until_ready(made)
        return 1e6 * (time.perf_counter() - begun), still_held

    while holds < MAX_HOLDS and rough_us < MOST_US / 20 and not wall_us(1 + more)[1]:
        holds *= 2
    short, long = [], []
    begun = time.perf_counter()
    while len(short) < turns and (len(short) < 3 or 1e6 * (time.perf_counter() - begun) < MOST_US):
        short.append(wall_us(1)[0])
        spent_us, was_held = wall_us(1 + more)
        long.append(spent_us)
        is_ahead = is_ahead or was_held
    return Timing(median_us=difference_us(short, long, more), is_host_bound=not is_ahead)


def difference_us(short: Sequence[float], long: Sequence[float], more: int) -> float:
    """Median over turns of the time of one of the `more` programs that a long run has beyond the short one.

    Raises RuntimeError where that is not positive.
    """
    found = statistics.median((b - a) / more for a, b in zip(short, long, strict=True))
    if found <= 0:
        raise RuntimeError(
            f"{more} more programs made a run {-found * more:.1f} us shorter; the device or the host was disturbed, or "
            "the programs are too short: measure again, with more turns"
        )
    return found


def num_copies(case: Case) -> int:
    """Sets of inputs of which none is still in a cache when its turn comes; whole programs of MAX_CALLS, if several."""
    least = max(2, min(MAX_COPIES, -(-2 * COLD_BYTES // max(case.num_bytes, 1))))
    return least if least <= MAX_CALLS else -(-least // MAX_CALLS) * MAX_CALLS


def measure_peers(case: Case, torch: Any, *, turns: int = 20) -> Iterator[dict[str, Any]]:
    """One record for each way in which PyTorch does the same work; `torch` is its module.

    The device sleeps while calls are dispatched, and events around the calls are on its own clock.
    """
    for name, make in case.peers.items():
        calls = make(torch, num_copies(case))
        times = []
        for turn in range(2 + turns):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            some = [calls[(turn * MAX_PEER_CALLS + i) % len(calls)] for i in range(min(MAX_PEER_CALLS, len(calls)))]
            torch.cuda._sleep(PEER_SLEEP_CYCLES)
            start.record()
            for call in some:
                call()
            stop.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / len(some))
        yield {"op": case.op, "impl": name, "case": case.name, "median_us": round(statistics.median(times[2:]), 3)}


def dependent_rows(prepared: Prepared, name: str, counts: Sequence[int]) -> list[int]:
    """Of the row counts, those at which some row differs in any bit from its value among all rows.

    The count is data of one compiled program, the one that is timed. Raises ValueError for a case that has no
    `keep_rows`.
    """
    case, calls, run = prepared.case, prepared.calls(name), prepared.programs[name]
    if case.keep_rows is None:
        raise ValueError(f"case {case.op} {case.name} has no rows to leave out")
    keep, differ, inputs = _compiled(case.keep_rows), jax.jit(rows_differ), prepared.inputs[0]

    def outputs(some: Sequence[int]) -> list[Any]:
        filled = [*some, *[some[-1]] * (calls - len(some))]
        return run([keep(inputs, jnp.int32(count)) for count in filled])[: len(some)]

    (everything,) = outputs([case.num_rows])
    return [
        count
        for some in itertools.batched(counts, calls)
        for count, found in zip(some, outputs(some), strict=True)
        if differ(found, everything, jnp.int32(count))
    ]


def rows_differ(found: Any, expected: Any, count: Array) -> Bool[Array, ""]:
    """Whether any bit of the first `count` rows of two trees of arrays differs; NaNs are compared by their bits."""

    def differ(a: Array, b: Array) -> Array:
        if a.dtype != jnp.bool_:
            bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
            a, b = (jax.lax.bitcast_convert_type(x, bits) for x in (a, b))
        is_row = jnp.arange(a.shape[0], dtype=jnp.int32) < count
        return jnp.any((a != b) & jnp.expand_dims(is_row, range(1, a.ndim)))

    return jnp.any(jnp.stack(jax.tree.leaves(jax.tree.map(differ, found, expected))))


def dependent_counts(prepared: Prepared, name: str, counts: Sequence[int]) -> list[int]:
    """Of the row counts, those at which a call of so many rows gives other bits than the call of all rows gives them.

    A program is compiled for each count. Raises ValueError for a case that has no `cut_rows`.
    """
    case, inputs = prepared.case, prepared.inputs[0]
    if case.cut_rows is None:
        raise ValueError(f"case {case.op} {case.name} does not say how a call with fewer rows looks")
    run, everything = _compiled(case.implementations[name]), _first_and_last(prepared, name)[0]

    def differs(count: int) -> bool:
        assert case.cut_rows is not None
        found = run(*case.cut_rows(inputs, count))
        return bool(rows_differ(found, jax.tree.map(lambda a: a[:count], everything), jnp.int32(count)))

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


def _program(run: Callable[..., Any]) -> Callable[[Sequence[tuple[Any, ...]]], list[Any]]:
    """Computes several sets of inputs; the implementation is lowered once for all of them."""
    each = jax.jit(run)
    return _compiled(lambda sets: [each(*one) for one in sets])


def _groups(inputs: list[tuple[Any, ...]], size: int) -> list[list[tuple[Any, ...]]]:
    """All whole groups of neighbours."""
    return [inputs[first : first + size] for first in range(0, len(inputs) - size + 1, size)]


def _first_and_last(prepared: Prepared, name: str) -> tuple[Any, Any]:
    """What an implementation makes of the first and of the last set of inputs."""
    groups = _groups(prepared.inputs, prepared.calls(name))
    run = prepared.programs[name]
    return run(groups[0])[0], run(groups[-1])[-1]


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(run, compiler_options=COMPILER_OPTIONS)
