"""Policies see the right estimates."""

import dataclasses

import numpy as np

from deepinfer_jax.scheduler.budget import CostCurve, best_budget, paper_lengths
from deepinfer_jax.scheduler.plan import Chunk
from deepinfer_jax.scheduler.sequence import Limits, Sequence
from deepinfer_jax.scheduler.verification import LOOK_AGAIN, BudgetPolicy, PaperPolicy, budget_of

CURVE = CostCurve(points=((2, 1.0), (4, 1.5), (8, 6.0)))
SURE, UNSURE = (0.9, 0.8, 0.7), (0.2, 0.05, 0.01)


def sequence_of(*estimates: tuple[int, tuple[float, ...]], max_tokens: int = 100) -> Sequence:
    sequence = Sequence(request_id="r", prompt=[1], limits=Limits(max_tokens=max_tokens, eos_id=0))
    sequence.has_drafts, sequence.estimates = True, estimates
    return sequence


def test_a_budget_comes_from_estimates_that_are_two_steps_old():
    sequences = [sequence_of((7, SURE), (8, UNSURE)), sequence_of((7, UNSURE), (8, SURE))]
    budget = BudgetPolicy(CURVE).budget(sequences, [3, 3], step=9)
    assert budget == best_budget(np.array([SURE, UNSURE]), 2, CURVE)
    later = BudgetPolicy(CURVE).budget(sequences, [3, 3], step=10)
    assert later == best_budget(np.array([UNSURE, SURE]), 2, CURVE)


def test_without_an_old_estimate_a_draft_counts_as_certain():
    fresh = BudgetPolicy(CURVE).budget([sequence_of((8, UNSURE))], [3], step=9)
    assert fresh == best_budget([[1.0, 1.0, 1.0]], 1, CURVE)
    assert fresh > BudgetPolicy(CURVE).budget([sequence_of((7, UNSURE))], [3], step=9)


def test_estimates_of_fewer_drafts_leave_the_others_certain():
    assert BudgetPolicy(CURVE).budget([sequence_of((1, (0.5,)))], [3], step=9) == best_budget(
        [[0.5, float("nan"), float("nan")]], 1, CURVE
    )


def test_the_early_stop_reads_the_newest_estimates_and_limits_each_request():
    sequences = [sequence_of((7, UNSURE), (8, SURE)), sequence_of((8, UNSURE)), sequence_of(max_tokens=1)]
    lengths = PaperPolicy(CURVE).lengths(sequences, 3)
    assert lengths == paper_lengths([list(SURE), list(UNSURE), []], CURVE, num_requests=3).tolist()
    assert PaperPolicy(CURVE).budget(sequences, [1, 1, 0], step=9) is None
    assert PaperPolicy.reads_newest and not BudgetPolicy.reads_newest


def test_steps_without_drafts_have_no_budget():
    chunk = Chunk(sequence=sequence_of(), start=1, length=1, draws=True, draw_position=2, first_unknown=2, epoch=0)
    assert budget_of([chunk], BudgetPolicy(CURVE), step=3) is None
    assert budget_of([chunk], None, step=3) is None


def test_budgets_follow_the_load():
    """Near all drafts of one request, and none of many where a step of more rows is dear."""
    curve = CostCurve(points=tuple((rows, 5.0 + max(0, rows - 64) * 0.5) for rows in range(8, 513, 8)))
    one = [sequence_of((1, (0.8, 0.64, 0.5, 0.4, 0.3)))]
    assert BudgetPolicy(curve).budget(one, [5], step=9) == 5
    many = [sequence_of((1, (0.3, 0.1, 0.05, 0.02, 0.01))) for _ in range(200)]
    assert BudgetPolicy(curve).budget(many, [5] * 200, step=9) < 20


def test_drafts_are_made_while_they_pay_and_now_and_then_to_look_again():
    policy = BudgetPolicy(dataclasses.replace(CURVE, draft_points=((1, 5.0),)))
    assert policy.proposes([], 3, step=1) and policy.proposes([sequence_of()], 3, step=2) is False
    cheap = BudgetPolicy(dataclasses.replace(CURVE, draft_points=((1, 0.3),)))
    assert cheap.proposes([sequence_of()], 3, step=2)  # nothing is known of its drafts
    sequences = [sequence_of((2, SURE), (3, UNSURE))]  # the newest one counts
    asked = [cheap.proposes(sequences, 3, step) for step in range(3, 3 + 3 * LOOK_AGAIN)]
    assert [step for step, made in enumerate(asked, start=3) if made] == [
        2 + LOOK_AGAIN,
        2 + 2 * LOOK_AGAIN,
        2 + 3 * LOOK_AGAIN,
    ]
    assert PaperPolicy(CURVE).proposes(sequences, 3, step=3)
