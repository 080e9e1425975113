"""Log-probabilities of prompt tokens: those of the same tokens when they are decoded, however the prompt is run."""

import dataclasses

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.snapshot import load_snapshot, save_snapshot
from deepinfer_jax.testing import tiny
from tests.engine.driving import (
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

FLOOR = -9999.0
LENGTHS = (1, 2, 63, 64, 65, 150)  # around a chunk and a page (64), and beyond the window (128)
# Temperature and filters apply to prompt tokens as to drawn ones.
SAMPLING: dict[str, dict] = {
    "plain": {},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 60},
    "min_p": {"min_p": 0.2, "temperature": 2.0},
    "greedy": {"temperature": 0.0},
}
ASYNC = {"sync": "0", "async": "1"}


def scoring(name: str = "plain", max_tokens: int = 4, **options) -> SamplingParams:
    return params_of(5, max_tokens, prompt_logprobs=True, **(SAMPLING[name] | options))


def decoded(engine, prompt: list[int], params: SamplingParams) -> list[float]:
    """The log-probabilities of all prompt tokens but the first, each drawn behind those in front of it."""
    golden = {"golden_token_ids": prompt[1:], "max_tokens": len(prompt) - 1, "prompt_logprobs": False}
    add(engine, "decoded", prompt[:1], dataclasses.replace(params, **golden))
    outputs = drain(engine)["decoded"]
    assert [output.token_id for output in outputs] == prompt[1:]
    return [output.token_logprobs for output in outputs]


@pytest.fixture(scope="module")
def want(tiny_model) -> dict[tuple[int, str], list[float]]:
    """By length and sampling: what decoding gives, without a prefix cache."""
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_JAX_PREFIX_CACHE": "off"})
    keys = [(length, "plain") for length in LENGTHS] + [(65, name) for name in SAMPLING] + [(150, "filtered")]
    return {
        (length, name): decoded(engine, prompt_of(length), scoring(name)) if length > 1 else [] for length, name in keys
    }


@pytest.fixture(scope="module")
def plain(tiny_model) -> dict[int, list]:
    """By length: the outputs of the same requests without prompt_logprobs."""
    engine = tiny.tiny_engine(tiny_model)
    for length in LENGTHS:
        add(engine, str(length), prompt_of(length), dataclasses.replace(scoring(), prompt_logprobs=False))
    return {int(name): facts_of(outputs) for name, outputs in drain(engine).items()}


def scores_of(outputs) -> list[float]:
    """The values; only the first output has them."""
    assert all(output.prompt_logprobs == [] for output in outputs[1:])
    return list(outputs[0].prompt_logprobs)


def run_all(engine, lengths=LENGTHS) -> dict[int, list]:
    """The outputs of a scoring request of each length, all at once."""
    for length in lengths:
        add(engine, str(length), prompt_of(length), scoring())
    found = {int(name): outputs for name, outputs in drain(engine).items()}
    check_free(engine)
    return found


@pytest.mark.parametrize("name", SAMPLING)
def test_they_are_those_of_the_same_tokens_when_decoded(llm, want, name):
    [outputs] = llm.generate(prompt_token_ids=[prompt_of(65)], sampling_params=scoring(name))
    got = scores_of(outputs)
    assert got == want[65, name] and len(got) == 64
    assert all(value <= 0 for value in got)
    assert (min(got) == FLOOR) == (name != "plain"), "tokens that are filtered out have the floor"


@pytest.mark.parametrize("is_async", ASYNC.values(), ids=ASYNC)
def test_company_and_length_change_nothing(tiny_model, want, plain, undisturbed, is_async):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async})
    for length in LENGTHS:
        add(engine, f"scored {length}", prompt_of(length), scoring())
    add(engine, "scored filtered", prompt_of(150), scoring("filtered"))
    add_many(engine)
    found = drain(engine)
    assert {name: facts_of(found[name]) for name in undisturbed} == undisturbed
    for length in LENGTHS:
        outputs = found[f"scored {length}"]
        assert scores_of(outputs) == want[length, "plain"] and len(scores_of(outputs)) == length - 1
        assert facts_of(outputs) == plain[length], "the answer is that of a request without them"
    assert scores_of(found["scored filtered"]) == want[150, "filtered"]
    assert all(output.prompt_logprobs == [] for name in undisturbed for output in found[name])
    check_free(engine)


@pytest.mark.parametrize("max_num_batched_tokens", [4, 7, 33, 64])
def test_chunks_change_nothing(tiny_model, want, plain, max_num_batched_tokens):
    engine = tiny.tiny_engine(tiny_model, max_num_batched_tokens=max_num_batched_tokens)
    found = run_all(engine)
    for length in LENGTHS:
        assert scores_of(found[length]) == want[length, "plain"]
        assert facts_of(found[length]) == plain[length]
    assert engine.scheduler.counters.prefill_steps >= sum(LENGTHS) // max_num_batched_tokens


@pytest.mark.slow
def test_a_prompt_in_one_piece_has_the_same(tiny_model, want, plain):
    engine = tiny.tiny_engine(tiny_model, chunked_prefill=False, max_num_batched_tokens=512)
    found = run_all(engine)
    assert engine.scheduler.counters.prefill_steps <= 2
    for length in LENGTHS:
        assert scores_of(found[length]) == want[length, "plain"]
        assert facts_of(found[length]) == plain[length]


