"""Drafts as an engine is told to use them: numbers, rules, options of single requests."""

import dataclasses

import pytest

from deepinfer_jax import EngineArgs, SamplingParams
from deepinfer_jax.config.args import resolve
from deepinfer_jax.engine.drafting import Speculation
from deepinfer_jax.engine.setup import load_engine_model, make_speculation
from deepinfer_jax.testing import tiny
from tests.engine import driving

LOGPROB_FIELDS = ("token_id", "token_logprobs", "top_logprobs", "top_token_ids")
OPTIONS = {
    "stop": SamplingParams(seq_seed=1, max_tokens=40, stop=["a", "e", " "], ignore_eos=True),
    "tokens": SamplingParams(seq_seed=2, max_tokens=40, stop_token_ids=[9, 77, 120, 200, 250], ignore_eos=True),
    "penalties": SamplingParams(seq_seed=3, max_tokens=40, repetition_penalty=1.4, frequency_penalty=0.3),
    "bad words": SamplingParams(seq_seed=4, max_tokens=40, bad_words=["ab", "e"], ignore_eos=True),
    "golden": SamplingParams(seq_seed=5, max_tokens=30, golden_token_ids=[9, -1, 8, 7, -1, -1, 6, 5, 4], min_tokens=20),
    "filters": SamplingParams(seq_seed=6, max_tokens=40, top_p=0.7, top_k=9, min_p=0.02, temperature=0.8),
    "scores": SamplingParams(seq_seed=7, max_tokens=9, prompt_logprobs=True, top_logprobs=5),
    "allowed": SamplingParams(seq_seed=8, max_tokens=30, allowed_token_ids=list(range(20, 60))),
    "bias": SamplingParams(seq_seed=9, max_tokens=30, logit_bias={30: 3.0, 31: -4.0}, first_n_token_no_eos=1),
}


def add_options(engine) -> None:
    for name, params in OPTIONS.items():
        driving.add(engine, name, driving.prompt_of(11 + len(name)), params)


@pytest.fixture(scope="module")
def plain(agreeing_model):
    engine = tiny.tiny_engine(agreeing_model)
    add_options(engine)
    return driving.drain(engine)


@pytest.mark.slow
def test_every_option_gives_the_same_with_drafts(agreeing_model, plain):
    engine = tiny.tiny_engine(agreeing_model, num_draft_tokens=5)
    add_options(engine)
    found = driving.drain(engine)
    for name, outputs in plain.items():
        assert driving.reasons({name: found[name]}) == driving.reasons({name: outputs})
        assert "".join(one.text for one in found[name]) == "".join(one.text for one in outputs)
        for field in (*LOGPROB_FIELDS, "num_output_tokens", "prompt_logprobs", "finished"):
            assert [getattr(one, field) for one in found[name]] == [getattr(one, field) for one in outputs], field
    assert engine.stats()["drafts"]["drafts_accepted"] > 20


def test_outputs_tell_what_their_step_verified(agreeing_model):
    engine = tiny.tiny_engine(agreeing_model, num_draft_tokens=5)
    driving.add(engine, "r", driving.prompt_of(20), driving.params_of(3, 60))
    outputs = driving.drain(engine)["r"]
    first, *others = outputs
    assert (first.draft_tok, first.accept_tok, first.confidence_score) == (1, 1, None)
    place = 0
    for one in others:
        place += 1
        is_last = one.confidence_score is not None
        assert (one.nextn_logprobs != 1.0) == (not is_last), "accepted drafts have the drafter's log-probability"
        if is_last:
            assert one.accept_tok == place <= one.draft_tok <= 6
            assert len(one.confidence_score) == one.draft_tok - 1
            assert all(0 <= chance <= 1 for chance in one.confidence_score)
            place = 0
    assert any(one.accept_tok > 1 for one in others)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_rules_draw_other_tokens_with_the_same_log_probabilities(agreeing_model, rule):
    engine = tiny.tiny_engine(agreeing_model, num_draft_tokens=5, spec_mode=rule)
    greedy = dataclasses.replace(driving.params_of(1, 50), temperature=0.0)
    driving.add(engine, "greedy", driving.prompt_of(20), greedy)
    driving.add(engine, "drawn", driving.prompt_of(20), driving.params_of(3, 80))
    found = driving.drain(engine)
    assert engine.stats()["drafts"]["drafts_accepted"] > 0 < engine.stats()["drafts"]["wasted_rows"]
    reference = tiny.tiny_engine(agreeing_model)
    tokens = [one.token_id for one in found["drawn"]]
    forced = dataclasses.replace(driving.params_of(3, 80), golden_token_ids=tokens)
    driving.add(reference, "greedy", driving.prompt_of(20), greedy)
    driving.add(reference, "drawn", driving.prompt_of(20), forced)
    assert driving.facts(driving.drain(reference)) == driving.facts(found)
    driving.add(reference, "match", driving.prompt_of(20), driving.params_of(3, 80))
    assert driving.facts(driving.drain(reference))["match"] != driving.facts(found)["drawn"]


def speculation_of(model, environ=None, **options) -> Speculation:
    config = resolve(EngineArgs(model=model, **options), environ or {})
    loaded = load_engine_model(config).runtime.model
    return make_speculation(config, loaded)


def test_the_number_of_drafts_is_that_of_the_checkpoint_unless_fewer_are_wanted(agreeing_model):
    assert speculation_of(agreeing_model).max_drafts == 5
    assert speculation_of(agreeing_model, num_draft_tokens=2).max_drafts == 2
    assert speculation_of(agreeing_model, {"DEEPINFER_USE_NEXTN_DECODE": "0"}) == Speculation(rule="match")
    with pytest.raises(ValueError, match="DEEPINFER_USE_NEXTN_DECODE=6 is above 5: the model has blocks of 5 drafts"):
        speculation_of(agreeing_model, num_draft_tokens=6)


def test_a_model_without_draft_stages_drafts_nothing(agreeing_model):
    config = resolve(EngineArgs(model=agreeing_model), {})
    model = load_engine_model(config).runtime.model
    ratios = model.compress_ratios[: model.num_hidden_layers]
    model = dataclasses.replace(model, num_nextn_predict_layers=0, compress_ratios=ratios)
    assert make_speculation(config, model).max_drafts == 0
    wanted = resolve(EngineArgs(model=agreeing_model, num_draft_tokens=1), {})
    with pytest.raises(ValueError, match="no draft stages"):
        make_speculation(wanted, model)


def test_temperatures_of_the_confidence_head(agreeing_model):
    name = "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE"
    assert speculation_of(agreeing_model, {name: "2"}, num_draft_tokens=3).temperatures == (2.0, 2.0, 2.0)
    given = {name: "1,2,3,4,5"}
    assert speculation_of(agreeing_model, given).temperatures == (1.0, 2.0, 3.0, 4.0, 5.0)
    with pytest.raises(ValueError, match="has 2 values for 5 drafts"):
        speculation_of(agreeing_model, {name: "1,2"})
