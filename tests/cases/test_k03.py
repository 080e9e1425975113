"""K03: speculation must not be visible."""

import itertools

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.scheduler.budget import CostCurve
from deepinfer_jax.scheduler.verification import BudgetPolicy
from deepinfer_jax.testing import tiny

NUM_TOKENS, QUICK_TOKENS = 200, 60
# Injected: rows above 16 are dear, so that lengths between none and all are worth it.
CURVE = CostCurve(points=((8, 1.0), (16, 1.2), (24, 2.0), (48, 5.0), (240, 40.0)))


def requests(num_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """12 prompts: each temperature and top_p twice."""
    rng = np.random.default_rng(3)
    options = list(itertools.product((0.0, 0.7, 1.0), (1.0, 0.9))) * 2
    prompts = [rng.integers(3, 299, 11 + 13 * index).tolist() for index in range(len(options))]
    params = [
        SamplingParams(temperature=t, top_p=p, seq_seed=index, max_tokens=num_tokens, ignore_eos=True)
        for index, (t, p) in enumerate(options)
    ]
    return prompts, params


def run(engine, num_tokens: int) -> list[list[tuple[int, float]]]:
    prompts, params = requests(num_tokens)
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request("", str(index), own, prompt)
    found: list[list[tuple[int, float]]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[int(output.request_id)].append((output.token_id, output.token_logprobs))
    return found


@pytest.mark.parametrize(
    "num_tokens", [QUICK_TOKENS, pytest.param(NUM_TOKENS, marks=pytest.mark.slow)], ids=["quick", "whole"]
)
def test_drafts_are_not_visible(agreeing_model, num_tokens):
    sizes = {"max_num_seqs": 12}
    plain = tiny.tiny_engine(agreeing_model, **sizes)
    want = run(plain, num_tokens)
    assert [len(tokens) for tokens in want] == [num_tokens] * 12
    fixed = tiny.tiny_engine(agreeing_model, **sizes, num_draft_tokens=5)
    assert run(fixed, num_tokens) == want
    assert fixed.stats()["decode_steps"] < plain.stats()["decode_steps"], "some drafts were kept"
    scheduled = tiny.tiny_engine(
        agreeing_model, **sizes, num_draft_tokens=5, varlen_verification=True, verification=BudgetPolicy(CURVE)
    )
    assert run(scheduled, num_tokens) == want
    assert len(scheduled.stats()["drafts"]["verified_lens"]) >= 2
    assert scheduled.stats()["drafts"]["drafts_verified"] < fixed.stats()["drafts"]["drafts_verified"]
