"""Rows grouped by expert against a plain loop over all pairs, and the independence of a pair from the others."""

from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from deepinfer_jax.ops import moe
from deepinfer_jax.testing import compare

NUM_EXPERTS, WIDTH, INNER = 5, 16, 32
# One expert's float32 products of 16 and 32 terms in two row counts.
DENSE_REL_L2 = 5e-7
EXACT = {"xla_allow_excess_precision": False}


def integer_apply(expert: jax.Array, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Exact in float32: every wrong pairing of row, expert and weight changes the result."""
    return rows * (expert + 1).astype(jnp.float32) + 1000 * weights[:, None]


def dense(ids: np.ndarray, u: np.ndarray, weights: np.ndarray, is_live: np.ndarray) -> np.ndarray:
    """A loop over all pairs of row and choice."""
    out = np.zeros((*ids.shape, u.shape[1]), np.float32)
    for row, choice in np.ndindex(ids.shape):
        if is_live[row]:
            out[row, choice] = u[row] * (ids[row, choice] + 1) + 1000 * weights[row, choice]
    return out


def inputs(num_rows: int, per_row: int) -> tuple[np.ndarray, np.ndarray]:
    u = np.arange(num_rows * WIDTH, dtype=np.float32).reshape(num_rows, WIDTH) + 1
    weights = np.arange(num_rows * per_row, dtype=np.float32).reshape(num_rows, per_row)
    return u, weights


def run(apply: Callable, tile: int, *, has_fixed_trips: bool = False) -> Callable:
    def routed(u, ids, weights, is_live):
        return moe.routed_experts(
            u, ids, weights, is_live, apply, num_experts=NUM_EXPERTS, tile=tile, has_fixed_trips=has_fixed_trips
        )

    return jax.jit(routed, compiler_options=EXACT)


RUNS = {(tile, fixed): run(integer_apply, tile, has_fixed_trips=fixed) for tile in (1, 8) for fixed in (False, True)}
CHOICES = {
    "spread": lambda rng: rng.integers(0, NUM_EXPERTS, (19, 3)),
    "one expert gets all": lambda rng: np.full((19, 3), 2),
    "last expert gets all": lambda rng: np.full((19, 3), NUM_EXPERTS - 1),
    "first expert gets none": lambda rng: rng.integers(1, NUM_EXPERTS, (19, 3)),
    "duplicates in a row": lambda rng: np.repeat(rng.integers(0, NUM_EXPERTS, (19, 1)), 3, axis=1),
    "one row": lambda rng: rng.integers(0, NUM_EXPERTS, (1, 3)),
    "whole tiles": lambda rng: np.repeat([[0], [1]], 8, axis=0),
}


@pytest.mark.parametrize("has_fixed_trips", [False, True], ids=["counted", "fixed"])
@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("choices", CHOICES)
def test_equals_a_loop_over_all_pairs(choices: str, tile: int, has_fixed_trips: bool):
    ids = CHOICES[choices](np.random.default_rng(0)).astype(np.int32)
    u, weights = inputs(*ids.shape)
    is_live = np.ones(len(ids), bool)
    made = RUNS[tile, has_fixed_trips](u, ids, weights, is_live)
    compare.assert_bitwise(made, dense(ids, u, weights, is_live))


@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("live", ["none", "some", "first", "last"])
def test_padding_rows_give_zeros_whatever_they_name(tile: int, live: str):
    rng = np.random.default_rng(1)
    is_live = {"none": np.zeros(19, bool), "some": rng.random(19) < 0.5, "first": np.arange(19) == 0}.get(
        live, np.arange(19) == 18
    )
    ids = rng.integers(0, NUM_EXPERTS, (19, 3)).astype(np.int32)
    u, weights = inputs(19, 3)
    made = RUNS[tile, False](u, ids, weights, is_live)
    compare.assert_bitwise(made, dense(ids, u, weights, is_live))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_equals_the_loop_on_arbitrary_choices(seed: int):
    rng = np.random.default_rng(seed)
    favourites = rng.integers(0, NUM_EXPERTS, rng.integers(1, NUM_EXPERTS + 1))
    ids = rng.choice(favourites, (19, 3)).astype(np.int32)
    is_live = rng.random(19) < rng.random()
    u, weights = inputs(19, 3)
    compare.assert_bitwise(RUNS[8, False](u, ids, weights, is_live), dense(ids, u, weights, is_live))


def test_only_as_many_tiles_run_as_there_are():
    calls: list[int] = []

    def counting(expert: jax.Array, rows: jax.Array, weights: jax.Array) -> jax.Array:
        jax.debug.callback(lambda e: calls.append(int(e)), expert)
        return integer_apply(expert, rows, weights)

    ids = np.asarray([[0, 3]] * 9 + [[3, 4]] * 2, np.int32)
    u, weights = inputs(*ids.shape)
    jax.block_until_ready(run(counting, 8)(u, ids, weights, np.arange(11) < 10))
    jax.effects_barrier()
    # Nine rows on expert 0, ten on 3, one on 4; the eleventh row is padding.
    assert sorted(calls) == [0, 0, 3, 3, 4]


@pytest.fixture
def weights_of_experts(seed_from_name: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed_from_name), 3)
    shapes = [(NUM_EXPERTS, INNER, WIDTH), (NUM_EXPERTS, WIDTH, INNER), (NUM_EXPERTS, INNER, WIDTH)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def real_apply(weights_of_experts: list[jax.Array]) -> Callable:
    def apply(expert: jax.Array, rows: jax.Array, weights: jax.Array) -> jax.Array:
        own = [w[expert] for w in weights_of_experts]
        return moe.expert(rows, *own, weights, limit=10.0, quantizes=False)

    return apply


@pytest.mark.parametrize("num_rows", [8, 16, 24, 64, 200])
def test_bits_of_a_row_do_not_depend_on_the_others(weights_of_experts, num_rows: int):
    """The first eight rows beside others that choose the same experts, then all pile up on one."""
    apply = run(real_apply(weights_of_experts), 8)
    rng = np.random.default_rng(2)
    u = rng.standard_normal((num_rows, WIDTH), np.float32)
    route = rng.uniform(0.1, 1, (num_rows, 2)).astype(np.float32)
    ids = rng.integers(0, NUM_EXPERTS, (num_rows, 2)).astype(np.int32)
    alone = np.asarray(apply(u[:8], ids[:8], route[:8], np.ones(8, bool)))
    together = apply(u, ids, route, np.ones(num_rows, bool))
    compare.assert_bitwise(np.asarray(together)[:8], alone)
    ids[8:] = 0
    compare.assert_bitwise(np.asarray(apply(u, ids, route, np.ones(num_rows, bool)))[:8], alone)
    order = rng.permutation(num_rows)
    moved = np.asarray(apply(u[order], ids[order], route[order], np.ones(num_rows, bool)))
    compare.assert_bitwise(moved[np.argsort(order)][:8], alone)


def test_equals_a_dense_product_of_every_expert(weights_of_experts):
    rng = np.random.default_rng(3)
    u = jnp.asarray(rng.standard_normal((19, WIDTH), np.float32))
    route = jnp.asarray(rng.uniform(0.1, 1, (19, 2)), jnp.float32)
    ids = rng.integers(0, NUM_EXPERTS, (19, 2)).astype(np.int32)
    apply = real_apply(weights_of_experts)
    made = np.asarray(run(apply, 8)(u, ids, route, np.ones(19, bool)))
    for choice in range(2):
        every = [np.asarray(apply(jnp.asarray(e), u, route[:, choice])) for e in range(NUM_EXPERTS)]
        want = np.stack([every[e][row] for row, e in enumerate(ids[:, choice])])
        compare.assert_close(made[:, choice], want, rel_l2=DENSE_REL_L2)


def test_no_rows_give_no_rows():
    made = RUNS[8, False](
        np.zeros((0, WIDTH), np.float32), np.zeros((0, 3), np.int32), np.zeros((0, 3), np.float32), np.zeros(0, bool)
    )
    assert made.shape == (0, 3, WIDTH)
