"""The options of `SamplingParams` through the engine: each does what it says, whatever runs beside it."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.sampling.bad_words import bad_sequences_of
from deepinfer_jax.sampling.params import derived_seed
from deepinfer_jax.testing import tiny
from deepinfer_jax.text.tiny_tokenizer import byte_ids
from tests.cases.forcing import EOS, FLOOR, MODEL_VOCAB_SIZE, allowed
from tests.engine.driving import add, add_many, check_free, drain, facts, facts_of, params_of, prompt_of

PROMPT = prompt_of(9)
A, B, C = byte_ids(b"abc")
# Log-probabilities are within 2^-20 of those of exact arithmetic (docs/sampling.md); float32 rounds below 16.
LOGPROB_ERROR = 4e-6

OPTIONS: dict[str, dict[str, Any]] = {
    "stop": {"stop": list("abcdefghijklmnopqrstuvwxyz"), "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": list(range(100, 140))},
    "min_tokens": {"min_tokens": 15, "ignore_eos": False, "logit_bias": {EOS: 20.0}},
    "min_p": {"min_p": 0.05},
    "logit_bias": {"logit_bias": {A: 4.0, B: -3.5}},
    "presence_penalty": {"presence_penalty": 2.0, "temperature": 0.3},
    "frequency_penalty": {"frequency_penalty": -1.0, "temperature": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.7, "top_k": 9},
    "allowed_token_ids": {"allowed_token_ids": list(range(60, 120))},
    "bad_words": {"bad_words": ["a", "b", "12"], "top_p": 0.9},
    "everything": {
        "logit_bias": {A: 1.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "allowed_token_ids": list(range(3, 299)),
        "bad_words": ["a"],
        "min_tokens": 3,
        "min_p": 0.001,
        "stop": "xyz",
        "top_p": 0.95,
    },
}


def option_params(name: str) -> SamplingParams:
    return params_of(list(OPTIONS).index(name), 20, **OPTIONS[name])


def row_of(output: RequestOutput) -> np.ndarray:
    """The processed log-probabilities by token id, float64; the floor as -inf."""
    row = np.full(MODEL_VOCAB_SIZE, -np.inf)
    for token_id, value in zip(output.top_token_ids, output.top_logprobs, strict=True):
        if value > FLOOR:
            row[token_id] = value
    return row


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def run(llm: LLM, *params: SamplingParams) -> list:
    """The outputs of one prompt under each of these parameters."""
    return llm.generate(prompt_token_ids=[PROMPT] * len(params), sampling_params=list(params), use_tqdm=False)


def ids_of(outputs) -> list[int]:
    return [output.token_id for output in outputs]


def text_of(outputs) -> str:
    return "".join(output.text for output in outputs)


# In company.


@pytest.fixture(scope="module")
def alone(tiny_model):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0"})
    found = {}
    for name in OPTIONS:
        add(engine, name, PROMPT, option_params(name))
        found |= drain(engine)
    check_free(engine)
    return facts(found)


@pytest.mark.parametrize("is_async", ["0", "1"], ids=["sync", "async"])
def test_company_changes_nothing(tiny_model, alone, undisturbed, is_async):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async})
    for name in OPTIONS:
        add(engine, name, PROMPT, option_params(name))
    add_many(engine)
    assert facts(drain(engine)) == alone | undisturbed
    engine.flush_inflight_reqs()
    check_free(engine)


def test_every_option_changes_the_answer(alone, llm):
    plain = [{"temperature", "top_p", "top_k"} & options.keys() for options in OPTIONS.values()]
    params = [
        dataclasses.replace(params_of(place, 20), **{name: options[name] for name in kept})
        for place, (kept, options) in enumerate(zip(plain, OPTIONS.values(), strict=True))
    ]
    for name, outputs in zip(OPTIONS, run(llm, *params), strict=True):
        assert facts_of(outputs) != alone[name], name


# Several answers.


def test_answers_of_one_prompt_come_as_a_list_and_the_first_is_that_of_one(llm):
    several = SamplingParams(n=5, seq_seed=3, max_tokens=12, ignore_eos=True)
    [single] = run(llm, dataclasses.replace(several, n=1))
    answers, one, two = run(llm, several, dataclasses.replace(several, n=1), dataclasses.replace(several, n=2))
    assert facts_of(answers[0]) == facts_of(one) == facts_of(single)
    assert [facts_of(answer) for answer in two] == [facts_of(answer) for answer in answers[:2]]
    assert len({tuple(facts_of(answer)) for answer in answers}) == 5
    for index, answer in enumerate(answers):
        [alone] = run(llm, dataclasses.replace(several, n=1, seq_seed=derived_seed(3, index)))
        assert facts_of(answer) == facts_of(alone)


def test_answers_without_a_seed_differ_and_greedy_ones_do_not(llm):
    sampled, greedy = run(
        llm,
        SamplingParams(n=9, max_tokens=12, ignore_eos=True),
        SamplingParams(n=3, max_tokens=12, ignore_eos=True, temperature=0),
    )
    assert len({tuple(ids_of(answer)) for answer in sampled}) == 9
    assert len({tuple(facts_of(answer)) for answer in greedy}) == 1


def test_texts_of_several_answers_are_lists(llm, text_llm):
    params = [SamplingParams(n=n, seq_seed=4, max_tokens=9, ignore_eos=True) for n in (1, 3, 1)]
    texts = text_llm.generate(["a", "b", "c"], params)
    results = llm.generate(["a", "b", "c"], params)
    assert texts == [text_of(results[0]), [text_of(answer) for answer in results[1]], text_of(results[2])]


def test_answers_are_told_apart_in_a_stream(llm):
    params = [SamplingParams(n=n, seq_seed=4, max_tokens=6, ignore_eos=True) for n in (2, 1)]
    found: dict[tuple[int, str], list[RequestOutput]] = {}
    for place, output in llm.stream(["a", "b"], params):
        found.setdefault((place, output.request_id), []).append(output)
    two, one = llm.generate(["a", "b"], params)
    assert [place for place, _ in sorted(found)] == [0, 0, 1]
    assert sorted(facts_of(outputs) for outputs in found.values()) == sorted(map(facts_of, [*two, one]))


def test_the_seed_of_the_engine_makes_several_answers_repeatable(tiny_model):
    params = SamplingParams(n=3, max_tokens=8, ignore_eos=True)

    def answers(seed: int) -> list:
        return [[facts_of(a) for a in result] for result in tiny.tiny_llm(tiny_model, seed=seed).generate("ab", params)]

    assert answers(7) == answers(7) != answers(8)


def test_a_request_of_an_engine_has_one_answer(llm):
    with pytest.raises(ValueError, match="n=2: an engine request has one answer"):
        add(llm.engine, "a", PROMPT, params_of(1, n=2))
    assert not llm.engine.has_unfinished_requests()


# Stop strings.


def stopping(text: str | list[int], stop, **options) -> SamplingParams:
    """Forces the text, then more."""
    golden = byte_ids(text.encode()) if isinstance(text, str) else text
    common = {"golden_token_ids": golden, "max_tokens": 40, "ignore_eos": True, "seq_seed": 1}
    return SamplingParams(stop=stop, **(common | options))


# Forced tokens, stop -> text without the stop string, with it, number of tokens.
STOPS: dict[str, tuple[Any, Any, str, str, int]] = {
    "across tokens": ("hello world", "wor", "hello ", "hello wor", 9),
    "one letter": ("hello world", "o", "hell", "hello", 5),
    "the first of several": ("hello world", ["wor", "zz", "lo"], "hel", "hello", 5),
    "the longest of those that end together": ("hello world", ["o", "llo", "lo"], "he", "hello", 5),
    "after a false start": ("aaab aab", "aab", "a", "aaab", 4),
    "at the start": ("hello", "h", "", "h", 1),
    "a letter of two tokens": ("caf\u00e9 au lait", "\u00e9", "caf", "caf\u00e9", 5),
    "behind a letter of four tokens": ("\U0001f600!x", "!", "\U0001f600", "\U0001f600!", 5),
}


def check_stop(llm: LLM, text_llm: LLM, params: SamplingParams, text: str, num_tokens: int) -> None:
    [outputs] = run(llm, params)
    assert text_of(outputs) == text
    assert [output.finish_reason for output in outputs] == [""] * (num_tokens - 1) + ["stop"]
    assert ids_of(outputs) == list(params.golden_token_ids or ())[:num_tokens]
    streamed = [output for _, output in llm.stream(prompt_token_ids=[PROMPT], sampling_params=params)]
    assert [(o.token_id, o.text, o.finish_reason) for o in streamed] == [
        (o.token_id, o.text, o.finish_reason) for o in outputs
    ]
    assert run(text_llm, params) == [text]


@pytest.mark.parametrize("name", STOPS)
def test_an_answer_ends_with_its_first_stop_string(llm, text_llm, name):
    forced_text, stop, without, whole, num_tokens = STOPS[name]
    check_stop(llm, text_llm, stopping(forced_text, stop), without, num_tokens)
    check_stop(llm, text_llm, stopping(forced_text, stop, include_stop_str_in_output=True), whole, num_tokens)


def test_a_stop_string_inside_a_token_cuts_its_text(llm, text_llm):
    tokens = [*byte_ids(b"x"), llm.get_tokenizer().encode_bare("12")[0], *byte_ids(b"y")]
    assert len(llm.get_tokenizer().encode_bare("12")) == 1
    for stop, without, whole in (("1", "x", "x1"), ("2", "x1", "x12"), ("12", "x", "x12"), ("x1", "", "x1")):
        check_stop(llm, text_llm, stopping(tokens, stop), without, 2)
        check_stop(llm, text_llm, stopping(tokens, stop, include_stop_str_in_output=True), whole, 2)
    check_stop(llm, text_llm, stopping(tokens, "2y"), "x1", 3)


def test_text_that_may_begin_a_stop_string_is_held_back_and_not_lost(llm, text_llm):
    params = stopping("abcabx", "abcd", max_tokens=6)
    [outputs] = run(llm, params)
    assert [output.text for output in outputs] == ["", "", "", "abc", "", "abx"]
    assert outputs[-1].finish_reason == "length"
    assert run(text_llm, params) == ["abcabx"]
    [outputs] = run(llm, stopping("abcab", "abcd", max_tokens=5))
    assert text_of(outputs) == "abcab", "also when the answer ends before it is decided"
    [outputs] = run(llm, stopping([*byte_ids(b"ab"), EOS], "abcd", ignore_eos=False))
    assert text_of(outputs).startswith("ab") and outputs[-1].finish_reason == "stop" and len(outputs) == 3


def test_a_stop_string_in_the_prompt_ends_nothing(llm):
    params = stopping("xyz", "bx", max_tokens=3)
    [outputs] = llm.generate("ab", params)
    assert (text_of(outputs), outputs[-1].finish_reason) == ("xyz", "length")


def test_the_last_token_may_hold_a_stop_string(llm):
    [outputs] = run(llm, stopping("xyz", "yz", max_tokens=3))
    assert (text_of(outputs), outputs[-1].finish_reason, len(outputs)) == ("x", "stop", 3)


def test_stopped_requests_free_what_they_held(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    for place in range(9):
        add(engine, str(place), prompt_of(70, seed=place), stopping("ab" * place + "!!", "!"))
    found = drain(engine)
    assert [len(found[str(place)]) for place in range(9)] == [2 * place + 1 for place in range(9)]
    engine.flush_inflight_reqs()
    check_free(engine)


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_fork_looks_for_stop_strings_as_its_parent_does(tiny_model, num_tokens):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", PROMPT, stopping("abcdefgh", "bcdef"))
    found = {"a": []}
    while len(engine.scheduler.get("a").output) < num_tokens:
        found["a"] += engine.step()
    engine.fork_request("a", "b")
    num_kept = len(engine.scheduler.get("a").output)
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert text_of(found["a"]) == "a"
    assert [output.finish_reason for output in found["a"]][-1] == "stop"
    assert ids_of(found["b"]) == ids_of(found["a"])[num_kept:]
    assert text_of(found["b"]) == ""


def test_a_fork_does_not_end_with_a_stop_string_that_came_before_min_tokens(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    params = stopping("abcdefgh", "b", min_tokens=4, max_tokens=8)
    add(engine, "a", PROMPT, params)
    found = {"a": []}
    while len(engine.scheduler.get("a").output) < 5:
        found["a"] += engine.step()
    saved = engine.save_request("a")
    engine.fork_request("a", "fork")
    engine.restore_request(saved, "restored")
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert text_of(found["a"]) == "abcdefgh"
    for name in ("fork", "restored"):
        assert text_of(found["a"]).endswith(text_of(found[name]))
        assert (len(found[name]), found[name][-1].finish_reason) == (8 - len(saved.output), "length")


@pytest.fixture(scope="module")
def bare_llm(tiny_model, tmp_path_factory):
    """Has no tokenizer."""
    file = tmp_path_factory.mktemp("bare") / "shape.json"
    file.write_text((tiny_model / "config.json").read_text())
    return tiny.tiny_llm(file)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": "a"},
        {"bad_words": ["a"]},
        {"so_args": {"schema_type": "regex", "schema": "a"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_concerns_texts_needs_a_tokenizer(bare_llm, options):
    params = [SamplingParams(max_tokens=1), SamplingParams(**options)]
    with pytest.raises(ValueError, match=f"{next(iter(options))}.* needs a tokenizer"):
        bare_llm.generate(prompt_token_ids=[[5], [6]], sampling_params=params)
    assert not bare_llm.engine.has_unfinished_requests()
    assert len(bare_llm.generate(prompt_token_ids=[[5]], sampling_params=params[0])[0]) == 1


# Ends.


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_an_answer_and_is_its_last_token(llm, ignore_eos):
    golden = [A, B, C, A, B]
    params = SamplingParams(golden_token_ids=golden, stop_token_ids=[C, 5], max_tokens=9, ignore_eos=ignore_eos)
    [outputs] = run(llm, params)
    assert (ids_of(outputs), outputs[-1].finish_reason) == ([A, B, C], "stop")
    assert text_of(outputs) == "abc"


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_an_answer_does_not_end_before_min_tokens(llm, min_tokens):
    bias = {EOS: 60.0, C: 50.0}
    [eos, stop_token, ignored] = run(
        llm,
        SamplingParams(min_tokens=min_tokens, logit_bias={EOS: 60.0}, max_tokens=9, top_logprobs=320),
        SamplingParams(min_tokens=min_tokens, logit_bias={C: 60.0}, max_tokens=9, stop_token_ids=[C]),
        SamplingParams(min_tokens=min_tokens, logit_bias=bias, max_tokens=9, stop_token_ids=[C], ignore_eos=True),
    )
    assert ids_of(eos).index(EOS) == min_tokens and eos[-1].finish_reason == "stop"
    assert [EOS in allowed(output) for output in eos] == [False] * min_tokens + [True]
    assert ids_of(stop_token).index(C) == min_tokens and stop_token[-1].finish_reason == "stop"
    assert ids_of(ignored) == [EOS] * 9, "with ignore_eos it ends nothing"


def test_stop_strings_are_not_looked_for_before_min_tokens(llm):
    [outputs] = run(llm, stopping("aaaaaaaa", "a", min_tokens=4))
    assert (len(outputs), text_of(outputs), outputs[-1].finish_reason) == (4, "aaa", "stop")


# Single logits. The rows are compared with exact arithmetic on the logits of the model.


@pytest.fixture
def logits_of(llm, monkeypatch):
    """Generates one request; its outputs, and the model's logits in front of each, float64."""
    pipeline, seen = llm.engine.pipeline, []
    sample = pipeline.sample

    def spy(launched, *args):
        seen.append(np.asarray(launched.waiting[0])[0].astype(np.float64))
        return sample(launched, *args)

    monkeypatch.setattr(pipeline, "sample", spy)

    def generate(params: SamplingParams) -> tuple[list[RequestOutput], list[np.ndarray]]:
        seen.clear()
        [outputs] = run(llm, params)
        return outputs, seen[: len(outputs)]

    return generate


