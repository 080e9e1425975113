import dataclasses
import pathlib

import pytest

from deepinfer_jax.config import args as args_module
from deepinfer_jax.config import environ
from deepinfer_jax.config.args import EngineArgs, EngineType, resolve

# Field -> default, in the order of interface.md section 6; [W] rules applied.
SPECIFIED = {
    "model": None,
    "served_model_name": "deepinfer-model",
    "tokenizer": None,
    "trust_remote_code": False,
    "load_format": "auto",
    "seed": None,
    "max_model_len": None,
    "data_parallel_size": 0,
    "context_parallel_size": 1,
    "expert_parallel_size": None,
    "engram_parallel_size": 0,
    "engine_rank": 0,
    "engine_group_rank": 0,
    "gpu_memory_utilization": 0.9,
    "max_num_batched_tokens": None,
    "max_num_seqs": 256,
    "disable_log_stats": False,
    "revision": None,
    "tokenizer_revision": None,
    "stop_preempted_request": True,
    "engine_type": EngineType.NORMAL,
    "chunked_prefill": True,
    "ignore_len": 134217728,
    "tokens_per_block": -1,
    "lookahead_tokens": 0,
    "offline_inference": False,
    "mesh_shape": None,
    "device": None,
    "num_kv_tokens": None,
    "dtype": None,
    "tensor_parallel_size": 1,
    "numerics": None,
    "kernels": None,
    "batch_invariant": None,
    "num_draft_tokens": None,
    "spec_mode": None,
    "varlen_verification": None,
    "host_ops": None,
}
ASYNC = "DEEPINFER_ZERO_OVERHEAD_SCHEDULING"
MISSING = "which has not landed in this version"


@pytest.fixture(autouse=True)
def _warn_again():
    args_module._warn_once.cache_clear()


@pytest.fixture
def land(monkeypatch):
    def add(*features):
        monkeypatch.setattr(environ, "LANDED", environ.LANDED | set(features))

    return add


def make(**fields):
    """EngineArgs as a user makes them, without the annotation checks of the test run."""
    args = object.__new__(EngineArgs)
    args.__dict__.update(SPECIFIED | fields)
    args.__post_init__()
    return args


def test_fields_and_defaults_are_the_specified_ones_in_order():
    assert {f.name: f.default for f in dataclasses.fields(EngineArgs)} == SPECIFIED
    assert [f.name for f in dataclasses.fields(EngineArgs)] == list(SPECIFIED)
    assert [kind.name for kind in EngineType] == ["NORMAL", "PROMPT", "COMPLETION"]


def test_defaults_resolve_to_one_device_with_drafts():
    config = resolve(EngineArgs(), {})
    expected = {
        "model": None,
        "tokenizer": None,
        "seed": None,
        "max_model_len": 4096,
        "data_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_parallel_size": 1,
        "engram_parallel_size": 1,
        "mesh_shape": (1, 1),
        "max_num_batched_tokens": 4096,
        "device": "auto",
        "numerics": None,
        "kernels": "auto",
        "batch_invariant": None,
        "jit_cache_dir": None,
        "engram_pad_token": 2,
        "enforce_eager": False,
        "num_draft_tokens": 5,
        "spec_mode": "match",
        "varlen_verification": False,
        "confidence_temperatures": 1.0,
        "max_backtracking_tokens": 6,
        "disable_log_stats": False,
        "tokens_per_block": 64,
        "num_kv_tokens": None,
        "prefix_cache": "exact",
        "async_scheduling": True,
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "field, variable, text, in_environment, argument",
    [
        ("model", "DEEPINFER_HF_MODEL_DIR", "/env", "/env", "/given"),
        ("device", "DEEPINFER_ACCELERATOR", "nvidia", "nvidia", "cpu"),
        ("numerics", "DEEPINFER_JAX_NUMERICS", "bf16", "bf16", "fp32"),
        ("kernels", "DEEPINFER_JAX_KERNELS", "reference", "reference", "auto"),
        ("batch_invariant", "DEEPINFER_BATCH_INVARIANT", "on", True, False),
        ("num_draft_tokens", "DEEPINFER_USE_NEXTN_DECODE", "3", 3, 0),
        ("spec_mode", "DEEPINFER_JAX_SPEC_MODE", "block", "block", "rejection"),
        ("host_ops", "DEEPINFER_JAX_ASCEND_HOST_OPS", "hyper,head", "hyper,head", "missing"),
        ("varlen_verification", "DEEPINFER_ENABLE_MTP_VARLEN", "1", True, False),
    ],
)
def test_argument_beats_environment_beats_default(field, variable, text, in_environment, argument):
    default = resolve(EngineArgs(), {})
    environment = resolve(EngineArgs(), {variable: text})
    explicit = resolve(make(**{field: argument}), {variable: text})
    assert default.source(field) == "default"
    assert environment.value(field) == in_environment
    assert environment.source(field) == f"environment variable {variable}"
    assert explicit.value(field) == argument
    assert explicit.source(field) == "argument"


