"""Requests with a grammar, beside others and on their own: the same result whatever happens around them."""

import functools
import json
import logging
import re
import threading

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine import constraints, steps
from deepinfer_jax.engine.snapshot import load_snapshot, save_snapshot
from deepinfer_jax.sampling.grammar import GrammarError, GrammarPool, GrammarTimeout, compile_grammar, debug
from deepinfer_jax.testing import tiny
from deepinfer_jax.text.tiny_tokenizer import byte_ids
from tests.cases import forcing
from tests.engine.driving import (
    Recorder,
    add,
    add_many,
    check_free,
    collect,
    drain,
    facts,
    facts_of,
    params_of,
    prompt_of,
    reasons,
    run_steps,
)

EOS, VOCAB_SIZE = forcing.EOS, forcing.MODEL_VOCAB_SIZE
FAILED = "xgrammar runtime errors or timeout"
ASYNC = {"sync": "0", "async": "1"}


def regex(pattern: str, **more) -> dict:
    return {"schema_type": "regex", "schema": pattern, **more}


GO = byte_ids(b"go")


def grammar(seed: int, so_args: dict, max_tokens: int = 40, **options) -> SamplingParams:
    return params_of(seed, max_tokens, so_args=so_args, ignore_eos=False, **options)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EBNF = 'root ::= "(" root ")" | [a-c] root | "x"'
LETTERS = regex("[a-z]{24}")
# Name -> (length of the prompt, parameters, how it ends): everything that ties a token to those in front of it.
TASKS = {
    "json": (37, grammar(1, {"schema_type": "json", "schema": SCHEMA}), None),
    "regex": (150, grammar(2, LETTERS, temperature=0.7), "stop"),
    "greedy": (5, grammar(3, LETTERS, temperature=0.0), "stop"),
    "ebnf": (70, grammar(4, {"schema_type": "ebnf", "schema": EBNF}, top_p=0.95, top_k=50), None),
    "trigger": (
        9,
        grammar(5, regex("[0-9]{40}", trigger_token_ids=GO), golden_token_ids=[9, 9, *GO]),
        "stop",
    ),
    "penalties": (64, params_of(6, 20, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2), "length"),
    "lists": (20, params_of(7, 20, bad_words=["a", "the"], logit_bias={70: 5.0}, min_tokens=9), "length"),
    "both": (30, grammar(8, LETTERS, repetition_penalty=1.3, logit_bias={byte_ids(b"q")[0]: 4.0}), "stop"),
}


def add_tasks(engine, names=TASKS) -> None:
    for name in names:
        length, params, _ = TASKS[name]
        add(engine, name, prompt_of(length), params)


@pytest.fixture(scope="module")
def engines(tiny_model):
    """One of each kind; a test that needs one of its own makes it."""
    return {
        name: tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": value})
        for name, value in ASYNC.items()
    }


@pytest.fixture(params=ASYNC)
def engine(engines, request):
    engine = engines[request.param]
    yield engine
    engine.abort_request(list(engine._answers._emitters))  # a test that failed leaves nothing to the next one
    engine.flush_inflight_reqs()


@pytest.fixture(scope="module")
def alone(engines):
    """What each of the tasks gives on its own, one step after the other."""
    found = {}
    for name, (_, _, end) in TASKS.items():
        add_tasks(engines["sync"], [name])
        found |= finish(engines["sync"], {})
        assert end in (None, found[name][-1].finish_reason), name
    assert set(reasons(found).values()) <= {"stop", "length"}
    return facts(found)


def finish(engine, found: dict) -> dict:
    """The outputs up to the end of all; a step that was launched before EOS was read has none."""
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert engine.flush_inflight_reqs() == []
    check_free(engine)
    return found


def start(engine, name: str, num_tokens: int) -> dict:
    """A task that has so many tokens, the next one in flight where steps are asynchronous."""
    add_tasks(engine, [name])
    found = {}
    while engine.get_num_pendings() or len(engine.scheduler.get(name).output) < num_tokens:
        collect(found, engine.step())
    return found


