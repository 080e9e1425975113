"""K12: decode equals prefill."""

import dataclasses

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny

PROMPT_LEN, NUM_TOKENS = 90, 150
PROMPT = np.random.default_rng(12).integers(3, 299, PROMPT_LEN).tolist()
SAMPLED = SamplingParams(temperature=1.0, seq_seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)


def run(llm, prompt: list[int], params: SamplingParams):
    [outputs] = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    return outputs


@pytest.fixture(scope="module")
def plain_llm(agreeing_model):
    return tiny.tiny_llm(agreeing_model)


@pytest.fixture(scope="module")
def answer(agreeing_model) -> tuple[list[int], np.ndarray]:
    """Tokens and log-probabilities with drafts."""
    llm = tiny.tiny_llm(agreeing_model, num_draft_tokens=5)
    outputs = run(llm, PROMPT, SAMPLED)
    assert len(outputs) == NUM_TOKENS and llm.stats()["drafts"]["drafts_accepted"] > 0
    logprobs = np.array([one.token_logprobs for one in outputs], np.float32)
    assert logprobs.max() <= 0
    return [one.token_id for one in outputs], logprobs


def test_forced_tokens_have_the_log_probabilities_of_sampled_ones(plain_llm, answer):
    tokens, logprobs = answer
    outputs = run(plain_llm, PROMPT, dataclasses.replace(SAMPLED, golden_token_ids=tokens))
    assert [one.token_id for one in outputs] == tokens
    np.testing.assert_array_equal(np.array([one.token_logprobs for one in outputs], np.float32), logprobs)


@pytest.mark.parametrize("chunk", [None, pytest.param(32, marks=pytest.mark.slow)])
def test_a_prompt_has_the_log_probabilities_of_an_answer(agreeing_model, answer, chunk):
    tokens, logprobs = answer
    options = {} if chunk is None else {"max_num_batched_tokens": chunk}
    llm = tiny.tiny_llm(agreeing_model, **options)
    scored = dataclasses.replace(SAMPLED, prompt_logprobs=True, max_tokens=1)
    [output] = run(llm, [*PROMPT, *tokens], scored)
    found = np.array(output.prompt_logprobs[-NUM_TOKENS:], np.float32)
    np.testing.assert_array_equal(found, logprobs)