PATH = [A, B, A, A, PROMPT[2], A, C]  # what is emitted: one token often, and one of the prompt
EDITS: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {A: 3.5, B: -100.0, EOS: 1e30, C: -2.0}},
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.75},
    "repetition": {"repetition_penalty": 1.5},
    "rewarded repetition": {"repetition_penalty": 0.5},
    "all": {
        "logit_bias": {A: 0.5, 77: 2.0},
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
    },
}


def edited(logits: np.ndarray, params: SamplingParams, output: list[int]) -> np.ndarray:
    """The logits with penalties and biases, as the documentation defines them."""
    row, r = logits.copy(), params.repetition_penalty
    for token_id in {*PROMPT, *output} if r != 1 else ():
        row[token_id] = row[token_id] / r if row[token_id] > 0 else row[token_id] * r
    for token_id, bias in params.bias_pairs:
        row[token_id] += bias
    for token_id in set(output):
        row[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
    return row


@pytest.mark.parametrize("name", EDITS)
def test_edits_change_the_logits_that_they_name(logits_of, name):
    params = SamplingParams(
        golden_token_ids=PATH, max_tokens=len(PATH) + 1, ignore_eos=True, top_logprobs=320, seq_seed=2, **EDITS[name]
    )
    outputs, logits = logits_of(params)
    for place, (output, row) in enumerate(zip(outputs, logits, strict=True)):
        want = log_softmax(edited(row, params, PATH[:place]))
        got = row_of(output)
        near = want > -16
        np.testing.assert_allclose(got[near], want[near], rtol=0, atol=LOGPROB_ERROR)
        assert (got[~near] < -15.9).all()


def test_a_token_that_is_likely_by_far_stops_repeating(llm):
    common = {"max_tokens": 20, "seq_seed": 3, "ignore_eos": True}
    free, frequent, present, repeated = run(
        llm,
        SamplingParams(logit_bias={A: 30.0}, **common),
        SamplingParams(logit_bias={A: 30.0}, frequency_penalty=2.0, **common),
        SamplingParams(logit_bias={A: 1.0}, presence_penalty=2.0, **common),
        SamplingParams(logit_bias={A: 30.0}, repetition_penalty=9.0, **common),
    )
    assert ids_of(free) == [A] * 20
    assert 9 <= ids_of(frequent).count(A) < 20, "some thirty units of bias are used up by two for each time"
    assert ids_of(frequent)[:9] == [A] * 9
    assert ids_of(present).count(A) < 20
    assert ids_of(repeated).count(A) == 20, "a bias comes after the repetition penalty, which it outweighs"


def test_min_p_keeps_what_is_likely_enough(llm):
    probe = {"top_logprobs": 320, "max_tokens": 1, "seq_seed": 4}
    for temperature in (1.0, 0.5):
        [[free]] = run(llm, SamplingParams(**probe, temperature=temperature))
        row = row_of(free)
        for min_p in (0.02, 0.3, 1.0):
            [[output]] = run(llm, SamplingParams(**probe, temperature=temperature, min_p=min_p))
            want = set(np.flatnonzero(row >= row.max() + math.log(min_p)).tolist())
            assert allowed(output) == want
            assert math.isclose(np.exp(row_of(output)).sum(), 1, abs_tol=1e-5)
            assert (len(want) == 1) == (min_p == 1.0)


# Lists of tokens.


@pytest.mark.parametrize("ids", [[A], [A, B, 299], list(range(0, 301, 7))], ids=["one", "few", "many"])
def test_nothing_but_allowed_tokens_is_drawn(llm, ids):
    [outputs] = run(llm, SamplingParams(allowed_token_ids=ids, max_tokens=9, top_logprobs=320, ignore_eos=True))
    assert all(allowed(output) == set(ids) for output in outputs)
    assert set(ids_of(outputs)) <= set(ids)
    assert EOS not in ids


def contains(tokens: list[int], sequence: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(sequence)]) == sequence for at in range(len(tokens)))


