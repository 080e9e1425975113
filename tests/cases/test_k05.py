"""K05: edges of the interface."""

import math

import pytest

from deepinfer_jax import SamplingParams

VOCAB_SIZE = 301
NAN, INF = math.nan, math.inf


def result(llm, prompt: str, params: SamplingParams) -> list[tuple[int, float]]:
    [outputs] = llm.generate(prompt, params)
    return [(o.token_id, o.token_logprobs) for o in outputs]


def test_no_tokens_means_one(llm):
    with pytest.warns(UserWarning, match="max_tokens=0"):
        params = SamplingParams(max_tokens=0, seq_seed=1)
    [outputs] = llm.generate("a", params)
    assert [o.finish_reason for o in outputs] == ["stop" if outputs[0].token_id == 1 else "length"]


@pytest.mark.parametrize(
    "name, values",
    [
        ("max_tokens", (-1, 2**31)),
        ("top_k", (0, -2, 2**31)),
        ("top_p", (0, -0.1, 1.0001, NAN)),
        ("temperature", (-1, NAN, INF)),
        ("top_logprobs", (1001, -1)),
    ],
)
def test_values_out_of_range_are_refused(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_top_k_above_the_vocabulary_is_off(llm):
    wide, off = (SamplingParams(top_k=k, seq_seed=4, max_tokens=12) for k in (10**6, -1))
    assert result(llm, "abc", wide) == result(llm, "abc", off)


def test_tiny_temperature_is_greedy(llm):
    tiny, greedy = (SamplingParams(temperature=t, max_tokens=12, top_p=0.5, top_k=7) for t in (1e-6, 0))
    assert result(llm, "abc", tiny) == result(llm, "abc", greedy)
    assert (tiny.temperature, tiny.top_p, tiny.top_k) == (1e-5, 1.0, -1)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1])
def test_a_bad_token_id_is_named_and_nothing_is_queued(llm, token_id):
    with pytest.raises(ValueError, match=rf"prompt 1 has token id {token_id}\b"):
        llm.generate(prompt_token_ids=[[5, 6], [7, token_id, 8], [9]])
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert [len(outputs) for outputs in llm.generate(prompt_token_ids=[[5], [6]], sampling_params=params)] == [3, 3]


def test_empty_prompts(llm):
    with pytest.raises(ValueError, match="prompt must not be empty"):
        llm.generate(prompt_token_ids=[[]])
    [outputs] = llm.generate("", SamplingParams(max_tokens=2, ignore_eos=True))
    assert [o.prompt_len for o in outputs] == [1, 1]  # BOS


def test_params_must_be_as_many_as_prompts(llm):
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize(
    "option",
    ["n", "stop", "stop_token_ids", "logit_bias", "presence_penalty", "frequency_penalty", "min_p", "min_tokens"],
)
def test_an_option_has_an_effect(llm, option):
    """Until drafts have landed, that it does not depend on them cannot be tested."""
    common = {"seq_seed": 5, "max_tokens": 40, "ignore_eos": True}
    token = result(llm, "abc", SamplingParams(**common))[3][0]
    if option == "min_tokens":
        common["stop_token_ids"] = [token]
    plain = result(llm, "abc", SamplingParams(**common))
    text = llm.get_tokenizer().decode([token])
    values = {"n": 2, "stop": text, "stop_token_ids": [token], "logit_bias": {token: -9.0}, "min_p": 1.0}
    values |= {"presence_penalty": 2.0, "frequency_penalty": 2.0, "min_tokens": 39}
    [outputs] = llm.generate("abc", SamplingParams(**common, **{option: values[option]}))
    if option == "n":
        first, second = ([(o.token_id, o.token_logprobs) for o in answer] for answer in outputs)
        assert first == plain != second
    else:
        assert [(o.token_id, o.token_logprobs) for o in outputs] != plain


@pytest.mark.parametrize("option", ["best_of", "stop_strings", "max_new_tokens"])
def test_an_unknown_option_is_refused_by_name(option):
    with pytest.raises(TypeError, match=rf"\b{option}\b"):
        SamplingParams(**{option: 1})


def test_the_name_of_the_seed_is_told():
    with pytest.raises(TypeError, match="seed.*seq_seed"):
        SamplingParams(seed=1)
