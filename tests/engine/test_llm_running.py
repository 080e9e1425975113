"""`LLM` while requests run: streams, failures, interrupts; and the engine below stays usable."""

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.llm import GenerationError
from deepinfer_jax.testing import tiny
from tests.engine.driving import add, check_free, drain, facts_of, params_of, prompt_of, reasons

PROMPTS = [prompt_of(9), prompt_of(30), prompt_of(70), prompt_of(3), prompt_of(150), prompt_of(1)]
PARAMS = [params_of(index, 8 + index) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def want(tiny_model):
    llm = tiny.tiny_llm(tiny_model)
    return llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)


def generate(llm) -> list:
    return llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)


def stream(llm):
    return llm.stream(prompt_token_ids=PROMPTS, sampling_params=PARAMS)


def same(results, want) -> bool:
    return [facts_of(outputs) for outputs in results] == [facts_of(outputs) for outputs in want]


def raising(method, error: BaseException, at: int, *, forever: bool = False):
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == at or (forever and len(calls) > at):
            raise error
        return method(*args, **kwargs)

    return call


def test_a_stream_gives_the_outputs_of_generate_as_they_come(tiny_model, want):
    llm = tiny.tiny_llm(tiny_model)
    results = [[] for _ in PROMPTS]
    places = []
    for place, output in stream(llm):
        results[place].append(output)
        places.append(place)
    assert same(results, want)
    assert places != sorted(places), "they come mixed"
    check_free(llm.engine)


def test_texts_of_outputs_join_to_the_whole_text(tiny_model):
    llm = tiny.tiny_llm(tiny_model, decode_sequence=True)
    prompts, params = ["one", "two €😀", ""], [params_of(index, 60) for index in range(3)]
    texts = [""] * 3
    for place, output in llm.stream(prompts, params):
        texts[place] += output.text
    assert texts == llm.generate(prompts, params)


def test_a_stream_checks_its_arguments_at_once(llm):
    with pytest.raises(ValueError, match="prompt 1 has token id 301"):
        llm.stream(prompt_token_ids=[[5], [301]])
    assert llm.engine.scheduler.num_unfinished == 0


@pytest.mark.parametrize("num_read", [0, 1, 7])
def test_closing_a_stream_aborts_its_requests(tiny_model, want, num_read):
    llm = tiny.tiny_llm(tiny_model)
    outputs = stream(llm)
    for _ in range(num_read):
        next(outputs)
    outputs.close()
    check_free(llm.engine)
    assert same(generate(llm), want)


def test_generate_may_run_while_a_stream_is_open(tiny_model, want):
    llm = tiny.tiny_llm(tiny_model)
    outputs = stream(llm)
    results = [[] for _ in PROMPTS]
    for _ in range(5):
        place, output = next(outputs)
        results[place].append(output)
    assert same(generate(llm), want)
    # A stream whose outputs went elsewhere would step for ever.
    step, idle = llm.engine.step, []

    def step_or_fail() -> list:
        found = step()
        idle.append(not found)
        assert sum(idle) < 50, "the stream waits for outputs that somebody else took"
        return found

    llm.engine.step = step_or_fail
    for place, output in outputs:
        results[place].append(output)
    assert same(results, want)


def test_requests_of_the_engine_keep_their_outputs_beside_generate(tiny_model, want):
    llm = tiny.tiny_llm(tiny_model)
    add(llm.engine, "own", prompt_of(9), params_of(0, 8))
    assert same(generate(llm), want)
    found = drain(llm.engine)
    assert facts_of(found.get("own", [])) == facts_of(want[0])


@pytest.mark.parametrize("at", [1, 2, 9])
@pytest.mark.parametrize("method", ["launch", "read"])
@pytest.mark.parametrize("call", [generate, lambda llm: list(stream(llm))], ids=["generate", "stream"])
def test_after_an_interrupt_nothing_is_queued(tiny_model, want, monkeypatch, call, method, at):
    llm = tiny.tiny_llm(tiny_model)
    original = getattr(llm.engine.pipeline, method)
    monkeypatch.setattr(llm.engine.pipeline, method, raising(original, KeyboardInterrupt(), at))
    with pytest.raises(KeyboardInterrupt):
        call(llm)
    check_free(llm.engine)
    assert same(generate(llm), want)