def text_of(outputs) -> str:
    return "".join(output.text for output in outputs)


# In company.


def test_company_changes_neither_those_with_a_grammar_nor_those_without(engine, alone, undisturbed):
    add_tasks(engine)
    add_many(engine)
    assert facts(finish(engine, {})) == alone | undisturbed


def test_answers_follow_their_grammar(alone, engines):
    decode = engines["sync"].tokenizer.decode
    texts = {name: decode([token for token, _ in found if token != EOS]) for name, found in alone.items()}
    assert texts["regex"].isalpha() and len(texts["regex"]) == 24
    assert texts["both"].isalpha() and len(texts["both"]) == 24 and texts["both"] != texts["regex"]
    assert texts["trigger"].split("go", 1)[1].isdigit()
    assert set(texts["ebnf"]) <= set("()abcx")
    if alone["json"][-1][0] == EOS:
        assert json.loads(texts["json"])["age"] >= 0


def test_an_answer_has_its_grammar_for_each_of_n(llm):
    params = SamplingParams(n=3, seq_seed=5, max_tokens=20, so_args=regex("[a-z]{8}"))
    [answers, single] = llm.generate(["x", "y"], [params, SamplingParams(max_tokens=2, ignore_eos=True)])
    texts = [forcing.text_of(outputs) for outputs in answers]
    assert all(len(text) == 8 and text.isalpha() and text.islower() for text in texts)
    assert len(set(texts)) == 3
    assert len(single) == 2


# Giving way, forks, snapshots.


@pytest.mark.parametrize("name", ["regex", "trigger", "penalties", "lists"])
@pytest.mark.parametrize("num_tokens", [1, 4, 12])
def test_a_preempted_request_keeps_its_grammar(engine, alone, name, num_tokens):
    found = start(engine, name, num_tokens)
    engine.scheduler._preempt(engine.scheduler.get(name))
    collect(found, engine.step())
    collect(found, engine.step())
    engine.scheduler._preempt(engine.scheduler.get(name))
    assert facts_of(finish(engine, found)[name]) == alone[name]


def test_requests_that_are_preempted_beside_each_other_keep_their_grammars(engine, alone, undisturbed):
    add_tasks(engine)
    add_many(engine)
    found, num_preempted = {}, 0
    while engine.has_unfinished_requests():
        collect(found, engine.step())
        [rank] = engine.scheduler.ranks
        if num_preempted < 25 and len(rank.running) > 1:
            num_preempted += 1
            engine.scheduler._preempt(rank.running[-1 - num_preempted % 2])
    assert facts(finish(engine, found)) == alone | undisturbed
    assert num_preempted == 25


@pytest.mark.slow
@pytest.mark.parametrize("is_async", ASYNC.values(), ids=ASYNC)
def test_with_little_memory_requests_keep_their_grammars(tiny_model, alone, undisturbed, is_async):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async}, **tiny.SCARCE)
    for index in range(3):
        add(engine, f"long {index}", prompt_of(200, seed=index), params_of(index, 200))
    add_tasks(engine)
    add_many(engine)
    found = facts(finish(engine, {}))
    assert {name: found[name] for name in (*alone, *undisturbed)} == alone | undisturbed
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("name", ["regex", "trigger", "penalties", "lists"])
@pytest.mark.parametrize("num_tokens, num_back", [(1, 0), (9, 0), (9, 3)])
def test_a_fork_goes_on_as_its_parent_does(engine, alone, name, num_tokens, num_back):
    found = start(engine, name, num_tokens)
    known = len(engine.scheduler.get(name).output) - num_back
    engine.fork_request(name, "fork", num_tokens=TASKS[name][0] + known)
    assert facts(finish(engine, found)) == {name: alone[name], "fork": alone[name][known:]}


