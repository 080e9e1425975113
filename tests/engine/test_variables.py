"""Every variable of the engine does what it says."""

import gc
import json
import logging
import socket
import urllib.request

import pytest

from deepinfer_jax.config.environ import VARIABLES
from deepinfer_jax.testing import tiny
from tests.engine.driving import Recorder, add, drain, facts_of, params_of, prompt_of, run_steps

EAGER = {"DEEPINFER_ENFORCE_EAGER": "1"}

# Variable -> the test of its effect, here or elsewhere.
TESTED = {
    "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K": "test_summed_keys_of_a_prefill_are_capped",
    "DEEPINFER_INDEX_ATTN_MEMORY_LIMIT": "test_a_workspace_that_is_too_small_is_refused",
    "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": "test_decode_sizes_are_spaced",
    "DEEPINFER_NUM_STATE_SLOTS_RATIO": "test_state_slots_follow_the_ratio",
    "DEEPINFER_PREFILL_STORE_EXTRA_STATE": "test_extra_state_serves_a_prompt_that_goes_back",
    "DEEPINFER_PREFILL_STORE_EXTRA_SIZE": "test_extra_state_serves_a_prompt_that_goes_back",
    "DEEPINFER_PREFILL_ATTEMPT_INTERVAL": "test_prompts_wait_for_decode_steps",
    "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": "test_prompts_wait_for_decode_steps",
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "test_engine: test_without_asynchronous_scheduling_a_step_is_read_at_once",
    "DEEPINFER_LOGGING_INTERVAL_STEP": "test_a_line_of_statistics_comes_at_every_interval",
    "DEEPINFER_GC_INTERVAL_STEP": "test_garbage_is_collected_at_every_interval",
    "DEEPINFER_DISABLE_SYNC_GUARD": "test_guard: test_the_variable_allows_it",
    "DEEPINFER_PROFILE_TORCH_CUDA_MEMORY": "test_the_memory_profile_is_written_at_the_end",
    "DEEPINFER_ENABLE_MEMORY_TRACING": "test_memory_is_a_figure_when_it_is_asked_for",
    "DEEPINFER_PROFILE_HTTP_ENABLE": "test_steps_are_traced_over_http",
    "DEEPINFER_PROFILE_HTTP_PORT_BASE": "test_steps_are_traced_over_http",
    "DEEPINFER_TORCH_PROFILER_DIR": "test_steps_are_traced_over_http",
    "DEEPINFER_JAX_PREFIX_CACHE": "test_prefix_cache",
}


def test_every_variable_of_the_engine_is_tested():
    assert set(TESTED) == {v.name for v in VARIABLES.values() if v.lands_with == "engine"}
    for test in TESTED.values():
        assert ":" in test or test in globals() or test == "test_prefix_cache"


@pytest.mark.parametrize("cap, num_together", [("64", 1), ("60", 3), ("1000", 4)])
def test_summed_keys_of_a_prefill_are_capped(tiny_model, cap, num_together):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K": cap}, hooks=recorder)
    for index in range(4):
        add(engine, str(index), prompt_of(64 if cap == "64" else 16 + 4 * index), params_of(index, 2))
    drain(engine)
    assert max(len(plan.chunks) for plan in recorder.plans if plan.is_prefill) == num_together
    for plan in recorder.plans:
        if plan.is_prefill:
            assert len(plan.chunks) == 1 or sum(chunk.end for chunk in plan.chunks) <= int(cap)


def test_a_workspace_that_is_too_small_is_refused(tiny_model):
    needed = 2 * 4 * 8 * tiny.MAX_MODEL_LEN
    tiny.tiny_engine(tiny_model, EAGER | {"DEEPINFER_INDEX_ATTN_MEMORY_LIMIT": str(needed)})
    with pytest.raises(ValueError, match=rf"DEEPINFER_INDEX_ATTN_MEMORY_LIMIT={needed - 1} .*max_model_len=512"):
        tiny.tiny_engine(tiny_model, EAGER | {"DEEPINFER_INDEX_ATTN_MEMORY_LIMIT": str(needed - 1)})


def test_decode_sizes_are_spaced(tiny_model):
    engine = tiny.tiny_engine(tiny_model, EAGER | {"DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": "16"}, max_num_seqs=33)
    assert engine.sizes.buckets.decode_rows == (16, 32, 48)
    # Its default stays out of the way of one size for all steps.
    assert tiny.tiny_engine(tiny_model, EAGER, max_num_seqs=33).sizes.buckets.decode_rows == (64,)


@pytest.mark.parametrize("ratio, num_slots", [("1", 5), ("1.5", 7), ("3", 13)])
def test_state_slots_follow_the_ratio(tiny_model, ratio, num_slots):
    engine = tiny.tiny_engine(tiny_model, EAGER | {"DEEPINFER_NUM_STATE_SLOTS_RATIO": ratio})
    assert engine.scheduler.config.state_slots_ratio == float(ratio)
    assert engine.scheduler.config.num_slots == num_slots == engine.scheduler.ranks[0].states.num_slots
    assert engine.pipeline._carried.newest.positions.shape == (num_slots + engine.scheduler.config.num_snapshots,)


