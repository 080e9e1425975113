import dataclasses

import pytest

from deepinfer_jax.config import environ
from deepinfer_jax.config.args import EngineArgs, EngineType, resolve


@pytest.fixture
def land(monkeypatch):
    def add(*features):
        monkeypatch.setattr(environ, "LANDED", environ.LANDED | set(features))

    return add


def test_config_is_frozen_hashable_and_equal_whatever_the_sources():
    by_argument = resolve(EngineArgs(numerics="q"), {})
    by_environment = resolve(EngineArgs(), {"DEEPINFER_JAX_NUMERICS": "q"})
    assert by_argument == by_environment
    assert hash(by_argument) == hash(by_environment)
    assert by_argument != resolve(EngineArgs(numerics="bf16"), {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        by_argument.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_describe_has_one_aligned_row_for_each_field_and_variable():
    config = resolve(EngineArgs(seed=7), {"DEEPINFER_JAX_NUMERICS": "q"})
    header, *rows = config.describe().splitlines()
    names = {row.split()[0] for row in rows}
    fields = {f.name for f in dataclasses.fields(config)} - {"others", "sources"}
    without_field = {v.name for v in environ.VARIABLES.values() if v.field not in fields}
    assert names == fields | without_field
    assert len(rows) == len(names)
    value_at, source_at = header.index("value"), header.index("source")
    shown = {row[:value_at].strip(): (row[value_at:source_at].strip(), row[source_at:]) for row in rows}
    assert shown["seed"] == ("7", "argument")
    assert shown["numerics"] == ("q", "environment variable DEEPINFER_JAX_NUMERICS")
    assert shown["engine_type"] == ("NORMAL", "default")
    assert shown["model"] == ("unset", "default")
    assert shown["token_blacklist"] == ("(empty)", "default")
    assert shown["DEEPINFER_GLOO_TIMEOUT"] == ("14400", "default")


def test_completion_engine_ends_preempted_requests_and_has_no_context_parallelism(land):
    land("transport", "sharding")
    args = EngineArgs(engine_type=EngineType.COMPLETION)
    assert resolve(args, {}).engine_type is EngineType.COMPLETION
    with pytest.raises(ValueError, match="set stop_preempted_request=True"):
        resolve(dataclasses.replace(args, stop_preempted_request=False), {})
    with pytest.raises(ValueError, match="engine_type=COMPLETION contradicts context_parallel_size=2"):
        resolve(dataclasses.replace(args, context_parallel_size=2), {})
    prompts = EngineArgs(engine_type=EngineType.PROMPT, stop_preempted_request=False, context_parallel_size=2)
    assert resolve(prompts, {}).engine_type is EngineType.PROMPT


def test_whole_prompts_need_a_step_that_holds_the_longest():
    args = EngineArgs(chunked_prefill=False, max_model_len=8192, max_num_batched_tokens=4096)
    with pytest.raises(ValueError, match="max_num_batched_tokens=4096 is below max_model_len=8192"):
        resolve(args, {})
    assert resolve(dataclasses.replace(args, chunked_prefill=True), {}).max_model_len == 8192
    free = resolve(dataclasses.replace(args, max_num_batched_tokens=None), {})
    assert free.max_num_batched_tokens == 8192


def test_dtype_that_contradicts_numerics_is_refused():
    with pytest.raises(ValueError, match="dtype='float32' contradicts numerics='q'"):
        resolve(EngineArgs(dtype="float32", numerics="q"), {})
    with pytest.raises(ValueError, match="dtype='bfloat16' contradicts numerics='fp32'"):
        resolve(EngineArgs(dtype="bfloat16"), {"DEEPINFER_JAX_NUMERICS": "fp32"})


def test_contradictory_sizes_are_refused():
    with pytest.raises(ValueError, match="mesh_shape=.2, 4. contradicts data_parallel_size=3"):
        resolve(EngineArgs(mesh_shape=(2, 4), data_parallel_size=3), {})
    with pytest.raises(ValueError, match="expert_parallel_size=3 is not data_parallel_size"):
        resolve(EngineArgs(data_parallel_size=2, expert_parallel_size=3), {})
    with pytest.raises(ValueError, match="engram_parallel_size=2 is not data_parallel_size"):
        resolve(EngineArgs(engram_parallel_size=2), {})
