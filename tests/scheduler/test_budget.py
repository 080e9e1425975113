"""How many drafts to verify: the cost curve, the total, and its split over requests."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.scheduler.budget import CostCurve, allocate, best_budget, drafting_pays, paper_lengths

# The counter-example of the specification (dspark 6.2): steps a second for 1, 2 and 3 rows.
STEPPED = CostCurve(points=((1, 1 / 1.0), (2, 1 / 0.5), (3, 1 / 0.45)))
FLAT = CostCurve(points=((64, 10.0),))


def curve_of(*points: tuple[int, float], **facts) -> CostCurve:
    return CostCurve(points=points, **facts)


def test_cost_is_that_of_the_next_compiled_size():
    curve = curve_of((8, 3.0), (16, 5.0), (64, 9.0))
    assert [curve.cost(rows) for rows in (0, 1, 8, 9, 16, 17, 64)] == [3.0, 3.0, 3.0, 5.0, 5.0, 9.0, 9.0]


def test_cost_goes_on_with_the_last_slope():
    assert curve_of((8, 3.0), (16, 5.0)).cost(32) == 9.0
    assert curve_of((8, 4.0)).cost(24) == 12.0  # one size: in proportion


def test_cost_never_falls_with_rows():
    curve = curve_of((8, 3.0), (16, 2.0), (24, 2.5))
    assert [curve.cost(rows) for rows in (8, 16, 24, 1000)] == [3.0, 3.0, 3.0, 3.0]


def test_cost_of_live_rows_is_added():
    curve = curve_of((8, 3.0), (16, 5.0), row_slope_ms=0.25)
    assert [curve.cost(rows) for rows in (4, 8, 12, 20)] == [4.0, 5.0, 8.0, 11.0]


def test_curve_survives_json():
    curve = curve_of(
        (8, 3.5), (16, 5.0), platform="gpu", mesh=(4, 2), dtype="q", row_slope_ms=0.01, draft_points=((1, 0.5),)
    )
    record = json.loads(json.dumps(curve.to_json()))
    assert set(record) >= {"platform", "mesh", "dtype", "points"}
    assert CostCurve.from_json(record) == curve
    assert CostCurve.from_json({"points": [[8, 3.5]]}) == curve_of((8, 3.5))


@pytest.mark.parametrize(
    "record, text",
    [
        ({}, "no cost curve"),
        ([[8, 3.0]], "no cost curve"),
        ({"points": [[8, 3.0]], "bucket": 1}, "its keys are"),
        ({"points": [8, 3.0]}, "no cost curve"),
        ({"points": [["many", 3.0]]}, "many"),
        ({"points": []}, "at least one compiled size"),
        ({"points": [[8, 3.0], [8, 4.0]]}, "must rise"),
        ({"points": [[0, 3.0]]}, "from at least 1"),
        ({"points": [[8, 0.0]]}, "a positive time"),
        ({"points": [[8, math.nan]]}, "a positive time"),
        ({"points": [[8, 3.0]], "row_slope_ms": -1.0}, "not negative"),
        ({"points": [[8, 3.0]], "draft_points": [[2, 1.0], [2, 2.0]]}, "must rise"),
        ({"points": [[8, 3.0]], "draft_points": [[2, -1.0]]}, "negative"),
    ],
)
def test_what_is_no_curve_is_refused(record, text):
    with pytest.raises(ValueError, match=text):
        CostCurve.from_json(record)


def test_all_drafts_are_verified_where_they_cost_nothing():
    assert best_budget([[0.9, 0.5], [0.01]], 2, FLAT) == 3


def test_none_is_verified_where_rows_cost_as_much_as_they_can_yield():
    proportional = curve_of(*((rows, float(rows)) for rows in range(1, 9)))
    assert best_budget([[1.0, 1.0], [0.9]], 2, proportional) == 0  # 1.0 a row at best: a tie, fewer rows
    assert best_budget([[0.99]], 1, curve_of((1, 1.0), (2, 1.9))) == 1


def test_all_drafts_are_verified_without_a_curve():
    assert best_budget([[0.0, 0.0], []], 2, None) == 2
    assert paper_lengths([[0.0, 0.0], []], None).tolist() == [2, 0]


def test_a_total_behind_a_step_of_the_cost_is_found():
    stairs = curve_of((2, 1.0), (4, 1.5), (8, 1.6))
    survival = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]
    assert best_budget(survival, 2, stairs) == 6
    assert paper_lengths(survival, stairs).tolist() == [0, 0]


def test_a_missing_estimate_counts_as_certain():
    nan = math.nan
    curve = curve_of((1, 1.0), (2, 1.7), (3, 2.6))
    assert best_budget([[nan]], 1, curve) == best_budget([[1.0]], 1, curve) == 1
    assert best_budget([[0.5]], 1, curve) == 0
    # Behind a known estimate it is no better than that one.
    assert best_budget([[0.1, nan]], 1, curve) == best_budget([[0.1, 0.1]], 1, curve) == 0
    assert paper_lengths([[nan]], curve).tolist() == [1]


def test_requests_without_drafts_count():
    curve = curve_of((1, 1.0), (2, 1.7), (3, 2.1))
    assert best_budget([[0.6]], 1, curve) == best_budget([[0.6], []], 1, curve) == 0
    assert best_budget([[0.6], []], 2, curve) == best_budget([[0.6]], 2, curve) == 1
    assert paper_lengths([[0.6], []], curve).tolist() == [1, 0]
    assert paper_lengths([[0.6]], curve).tolist() == [0]
    assert paper_lengths([[0.6]], curve, num_requests=2).tolist() == [1]


def test_early_stop_admits_equal_drafts_place_by_place():
    free_up_to_four = curve_of((1, 1.0), (4, 1.0), (5, 100.0))
    assert paper_lengths([[0.5, 0.5, 0.5], [0.5, 0.5]], free_up_to_four).tolist() == [1, 1]
    assert paper_lengths([[0.5, 0.5, 0.5]], free_up_to_four).tolist() == [3]


@pytest.mark.parametrize("choose", [best_budget, lambda s, n, c: paper_lengths(s, c, num_requests=n)])
def test_fewer_requests_than_draft_are_refused(choose):
    with pytest.raises(ValueError, match="num_requests=1 is below the 2 requests"):
        choose([[0.5], [0.5]], 1, FLAT)


def test_a_draft_that_is_not_available_does_not_count():
    survival = np.array([[0.9, 0.8], [0.7, 0.6]])
    assert best_budget(survival, 2, None, available=np.array([1, 2])) == 3
    assert paper_lengths(survival, FLAT, available=np.array([1, 2])).tolist() == [1, 2]
    assert paper_lengths([[0.9, 0.8], [0.7]], FLAT, available=np.array([1, 2])).tolist() == [1, 1]


# Estimates and costs with few bits, so that ties occur.
SIXTEENTHS = st.integers(0, 16).map(lambda n: n / 16)
REQUESTS = st.lists(st.lists(SIXTEENTHS, max_size=3).map(lambda c: np.cumprod(c).tolist()), min_size=1, max_size=4)
POINTS = st.dictionaries(st.integers(1, 20), st.integers(1, 64), min_size=1, max_size=6)  # rows: ms / 8


def random_curve(points: dict[int, int]) -> CostCurve:
    return curve_of(*((size, ms / 8) for size, ms in sorted(points.items())))


def rate(survival, num_requests: int, lengths, curve: CostCurve) -> float:
    tokens = num_requests + sum(math.fsum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tokens / curve.cost(num_requests + sum(lengths))


@given(survival=REQUESTS, points=POINTS, num_idle=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_the_budget_is_the_best_of_all_choices(survival, points, num_idle):
    """Against every choice of a length for each request."""
    curve = random_curve(points)
    num_requests = len(survival) + num_idle
    choices = list(itertools.product(*(range(len(row) + 1) for row in survival)))
    rates = [rate(survival, num_requests, lengths, curve) for lengths in choices]
    found = best_budget(survival, num_requests, curve)
    best_rates = {sum(lengths): 0.0 for lengths in choices}
    for lengths, value in zip(choices, rates, strict=True):
        best_rates[sum(lengths)] = max(best_rates[sum(lengths)], value)
    # All sums are exact, so that ties are.
    assert found == min(total for total, value in best_rates.items() if value == max(rates))
    # The split of that total reaches its rate.
    width = max(map(len, survival), default=0)
    table = np.array([[*row, *[0.0] * (width - len(row))] for row in survival], np.float32).reshape(len(survival), -1)
    lengths = allocate(table, found, np.array([len(row) for row in survival]))
    assert lengths.sum() == found
    assert rate(survival, num_requests, lengths.tolist(), curve) == max(rates)


@given(survival=REQUESTS, points=POINTS)
@settings(max_examples=100, deadline=None)
def test_the_early_stop_admits_while_each_draft_pays(survival, points):
    curve = random_curve(points)
    lengths = paper_lengths(survival, curve)
    drafts = [(-row[j], j, r) for r, row in enumerate(survival) for j in range(len(row))]
    expected, best = [0] * len(survival), rate(survival, len(survival), [0] * len(survival), curve)
    for _, _, request in sorted(drafts):
        expected[request] += 1
        value = rate(survival, len(survival), expected, curve)
        if value <= best:  # all sums are exact, so that a tie stops
            expected[request] -= 1
            break
        best = value
    assert lengths.tolist() == expected


def law_of_first_token(choose) -> list[float]:
    """The law of the token that a step emits first: target (0.7, 0.3), drafter (0.5, 0.5), two drafts.

    The second draft looks good behind a first draft of token 0 and hopeless behind one of token 1.
    """
    p, q = (0.7, 0.3), (0.5, 0.5)
    law = [0.0, 0.0]
    for first, second_confidence in enumerate((0.9, 0.0)):
        is_verified = choose([[0.8, 0.8 * second_confidence]]) >= 1
        accepted = min(1.0, p[first] / q[first]) if is_verified else 0.0
        law[first] += q[first] * accepted
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)] if is_verified else list(p)
        for token in range(2):
            law[token] += q[first] * (1 - accepted) * residual[token] / sum(residual)
    return law


def test_a_global_search_over_new_estimates_is_biased_and_the_early_stop_is_not():
    assert law_of_first_token(lambda survival: best_budget(survival, 1, STEPPED)) == pytest.approx([0.85, 0.15])
    assert law_of_first_token(lambda survival: int(paper_lengths(survival, STEPPED)[0])) == pytest.approx([0.7, 0.3])


def test_allocation_takes_the_likeliest_drafts():
    survival = np.array([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]], np.float32)
    full = np.array([3, 3])
    expected = {0: [0, 0], 1: [1, 0], 2: [1, 1], 3: [1, 2], 4: [1, 3], 5: [2, 3], 6: [3, 3], 9: [3, 3], -1: [0, 0]}
    for budget, lengths in expected.items():
        assert allocate(survival, budget, full).tolist() == lengths


def test_allocation_of_ties_goes_request_by_request():
    survival = np.full((3, 2), 0.5, np.float32)
    got = [allocate(survival, budget, np.full(3, 2)).tolist() for budget in range(7)]
    assert got == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2]]


def test_allocation_counts_no_estimate_as_hopeless():
    survival = np.array([[math.nan, math.nan], [0.1, 0.0]], np.float32)
    assert allocate(survival, 1, np.array([2, 2])).tolist() == [0, 1]


TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(st.lists(SIXTEENTHS | st.just(math.nan), min_size=width, max_size=width), st.integers(0, width)),
        min_size=1,
        max_size=6,
    )
)


@given(rows=TABLES, budget=st.integers(0, 30), padding=st.lists(st.integers(0, 6), max_size=4))
@settings(max_examples=150, deadline=None)
def test_allocation_is_a_prefix_of_each_request_and_blind_to_padding(rows, budget, padding):
    survival = np.array([row for row, _ in rows], np.float32)
    available = np.array([length for _, length in rows])
    lengths = allocate(survival, budget, available)
    assert (lengths <= available).all() and lengths.sum() == min(budget, available.sum())
    # What is left out survives no better than what is taken, as far as it may be told from what is in front of it.
    lowest = np.minimum.accumulate(np.where(np.isnan(survival), 0, survival), axis=1)
    taken = np.arange(survival.shape[1])[None, :] < lengths[:, None]
    left = ~taken & (np.arange(survival.shape[1])[None, :] < available[:, None])
    if taken.any() and left.any():
        assert lowest[taken].min() >= lowest[left].max()
    places = sorted(min(place, len(rows)) for place in padding)
    padded = np.insert(survival, places, 1.0, axis=0), np.insert(available, places, 0)
    kept = np.insert(np.ones(len(rows), bool), places, False)
    spread = allocate(padded[0], budget, padded[1])
    assert spread[kept].tolist() == lengths.tolist() and not spread[~kept].any()
    count = len(rows)
    assert best_budget(padded[0], count, FLAT, available=padded[1]) == best_budget(
        survival, count, FLAT, available=available
    )
    early = paper_lengths(padded[0], STEPPED, num_requests=count, available=padded[1])
    assert early[kept].tolist() == paper_lengths(survival, STEPPED, available=available).tolist()


def test_drafts_cost_what_lies_between_the_points():
    curve = curve_of((8, 1.0), draft_points=((2, 1.0), (4, 3.0)))
    assert [curve.draft_cost(count) for count in (1, 2, 3, 4, 8)] == [1.0, 1.0, 2.0, 3.0, 6.0]
    assert curve_of((8, 1.0)).draft_cost(100) == 0.0


def test_drafting_pays_where_tokens_outweigh_its_cost():
    rows = ((8, 1.0), (16, 2.0), (32, 4.0))
    sure, unsure = [[0.9, 0.8]] * 4, [[0.1, 0.01]] * 4
    cheap, dear = (curve_of(*rows, draft_points=((4, ms),)) for ms in (0.2, 1.0))
    # 4 requests: 4 tokens in 1 ms without drafts; 4 sure drafts fit into the same 8 rows, 7.6 tokens in 1.2 or 2 ms.
    assert drafting_pays(sure, 4, cheap) and not drafting_pays(sure, 4, dear)
    assert not drafting_pays(unsure, 4, cheap)  # 4.4 tokens in 1.2 ms
    assert drafting_pays(unsure, 4, None) and drafting_pays(unsure, 4, curve_of(*rows))
    assert drafting_pays([[float("nan")] * 2] * 4, 4, cheap)  # nothing is known: they count as certain


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0.0, 3.0))
def test_drafting_pays_exactly_if_some_number_of_drafts_does(survival, draft_ms):
    curve = curve_of((2, 1.0), (4, 1.3), (8, 2.0), (16, 5.0), draft_points=((5, draft_ms),))
    count = len(survival)
    ranked = sorted(itertools.chain.from_iterable(itertools.accumulate(each, min) for each in survival), reverse=True)
    without = count / curve.cost(count)
    rates = [(count + sum(ranked[:b])) / (curve.cost(count + b) + draft_ms) for b in range(len(ranked) + 1)]
    if abs(max(rates) - without) > 1e-9:
        assert drafting_pays(survival, count, curve) == (max(rates) > without)
