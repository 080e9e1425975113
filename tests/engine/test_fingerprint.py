"""The bit fingerprint tells results apart by token, by bits of log-probabilities and by how they end."""

import dataclasses

import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax.engine.fingerprint import bit_fingerprint
from deepinfer_jax.engine.outputs import CompletionOutput, RequestOutput, fold_end
from tests.engine import driving


def output(token_id: int, logprob: float, finish_reason: str = "") -> RequestOutput:
    return RequestOutput(
        request_id="a",
        prompt_len=1,
        token_id=token_id,
        finish_reason=finish_reason,
        finished=bool(finish_reason),
        max_num_batched_tokens=1,
        token_logprobs=float(np.float32(logprob)),
        num_output_tokens=1,
    )


PLAIN = [output(5, -0.1), output(7, -2.5, "length")]
ONE_ULP = float(np.nextafter(np.float32(-0.1), np.float32(0)))


@pytest.mark.parametrize(
    "other",
    [
        [output(5, -0.1), output(8, -2.5, "length")],
        [output(5, ONE_ULP), output(7, -2.5, "length")],
        [output(5, -0.1), output(7, -2.5, "stop")],
        [output(5, -0.1), output(7, -2.5)],
        [output(7, -2.5), output(5, -0.1, "length")],
        [output(5, -0.1, "length")],
        [],
    ],
    ids=["token", "one-ulp", "reason", "unfinished", "order", "shorter", "empty"],
)
def test_every_difference_changes_it(other):
    assert bit_fingerprint(other) != bit_fingerprint(PLAIN)


def test_the_sign_of_zero_counts():
    assert bit_fingerprint([output(5, 0.0)]) != bit_fingerprint([output(5, -0.0)])


def test_it_is_the_same_in_every_version():
    assert bit_fingerprint(PLAIN) == "4a5a956270b3bccacba72900c76da171"


def test_texts_and_alternatives_do_not_count():
    other = [dataclasses.replace(each, text="x", top_logprobs=[-1.0], top_token_ids=[3]) for each in PLAIN]
    assert bit_fingerprint(other) == bit_fingerprint(PLAIN)


def test_an_end_without_a_token_counts_for_its_reason():
    outputs = [output(5, -0.1), output(7, -2.5), output(-1, 0.0, "stop")]
    assert bit_fingerprint(outputs) == bit_fingerprint(fold_end(outputs))
    assert bit_fingerprint(outputs) != bit_fingerprint([*outputs[:2], output(-1, 0.0, "length")])


def test_a_completion_has_it_and_equal_seeds_give_equal_ones(llm):
    prompts = [driving.prompt_of(20), driving.prompt_of(9)]
    params = [driving.params_of(seed, 6) for seed in (1, 2)]
    first = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    swapped = llm.generate(prompt_token_ids=prompts[::-1], sampling_params=params[::-1], use_tqdm=False)
    prints = [CompletionOutput.from_outputs(outputs).fingerprint for outputs in first]
    assert prints == [bit_fingerprint(outputs) for outputs in swapped[::-1]]
    assert prints[0] != prints[1] and deepinfer_jax.bit_fingerprint is bit_fingerprint