def test_argument_beats_a_variable_whose_feature_is_missing_but_not_a_malformed_one():
    assert resolve(EngineArgs(kernels="auto"), {"DEEPINFER_JAX_KERNELS": "mosaic_sm90"}).kernels == "auto"
    with pytest.raises(ValueError, match="DEEPINFER_ACCELERATOR='tpu' is refused"):
        resolve(EngineArgs(device="cpu"), {"DEEPINFER_ACCELERATOR": "tpu"})


def test_process_environment_is_the_default_and_is_read_at_each_resolve(monkeypatch):
    for value in ("2", "3"):
        monkeypatch.setenv("DEEPINFER_ENGRAM_PAD_TOKEN", value)
        assert resolve(EngineArgs()).engram_pad_token == int(value)


def test_sources_tell_derived_values_and_what_they_come_from():
    config = resolve(EngineArgs(model="/m", dtype="float32"), {})
    expected = {
        "model": "argument",
        "tokenizer": "derived from model",
        "numerics": "derived from dtype",
        "max_num_batched_tokens": "derived from max_model_len and max_num_seqs",
        "data_parallel_size": "derived from the other sizes",
        "num_draft_tokens": "default",
        "max_backtracking_tokens": "derived from DEEPINFER_USE_NEXTN_DECODE",
        "tokens_per_block": "derived: the page size",
        "async_scheduling": "derived from engine_type",
        "prefix_cache": "default",
        "xgrammar_timeout": "default",
        "DEEPINFER_GLOO_TIMEOUT": "default",
    }
    assert {name: config.source(name) for name in expected} == expected
    assert (config.tokenizer, config.numerics) == ("/m", "fp32")


def test_drafts_are_on_by_default_and_have_room():
    config = resolve(EngineArgs(max_num_seqs=1000), {})
    assert (config.num_draft_tokens, config.source("num_draft_tokens")) == (5, "default")
    assert config.max_num_batched_tokens == 6000


@pytest.mark.parametrize(
    "field, value, feature",
    [
        ("engine_rank", 1, "processes"),
        ("engine_group_rank", 1, "processes"),
        ("engine_type", EngineType.PROMPT, "transport"),
        ("engine_type", EngineType.COMPLETION, "transport"),
    ],
)
def test_argument_that_turns_a_missing_feature_on_is_refused(field, value, feature):
    shown = value.name if isinstance(value, EngineType) else value
    with pytest.raises(NotImplementedError) as caught:
        resolve(make(**{field: value}), {})
    assert str(caught.value).startswith(f"{field}={shown} needs {feature}, {MISSING}; allowed now:")
    assert f"; change or unset {field}" in str(caught.value)


