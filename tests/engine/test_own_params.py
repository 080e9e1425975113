"""An engine that runs parameters of the caller's: changed weights, and what does not fit."""

import dataclasses

import jax.numpy as jnp
import pytest

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.checkpoint.load import load_model
from deepinfer_jax.config.args import resolve
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.testing.tiny import CONFIG_NAME

MODEL = str(shipped_config(CONFIG_NAME))
CONFIG = resolve(EngineArgs(MODEL, max_model_len=512, max_num_seqs=4, num_draft_tokens=0), {})


def answer(engine):
    engine.add_request("", "one", SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0), [5, 6, 7])
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [output.token_id for output in engine.step()]
    return tokens


@pytest.fixture(scope="module")
def loaded():
    return load_model(MODEL, with_vision=True)


def test_parameters_of_the_caller_run_in_place_of_the_files(loaded):
    params, _ = loaded
    usual = answer(LLMEngine(CONFIG))
    assert answer(LLMEngine(CONFIG, params=params)) == usual
    turned = dataclasses.replace(params, head=jnp.flip(params.head, axis=0))
    assert answer(LLMEngine(CONFIG, params=turned))[0] == params.head.shape[0] - 1 - usual[0]


def test_what_does_not_fit_is_named(loaded):
    params, _ = loaded
    with pytest.raises(ValueError, match=r"head is float32 .* where the config wants bfloat16"):
        LLMEngine(CONFIG, params=dataclasses.replace(params, head=params.head.astype(jnp.float32)))
    with pytest.raises(ValueError, match="no draft stages and drafts are asked for"):
        LLMEngine(dataclasses.replace(CONFIG, num_draft_tokens=2), params=params)
