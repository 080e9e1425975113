"""`LLMEngine` as a whole: steps, hooks, counts, the end."""

import time

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine import steps
from deepinfer_jax.testing import tiny
from tests.engine.driving import (
    LENGTHS,
    Recorder,
    add,
    add_many,
    check_free,
    drain,
    facts,
    params_of,
    prompt_of,
    reasons,
    run_steps,
)

SYNC, ASYNC = ({"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": value} for value in "01")


@pytest.mark.parametrize("environ", [SYNC, ASYNC], ids=["sync", "async"])
def test_when_a_step_is_read_changes_no_result(tiny_model, undisturbed, environ):
    engine = tiny.tiny_engine(tiny_model, environ)
    add_many(engine)
    found = drain(engine)
    assert facts(found) == undisturbed
    assert set(reasons(found).values()) == {"length"}
    check_free(engine)


def test_without_asynchronous_scheduling_a_step_is_read_at_once(tiny_model):
    sync, later = tiny.tiny_engine(tiny_model, SYNC), tiny.tiny_engine(tiny_model)
    for engine in (sync, later):
        add(engine, "a", prompt_of(5))
    assert [len(sync.step()) for _ in range(3)] == [1, 1, 1]
    assert [len(later.step()) for _ in range(3)] == [0, 1, 1]
    assert later.scheduler.num_unread == 1 and sync.scheduler.num_unread == 0
    assert [len(engine.flush_inflight_reqs()) for engine in (sync, later)] == [0, 1]


def test_a_fresh_engine_has_nothing_to_do(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    assert engine.step() == engine.flush_inflight_reqs() == []
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == engine.get_num_pendings() == 0


def test_requests_may_come_while_others_run(tiny_model, undisturbed):
    engine = tiny.tiny_engine(tiny_model)
    found = {}
    for index, length in enumerate(LENGTHS):
        temperature = (1.0, 0.0, 0.7)[index % 3]
        add(engine, str(index), prompt_of(length), params_of(index, 8 + index, temperature=temperature))
        for name, outputs in run_steps(engine, 2).items():
            found.setdefault(name, []).extend(outputs)
    for name, outputs in drain(engine).items():
        found.setdefault(name, []).extend(outputs)
    assert facts(found) == undisturbed


def test_counts_add_up(tiny_model):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, hooks=recorder)
    add_many(engine)
    run_steps(engine, 9)
    engine.abort_request("2")
    found = drain(engine)
    stats = engine.stats()
    num_tokens = sum(output.token_id >= 0 for output in recorder.outputs)
    assert set(found) <= {str(index) for index in range(len(LENGTHS))}
    assert stats["requests"] == len(LENGTHS)
    assert stats["prompt_tokens"] == sum(LENGTHS)
    assert stats["output_tokens"] == num_tokens
    assert stats["finished"] == {"length": len(LENGTHS) - 1, "abort": 1}
    assert stats["aborted"] == 1
    assert stats["steps"] == stats["prefill_steps"] + stats["decode_steps"] == len(recorder.plans)
    assert stats["prefill_steps"] == sum(plan.is_prefill for plan in recorder.plans)
    assert stats["rows"] == sum(plan.num_rows for plan in recorder.plans)
    assert stats["copies"] == sum(plan.num_copies for plan in recorder.plans)
    assert stats["padded_rows"] == stats["encoder_rows"] == stats["decoder_rows"] >= stats["rows"]
    assert sum(stats["buckets"].values()) == stats["steps"]
    assert stats["running"] == stats["waiting"] == stats["kv_used"] == stats["preemptions"] == 0
    assert stats["prefix_lookups"] == len(LENGTHS) and stats["snapshots"] > 0 and stats["kv_cached"] > 0
    assert 0 < stats["ttft_p50_s"] <= stats["ttft_max_s"] < 60
    assert 0 <= stats["idle_s"] <= stats["work_s"] <= stats["elapsed_s"]