def test_bad_words_do_not_appear_as_their_tokens(llm):
    words = ["ab", "ba", "c", " a", "12"]
    sequences = bad_sequences_of(words, llm.get_tokenizer())
    assert {len(sequence) for sequence in sequences} >= {1, 2}
    bias = {token_id: 9.0 for sequence in sequences for token_id in sequence}
    common = {"logit_bias": bias, "max_tokens": 60, "ignore_eos": True}
    free = [ids_of(outputs) for outputs in run(llm, *(SamplingParams(seq_seed=s, **common) for s in range(6)))]
    kept = run(llm, *(SamplingParams(seq_seed=s, bad_words=words, top_logprobs=320, **common) for s in range(6)))
    assert sum(any(contains(tokens, s) for tokens in free) for s in sequences) > len(sequences) // 2
    for sequence in sequences:
        assert not any(contains(ids_of(outputs), sequence) for outputs in kept), sequence
    for outputs in kept:
        tokens = ids_of(outputs)
        for place, output in enumerate(outputs):
            completing = {s[-1] for s in sequences if tuple(tokens[place - len(s) + 1 : place]) == s[:-1]}
            assert allowed(output) == set(range(MODEL_VOCAB_SIZE)) - completing


def test_the_prompt_does_not_begin_a_bad_word(llm):
    [[output]] = llm.generate("a", SamplingParams(bad_words=["ab"], logit_bias={B: 60.0}, max_tokens=1))
    assert output.token_id == B


