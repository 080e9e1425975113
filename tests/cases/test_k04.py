"""K04: preemption leaves no trace."""

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny

NUM_REQUESTS, PROMPT_LEN, NUM_TOKENS = 8, 50, 250


def run(llm) -> list:
    rng = np.random.default_rng(4)
    prompts = rng.integers(3, 299, (NUM_REQUESTS, PROMPT_LEN))
    params = [
        SamplingParams(temperature=1.0, seq_seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        for seed in range(NUM_REQUESTS)
    ]
    return llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)


def facts(results) -> list[list[tuple[int, float]]]:
    return [[(one.token_id, one.token_logprobs) for one in outputs] for outputs in results]


@pytest.fixture(scope="module")
def ample(crowded_llm):
    before = crowded_llm.stats()["preemptions"]
    results = facts(run(crowded_llm))
    assert crowded_llm.stats()["preemptions"] == before
    assert [len(outputs) for outputs in results] == [NUM_TOKENS] * NUM_REQUESTS
    return results


def test_preempted_requests_are_computed_again_to_the_same_result(make_llm, ample):
    llm = make_llm(**tiny.SCARCE, stop_preempted_request=False)
    results = run(llm)
    assert facts(results) == ample
    assert {outputs[-1].finish_reason for outputs in results} == {"length"}
    assert llm.stats()["preemptions"] > 0


def test_preempted_requests_that_end_say_so_and_keep_their_tokens(make_llm, ample):
    llm = make_llm(**tiny.SCARCE, stop_preempted_request=True)
    results = run(llm)
    assert len(results) == NUM_REQUESTS
    reasons = [outputs[-1].finish_reason for outputs in results]
    assert set(reasons) == {"length", "insufficient_system_resource"}
    assert reasons[0] == "length", "the oldest one finishes"
    for outputs, reason, whole in zip(facts(results), reasons, ample, strict=True):
        assert outputs == whole[: len(outputs)]
        assert (len(outputs) == NUM_TOKENS) == (reason == "length")
    assert llm.stats()["preemptions"] == reasons.count("insufficient_system_resource")