@pytest.mark.parametrize("method", ["launch", "read"])
def test_after_an_interrupt_of_the_only_request_nothing_is_left(tiny_model, monkeypatch, method):
    llm = tiny.tiny_llm(tiny_model)
    original = getattr(llm.engine.pipeline, method)
    monkeypatch.setattr(llm.engine.pipeline, method, raising(original, KeyboardInterrupt(), 3))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt_token_ids=[[5]], sampling_params=params_of(1, 9))
    check_free(llm.engine)


@pytest.mark.parametrize("hook", ["planned", "took_tokens"])
def test_after_an_interrupt_between_planning_and_outputs_nothing_is_queued(tiny_model, want, monkeypatch, hook):
    llm = tiny.tiny_llm(tiny_model)
    listener = llm.engine._answers
    monkeypatch.setattr(listener, hook, raising(getattr(listener, hook), KeyboardInterrupt(), 5))
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert same(generate(llm), want)
    check_free(llm.engine)


def test_an_id_that_is_in_use_is_not_taken_again(tiny_model, want):
    llm = tiny.tiny_llm(tiny_model)
    add(llm.engine, "generate-1", [5])
    assert same(generate(llm), want)
    assert llm.engine.get_num_unfinished_requests() <= 1
    llm.engine.abort_request("generate-1")


def test_a_failure_is_raised_where_texts_are_wanted_with_all_results(tiny_model, monkeypatch):
    llm = tiny.tiny_llm(tiny_model, decode_sequence=True)
    error = RuntimeError("the device caught fire")
    params = [params_of(0, 3), params_of(1, 30), params_of(2, 5)]
    monkeypatch.setattr(llm.engine.pipeline, "launch", raising(llm.engine.pipeline.launch, error, 12))
    with pytest.raises(GenerationError, match=r"1 of 3 requests failed \(answer 1: abort\)") as raised:
        llm.generate(["a", "b", "c"], params)
    assert raised.value.__cause__ is error
    first, second, third = raised.value.results
    assert [outputs[-1].finish_reason for outputs in raised.value.results] == ["length", "abort", "length"]
    assert (len(first), len(third)) == (3, 5) and 5 < len(second) < 30
    assert all(output.token_id >= 0 for output in second), "the last token tells of the end"
    check_free(llm.engine)
    assert len(llm.generate(["a"], params[:1])) == 1


def test_a_failure_is_a_finish_reason_where_outputs_are_wanted(tiny_model, monkeypatch):
    llm = tiny.tiny_llm(tiny_model)
    monkeypatch.setattr(llm.engine.pipeline, "launch", raising(llm.engine.pipeline.launch, OSError(), 1, forever=True))
    results = generate(llm)
    assert [[output.token_id for output in outputs] for outputs in results] == [[-1]] * len(PROMPTS)
    assert {outputs[-1].finish_reason for outputs in results} == {"abort"}
    check_free(llm.engine)


def test_requests_that_are_stopped_for_lack_of_memory_say_so(tiny_model):
    llm = tiny.tiny_llm(tiny_model, **tiny.SCARCE, stop_preempted_request=True)
    params = [params_of(index, 400) for index in range(3)]
    results = llm.generate(prompt_token_ids=[[5 + index] for index in range(3)], sampling_params=params)
    assert [outputs[-1].finish_reason for outputs in results] == ["length", "length", "insufficient_system_resource"]
    assert llm.stats()["preemptions"] == 1
    check_free(llm.engine)


def test_a_closed_llm_says_so(tiny_model):
    llm = tiny.tiny_llm(tiny_model)
    outputs = llm.stream(prompt_token_ids=[[5]], sampling_params=SamplingParams())
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        llm.stats,
        llm.get_tokenizer,
        lambda: next(outputs),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_ids_of_requests_do_not_repeat(tiny_model):
    llm = tiny.tiny_llm(tiny_model)
    names = [outputs[0].request_id for _ in range(2) for outputs in generate(llm)]
    assert len(set(names)) == len(names)
    assert reasons({names[0]: generate(llm)[0]})
