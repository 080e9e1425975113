"""The harness of `scripts/bench_kernels.py`, on an op that a CPU runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from deepinfer_jax.kernels.case import Case
from deepinfer_jax.testing import kernel_bench

SLOW = kernel_bench.Ceilings(bytes_per_s=1e15, flops_per_s={"bf16": 1e12, "fp8": 2e12})


def make_pair(key: Array) -> tuple[Array, Array]:
    return jax.random.normal(key, (8, 16)), jax.random.normal(key, (16, 4))


def keep_first(inputs: tuple[Any, ...], count: Array) -> tuple[Any, ...]:
    rows, weights = inputs
    return jnp.where(jnp.arange(8)[:, None] < count, rows, 0.0), weights


def cut(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    rows, weights = inputs
    return rows[:count], weights


CASE = Case(
    op="product",
    name="8 rows",
    make=make_pair,
    implementations={
        "reference": lambda rows, weights: rows @ weights,
        "row by row": lambda rows, weights: jax.lax.map(lambda row: jnp.sum(row[:, None] * weights, axis=0), rows),
        "doubled": lambda rows, weights: 2 * (rows @ weights),
        "mean added": lambda rows, weights: rows @ weights + 1e-6 * jnp.mean(rows),
    },
    num_bytes=4 * (8 * 16 + 16 * 4 + 8 * 4),
    flops=2 * 8 * 16 * 4,
    keep_rows=keep_first,
    cut_rows=cut,
    num_rows=8,
)


def one_record(case: Case, name: str, ceilings: kernel_bench.Ceilings = SLOW) -> dict[str, Any]:
    return kernel_bench.measure(kernel_bench.prepare(case), name, ceilings, turns=15, held_bytes=1 << 10)


def test_a_record_says_what_bounds_the_case_and_how_near_it_came() -> None:
    record = one_record(CASE, "row by row")
    assert record["bound"] == "compute"
    assert record["fraction"] == pytest.approx(1e6 * CASE.flops / 1e12 / record["median_us"], rel=0.05, abs=1e-4)
    assert 0 <= record["rel_err"] < 1e-5


def test_a_wrong_implementation_is_not_timed() -> None:
    with pytest.raises(ValueError, match="doubled is off by 1"):
        one_record(CASE, "doubled")


def test_kernels_for_another_gpu_are_left_out() -> None:
    kernels = dict.fromkeys(("reference", "mosaic_sm90", "mosaic_sm100"), CASE.implementations["reference"])
    families = {"mosaic_sm90": ("wgmma",), "mosaic_sm100": ("tcgen05",)}
    case = dataclasses.replace(CASE, implementations=kernels, families=families)
    found = kernel_bench.runnable(case, "9.0")
    assert found.implementations.keys() == {"reference", "mosaic_sm90"}
    assert found.families == {"mosaic_sm90": ("wgmma",)}
    assert kernel_bench.runnable(case, "12.0").implementations.keys() == {"reference"}


def test_instructions_belong_to_an_implementation() -> None:
    with pytest.raises(ValueError, match="has instructions for mosaic_sm100, but no such implementation"):
        dataclasses.replace(CASE, families={"mosaic_sm100": ("tcgen05",)})


def test_a_time_below_the_floor_is_an_error() -> None:
    impossible = kernel_bench.Ceilings(bytes_per_s=1.0, flops_per_s={"bf16": 1.0, "fp8": 1.0})
    with pytest.raises(ValueError, match="count them again"):
        one_record(CASE, "reference", impossible)


def test_rows_that_depend_on_others_are_found() -> None:
    counts, prepared = list(range(1, 9)), kernel_bench.prepare(CASE)
    assert kernel_bench.dependent_rows(prepared, "row by row", counts) == []
    assert kernel_bench.dependent_rows(prepared, "mean added", counts) == counts[:-1]
    assert kernel_bench.dependent_rows(prepared, "mean added", [8, 8, 3]) == [3]


def test_rows_are_compared_by_their_bits() -> None:
    values = np.array([[1.0, np.nan], [0.0, 2.0]], np.float32)
    other = np.array([[1.0, np.nan], [-0.0, 2.0]], np.float32)
    assert not kernel_bench.rows_differ([jnp.array(values)], [jnp.array(other)], jnp.int32(1))
    assert kernel_bench.rows_differ([jnp.array(values)], [jnp.array(other)], jnp.int32(2))


def test_calls_of_fewer_rows_are_compared() -> None:
    prepared = kernel_bench.prepare(CASE)
    assert kernel_bench.dependent_counts(prepared, "row by row", [1, 5]) == []
    assert kernel_bench.dependent_counts(prepared, "mean added", [1, 5]) == [1, 5]
    with pytest.raises(ValueError, match="fewer rows"):
        kernel_bench.dependent_counts(kernel_bench.prepare(dataclasses.replace(CASE, cut_rows=None)), "doubled", [1])


def test_integers_must_be_equal_and_nan_is_never_right() -> None:
    ids = np.arange(3)
    assert kernel_bench.relative_error(ids, ids) == 0.0
    assert kernel_bench.relative_error(ids + 1, ids) == float("inf")
    assert kernel_bench.relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")


def test_small_cases_get_more_copies_than_large_ones() -> None:
    large = dataclasses.replace(CASE, num_bytes=1 << 30)
    assert kernel_bench.num_copies(large) == 2
    assert kernel_bench.num_copies(CASE) == kernel_bench.MAX_COPIES
    some = dataclasses.replace(CASE, num_bytes=50 << 20)
    assert kernel_bench.num_copies(some) == 2 * kernel_bench.MAX_CALLS


def test_programs_take_turns_with_all_inputs() -> None:
    prepared = kernel_bench.prepare(dataclasses.replace(CASE, reference_calls=1))
    assert prepared.calls("reference") == 1
    assert prepared.calls("doubled") == kernel_bench.MAX_CALLS
    used: list[int] = []
    timing = kernel_bench.device_us(
        lambda i: used.append(i) or jnp.ones(1 << 14).sum(), turns=15, more=4, held_bytes=1 << 10
    )
    assert timing.median_us > 0
    assert used[2:] == list(range(1, len(used) - 1))


def test_time_is_the_difference_of_a_long_and_a_short_run() -> None:
    assert kernel_bench.difference_us([400.0, 410.0, 900.0], [480.0, 490.0, 901.0], 8) == 10
    with pytest.raises(RuntimeError, match="16.0 us shorter"):
        kernel_bench.difference_us([416.0], [400.0], 8)


def test_a_case_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="no implementation called reference"):
        dataclasses.replace(CASE, implementations={})
