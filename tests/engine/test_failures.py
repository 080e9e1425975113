"""What goes wrong in a step ends the requests of that step; the others give what they would have given."""

import dataclasses

import jax.numpy as jnp
import pytest

from deepinfer_jax.checkpoint.load import load_model
from deepinfer_jax.testing import tiny
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
)


class Once:
    """Raises an error at one call of a method, before or after it has done its work; notes whose step that was."""

    def __init__(self, method, error: BaseException, at: int, *, after: bool) -> None:
        self.method, self.error, self.at, self.after = method, error, at, after
        self.num_calls = 0
        self.names: set[str] = set()

    def __call__(self, step, **kwargs):
        self.num_calls += 1
        is_now = self.num_calls == self.at
        if is_now:
            chunks = getattr(step, "plan", step).chunks
            self.names = {chunk.sequence.request_id for chunk in chunks if not chunk.is_stale}
        if is_now and not self.after:
            raise self.error
        result = self.method(step, **kwargs)
        if is_now:
            raise self.error
        return result


@pytest.mark.parametrize("environ", ["0", "1"], ids=["sync", "async"])
@pytest.mark.parametrize("at", [1, 2, 3, 9])  # of prefill, and of decode
@pytest.mark.parametrize("method, after", [("launch", False), ("launch", True), ("read", False)])
def test_an_exception_ends_the_requests_of_its_step(tiny_model, undisturbed, monkeypatch, method, after, at, environ):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": environ}, hooks=recorder)
    once = Once(getattr(engine.pipeline, method), RuntimeError("the device caught fire"), at, after=after)
    monkeypatch.setattr(engine.pipeline, method, once)
    add_many(engine)
    found = drain(engine)
    ended = {name for name, reason in reasons(found).items() if reason == "abort"}
    assert ended and ended <= once.names
    for name, outputs in facts(found).items():
        assert outputs[:-1] == undisturbed[name][: len(outputs) - 1]
        assert outputs == undisturbed[name] if name not in ended else outputs[-1] == (-1, 0.0)
    errors = {sequence.request_id: sequence.error for sequence in recorder.ended}
    assert errors == {name: once.error if name in ended else None for name in undisturbed}
    assert engine.stats()["finished"] == {"abort": len(ended), "length": len(undisturbed) - len(ended)}
    check_free(engine)


@pytest.mark.parametrize("at", [1, 2, 9])
@pytest.mark.parametrize("method", ["launch", "read"])
def test_an_interrupt_is_raised_and_the_engine_goes_on(tiny_model, undisturbed, monkeypatch, method, at):
    engine = tiny.tiny_engine(tiny_model)
    once = Once(getattr(engine.pipeline, method), KeyboardInterrupt(), at, after=False)
    monkeypatch.setattr(engine.pipeline, method, once)
    add_many(engine)
    found = {}
    with pytest.raises(KeyboardInterrupt):
        while True:
            collect(found, engine.step())
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    ended = {name for name, reason in reasons(found).items() if reason == "abort"}
    assert ended <= once.names
    assert sorted(found) == sorted(undisturbed), "every request has its end"
    for name, outputs in facts(found).items():
        assert outputs == undisturbed[name] if name not in ended else outputs[-1] == (-1, 0.0)
    check_free(engine)


def test_an_interrupt_with_nobody_left_still_gives_the_ends(tiny_model, monkeypatch):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", [5])
    monkeypatch.setattr(engine.pipeline, "launch", Once(engine.pipeline.launch, KeyboardInterrupt(), 1, after=False))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert reasons(drain(engine)) == {"a": "abort"}
    add(engine, "a", [5], params_of(1, 2))
    assert reasons(drain(engine)) == {"a": "length"}
    check_free(engine)


class Breaking(Recorder):
    """Hooks one of which raises once."""

    def __init__(self, hook: str, at: int) -> None:
        super().__init__()
        method, calls = getattr(self, hook), []

        def call(argument) -> None:
            calls.append(None)
            if len(calls) == at:
                raise KeyError(hook)
            method(argument)

        setattr(self, hook, call)


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("hook", ["post_schedule", "process_output", "finalize_seq"])
def test_an_exception_of_a_hook_is_raised_and_the_engine_goes_on(tiny_model, undisturbed, hook, at):
    engine = tiny.tiny_engine(tiny_model, hooks=Breaking(hook, at))
    add_many(engine)
    with pytest.raises(KeyError, match=hook):
        drain(engine)
    drain(engine)
    check_free(engine)
    add_many(engine)
    assert facts(drain(engine)) == undisturbed


@pytest.fixture
def poisoned(tiny_model, undisturbed):
    """An engine whose embedding of one token, which nobody else draws or is given, is not a number."""
    used = {token for outputs in undisturbed.values() for token, _ in outputs}
    given = {token for length in (37, 1, 150, 64, 70, 9, 90) for token in prompt_of(length)}
    token = min(set(range(3, 259)) - used - given)

    params, _ = load_model(tiny_model, with_vision=True)
    embed = params.embed.at[token].set(jnp.nan)
    return tiny.tiny_engine(tiny_model, params=dataclasses.replace(params, embed=embed)), token


@pytest.mark.parametrize("place", [0, 40, 89])
def test_logits_that_are_not_finite_end_their_request_only(poisoned, undisturbed, place):
    engine, token = poisoned
    prompt = prompt_of(90)
    prompt[place] = token
    bad = add(engine, "bad", prompt)
    add_many(engine)
    found = drain(engine)
    assert [output.finish_reason for output in found.pop("bad")] == ["abort"]
    assert "not finite" in str(bad.error)
    assert facts(found) == undisturbed, "in the same steps, and then in its slot and pages"
    check_free(engine)
    add_many(engine)
    assert facts(drain(engine)) == undisturbed


def test_a_token_drawn_with_no_finite_successor_is_the_last_one(poisoned, undisturbed):
    engine, token = poisoned
    add(engine, "bad", prompt_of(9), params_of(1, 9, golden_token_ids=[7, 8, token]))
    add_many(engine)
    found = drain(engine)
    assert [token_id for token_id, _ in facts_of(found["bad"])] == [7, 8, token, -1]
    assert reasons(found).pop("bad") == "abort"
    del found["bad"]
    assert facts(found) == undisturbed
    check_free(engine)