def test_constraints_that_allow_no_token_end_their_request_only(llm):
    plain = SamplingParams(max_tokens=4, seq_seed=1, ignore_eos=True)
    none = SamplingParams(allowed_token_ids=[A], bad_words=["a"], max_tokens=4)
    later = SamplingParams(allowed_token_ids=[A, B], bad_words=["ab", "aa"], golden_token_ids=[B, A], max_tokens=4)
    [want] = run(llm, plain)
    first, second, third = run(llm, none, plain, later)
    assert [output.token_id for output in first] == [-1]
    assert first[0].finish_reason not in ("", "stop", "length")
    assert facts_of(second) == facts_of(want)
    assert ids_of(third) == [B, A] and third[-1].finish_reason == first[0].finish_reason


# Variables.

BLACKLIST = "3..40,99"
FORBIDDEN = {*range(3, 41), 99}
VARIABLES = {
    "blacklist": {"DEEPINFER_DECODE_TOKEN_BLACKLIST": BLACKLIST},
    "top-k": {"DEEPINFER_SAMPLER_FORCE_TOPK": "5"},
    "mass": {"DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": "1"},
}
VARIABLES["all"] = {name: value for variable in VARIABLES.values() for name, value in variable.items()}


@pytest.mark.slow  # an engine of its own each
@pytest.mark.parametrize("names", VARIABLES)
def test_a_deployment_limits_every_draw(tiny_model, llm, names):
    environ = VARIABLES[names] | {"DEEPINFER_ENFORCE_EAGER": "1"}
    engine = tiny.tiny_engine(tiny_model, environ)
    common = {"top_logprobs": 320, "ignore_eos": True, "max_tokens": 12, "seq_seed": 8}
    golden = [20, A, 99, 7]
    requests = {
        "sampled": SamplingParams(**common),
        "forced": SamplingParams(**common, golden_token_ids=golden),
        # The only one that needs masks; when it has ended, steps are one call.
        "listed": SamplingParams(**(common | {"max_tokens": 3}), allowed_token_ids=[*range(30, 60), 99]),
        "filtered": SamplingParams(**common, top_p=0.5, golden_token_ids=golden),
    }
    for name, params in requests.items():
        add(engine, name, PROMPT, params)
    found = drain(engine)
    forbidden = FORBIDDEN if "DEEPINFER_DECODE_TOKEN_BLACKLIST" in environ else set()
    most = int(environ.get("DEEPINFER_SAMPLER_FORCE_TOPK", MODEL_VOCAB_SIZE))
    [free] = run(llm, dataclasses.replace(requests["sampled"], golden_token_ids=ids_of(found["sampled"])))
    for output, before in zip(found["sampled"], free, strict=True):
        order = [token_id for token_id in before.top_token_ids if token_id >= 0 and token_id not in forbidden]
        assert allowed(output) == set(order[:most])
    for output in found["listed"]:
        assert allowed(output) <= set(requests["listed"].allowed_token_ids) - forbidden
        assert len(allowed(output)) == min(most, len({*range(30, 60), 99} - forbidden))
    for name in ("forced", "filtered"):
        assert ids_of(found[name])[: len(golden)] == golden, "a forced token may be a forbidden one"
    for output in itertools.chain.from_iterable(found.values()):
        assert not allowed(output) & forbidden and len(allowed(output)) <= most
        if "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS" not in environ:
            assert output.sum_smaller_probs == -1.0
            continue
        row = row_of(output)
        is_less = row < row[output.token_id]
        want = np.exp(row[is_less]).sum() if np.isfinite(row[output.token_id]) else 0.0
        assert math.isclose(output.sum_smaller_probs, want, abs_tol=1e-5)
    check_free(engine)
