"""What `LLMEngine.add_request` takes, refuses, and does not queue."""

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny
from tests.engine.driving import Recorder, add, check_free, drain, facts, facts_of, params_of, prompt_of, reasons

EAGER = {"DEEPINFER_ENFORCE_EAGER": "1"}


def test_parameters_may_be_a_dict_whose_nones_are_defaults(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    options = {"max_tokens": 6, "seq_seed": 3, "top_p": None, "temperature": 0.7, "golden_token_ids": None}
    add(engine, "dict", [5, 6], options)
    add(engine, "object", np.asarray([5, 6]), SamplingParams(max_tokens=6, seq_seed=3, temperature=0.7))
    found = facts(drain(engine))
    assert found["dict"] == found["object"]
    with pytest.raises(TypeError, match="no_such_option"):
        add(engine, "unknown", [5], {"no_such_option": 0.5})


@pytest.mark.parametrize(
    "prompt, error, text",
    [
        ([], ValueError, "must not be empty"),
        ([5, 301], ValueError, "token id 301 at place 1"),
        ([-1], ValueError, "token id -1"),
        ([True], TypeError, "True"),
        ([5.0], TypeError, "5.0"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing(tiny_model, prompt, error, text):
    engine = tiny.tiny_engine(tiny_model, EAGER)
    with pytest.raises(error, match=text):
        add(engine, "a", prompt)
    check_free(engine)
    assert engine.stats()["requests"] == 0


def test_more_than_one_answer_is_refused_with_a_hint(tiny_model):
    engine = tiny.tiny_engine(tiny_model, EAGER)
    with pytest.raises(ValueError, match="n=2.*fork_request"):
        add(engine, "a", [5], {"n": 2})
    check_free(engine)


def test_an_id_belongs_to_one_unfinished_request(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", [5], params_of(1, 4))
    with pytest.raises(ValueError, match="request 'a' is unfinished"):
        add(engine, "a", [6])
    first = drain(engine)
    assert reasons(first) == {"a": "length"} and len(first["a"]) == 4
    add(engine, "a", [5], params_of(1, 4))
    assert facts(drain(engine)) == facts(first)
    check_free(engine)


def test_a_built_request_runs_once_it_is_queued(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    built = add(engine, "a", [5, 6], params_of(1, 4), enqueue=False)
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.enqueue(built)
    add(engine, "b", [5, 6], params_of(1, 4))
    found = facts(drain(engine))
    assert found["a"] == found["b"]
    with pytest.raises(ValueError, match="added before"):
        engine.enqueue(built)
    check_free(engine)


def test_what_the_caller_gave_stays_with_the_sequence(tiny_model):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, hooks=recorder)
    engine.add_request("someone", "a", params_of(1, 1), [5], extra={"trace": 7})
    drain(engine)
    [ended] = recorder.ended
    assert (ended.options.user_id, ended.options.extra, ended.request_id) == ("someone", {"trace": 7}, "a")


def test_a_prompt_is_cut_at_its_checkpoints_and_kept_for_others(tiny_model):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, hooks=recorder)
    prompt = prompt_of(150)
    other = [*prompt[:70], *prompt_of(30, seed=1)]
    add(engine, "cold", other, params_of(1))
    cold = facts_of(drain(engine)["cold"])
    engine.scheduler.clear_prefix_cache()
    add(engine, "a", prompt, params_of(1), chunk_checkpoints=[70, 140])
    drain(engine)
    ends = [chunk.end for plan in recorder.plans for chunk in plan.chunks if chunk.sequence.request_id == "a"]
    assert {70, 140, 150} <= set(ends)
    before = engine.stats()["prefix_hit_tokens"]
    add(engine, "other", other, params_of(1))
    assert facts_of(drain(engine)["other"]) == cold
    assert engine.stats()["prefix_hit_tokens"] - before == 70


@pytest.mark.parametrize("checkpoint", [0, -1, 6, True])
def test_checkpoints_lie_inside_the_prompt(tiny_model, checkpoint):
    engine = tiny.tiny_engine(tiny_model, EAGER)
    with pytest.raises(ValueError, match="chunk_checkpoints has"):
        add(engine, "a", [5] * 5, chunk_checkpoints=[3, checkpoint])
    check_free(engine)


def test_a_prompt_that_can_never_fit_ends_at_once_with_one_output(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    assert engine.max_prompt_len == 512
    add(engine, "long", [5] * 513)
    add(engine, "fits", [5] * 512, params_of(1, 4))
    found = drain(engine)
    [output] = found["long"]
    assert (output.token_id, output.num_output_tokens, output.prompt_len) == (-1, 0, 513)
    assert (output.finish_reason, output.finished, output.text) == ("prompt_length_exceeded", True, "")
    assert reasons(found)["fits"] == "length" and len(found["fits"]) == 1
    check_free(engine)


def test_prompts_above_the_ignored_length_end_at_once(tiny_model):
    engine = tiny.tiny_engine(tiny_model, ignore_len=9)
    add(engine, "long", [5] * 10)
    add(engine, "fits", [5] * 9, params_of(1, 2))
    assert engine.max_prompt_len == 9
    found = drain(engine)
    assert reasons(found) == {"long": "prompt_length_exceeded", "fits": "length"}
    assert [output.token_id for output in found["long"]] == [-1]
    check_free(engine)