def test_nothing_is_compiled_after_the_start(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    rng = np.random.default_rng(7)
    for index, length in enumerate(rng.integers(1, 400, 24).tolist()):
        temperature, top_p, top_k = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.5, 1.0]), rng.choice([-1, 5])
        params = {"temperature": float(temperature), "top_p": float(top_p), "top_k": int(top_k)}
        add(engine, str(index), prompt_of(length), params_of(index, int(rng.integers(1, 30)), **params))
    run_steps(engine, 20)
    engine.fork_request("0", "fork")
    assert len(drain(engine)) == 24 + 1
    stats = engine.stats()
    assert (stats["recompilations"], stats["recompiled"]) == (0, {})
    assert set(stats["buckets"]) == {engine.sizes.buckets.first.name}


def test_alternatives_are_compiled_at_the_start_too(tiny_model):
    steps.best_tokens.clear_cache()
    engine = tiny.tiny_engine(tiny_model)
    for count in (1, 100):
        add(engine, str(count), prompt_of(9), params_of(4, 2, top_logprobs=count))
    drain(engine)
    assert engine.stats()["recompiled"] == {}


def test_hooks_see_every_plan_and_every_output_once(tiny_model, undisturbed):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, hooks=recorder)
    add_many(engine)
    found = drain(engine)
    assert facts(found) == undisturbed
    assert [plan.step for plan in recorder.plans] == list(range(len(recorder.plans)))
    assert len(recorder.outputs) == sum(map(len, found.values()))
    for name, outputs in found.items():
        assert [output for output in recorder.outputs if output.request_id == name] == outputs
    assert sorted(sequence.request_id for sequence in recorder.ended) == sorted(undisturbed)
    assert all(sequence.finish_reason == "length" and sequence.slot == -1 for sequence in recorder.ended)


def test_latencies_count_from_the_arrival(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    add(engine, "a", prompt_of(5), arrival_time=time.perf_counter() - 1000)
    add(engine, "b", prompt_of(5))
    drain(engine)
    stats = engine.stats()
    assert 1000 < stats["ttft_max_s"] < 1100
    assert 500 < stats["ttft_mean_s"] < 550


def test_top_alternatives_come_with_their_token(tiny_model):
    engine = tiny.tiny_engine(tiny_model)
    for count in (0, 3, 25):
        add(engine, str(count), prompt_of(9), params_of(4, 5, top_logprobs=count))
    found = drain(engine)
    assert facts(found)["0"] == facts(found)["3"] == facts(found)["25"]
    for count, name in ((0, "0"), (3, "3"), (25, "25")):
        assert all(len(output.top_token_ids) == len(output.top_logprobs) == count for output in found[name])
    for few, many in zip(found["3"], found["25"], strict=True):
        assert few.top_token_ids == many.top_token_ids[:3] and few.top_logprobs == many.top_logprobs[:3]


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: add(engine, "b", [4]),
        lambda engine: engine.enqueue(engine.scheduler.get("a")),
        lambda engine: engine.step(),
        lambda engine: engine.flush_inflight_reqs(),
        lambda engine: engine.fork_request("a", "b"),
        lambda engine: engine.save_request("a"),
        lambda engine: engine.stats(),
        lambda engine: engine.fingerprint(),
    ],
    ids=["add", "enqueue", "step", "flush", "fork", "save", "stats", "fingerprint"],
)
def test_a_closed_engine_says_so(tiny_model, use):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"})
    add(engine, "a", [5])
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        use(engine)


def test_engine_seed_and_order_give_the_seeds_that_requests_lack(tiny_model):
    def run(seed: int) -> list:
        engine = tiny.tiny_engine(tiny_model, seed=seed)
        for name in ("a", "b"):
            add(engine, name, [9, 8], SamplingParams(max_tokens=8, ignore_eos=True))
        return list(facts(drain(engine)).values())

    first, second = run(5)
    assert [first, second] == run(5)
    assert first != second
    assert first not in run(6)


def test_seeds_of_requests_that_are_built_first_and_queued_later_differ(tiny_model):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_ENFORCE_EAGER": "1"}, seed=5)
    built = [add(engine, name, [9], SamplingParams(), enqueue=False) for name in ("a", "b")]
    assert built[0].options.seed != built[1].options.seed
