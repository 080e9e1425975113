"""Expert placement against brute force on small cases, and what must hold on all."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.scheduler import placement


def largest_share(loads: np.ndarray, counts: np.ndarray) -> float:
    return float((loads / counts).max(axis=1).sum())


def fullest_device(loads: np.ndarray, counts: np.ndarray, placed: list[list[int]]) -> float:
    shares = loads / counts
    return float(np.stack([shares[:, own].sum(axis=1) for own in placed], axis=1).max(axis=1).sum())


@st.composite
def windows(draw) -> np.ndarray:
    steps, experts = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    numbers = st.lists(st.integers(0, 20), min_size=experts, max_size=experts)
    return np.asarray(draw(st.lists(numbers, min_size=steps, max_size=steps)), np.float64)


@given(windows(), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_each_spare_place_goes_where_it_helps_most(loads, spare):
    """Every round is the best of all choices, the lowest expert among equals."""
    want = np.ones(loads.shape[1], np.int64)
    for _ in range(spare):
        totals = [largest_share(loads, want + np.eye(len(want))[e]) for e in range(len(want))]
        want[int(np.argmin(np.round(totals, 9)))] += 1
    got = placement.count_replicas(loads, loads.shape[1] + spare)
    assert got.sum() == want.sum() and (got >= 1).all()
    assert largest_share(loads, got) == pytest.approx(largest_share(loads, want))


@given(windows(), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_placement_keeps_to_capacity_and_is_near_the_best(loads, num_shards, slack):
    counts = np.ones(loads.shape[1], np.int64)
    capacity = -(-loads.shape[1] // num_shards) + slack
    placed = placement.place_replicas(loads, counts, num_shards=num_shards, capacity=capacity)
    assert sorted(itertools.chain.from_iterable(placed)) == list(range(loads.shape[1]))
    assert all(len(own) <= capacity for own in placed)
    best = min(
        fullest_device(loads, counts, [[e for e in range(len(counts)) if at[e] == s] for s in range(num_shards)])
        for at in itertools.product(range(num_shards), repeat=len(counts))
        if max(np.bincount(at, minlength=num_shards)) <= capacity
    )
    assert best - 1e-9 <= fullest_device(loads, counts, placed) <= 2 * best + 1e-9


def test_heaviest_first_lowest_device_on_ties():
    loads = np.asarray([[4.0, 4.0, 2.0, 1.0]])
    placed = placement.place_replicas(loads, np.ones(4, np.int64), num_shards=2, capacity=2)
    assert placed == [[0, 2], [1, 3]]


def test_too_few_places_are_refused():
    with pytest.raises(ValueError, match="num_places=3 is below 4"):
        placement.count_replicas(np.ones((1, 4)), 3)
    with pytest.raises(ValueError, match="4 replicas do not fit 1 devices of 3 places"):
        placement.place_replicas(np.ones((1, 4)), np.ones(4, np.int64), num_shards=1, capacity=3)


def test_replicas_are_bounded():
    counts = placement.count_replicas(np.asarray([[9.0, 1.0]]), 100)
    assert counts.tolist() == [placement.MAX_REPLICAS] * 2


def test_what_is_there_stays_there():
    before = np.asarray([0, 1, 2, -1, 3, 4, 5, -1])
    after = placement.settle([[2, 5, 0], [4, 3, 1, 0]], before, capacity=4)
    assert after.tolist() == [0, 5, 2, -1, 3, 4, 1, 0]
    assert placement.sources_of(before, after).tolist() == [-1, 6, -1, -1, -1, -1, 1, 0]
    table = placement.replica_table(after, 6, 3)
    assert table.tolist() == [[0, 7, 0], [6, 6, 6], [2, 2, 2], [4, 4, 4], [5, 5, 5], [1, 1, 1]]


def test_an_expert_without_a_place_is_refused():
    with pytest.raises(ValueError, match="expert 1 has no place"):
        placement.replica_table(np.asarray([0, 2]), 3, 2)


def test_imbalance():
    loads = np.asarray([[6.0, 2.0]])
    assert placement.imbalance(loads, np.asarray([0, 1]), num_shards=2) == 1.5
    assert placement.imbalance(loads, np.asarray([0, -1, 1, 0]), num_shards=2) == pytest.approx(1.25)
    assert placement.imbalance(np.zeros((1, 2)), np.asarray([0, 1]), num_shards=2) == 1.0