@pytest.mark.slow
@pytest.mark.parametrize("size, num_hits", [("32", 1), ("8", 0)])
def test_a_prompt_that_goes_back_takes_over_extra_state(tiny_model, size, num_hits):
    extra = {"DEEPINFER_PREFILL_STORE_EXTRA_STATE": "1", "DEEPINFER_PREFILL_STORE_EXTRA_SIZE": size}
    engine = tiny.tiny_engine(tiny_model, extra)
    prompt, other = prompt_of(150), [*prompt_of(150)[:130], *prompt_of(40, seed=1)]
    add(engine, "first", prompt, params_of(3))
    drain(engine)
    add(engine, "other", other, params_of(3))
    got = facts_of(drain(engine)["other"])
    assert engine.stats()["prefix_hits"] == num_hits
    cold = tiny.tiny_engine(tiny_model)
    add(cold, "other", other, params_of(3))
    assert facts_of(drain(cold)["other"]) == got


def test_extra_state_serves_a_prompt_that_goes_back(tiny_model):
    for environ, rollback in (
        ({}, 6),
        ({"DEEPINFER_PREFILL_STORE_EXTRA_SIZE": "32"}, 6),
        ({"DEEPINFER_PREFILL_STORE_EXTRA_STATE": "1"}, 128),
        ({"DEEPINFER_PREFILL_STORE_EXTRA_STATE": "1", "DEEPINFER_PREFILL_STORE_EXTRA_SIZE": "32"}, 32),
    ):
        engine = tiny.tiny_engine(tiny_model, EAGER | environ)
        assert engine.scheduler.config.rollback_tokens == engine.runtime.rollback_tokens == rollback
        assert engine.runtime.ring_len == 128 + rollback


@pytest.mark.parametrize("name", ["DEEPINFER_PREFILL_ATTEMPT_INTERVAL", "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL"])
def test_prompts_wait_for_decode_steps(tiny_model, name):
    engine = tiny.tiny_engine(tiny_model, EAGER | {name: "7"})
    field = "prefill_interval" if name == "DEEPINFER_PREFILL_ATTEMPT_INTERVAL" else "prefill_any_interval"
    others = {"prefill_interval": 70, "prefill_any_interval": 100} | {field: 7}
    assert {each: getattr(engine.scheduler.config, each) for each in others} == others


@pytest.mark.parametrize("interval", [3, 12])
def test_a_prompt_comes_in_after_the_interval(tiny_model, interval):
    recorder = Recorder()
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_PREFILL_ATTEMPT_INTERVAL": str(interval)}, hooks=recorder)
    add(engine, "early", prompt_of(5), params_of(1, 40))
    run_steps(engine, 10)
    num_plans = len(recorder.plans)
    add(engine, "late", prompt_of(5), params_of(1, 5))
    drain(engine)
    [later] = [plan.step for plan in recorder.plans[num_plans:] if plan.is_prefill]
    assert later == max(num_plans, interval + 1)


def test_a_line_of_statistics_comes_at_every_interval(tiny_model, caplog):
    environ = {"DEEPINFER_LOGGING_INTERVAL_STEP": "5"}
    for is_silent, num_lines in ((False, 4), (True, 0)):
        engine = tiny.tiny_engine(tiny_model, environ, disable_log_stats=is_silent)
        add(engine, "a", prompt_of(5), params_of(1, 30))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="deepinfer_jax"):
            run_steps(engine, 20)
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
        assert len(lines) == num_lines
        assert all("tokens/s" in line and "running 1" in line for line in lines)


def test_garbage_is_collected_at_every_interval(tiny_model, monkeypatch):
    calls = []
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_GC_INTERVAL_STEP": "5"})
    monkeypatch.setattr(gc, "collect", lambda: calls.append(None))
    add(engine, "a", prompt_of(5), params_of(1, 30))
    run_steps(engine, 14)
    assert len(calls) == 2


def test_the_memory_profile_is_written_at_the_end(tiny_model, tmp_path):
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_PROFILE_TORCH_CUDA_MEMORY": str(tmp_path / "memory.prof")})
    engine.close()
    assert (tmp_path / "memory.prof").stat().st_size > 0


def test_memory_is_a_figure_when_it_is_asked_for(tiny_model):
    assert "memory_live_bytes" not in tiny.tiny_engine(tiny_model).stats()
    assert tiny.tiny_engine(tiny_model, {"DEEPINFER_ENABLE_MEMORY_TRACING": "1"}).stats()["memory_live_bytes"] > 0


def test_steps_are_traced_over_http(tiny_model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {
        "DEEPINFER_PROFILE_HTTP_ENABLE": "1",
        "DEEPINFER_PROFILE_HTTP_PORT_BASE": str(port),
        "DEEPINFER_TORCH_PROFILER_DIR": str(tmp_path),
    }
    engine = tiny.tiny_engine(tiny_model, environ)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/profile?num_steps=2", timeout=10) as answer:
        told = json.load(answer)
    assert told["num_steps"] == 2 and told["output_dir"].startswith(str(tmp_path))
    add(engine, "a", prompt_of(5), params_of(1, 5))
    drain(engine)
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    engine.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/profile", timeout=10)


def test_without_the_variable_nothing_listens(tiny_model):
    assert tiny.tiny_engine(tiny_model, EAGER)._profiler.port is None


def test_a_capacity_that_is_too_small_is_refused(tiny_model):
    with pytest.raises(ValueError, match=r"max_model_len=512 is above 80% of .* 600 tokens; raise num_kv_tokens.* 480"):
        tiny.tiny_engine(tiny_model, EAGER, num_kv_tokens=600)
    with pytest.raises(ValueError, match="num_kv_tokens"):
        tiny.tiny_engine(tiny_model, EAGER, num_kv_tokens=10)
    assert tiny.tiny_engine(tiny_model, EAGER, num_kv_tokens=640).scheduler.config.num_pages == 10