def test_a_fork_may_have_another_grammar(engine, alone):
    num_kept = 9
    kept = [token for token, _ in alone["regex"][:num_kept]]
    other = grammar(44, regex("[a-z]{12}"))
    found = start(engine, "regex", num_kept)
    engine.fork_request("regex", "fork", sampling_params=other, num_tokens=150 + num_kept)
    engine.fork_request("regex", "free", sampling_params=params_of(45, 20), num_tokens=150 + num_kept)
    add(engine, "fresh", prompt_of(150), grammar(44, regex("[a-z]{12}"), golden_token_ids=kept))
    add(engine, "fresh free", prompt_of(150), params_of(45, 20, golden_token_ids=kept))
    found = finish(engine, found)
    assert facts_of(found["fork"]) == facts_of(found["fresh"])[num_kept:]
    assert facts_of(found["free"]) == facts_of(found["fresh free"])[num_kept:]
    assert facts_of(found["regex"]) == alone["regex"]
    text = text_of(found["fresh"])
    assert found["fork"][-1].finish_reason == "stop"
    assert engine.tokenizer.decode(kept) + text_of(found["fork"]) == text


def test_a_fork_whose_tokens_do_not_fit_its_grammar_is_refused(engine, alone):
    found = start(engine, "regex", 5)
    with pytest.raises(ValueError, match="the tokens so far do not fit so_args.*change so_args or num_tokens"):
        engine.fork_request("regex", "fork", sampling_params=grammar(1, regex("[0-9]+")))
    with pytest.raises(ValueError, match="schema_type"):
        engine.fork_request("regex", "fork", sampling_params=grammar(1, {"schema": "a"}))
    with pytest.raises(ValueError, match="position 0"):
        engine.fork_request("regex", "fork", sampling_params=grammar(1, regex("(?=a)")))
    # From the end of the prompt on, it fits.
    engine.fork_request("regex", "fork", sampling_params=grammar(1, regex("[0-9]{4}")), num_tokens=150)
    found = finish(engine, found)
    assert facts_of(found["regex"]) == alone["regex"]
    assert text_of(found["fork"])[:4].isdigit()


@pytest.mark.parametrize("name", ["regex", "trigger", "penalties", "lists"])
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_a_saved_request_keeps_its_grammar(engine, engines, alone, tmp_path, name, num_tokens):
    found = start(engine, name, num_tokens)
    saved = engine.save_request(name)
    num_saved = len(saved.output)
    save_snapshot(saved, tmp_path / "request.safetensors")
    engine.restore_request(saved, "copy")
    found = finish(engine, found)
    assert facts(found) == {name: alone[name], "copy": alone[name][num_saved:]}
    other = engines["sync"]
    other.restore_request(load_snapshot(tmp_path / "request.safetensors", other.runtime), "loaded")
    assert facts(finish(other, {})) == {"loaded": alone[name][num_saved:]}


# The order of things in a step.