def test_engines_for_prompts_or_completions_alone_are_refused_with_what_to_use():
    with pytest.raises(
        NotImplementedError, match="has no transport yet: use NORMAL and the snapshot calls of LLMEngine$"
    ):
        resolve(EngineArgs(engine_type=EngineType.PROMPT), {})


@pytest.mark.parametrize(
    "engine_type, environment, is_async, source",
    [
        (EngineType.NORMAL, {}, True, "derived from engine_type"),
        (EngineType.COMPLETION, {}, True, "derived from engine_type"),
        (EngineType.PROMPT, {}, False, "derived from engine_type"),
        (EngineType.NORMAL, {ASYNC: "0"}, False, f"environment variable {ASYNC}"),
        (EngineType.PROMPT, {ASYNC: "1"}, True, f"environment variable {ASYNC}"),
    ],
    ids=["normal", "completion", "prompt", "turned-off", "turned-on"],
)
def test_unset_async_scheduling_follows_the_engine_type(engine_type, environment, is_async, source, land):
    land("transport")
    config = resolve(EngineArgs(engine_type=engine_type), environment)
    assert (config.async_scheduling, config.source("async_scheduling")) == (is_async, source)


@pytest.mark.parametrize(
    "fields",
    [
        {"data_parallel_size": 1, "expert_parallel_size": 1, "engram_parallel_size": 1},
        {"mesh_shape": (1, 1), "tensor_parallel_size": 1},
        {"disable_log_stats": True, "stop_preempted_request": False, "offline_inference": True},
        {"load_format": "dummy", "seed": -1},
        {"disable_log_stats": False, "served_model_name": "other"},
        {"gpu_memory_utilization": 0.5, "num_kv_tokens": 8192},
        {"ignore_len": 1, "tokens_per_block": 64, "lookahead_tokens": 0},
        {"chunked_prefill": False},
        {"dtype": "bfloat16", "numerics": "q"},
        {"revision": "main", "tokenizer_revision": "main"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_argument_that_needs_no_missing_feature_is_accepted(fields):
    config = resolve(make(**fields), {})
    assert {name: config.value(name) for name in fields} == fields


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("load_format", "pt", "load_format='pt' is unknown; choose one of auto, dummy"),
        ("dtype", "float16", "dtype='float16' is unknown; choose one of float32, bfloat16"),
        ("numerics", "fp16", "numerics='fp16' is refused: not one of the choices; allowed: fp32_"),
        ("device", "tpu", "device='tpu' is refused: not one of the choices; allowed: auto, cpu"),
        ("kernels", "A-b", "kernels='A-b' is refused: not an implementation name"),
        ("model", "", "model is an empty string"),
        ("max_model_len", 0, "max_model_len=0 is below 1; raise max_model_len"),
        ("max_num_seqs", 0, "max_num_seqs=0 is below 1"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens=0 is below 1"),
        ("num_kv_tokens", 0, "num_kv_tokens=0 is below 1"),
        ("ignore_len", 0, "ignore_len=0 is below 1; raise ignore_len"),
        ("tokens_per_block", -2, "tokens_per_block=-2 is below -1"),
        ("tokens_per_block", 0, "tokens_per_block=0 is not the page size of 64 tokens; leave tokens_per_block out"),
        ("tokens_per_block", 128, "tokens_per_block=128 is not the page size of 64 tokens"),
        ("lookahead_tokens", 1, "lookahead_tokens=1 is refused: drafts reserve their own room; leave lookahead_tokens"),
        ("data_parallel_size", -1, "data_parallel_size=-1 is below 0"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization=1.5 is outside (0, 1]"),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization=0.0 is outside (0, 1]"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization=nan is outside (0, 1]"),
        ("mesh_shape", (0, 1), "mesh_shape=(0, 1) is not a pair of sizes >= 1; give (dp, cp)"),
        ("mesh_shape", (1, 1, 1), "mesh_shape=(1, 1, 1) is not a pair"),
        ("trust_remote_code", True, "code from a model directory is never executed"),
        (
            "tensor_parallel_size",
            2,
            "tensor_parallel_size=2 is refused: attention is data parallel",
        ),
    ],
)
def test_value_out_of_range_is_refused_naming_field_and_value(field, value, message):
    with pytest.raises(ValueError) as caught:
        make(**{field: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("seed", True, "seed=True is of type bool; give one of type int"),
        ("seed", 1.0, "seed=1.0 is of type float; give one of type int"),
        ("max_model_len", "4096", "max_model_len='4096' is of type str; give one of type int"),
        ("max_num_seqs", None, "max_num_seqs=None is of type NoneType; give one of type int"),
        ("chunked_prefill", 1, "chunked_prefill=1 is of type int; give one of type bool"),
        (
            "engine_type",
            "NORMAL",
            "engine_type='NORMAL' is of type str; give one of type EngineType",
        ),
        ("model", 3, "model=3 is of type int; give one of type str"),
        ("gpu_memory_utilization", "0.9", "gpu_memory_utilization='0.9' is not a number"),
    ],
)
def test_value_of_wrong_type_is_refused_naming_field_and_type(field, value, message):
    with pytest.raises(TypeError) as caught:
        make(**{field: value})
    assert message in str(caught.value)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="max_tokens"):
        EngineArgs(**{"max_tokens": 1})  # pyright: ignore[reportArgumentType]


def test_every_argument_has_a_type_check():
    checked = set(args_module._CHECKS) | {"gpu_memory_utilization", "mesh_shape"}
    assert checked == set(SPECIFIED)


def test_path_is_accepted_as_model_and_text_is_stripped():
    config = resolve(EngineArgs(model=pathlib.Path("/m"), numerics=" q "), {})
    assert (config.model, config.tokenizer, config.numerics) == ("/m", "/m", "q")


@pytest.mark.parametrize(
    "fields, dp, cp",
    [
        ({"expert_parallel_size": 8, "context_parallel_size": 2}, 4, 2),
        ({"data_parallel_size": 3, "context_parallel_size": 2}, 3, 2),
        ({"mesh_shape": (2, 4)}, 2, 4),
        ({"mesh_shape": (2, 4), "data_parallel_size": 2, "context_parallel_size": 4}, 2, 4),
    ],
    ids=["from-experts", "from-sizes", "from-mesh", "both"],
)
def test_sizes_follow_from_each_other(fields, dp, cp):
    config = resolve(make(**fields), {})
    assert (config.data_parallel_size, config.context_parallel_size) == (dp, cp)
    assert config.mesh_shape == (dp, cp)
    assert (config.expert_parallel_size, config.engram_parallel_size) == (dp * cp, dp * cp)


def test_variables_of_the_originals_kernel_tests_are_refused():
    resolve(EngineArgs(), {"DEEPINFER_FUSED_SAMPLE_STRESS_TEST": "1"})
    for name, text in (
        ("DEEPINFER_FUSED_SAMPLE_STRESS_TEST", "2"),
        ("DEEPINFER_FUSED_SAMPLE_DETAIL_LOG", "x"),
    ):
        with pytest.raises(ValueError, match=f"{name}={text} is read only by DeepInfer's own"):
            resolve(EngineArgs(), {name: text})


def test_unknown_variable_warns_once_with_the_closest_name():
    given = {"DEEPINFER_BATCH_INVARIENT": "1", "DEEPINFER_XYZZY": "1", "HOME": "/"}
    with pytest.warns(UserWarning) as caught:
        resolve(EngineArgs(), given)
        resolve(EngineArgs(), given)
    assert [str(warning.message) for warning in caught] == [
        "DEEPINFER_BATCH_INVARIENT is not a variable of deepinfer_jax; did you mean DEEPINFER_BATCH_INVARIANT?",
        "DEEPINFER_XYZZY is not a variable of deepinfer_jax",
    ]