@pytest.mark.parametrize("is_async", ASYNC.values(), ids=ASYNC)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_a_request_that_gives_way_has_them_once(tiny_model, want, plain, num_steps, is_async):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async})
    add(engine, "a", prompt_of(150), scoring())
    add(engine, "b", prompt_of(65), scoring("filtered"))
    found = run_steps(engine, num_steps)
    for name in "ba":
        sequence = engine.scheduler.get(name)
        if sequence is not None and sequence.slot >= 0:
            engine.scheduler._preempt(sequence)
    assert engine.scheduler.counters.preemptions > 0
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert scores_of(found["a"]) == want[150, "plain"]
    assert scores_of(found["b"]) == want[65, "filtered"]
    assert facts_of(found["a"]) == plain[150]
    check_free(engine)


def test_known_prefixes_do_not_shorten_them(tiny_model, want, plain):
    engine = tiny.tiny_engine(tiny_model)
    prompt = prompt_of(150)
    for place in range(2):
        add(engine, f"first {place}", prompt, dataclasses.replace(scoring(), prompt_logprobs=False))
        drain(engine)
    assert engine.stats()["prefix_hit_tokens"] == 149
    rows = engine.scheduler.counters.prefill_rows
    add(engine, "scored", prompt, scoring())
    outputs = drain(engine)["scored"]
    assert (scores_of(outputs), facts_of(outputs)) == (want[150, "plain"], plain[150])
    assert engine.scheduler.counters.prefill_rows == rows + 150
    add(engine, "later", prompt, dataclasses.replace(scoring(), prompt_logprobs=False))
    assert facts_of(drain(engine)["later"]) == plain[150]
    assert engine.stats()["prefix_hit_tokens"] == 2 * 149, "others take over what it has computed"
    check_free(engine)


def test_they_come_with_the_first_output_of_each_answer(llm, want):
    params = [scoring(n=2), scoring(), dataclasses.replace(scoring(), prompt_logprobs=False)]
    two, one, none = llm.generate(prompt_token_ids=[prompt_of(65)] * 3, sampling_params=params)
    assert [scores_of(outputs) for outputs in (*two, one)] == [want[65, "plain"]] * 3
    assert scores_of(none) == []
    assert facts_of(none) == facts_of(one) == facts_of(two[0]) != facts_of(two[1])


def test_a_prompt_of_one_token_has_none(llm):
    [outputs] = llm.generate("", scoring())
    assert outputs[0].prompt_len == 1
    assert scores_of(outputs) == []


def test_what_a_request_ties_to_its_output_leaves_its_prompt_alone(llm, want):
    """A grammar, lists and penalties concern output tokens, and they apply to the first one of these."""
    options = [
        {"so_args": {"schema_type": "regex", "schema": "[a-z]{2}"}},
        {"allowed_token_ids": [7, 8]},
        {"logit_bias": {9: 60.0}, "presence_penalty": 1.0, "repetition_penalty": 2.0},
        {"first_n_token_no_eos": 1, "top_logprobs": 320},
    ]
    params = [scoring(**option) for option in options]
    results = llm.generate(prompt_token_ids=[prompt_of(150)] * len(params), sampling_params=params)
    assert [scores_of(outputs) for outputs in results] == [want[150, "plain"]] * len(params)
    letters, listed, biased, bare = [outputs[0] for outputs in results]
    assert letters.text.isalpha() and listed.token_id in (7, 8) and biased.token_id == 9
    assert dict(zip(bare.top_token_ids, bare.top_logprobs, strict=True))[1] == FLOOR


def test_an_end_without_a_token_has_none(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(150), scoring())
    run_steps(engine, 2)
    engine.abort_request("a")
    [output] = drain(engine)["a"]
    assert (output.token_id, output.prompt_logprobs, output.finish_reason) == (-1, [], "abort")
    engine.flush_inflight_reqs()
    check_free(engine)


def test_a_fork_has_none(tiny_model, want):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(65), scoring(max_tokens=9))
    found = {}
    while len(engine.scheduler.get("a").output) < 3:
        collect(found, engine.step())
    engine.fork_request("a", "b")
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert scores_of(found["a"]) == want[65, "plain"]
    assert scores_of(found["b"]) == []
    assert set(reasons(found).values()) == {"length"}
    check_free(engine)


def test_a_fork_that_asks_for_them_is_refused(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(65), params_of(5, 9))
    found = run_steps(engine, 4)
    with pytest.raises((ValueError, NotImplementedError), match="prompt_logprobs"):
        engine.fork_request("a", "b", sampling_params=scoring())
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert list(found) == ["a"]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_request_restored_before_its_first_output_has_them(tiny_model, want, plain, tmp_path, num_steps):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(150), scoring())
    found = run_steps(engine, num_steps)
    saved = engine.save_request("a")
    num_given = len(saved.output)
    save_snapshot(saved, tmp_path / "request.safetensors")
    engine.restore_request(load_snapshot(tmp_path / "request.safetensors", engine.runtime), "b")
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert scores_of(found["a"]) == want[150, "plain"]
    assert scores_of(found["b"]) == ([] if num_given else want[150, "plain"])
    assert facts(found) == {"a": plain[150], "b": plain[150][num_given:]}
    check_free(engine)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_bounded_replay_switches_them_off_with_a_warning(tiny_model, mode):
    environ = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": mode, "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}
    engine = tiny.tiny_engine(tiny_model, environ | {"DEEPINFER_ENFORCE_EAGER": "1"})
    with pytest.warns(UserWarning, match="prompt_logprobs is off: with bounded replay"):
        sequence = add(engine, "a", prompt_of(9), scoring())
    assert not sequence.scores_prompt and not sequence.options.params.prompt_logprobs
    engine.abort_request("a")
