"""`LLMEngine.abort_request` at any moment: one end, nothing held, nobody else disturbed."""

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
    run_steps,
)

# What a request is doing -> (asynchronous, how to tell). Request "2" has a prompt of three chunks.
MOMENTS = {
    "waiting": ("5", "1", lambda s: s.slot < 0),
    "in front of its prefill": ("2", "1", lambda s: s.num_scheduled == 0),
    "in the middle of its prefill": ("2", "0", lambda s: 0 < s.num_written < len(s.prompt) and not s.rows_in_flight),
    "prefill in flight": ("2", "1", lambda s: s.is_in_prefill and s.rows_in_flight > 0),
    "first token in flight": ("2", "1", lambda s: s.draws_in_flight and not s.output),
    "decoding": ("2", "0", lambda s: len(s.output) == 5),
    "decode in flight": ("2", "1", lambda s: s.draws_in_flight and len(s.output) == 5),
    "last token in flight": ("2", "1", lambda s: s.draws_in_flight and len(s.output) == s.limits.max_tokens - 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_abort_ends_one_request_at_once(tiny_model, undisturbed, moment):
    name, is_async, is_now = MOMENTS[moment]
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async})
    add_many(engine)
    found = {}
    while not is_now(engine.scheduler.get(name)):
        collect(found, engine.step())
    num_given = len(found.get(name, []))
    sequence = engine.scheduler.get(name)
    in_flight = {sequence.slot} if sequence.rows_in_flight else set()
    assert engine.abort_request(name) == (1, num_given)
    assert engine.scheduler.ranks[0].states.quarantined == in_flight
    assert engine.scheduler.get(name) is None
    assert engine.abort_request(name) == (0, 0)
    for other, outputs in drain(engine).items():
        found.setdefault(other, []).extend(outputs)
    *tokens, end = found.pop(name)
    assert facts_of(tokens) == undisturbed[name][:num_given]
    assert (end.token_id, end.finish_reason, end.finished) == (-1, "abort", True)
    assert end.num_output_tokens == num_given
    assert facts(found) == {other: outputs for other, outputs in undisturbed.items() if other != name}
    check_free(engine)


def test_an_abort_after_the_end_does_nothing(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", [5], params_of(1, 3))
    assert reasons(drain(engine)) == {"a": "length"}
    assert engine.abort_request(["a", "never"]) == (0, 0)
    assert engine.step() == []
    check_free(engine)


def test_all_at_once(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add_many(engine)
    found = run_steps(engine, 9)
    num_given = sum(map(len, found.values()))
    assert engine.abort_request([str(index) for index in range(6)]) == (6, num_given)
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert set(reasons(found).values()) == {"abort"} and len(found) == 6
    engine.flush_inflight_reqs()
    check_free(engine)


def test_a_name_that_is_given_twice_counts_once(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", [5])
    found = run_steps(engine, 4)
    assert engine.abort_request(["a", "a"]) == (1, len(found["a"]))
    assert [output.finish_reason for output in engine.step()] == ["abort"]


def test_what_an_aborted_request_held_serves_the_next_one(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "want", prompt_of(90), params_of(3))
    want = facts_of(drain(engine)["want"])
    found = {}
    for number in range(12):
        engine.scheduler.clear_prefix_cache()
        add(engine, f"gone {number}", prompt_of(100 + number), params_of(number))
        add(engine, f"kept {number}", prompt_of(90), params_of(3))
        for _ in range(number):
            collect(found, engine.step())
        engine.abort_request(f"gone {number}")
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert [facts_of(found[f"kept {number}"]) for number in range(12)] == [want] * 12
    check_free(engine)
