"""The front end: bad input loses nothing, and a result depends on its own request only."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.testing import tiny

EOS = 1
VOCAB_SIZE = 301
SAMPLED = SamplingParams(max_tokens=12, seq_seed=11, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 299, length).tolist()


def ids_of(outputs) -> list[int]:
    return [output.token_id for output in outputs]


def same(a, b) -> bool:
    """Equal token ids, bit-equal log-probabilities."""
    return [(o.token_id, o.token_logprobs) for o in a] == [(o.token_id, o.token_logprobs) for o in b]


# Name -> (arguments of generate, exception, what its text says).
BAD_CALLS = {
    "nothing": ({}, ValueError, "neither prompts nor prompt_token_ids"),
    "empty list": ({"prompts": []}, ValueError, "list of prompts is empty"),
    "empty id list": ({"prompt_token_ids": []}, ValueError, "list of prompts is empty"),
    "empty prompt": ({"prompt_token_ids": [[5], []]}, ValueError, "prompt 1: prompt must not be empty"),
    "id too large": ({"prompt_token_ids": [[5], [5, VOCAB_SIZE], [6]]}, ValueError, "prompt 1 has token id 301 at"),
    "id negative": ({"prompt_token_ids": [[5], [-1], [6]]}, ValueError, "prompt 1 has token id -1 at place 0"),
    "id beyond int64": ({"prompt_token_ids": [[2**70]]}, ValueError, "prompt 0 has token id 1180591620717411303424"),
    "bool for an id": ({"prompt_token_ids": [[True, 4]]}, TypeError, "prompt 0 has True"),
    "too long": ({"prompt_token_ids": [[4] * 513]}, ValueError, "prompt 0 has 513 tokens, more than the 512 that can"),
    "lengths": ({"prompts": ["a", "b"], "prompt_token_ids": [[3]]}, ValueError, "2 prompts and 1 prompt_token_ids"),
    "params": ({"prompts": ["a"] * 3, "sampling_params": [GREEDY] * 2}, ValueError, "3 prompts and 2 sampling_params"),
    "images": ({"prompts": "a", "multi_modal_data": {}}, ValueError, "prompt 0 needs either images or image_bytes"),
    "golden id": (
        {"prompts": "a", "sampling_params": SamplingParams(golden_token_ids=[4, VOCAB_SIZE])},
        ValueError,
        r"golden_token_ids\[1\]=301 of prompt 0",
    ),
    "grammar": (
        {"prompts": "a", "sampling_params": SamplingParams(so_args={"schema_type": "xml", "schema": "a"})},
        ValueError,
        "schema_type.*xml",
    ),
    "surrogate": ({"prompts": ["a", "\ud800"]}, ValueError, "prompt 1: the text holds a lone surrogate"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused_and_nothing_is_queued(llm, name):
    arguments, error, text = BAD_CALLS[name]
    with pytest.raises(error, match=text):
        llm.generate(**arguments)
    assert llm.engine.scheduler.num_unfinished == 0
    [outputs] = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=SamplingParams(max_tokens=1))
    assert len(outputs) == 1


def test_unknown_option_is_refused(tiny_model):
    with pytest.raises(TypeError, match="no option 'max_num_seq'; did you mean max_num_seqs"):
        LLM(tiny_model, max_num_seq=3)


def test_unreadable_models_are_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="no existing directory or config file"):
        LLM(tmp_path / "absent")
    with pytest.raises(ValueError, match="cannot read the model config"):
        LLM(tmp_path)
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=weights.name):
        LLM(broken)


def test_limits_that_do_not_fit_are_refused(tiny_model):
    with pytest.raises(ValueError, match="max_model_len=20000 is above max_position_embeddings=16384"):
        LLM(tiny_model, max_model_len=20000)
    with pytest.raises(ValueError, match="revision='main' is of no use"):
        LLM(tiny_model, revision="main")
    with pytest.raises(ValueError, match="tokenizer_revision='main' is of no use"):
        LLM(tiny_model, tokenizer_revision="main")


def test_closed_engine_says_so(tiny_model):
    llm = tiny.tiny_llm(tiny_model)
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate("a")


def test_row_does_not_depend_on_company_or_place(llm):
    prompts = [prompt_of(n) for n in (37, 1, 5, 128, 129, 200, 64, 3, 70)]  # more than there are slots
    alone = [llm.generate(prompt_token_ids=[p], sampling_params=SAMPLED)[0] for p in prompts]
    together = llm.generate(prompt_token_ids=prompts, sampling_params=SAMPLED)
    backwards = llm.generate(prompt_token_ids=prompts[::-1], sampling_params=SAMPLED)[::-1]
    assert all(map(same, alone, together))
    assert all(map(same, alone, backwards))
    assert len({tuple(ids_of(outputs)) for outputs in together}) == len(prompts)


@pytest.mark.parametrize(
    "max_num_batched_tokens", [*(pytest.param(rows, marks=pytest.mark.slow) for rows in (4, 7)), 64]
)
def test_row_does_not_depend_on_chunks(llm, tiny_model, max_num_batched_tokens):
    prompts = [prompt_of(n) for n in (150, 9, 65)]
    chunked = tiny.tiny_llm(tiny_model, max_num_batched_tokens=max_num_batched_tokens)
    want = llm.generate(prompt_token_ids=prompts, sampling_params=SAMPLED)
    assert all(map(same, want, chunked.generate(prompt_token_ids=prompts, sampling_params=SAMPLED)))


def test_nothing_is_compiled_after_each_step_ran_once(llm):
    llm.generate(prompt_token_ids=[prompt_of(40), [5]], sampling_params=SAMPLED)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if event.startswith("/jax/core/compile") else None
    )
    lengths = (1, 8, 9, 30, 200, 64)
    params = [SamplingParams(temperature=t, top_p=0.9, top_k=40, max_tokens=9) for t in (0, 0.5, 1, 2, 1, 1)]
    llm.generate(prompt_token_ids=[prompt_of(n) for n in lengths], sampling_params=params)
    assert compiled == []


def test_order_and_fields_of_outputs(llm):
    tokens = [1, 4, 2, 7, 3, 5]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in tokens]
    results = llm.generate(prompt_token_ids=[prompt_of(n) for n in (3, 30, 9, 70, 1, 2)], sampling_params=params)
    assert [len(outputs) for outputs in results] == tokens
    first = int(results[0][0].request_id.removeprefix("generate-"))
    for index, (outputs, length) in enumerate(zip(results, (3, 30, 9, 70, 1, 2), strict=True)):
        assert {frozenset(vars(o)) for o in outputs} == {frozenset(f.name for f in dataclasses.fields(RequestOutput))}
        assert {o.request_id for o in outputs} == {f"generate-{first + index}"}
        assert {o.prompt_len for o in outputs} == {length}
        assert [o.num_output_tokens for o in outputs] == list(range(1, len(outputs) + 1))
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [o.finish_reason for o in outputs] == [""] * (len(outputs) - 1) + ["length"]
        assert all(o.token_logprobs <= 0 and o.draft_tok == o.accept_tok == 1 for o in outputs)
        assert all(o.nextn_logprobs == 1.0 and o.sum_smaller_probs == -1.0 for o in outputs)
        assert all(o.top_logprobs == [] and o.confidence_score is None for o in outputs)


def test_texts_are_the_decoded_tokens(llm, text_llm):
    prompts = ["The quick brown fox", "", "é€😀"]
    texts = text_llm.generate(prompts, SAMPLED)
    results = llm.generate(prompts, SAMPLED)
    decode = llm.get_tokenizer().decode
    for text, outputs in zip(texts, results, strict=True):
        summary = CompletionOutput.from_outputs(outputs)
        assert text == decode(ids_of(outputs)) == summary.text
        assert summary.token_ids == tuple(ids_of(outputs))
        assert summary.finish_reason == "length"
        assert summary.cumulative_logprob == sum(o.token_logprobs for o in outputs)
    assert text_llm.generate("The quick brown fox", SAMPLED) == texts[:1]


def test_prompt_forms_agree(llm):
    text = "Once upon a time"
    ids = llm.get_tokenizer().encode(text)
    want = llm.generate([text], GREEDY)
    for arguments in (
        {"prompts": [ids]},
        {"prompt_token_ids": [np.asarray(ids, np.int32)]},
        {"prompt_token_ids": np.asarray([ids])},
        {"prompts": ["ids win over this"], "prompt_token_ids": [ids]},
    ):
        assert same(want[0], llm.generate(**arguments, sampling_params=GREEDY)[0])


def test_eos_ends_a_request_and_is_an_output(llm):
    golden = [10, 11, EOS, 20, 21, 22]
    [stopped] = llm.generate("a", SamplingParams(golden_token_ids=golden, max_tokens=5))
    assert ids_of(stopped) == [10, 11, EOS]
    assert stopped[-1].finish_reason == "stop"
    [kept] = llm.generate("a", SamplingParams(golden_token_ids=golden, max_tokens=5, ignore_eos=True))
    assert ids_of(kept) == golden[:5]
    assert kept[-1].finish_reason == "length"


def test_first_token_can_be_kept_from_being_eos(llm):
    options = {"max_tokens": 1, "top_logprobs": VOCAB_SIZE}
    [[free]] = llm.generate("a", SamplingParams(**options))
    [[kept]] = llm.generate("a", SamplingParams(**options, first_n_token_no_eos=1))
    assert dict(zip(free.top_token_ids, free.top_logprobs, strict=True))[EOS] > -9999
    assert dict(zip(kept.top_token_ids, kept.top_logprobs, strict=True))[EOS] == -9999


def test_context_ends_a_request(llm):
    [outputs] = llm.generate(
        prompt_token_ids=[prompt_of(510)], sampling_params=SamplingParams(max_tokens=50, ignore_eos=True)
    )
    # Ended by the first token that the 512 positions do not hold.
    assert (len(outputs), outputs[-1].finish_reason) == (3, "length")


def test_top_logprobs_have_the_asked_length_and_order(llm):
    params = [SamplingParams(max_tokens=3, seq_seed=5, top_logprobs=n) for n in (0, 3, 20, 320)]
    results = llm.generate(["same"] * 4, params)
    for outputs, count in zip(results, (0, 3, 20, 320), strict=True):
        assert same(outputs, results[0])
        assert all(len(o.top_logprobs) == len(o.top_token_ids) == count for o in outputs)
        for output in outputs:
            assert output.top_logprobs == sorted(output.top_logprobs, reverse=True)
            if count >= VOCAB_SIZE:
                place = output.top_token_ids.index(output.token_id)
                assert output.top_logprobs[place] == output.token_logprobs
                assert np.isclose(np.exp(output.top_logprobs).sum(), 1, atol=1e-4)


def test_greedy_is_the_argmax_and_has_no_seed(llm):
    params = SamplingParams(max_tokens=8, temperature=0.0, top_logprobs=1, ignore_eos=True)
    first, second = llm.generate(["same"] * 2, params)
    assert ids_of(first) == ids_of(second) == [o.top_token_ids[0] for o in first]


def test_engine_seed_makes_default_seeds_repeatable(tiny_model):
    params = SamplingParams(max_tokens=12)
    a, b, other = (tiny.tiny_llm(tiny_model, seed=seed).generate(["x"] * 2, params) for seed in (7, 7, 8))
    assert all(map(same, a, b))
    assert not same(a[0], a[1])
    assert not same(a[0], other[0])


def test_model_choice_is_argument_then_variable_then_embedded(tiny_model, llm, monkeypatch, tmp_path):
    other = tiny.tiny_byte_model(tmp_path, seed=2)
    monkeypatch.setattr("deepinfer_jax.engine.setup.embedded_model", lambda: other)
    monkeypatch.setenv("DEEPINFER_ENFORCE_EAGER", "1")
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tiny_model))
    sizes = {"max_model_len": tiny.MAX_MODEL_LEN, "max_num_seqs": tiny.MAX_NUM_SEQS, "decode_sequence": False}
    [want] = llm.generate("x", GREEDY)
    assert same(want, LLM(**sizes).generate("x", GREEDY)[0])
    [elsewhere] = LLM(other, **sizes).generate("x", GREEDY)
    assert not same(want, elsewhere)
    monkeypatch.delenv("DEEPINFER_HF_MODEL_DIR")
    assert same(elsewhere, LLM(**sizes).generate("x", GREEDY)[0])


def test_bare_config_has_random_weights_and_no_tokenizer(tiny_model, tmp_path):
    file = tmp_path / "shape.json"
    file.write_text((tiny_model / "config.json").read_text())
    with pytest.raises(ValueError, match="decode_sequence=True needs a tokenizer"):
        tiny.tiny_llm(file, decode_sequence=True)
    bare = tiny.tiny_llm(file)
    with pytest.raises(ValueError, match="prompt 0 is a text, and this model has no tokenizer"):
        bare.generate("a")
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.get_tokenizer()
    [outputs] = bare.generate(prompt_token_ids=[[4, 5]], sampling_params=GREEDY)
    assert [o.text for o in outputs] == [""] * 6
    [dummy] = tiny.tiny_llm(tiny_model, load_format="dummy").generate(prompt_token_ids=[[4, 5]], sampling_params=GREEDY)
    assert same(outputs, dummy)
    named = tiny.tiny_llm(file, tokenizer=tiny_model, seed=3)
    assert not same(outputs, named.generate(prompt_token_ids=[[4, 5]], sampling_params=GREEDY)[0])
    assert named.get_tokenizer().vocab_size == VOCAB_SIZE


def test_default_context_gives_way_to_a_short_model(tiny_model, tmp_path):
    raw = json.loads((tiny_model / "config.json").read_text())
    raw["text_config"]["max_position_embeddings"] = 96
    short = shutil.copytree(tiny_model, tmp_path / "short")
    (short / "config.json").write_text(json.dumps(raw))
    from deepinfer_jax.config.args import EngineArgs, resolve
    from deepinfer_jax.config.released import load_config
    from deepinfer_jax.engine.setup import context_limit

    config = load_config(short)
    assert context_limit(resolve(EngineArgs(), {}), config) == 96
    assert context_limit(resolve(EngineArgs(max_model_len=50), {}), config) == 50
    with pytest.raises(ValueError, match="max_model_len=97 is above max_position_embeddings=96"):
        context_limit(resolve(EngineArgs(max_model_len=97), {}), config)
