"""`LLMEngine.fork_request`: the same continuation as the parent's, or as a fresh request with the same tokens."""

import pytest

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
)

PROMPT, NUM_TOKENS = prompt_of(150), 30


@pytest.fixture(scope="module")
def whole(tiny_model):
    """What the parent of all forks gives."""
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", PROMPT, params_of(5, NUM_TOKENS))
    return facts_of(drain(engine)["a"])


@pytest.fixture(params=["0", "1"], ids=["sync", "async"])
def engine(tiny_model, request):
    return tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": request.param})


def start(engine, num_tokens: int) -> dict:
    """A parent that has so many tokens, the next one in flight where steps are asynchronous."""
    add(engine, "a", PROMPT, params_of(5, NUM_TOKENS))
    found = {}
    while len(engine.scheduler.get("a").output) < num_tokens:
        collect(found, engine.step())
    return found


def finish(engine, found: dict) -> dict:
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert set(reasons(found).values()) == {"length"}
    check_free(engine)
    return found


@pytest.mark.parametrize("num_tokens", [1, 2, 10, NUM_TOKENS - 2])
def test_a_fork_goes_on_as_its_parent_does(engine, whole, num_tokens):
    found = start(engine, num_tokens)
    engine.fork_request("a", "b")
    found = finish(engine, found)
    assert facts(found) == {"a": whole, "b": whole[num_tokens:]}
    assert [output.num_output_tokens for output in found["b"]] == list(range(num_tokens + 1, NUM_TOKENS + 1))
    assert engine.scheduler.counters.forks_copied == 1


@pytest.mark.parametrize("behind, is_copied", [(0, True), (4, True), (20, False)])
def test_a_fork_may_go_back(engine, whole, behind, is_copied):
    found = start(engine, 22)
    engine.fork_request("a", "b", num_tokens=len(PROMPT) + 22 - behind)
    found = finish(engine, found)
    assert facts(found) == {"a": whole, "b": whole[22 - behind :]}
    counters = engine.scheduler.counters
    assert (counters.forks_copied, counters.forks_queued) == (is_copied, not is_copied)


def test_a_fork_of_one_that_waits_waits_too(engine, whole):
    for index in range(tiny.MAX_NUM_SEQS):
        add(engine, str(index), prompt_of(9, seed=index), params_of(index, 5))
    found = start(engine, 0)
    engine.fork_request("a", "b")
    assert engine.scheduler.counters.forks_queued == 1
    found = finish(engine, found)
    assert facts_of(found["a"]) == facts_of(found["b"]) == whole


def test_a_fork_does_not_push_in_front_of_those_that_wait(engine, whole, undisturbed):
    found = start(engine, 10)
    add_many(engine)
    engine.fork_request("a", "b")
    assert engine.scheduler.counters.forks_queued == 1
    assert facts(finish(engine, found)) == undisturbed | {"a": whole, "b": whole[10:]}


def test_forks_have_forks(engine, whole):
    found = start(engine, 10)
    engine.fork_request("a", "b")
    engine.fork_request("b", "c")
    collect(found, engine.step())
    collect(found, engine.step())
    engine.fork_request("c", "d")
    num_known = len(engine.scheduler.get("d").output)
    found = finish(engine, found)
    assert facts(found) == {"a": whole, "b": whole[10:], "c": whole[10:], "d": whole[num_known:]}


def test_a_fork_outlives_its_parent(engine, whole):
    found = start(engine, 10)
    engine.fork_request("a", "b")
    engine.abort_request("a")
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert facts_of(found["b"]) == whole[10:]
    check_free(engine)


def test_other_parameters_apply_from_the_fork_on(engine, whole):
    num_kept = 10
    other = params_of(77, NUM_TOKENS + 5, temperature=0.8, top_logprobs=2)
    golden = params_of(77, NUM_TOKENS + 5, temperature=0.8, golden_token_ids=[token for token, _ in whole[:num_kept]])
    found = start(engine, num_kept)
    engine.fork_request("a", "b", sampling_params=other)
    add(engine, "fresh", PROMPT, golden)
    found = finish(engine, found)
    assert facts_of(found["b"]) == facts_of(found["fresh"])[num_kept:] != whole[num_kept:]
    assert len(found["b"]) == NUM_TOKENS + 5 - num_kept
    assert all(len(output.top_token_ids) == 2 for output in found["b"])
    assert facts_of(found["a"]) == whole


def test_a_fork_that_has_all_its_tokens_ends_at_once(engine, whole):
    found = start(engine, 10)
    engine.fork_request("a", "b", sampling_params=params_of(1, 10))
    found = finish(engine, found)
    [end] = found["b"]
    assert (end.token_id, end.num_output_tokens, end.finish_reason) == (-1, 10, "length")
    assert facts_of(found["a"]) == whole


def test_the_text_of_a_fork_joins_to_its_parents(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    found = start(engine, 10)
    engine.fork_request("a", "b")
    found = finish(engine, found)
    text = "".join(output.text for output in found["a"])
    assert text.endswith("".join(output.text for output in found["b"]))
    assert text == engine.tokenizer.decode([output.token_id for output in found["a"]])


def test_what_cannot_be_forked_is_refused(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    with pytest.raises(ValueError, match="'a' is not unfinished"):
        engine.fork_request("a", "b")
    start(engine, 3)
    with pytest.raises(ValueError, match="'a' is unfinished"):
        engine.fork_request("a", "a")
    for num_tokens in (len(PROMPT) - 1, len(PROMPT) + 4):
        with pytest.raises(ValueError, match=f"num_tokens={num_tokens} must be from 150"):
            engine.fork_request("a", "b", num_tokens=num_tokens)
    with pytest.raises(ValueError, match="golden_token_ids"):
        engine.fork_request("a", "b", sampling_params=params_of(1, golden_token_ids=[301]))
    assert list(drain(engine)) == ["a"]
    check_free(engine)