class Spy:
    """Notes what a pipeline is told, in order: (what, number of the step)."""

    def __init__(self, engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        pipeline = engine.pipeline
        launch, sample, read = pipeline.launch, pipeline.sample, pipeline.read

        def spy_launch(plan, *, waits_for_masks=False):
            self.events.append(("forward" if waits_for_masks else "step", plan.step))
            return launch(plan, waits_for_masks=waits_for_masks)

        def spy_sample(launched, *args):
            self.events.append(("sample", launched.plan.step))
            return sample(launched, *args)

        def spy_read(launched):
            self.events.append(("read", launched.plan.step))
            return read(launched)

        monkeypatch.setattr(pipeline, "launch", spy_launch)
        monkeypatch.setattr(pipeline, "sample", spy_sample)
        monkeypatch.setattr(pipeline, "read", spy_read)


def test_the_forward_of_a_step_is_launched_before_the_step_in_front_is_read(engines, monkeypatch):
    engine = engines["async"]
    spy = Spy(engine, monkeypatch)
    add(engine, "a", prompt_of(9), grammar(1, regex("[a-z]{6}")))
    add(engine, "b", prompt_of(9), params_of(1, 20))
    finish(engine, {})
    place = {event: index for index, event in enumerate(spy.events)}
    masked = sorted(step for what, step in spy.events if what == "forward")
    numbers = sorted(step for what, step in spy.events if what == "read")
    first = numbers[0]
    assert numbers == list(range(first, first + len(numbers)))
    assert len(masked) >= 6 and len(masked) < len(numbers), "some steps have no constrained row any more"
    for step in numbers:
        launched = place.get(("forward", step), place.get(("step", step)))
        if step > first:
            assert launched < place["read", step - 1], "launched before the step in front of it is read"
        if step in masked:
            assert launched < place["sample", step] < place["read", step]
            if step > first:
                assert place["read", step - 1] < place["sample", step], "its masks need the tokens of that one"
        else:
            assert ("sample", step) not in place


def test_without_asynchronous_scheduling_a_step_is_sampled_and_read_at_once(engines, monkeypatch):
    engine = engines["sync"]
    spy = Spy(engine, monkeypatch)
    add(engine, "a", prompt_of(9), grammar(1, regex("[a-z]{6}")))
    finish(engine, {})
    assert {what for what, _ in spy.events} == {"forward", "sample", "read"}
    for at in range(0, len(spy.events), 3):
        step = spy.events[at][1]
        assert spy.events[at : at + 3] == [("forward", step), ("sample", step), ("read", step)]


class Forbidden:
    """A step function that may not be called."""

    def __call__(self, *_, **__):
        raise AssertionError("a step without constrained rows was cut in two")

    def num_compiled(self) -> int:
        return 0


def test_steps_without_constrained_rows_are_one_call(engine, undisturbed, monkeypatch):
    monkeypatch.setattr(steps, "run_forward", Forbidden())
    monkeypatch.setattr(steps, "run_sampling", Forbidden())
    add_many(engine)
    # Greedy or not, these options need nothing from the host.
    options = {"stop": ["abc"], "stop_token_ids": [299], "min_p": 0.01, "first_n_token_no_eos": 1, "min_tokens": 0}
    add(engine, "options", prompt_of(9), params_of(1, 5, **options))
    found = facts(finish(engine, {}))
    assert {name: found[name] for name in undisturbed} == undisturbed


def test_a_prompt_that_has_more_to_come_needs_no_masks(engine, monkeypatch):
    spy = Spy(engine, monkeypatch)
    add(engine, "a", prompt_of(150), grammar(1, regex("[a-z]{3}")))
    finish(engine, {})
    launches = [what for what, _ in spy.events if what in ("step", "forward")]
    assert launches[:3] == ["step", "step", "forward"]


def test_a_finished_grammar_costs_no_more_masks(engine, monkeypatch):
    spy = Spy(engine, monkeypatch)
    add(engine, "a", prompt_of(9), params_of(1, 20, so_args=regex("[a-z]{3}")))
    assert EOS in [output.token_id for output in finish(engine, {})["a"]]
    launches = [what for what, _ in spy.events if what in ("step", "forward")]
    # Asynchronous: the step behind EOS is launched before EOS is known.
    num_masked = launches.count("forward")
    assert num_masked in (4, 5) and launches == ["forward"] * num_masked + ["step"] * (20 - num_masked)


# Triggers and ends.


def test_until_the_trigger_has_appeared_the_answer_is_a_free_one(engine):
    free = params_of(21, 30)
    add(engine, "free", prompt_of(9), free)
    tokens = facts_of(drain(engine)["free"])
    # The first place from which two tokens that did not come one after the other before can be the trigger.
    pairs = [(a, b) for (a, _), (b, _) in zip(tokens, tokens[1:], strict=False)]
    at = next(i for i in range(6, 20) if pairs.index(pairs[i]) == i)
    so_args = regex("[0-9]{4}", trigger_token_ids=list(pairs[at]))
    add(engine, "bound", prompt_of(9), params_of(21, 30, so_args=so_args, ignore_eos=False))
    found = finish(engine, {})["bound"]
    assert facts_of(found)[: at + 2] == tokens[: at + 2]
    rest = [output.token_id for output in found[at + 2 :]]
    assert rest[-1] == EOS
    text = engine.tokenizer.decode(rest[:-1])
    assert len(text) == 4 and text.isdigit()


def test_eos_is_allowed_exactly_where_the_grammar_may_end(llm):
    params = [forcing.forced("abcd"[:num], so_args=regex("[a-z]{2,4}")) for num in range(5)]
    rows = [outputs[-1] for outputs in forcing.run(llm, params)]
    assert [EOS in forcing.allowed(row) for row in rows] == [False, False, True, True, True]
    assert forcing.allowed(rows[4]) == {EOS}
    assert (rows[4].token_id, rows[4].finish_reason) == (EOS, "stop")


def test_behind_the_end_everything_is_allowed(llm):
    golden = [*byte_ids(b"ab"), EOS]
    [outputs] = forcing.run(llm, [forcing.forced(golden, 3, so_args=regex("[a-z]{2}"), ignore_eos=True)])
    assert [len(forcing.allowed(output)) for output in outputs] == [26, 26, 1] + [forcing.MODEL_VOCAB_SIZE] * 3
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("place", [0, 3])
def test_a_forced_token_that_the_grammar_forbids_ends_its_request(engine, undisturbed, place):
    golden = [*[-1] * place, *byte_ids(b"7")]
    sequence = add(engine, "bad", prompt_of(9), grammar(1, regex("[a-z]{9}"), golden_token_ids=golden))
    add_many(engine)
    found = finish(engine, {})
    outputs = found.pop("bad")
    assert [output.token_id == -1 for output in outputs] == [False] * place + [True]
    assert outputs[-1].finish_reason == FAILED
    assert isinstance(sequence.error, GrammarError) and "not allowed at output position" in str(sequence.error)
    assert facts(found) == undisturbed


# Grammars under way.


class Builder:
    """A compiler that waits until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.num_begun = 0

    def __call__(self, request, vocabulary, *, whitespace):
        self.num_begun += 1
        assert self.released.wait(60)
        return compile_grammar(request, vocabulary, whitespace=whitespace)


@pytest.fixture
def builder(monkeypatch):
    """Grammars of engines that are made in this test wait for it."""
    builder = Builder()
    monkeypatch.setattr(constraints, "GrammarPool", functools.partial(GrammarPool, compiler=builder))
    yield builder
    builder.released.set()


@pytest.fixture
def waiting(builder, tiny_model):
    """An engine whose grammars wait for the builder, at most a second."""
    return tiny.tiny_engine(tiny_model, {"DEEPINFER_XGRAMMAR_TIMEOUT": "1"})


def test_others_run_while_a_grammar_is_compiled(builder, tiny_model, alone, undisturbed):
    engine = tiny.tiny_engine(tiny_model)
    add_tasks(engine, ["regex"])
    add_many(engine)
    assert (engine.get_num_pendings(), engine.get_num_unfinished_requests()) == (1, 7)
    found = {}
    while engine.get_num_unfinished_requests() > 1:
        collect(found, engine.step())
    assert facts(found) == undisturbed
    assert (engine.get_num_pendings(), engine.has_unfinished_requests()) == (1, True)
    assert engine.step() == []
    builder.released.set()
    while engine.get_num_pendings():
        collect(found, engine.step())
    assert engine.get_num_unfinished_requests() == 1
    assert facts_of(finish(engine, found)["regex"]) == alone["regex"]


def test_a_grammar_that_takes_too_long_ends_its_request_only(waiting, alone, undisturbed, builder):
    sequence = add(waiting, "late", prompt_of(9), grammar(1, regex("[a-z]{9}")))
    add_many(waiting)
    found = finish(waiting, {})
    assert [(o.token_id, o.finish_reason, o.text) for o in found.pop("late")] == [(-1, FAILED, "")]
    assert isinstance(sequence.error, GrammarTimeout) and "DEEPINFER_XGRAMMAR_TIMEOUT" in str(sequence.error)
    assert facts(found) == undisturbed
    builder.released.set()
    add_tasks(waiting, ["regex"])
    assert facts(finish(waiting, {})) == {"regex": alone["regex"]}


def test_generate_says_which_prompt_had_a_grammar_that_took_too_long(builder, tiny_model, monkeypatch):
    monkeypatch.setenv("DEEPINFER_XGRAMMAR_TIMEOUT", "1")
    llm = tiny.tiny_llm(tiny_model)
    params = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(so_args=regex("a"))]
    with pytest.raises(ValueError, match="prompt 1: so_args: the grammar was not compiled within 1 s"):
        llm.generate(["a", "b"], params)
    assert not llm.engine.has_unfinished_requests()
    first, late = llm.generate(["a", "b"], params, on_error="finish")
    assert len(first) == 2
    assert [(o.token_id, o.finish_reason) for o in late] == [(-1, FAILED)]


def test_a_request_is_aborted_while_its_grammar_is_compiled(builder, tiny_model, undisturbed, alone):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, hooks=recorder)
    add(engine, "regex", prompt_of(9), grammar(1, regex("[a-z]{9}")))
    add_many(engine)
    collect(found := {}, engine.step())
    assert engine.abort_request(["regex", "unknown"]) == (1, 0)
    assert engine.get_num_pendings() == 0
    add_tasks(engine, ["regex"])  # its name is free again
    builder.released.set()
    found = finish(engine, found)
    first, *rest = found.pop("regex")
    assert (first.token_id, first.finish_reason, first.text) == (-1, "abort", "")
    assert facts_of(rest) == alone["regex"]
    assert facts(found) == undisturbed
    assert [sequence.request_id for sequence in recorder.ended].count("regex") == 2


def test_a_name_is_taken_while_its_grammar_is_compiled(builder, tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(9), grammar(1, regex("[a-z]{9}")))
    add(engine, "b", prompt_of(9), params_of(1, 30))
    for params in (params_of(1), grammar(1, LETTERS)):
        for name in "ab":
            with pytest.raises(ValueError, match=f"'{name}' is unfinished"):
                add(engine, name, prompt_of(9), params)
    builder.released.set()
    assert set(finish(engine, {})) == {"a", "b"}


@pytest.mark.parametrize("how", ["forked", "saved"])
def test_what_waits_for_its_grammar_can_be_neither_forked_nor_saved(builder, tiny_model, how):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(9), grammar(1, regex("[a-z]{9}")))
    engine.step()
    with pytest.raises(ValueError, match=f"'a' waits for its grammar.*nothing yet that could be {how}; call step"):
        if how == "forked":
            engine.fork_request("a", "b")
        else:
            engine.save_request("a")
    assert (engine.get_num_unfinished_requests(), engine.get_num_pendings()) == (1, 1), "nothing was queued"
    builder.released.set()
    assert set(finish(engine, {})) == {"a"}


@pytest.mark.parametrize("how", ["fork", "restore"])
def test_a_name_that_is_taken_so_is_refused_for_a_fork_or_a_saved_request(builder, tiny_model, how):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "b", prompt_of(9), params_of(1, 30))
    found = run_steps(engine, 4)
    saved = engine.save_request("b")
    add(engine, "a", prompt_of(9), grammar(1, regex("[a-z]{9}")))
    with pytest.raises(ValueError, match="'a'"):
        if how == "fork":
            engine.fork_request("b", "a")
        else:
            engine.restore_request(saved, "a")
    assert (engine.get_num_unfinished_requests(), engine.get_num_pendings()) == (2, 1), "nothing was queued"
    builder.released.set()
    found = finish(engine, found)
    assert len(found["b"]) == 30 and found["a"][-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "so_args, text",
    [
        ({"schema": "a"}, "schema_type.*is missing"),
        (regex("a", bound_token_id=3), "bound_token_id"),
        (regex("a", trigger_token_ids=[-1]), "trigger_token_ids"),
        (
            regex("a", trigger_token_ids=[5, VOCAB_SIZE]),
            f"ids'] holds {VOCAB_SIZE}.*0..{VOCAB_SIZE - 1}",
        ),
        (regex("a", trigger_token_ids=[5], bound_token_id=9 * VOCAB_SIZE), f"'bound_token_id'] holds {9 * VOCAB_SIZE}"),
    ],
)
def test_bad_entries_are_refused_at_once(engine, so_args, text):
    with pytest.raises(ValueError, match=text):
        add(engine, "a", prompt_of(9), {"so_args": so_args})
    assert not engine.has_unfinished_requests() and engine.get_num_pendings() == 0
    check_free(engine)


@pytest.mark.parametrize("on_error", ["raise", "finish"])
def test_generate_refuses_ids_beyond_the_vocabulary_before_anything_is_queued(llm, on_error):
    params = [SamplingParams(max_tokens=2), SamplingParams(so_args=regex("a", trigger_token_ids=[VOCAB_SIZE]))]
    with pytest.raises(ValueError, match=f"prompt 1: .*'trigger_token_ids'] holds {VOCAB_SIZE}, and the model's ids"):
        llm.generate(["a", "b"], params, on_error=on_error)
    assert not llm.engine.has_unfinished_requests()


# What is logged.


@pytest.fixture
def logged(caplog):
    """The lines about grammars so far."""
    caplog.set_level(logging.INFO, logger=debug.__name__)
    return lambda: [record.getMessage() for record in caplog.records if record.name == debug.__name__]


def test_debug_tells_of_each_grammar_and_of_each_request_at_its_end(tiny_model, logged):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_XGRAMMAR_DEBUG": "1", "DEEPINFER_SO_BUILDER_CPUS": "1"})
    for name in ("a", "b", "c"):  # the third is at its length in front of the end of the grammar
        add(engine, name, prompt_of(9), grammar(1, regex("[a-z]{6}"), max_tokens=3 if name == "c" else 40))
    add(engine, "other", prompt_of(9), params_of(2, 2, bad_words=["x"]))
    while engine.get_num_pendings():
        engine.step()
    [text] = logged()
    assert re.fullmatch(r"regex grammar, compiled in \d+\.\d ms: .*\{6.*", text), "equal grammars are compiled once"
    finish(engine, {})
    form = re.compile(r"(grammar of .*): (\d+) masks, mean (\S+) ms, longest (\S+) ms")
    lines = [form.fullmatch(line) for line in logged()[1:]]
    counts = {line[1]: int(line[2]) for line in lines}
    assert counts == {"grammar of request a": 7, "grammar of request b": 7, "grammar of request c": 3}
    assert all(0 < float(line[3]) <= float(line[4]) for line in lines)


def test_without_debug_nothing_is_logged(engines, logged):
    add(engines["sync"], "a", prompt_of(9), grammar(1, regex("[a-z]{6}x")))
    finish(engines["sync"], {})
    assert logged() == []


# Failures while requests run.


@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_matcher_that_fails_ends_its_request_only(engine, alone, undisturbed, monkeypatch, at):
    sequence = add(engine, "bad", prompt_of(9), grammar(1, LETTERS))
    while engine.get_num_pendings():
        engine._take_grammars()
    state, num_masks = sequence.options.constraint, []
    fill = state.fill_mask

    def fail_late(row: np.ndarray) -> None:
        num_masks.append(None)
        if len(num_masks) == at:
            raise GrammarError("out of fuel")
        fill(row)

    monkeypatch.setattr(state, "fill_mask", fail_late)
    add_tasks(engine, ["regex"])
    add_many(engine)
    found = finish(engine, {})
    outputs = found.pop("bad")
    assert [output.token_id == -1 for output in outputs] == [False] * (at - 1) + [True]
    assert outputs[-1].finish_reason == FAILED and str(sequence.error) == "out of fuel"
    assert facts(found) == undisturbed | {"regex": alone["regex"]}


def test_a_failed_matcher_leaves_the_tokens_in_front_of_it(tiny_model, monkeypatch):
    """In the texts of `generate`, and as an error."""
    from deepinfer_jax.engine.llm import GenerationError

    llm = tiny.tiny_llm(tiny_model, decode_sequence=True)
    golden = byte_ids(b"ab7")
    params = SamplingParams(golden_token_ids=golden, max_tokens=9, so_args=regex("[a-z]{9}"))
    with pytest.raises(GenerationError, match=f"1 of 2 requests failed .answer 1: {FAILED}") as caught:
        llm.generate(["a", "b"], [SamplingParams(max_tokens=1, ignore_eos=True), params])
    assert isinstance(caught.value.__cause__, GrammarError)
    outputs = caught.value.results[1]
    assert [(o.token_id, o.finish_reason) for o in outputs] == [(golden[0], ""), (golden[1], FAILED)]
    assert len(llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))) == 1


@pytest.mark.parametrize(
    "options, reason, names",
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 3}, "abort", "allowed_token_ids, min_tokens"),
        ({"allowed_token_ids": byte_ids(b"ab"), "bad_words": ["a", "b"]}, "abort", "allowed_token_ids, bad_words"),
        ({"allowed_token_ids": byte_ids(b"7"), "so_args": LETTERS}, FAILED, "so_args, allowed_token_ids"),
    ],
    ids=["ends", "lists", "grammar"],
)
def test_options_that_leave_no_token_end_their_request_and_are_named(engine, undisturbed, options, reason, names):
    sequence = add(engine, "bad", prompt_of(9), params_of(1, 9, ignore_eos=False, **options))
    add_many(engine)
    found = finish(engine, {})
    assert [(o.token_id, o.finish_reason) for o in found.pop("bad")] == [(-1, reason)]
    assert f"or {names} leave no token; the weights" in str(sequence.error)
    assert facts(found) == undisturbed


@pytest.mark.parametrize("at", [1, 4])
def test_a_step_that_breaks_while_it_is_sampled_ends_its_requests(engine, alone, undisturbed, monkeypatch, at):
    sample, names, num_calls = engine.pipeline.sample, set(), []

    def fail_late(launched, *args):
        num_calls.append(None)
        if len(num_calls) == at:
            names.update(chunk.sequence.request_id for chunk in launched.plan.chunks if not chunk.is_stale)
            raise RuntimeError("the device caught fire")
        return sample(launched, *args)

    monkeypatch.setattr(engine.pipeline, "sample", fail_late)
    add_tasks(engine)
    add_many(engine)
    found = finish(engine, {})
    ended = {name for name, reason in reasons(found).items() if reason == "abort"}
    assert ended == names
    for name, outputs in facts(found).items():
        want = (alone | undisturbed)[name]
        assert outputs == (want if name not in ended else [*want[: len(outputs) - 1], (-1, 0.0)]), name


def test_a_step_that_breaks_in_front_leaves_a_grammar_where_it_was(engine, alone, monkeypatch):
    found = start(engine, "regex", 5)
    add(engine, "bad", prompt_of(30), params_of(1, 9))
    read = engine.pipeline.read

    def fail(launched):
        if any(chunk.sequence.request_id == "bad" for chunk in launched.plan.chunks):
            raise RuntimeError("the device caught fire")
        return read(launched)

    monkeypatch.setattr(engine.pipeline, "read", fail)
    while engine.scheduler.get("bad") is not None:
        collect(found, engine.step())
    found = finish(engine, found)
    assert [output.finish_reason for output in found["bad"]] == ["abort"]
    assert facts_of(found["regex"]) == alone["regex"]
