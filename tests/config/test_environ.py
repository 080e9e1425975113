import dataclasses
import re
import tempfile
import warnings
from pathlib import Path

import pytest

from deepinfer_jax.config import args as args_module
from deepinfer_jax.config import environ, forms
from deepinfer_jax.config.args import EngineArgs, resolve

GIB = 2**30
# Name -> (type, default, kind) as interface.md sections 10 and 10b list them, in their order.
SPECIFIED = {
    "DEEPINFER_ACCELERATOR": ("choice", "auto", "K"),
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": ("bool", False, "K"),
    "DEEPINFER_JIT_CACHE_DIR": ("str", None, "K"),
    "DEEPINFER_NCCL_NUM_SMS": ("int", 32, "N"),
    "DEEPINFER_USERBUFFER_COMM_SMS": ("int", 0, "N"),
    "DEEPINFER_GLOO_TIMEOUT": ("int", 14400, "K"),
    "DEEPINFER_REARRANGE_P2P_GROUPS": ("int", 1, "N"),
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS": ("int", 0, "K"),
    "DEEPINFER_EXPERT_COUNT_WINDOW_SIZE": ("int", 100, "K"),
    "DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL": ("int", 0, "K"),
    "DEEPINFER_REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE": ("bool", False, "K"),
    "DEEPINFER_MOE_LB_STAT_INTERVAL": ("int", 128, "K"),
    "DEEPINFER_FORCE_IMBALANCE_RATIO": ("float", 0.0, "K"),
    "DEEPINFER_FORCE_LOAD_BALANCE": ("bool", False, "K"),
    "DEEPINFER_SHOW_EPLB_DETAIL": ("bool", False, "K"),
    "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K": ("int", 2**30, "K"),
    "DEEPINFER_INDEX_ATTN_MEMORY_LIMIT": ("bytes", 10 * GIB, "K"),
    "DEEPINFER_USE_NEXTN_DECODE": ("int", 5, "K"),
    "DEEPINFER_ENABLE_MTP_VARLEN": ("bool", False, "K"),
    "DEEPINFER_MAX_BACKTRACKING_TOKENS": ("int", 6, "K"),
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE": ("float or list", 1.0, "K"),
    "DEEPINFER_ENGRAM_PAD_TOKEN": ("int", 2, "K"),
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE": ("bool", False, "K"),
    "DEEPINFER_SAMPLER_FORCE_TOPK": ("int", 0, "K"),
    "DEEPINFER_DECODE_TOKEN_BLACKLIST": ("str", "", "K"),
    "DEEPINFER_ENFORCE_EAGER": ("bool", False, "K"),
    "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": ("int", 8, "K"),
    "DEEPINFER_DFLASH_ENFORCE_EAGER": ("bool", False, "K"),
    "DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL": ("int", 8, "K"),
    "DEEPINFER_DECODE_PERF_CACHE_DIR": ("str", None, "K"),
    "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC": ("int", 3600, "K"),
    "DEEPINFER_NUM_STATE_SLOTS_RATIO": ("float", 1.2, "K"),
    "DEEPINFER_PREFILL_STORE_EXTRA_STATE": ("bool", False, "K"),
    "DEEPINFER_PREFILL_STORE_EXTRA_SIZE": ("int", 128, "K"),
    "DEEPINFER_XGRAMMAR_DEBUG": ("bool", False, "K"),
    "DEEPINFER_XGRAMMAR_TIMEOUT": ("int", 20, "K"),
    "DEEPINFER_XGRAMMAR_DISABLE_CACHE": ("bool", False, "K"),
    "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES": ("int", 10 * GIB, "K"),
    "DEEPINFER_SO_BUILDER_CPUS": ("int", 4, "K"),
    "DEEPINFER_PREFILL_ATTEMPT_INTERVAL": ("int", 70, "K"),
    "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": ("int", 100, "K"),
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": ("bool", False, "K"),
    "DEEPINFER_LOGGING_INTERVAL_STEP": ("int", 100, "K"),
    "DEEPINFER_NCCL_MEMORY_SAMPLE_INTERVAL_STEPS": ("int", 1000, "N"),
    "DEEPINFER_RINGBUFFER_WARNING_INTERVAL": ("int", 60, "N"),
    "DEEPINFER_GC_INTERVAL_STEP": ("int", 1000, "K"),
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": ("choice", "off", "K"),
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": ("int", 0, "K"),
    "DEEPINFER_BATCH_INVARIANT": ("bool", None, "K"),
    "DEEPINFER_DISABLE_SYNC_GUARD": ("bool", False, "K"),
    "DEEPINFER_PROFILE_TORCH_CUDA_MEMORY": ("str", None, "A"),
    "DEEPINFER_ENABLE_MEMORY_TRACING": ("bool", False, "A"),
    "DEEPINFER_PROFILE_HTTP_ENABLE": ("bool", False, "K"),
    "DEEPINFER_PROFILE_HTTP_PORT_BASE": ("int", 6070, "K"),
    "DEEPINFER_TORCH_PROFILER_DIR": ("str", tempfile.gettempdir(), "A"),
    "DEEPINFER_USE_MULTIMODAL_POOL": ("bool", False, "N"),
    "DEEPINFER_MULTIMODAL_POOL_SIZE_GB": ("int", 8, "N"),
    "DEEPINFER_MULTI_MODAL_BUFFER_SIZE": ("int", 512, "K"),
    "DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT": ("float", 1800.0, "K"),
    # Read elsewhere in the original.
    "DEEPINFER_HF_MODEL_DIR": ("str", None, "K"),
    "DEEPINFER_CPP_LOG_LEVEL": ("str", None, "N"),
    "DEEPINFER_FUSED_SAMPLE_STRESS_TEST": ("int", 1, "-"),
    "DEEPINFER_FUSED_SAMPLE_DETAIL_LOG": ("str", None, "-"),
    # Our own.
    "DEEPINFER_JAX_KERNELS": ("choice", "auto", "K"),
    "DEEPINFER_JAX_NUMERICS": ("choice", None, "K"),
    "DEEPINFER_JAX_PREFIX_CACHE": ("choice", "exact", "K"),
    "DEEPINFER_JAX_SPEC_MODE": ("choice", "match", "K"),
    "DEEPINFER_JAX_GRAMMAR_WHITESPACE": ("int", 8, "K"),
    "DEEPINFER_JAX_ASCEND_SIM": ("bool", False, "K"),
    "DEEPINFER_JAX_ASCEND_MODE": ("choice", "resident", "K"),
    "DEEPINFER_JAX_ASCEND_HOST_OPS": ("str", "", "K"),
    "DEEPINFER_JAX_ASCEND_ARENA": ("bytes", 64 * 2**20, "K"),
    "DEEPINFER_JAX_ASCEND_LIBDIR": ("str", None, "K"),
    "DEEPINFER_JAX_ASCEND_ACCEPT_VERSION": ("str", None, "K"),
    "DEEPINFER_JAX_ASCEND_SYNC_TIMEOUT_MS": ("int", 600000, "K"),
    "DEEPINFER_JAX_ASCEND_BLOCKING": ("bool", False, "K"),
    "DEEPINFER_JAX_ASCEND_DETERMINISM": ("int", None, "K"),
    "DEEPINFER_JAX_SIM_FAULTS": ("str", None, "K"),
}


@pytest.fixture(autouse=True)
def _warn_again():
    args_module._warn_once.cache_clear()


@pytest.fixture
def land(monkeypatch):
    def add(*features):
        monkeypatch.setattr(environ, "LANDED", environ.LANDED | set(features))

    return add


def read(name: str, text: str) -> forms.Value:
    return getattr(environ.Envs({name: text}), name)


def test_table_has_the_59_variables_the_4_others_and_our_15_in_order():
    assert list(environ.VARIABLES) == list(SPECIFIED)
    assert len(SPECIFIED) == 59 + 4 + 15


@pytest.mark.parametrize("name", SPECIFIED)
def test_unset_variable_has_the_specified_type_default_and_kind(name):
    kind, default, effect = SPECIFIED[name]
    variable = environ.VARIABLES[name]
    value = getattr(environ.Envs({}), name)
    assert (variable.form.kind, value, variable.kind) == (kind, default, effect)
    assert type(value) is type(default)


@pytest.mark.parametrize("name", SPECIFIED)
def test_default_written_out_reads_as_the_default(name):
    variable = environ.VARIABLES[name]
    if variable.default_value is not None:
        assert read(name, str(variable.default_value)) == SPECIFIED[name][1]


def test_variables_have_distinct_fields_and_a_known_feature():
    fields = [variable.field for variable in environ.VARIABLES.values()]
    assert len(set(fields)) == len(fields)
    features = {"model", "replay", "kernels", "engine", "sampling", "speculation"}
    features |= {"sharding", "balancing", "processes", "routing studies", "host tables", "vision", "Ascend"}
    assert features >= environ.LANDED
    for variable in environ.VARIABLES.values():
        assert variable.lands_with in (features if variable.kind in "KA" else {""})
        assert variable.doc


def test_backtracking_covers_the_drafts_and_one_more():
    drafts, own = "DEEPINFER_USE_NEXTN_DECODE", "DEEPINFER_MAX_BACKTRACKING_TOKENS"
    cases = [({drafts: "0"}, 1), ({drafts: "7"}, 8), ({own: "3"}, 6), ({own: "20"}, 20)]
    for given, expected in cases:
        assert getattr(environ.Envs(given), own) == expected


def test_value_is_fixed_at_first_use_until_rearmed():
    given = {"DEEPINFER_GC_INTERVAL_STEP": "5", "DEEPINFER_XGRAMMAR_TIMEOUT": "6"}
    envs = environ.Envs(given)
    assert (envs.DEEPINFER_GC_INTERVAL_STEP, envs.DEEPINFER_XGRAMMAR_TIMEOUT) == (5, 6)
    given.update(DEEPINFER_GC_INTERVAL_STEP="50", DEEPINFER_XGRAMMAR_TIMEOUT="60")
    assert (envs.DEEPINFER_GC_INTERVAL_STEP, envs.DEEPINFER_XGRAMMAR_TIMEOUT) == (5, 6)
    envs.rearm("DEEPINFER_GC_INTERVAL_STEP")
    assert (envs.DEEPINFER_GC_INTERVAL_STEP, envs.DEEPINFER_XGRAMMAR_TIMEOUT) == (50, 6)
    envs.rearm_all()
    assert (envs.DEEPINFER_GC_INTERVAL_STEP, envs.DEEPINFER_XGRAMMAR_TIMEOUT) == (50, 60)


def test_malformed_value_is_read_again_after_it_is_corrected():
    given = {"DEEPINFER_GC_INTERVAL_STEP": "x"}
    envs = environ.Envs(given)
    with pytest.raises(ValueError, match="DEEPINFER_GC_INTERVAL_STEP"):
        _ = envs.DEEPINFER_GC_INTERVAL_STEP
    given["DEEPINFER_GC_INTERVAL_STEP"] = "3"
    assert envs.DEEPINFER_GC_INTERVAL_STEP == 3


def test_envs_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("DEEPINFER_SO_BUILDER_CPUS", "3")
    environ.envs.rearm("DEEPINFER_SO_BUILDER_CPUS")
    assert environ.envs.DEEPINFER_SO_BUILDER_CPUS == 3
    environ.envs.rearm("DEEPINFER_SO_BUILDER_CPUS")


def test_unknown_name_is_refused_with_the_closest():
    envs = environ.Envs({})
    with pytest.raises(AttributeError, match="did you mean DEEPINFER_BATCH_INVARIANT"):
        _ = envs.DEEPINFER_BATCH_INVARIENT
    with pytest.raises(ValueError, match="did you mean DEEPINFER_ENFORCE_EAGER"):
        envs.rearm("DEEPINFER_ENFORCE_EAGAR")
    with pytest.raises(AttributeError, match="^envs has no variable UNLIKE_ANYTHING$"):
        _ = envs.UNLIKE_ANYTHING


def test_values_cannot_be_assigned_and_are_listed():
    envs = environ.Envs({})
    with pytest.raises(AttributeError):
        envs.DEEPINFER_BATCH_INVARIANT = True  # pyright: ignore[reportAttributeAccessIssue]
    assert set(SPECIFIED) <= set(dir(envs))


def test_markdown_table_has_a_row_for_each_variable_with_default_and_status():
    lines = environ.markdown_table().splitlines()
    assert lines[:2] == [
        "| Variable | Type | Default | Meaning | Status |",
        "|---|---|---|---|---|",
    ]
    assert [re.match(r"\| `(\w+)` \|", line)[1] for line in lines[2:]] == list(SPECIFIED)  # pyright: ignore[reportOptionalSubscript]
    assert all(line.count("|") == 6 for line in lines)
    rows = {line.split("`")[1]: line for line in lines[2:]}
    expected = {
        "DEEPINFER_ENFORCE_EAGER": "| bool | `0` | no decode buckets compiled ahead | works |",
        "DEEPINFER_NCCL_NUM_SMS": "| int | `32` | SMs for NCCL | accepted, no effect |",
        "DEEPINFER_FUSED_SAMPLE_DETAIL_LOG": "| str | unset | a DeepInfer test | refused |",
        "DEEPINFER_USE_NEXTN_DECODE": "| maximum draft length, 0 is off | works |",
        "DEEPINFER_JAX_KERNELS": "| works |",
        "DEEPINFER_SAMPLER_FORCE_TOPK": "| sample among the k best only | works |",
        "DEEPINFER_GLOO_TIMEOUT": "| lands with processes |",
    }
    for name, end in expected.items():
        assert rows[name].endswith(end), rows[name]


@pytest.mark.parametrize(
    "variable, off",
    [(variable, off) for variable in environ.VARIABLES.values() for off in variable.off_values if off is not None],
    ids=lambda value: value.name if isinstance(value, environ.Variable) else str(value),
)
def test_value_that_turns_nothing_on_is_accepted(variable, off):
    config = resolve(EngineArgs(), {variable.name: str(off)})
    name = variable.field if hasattr(config, variable.field) else variable.name
    if variable.derive is None:
        assert config.value(name) == off
        assert config.source(name) == f"environment variable {variable.name}"


@pytest.mark.parametrize(
    "text",
    [
        "DEEPINFER_GLOO_TIMEOUT=9 needs processes; 14400",
    ],
)
def test_variable_that_turns_a_missing_feature_on_is_refused_with_what_is_allowed(text, land):
    setting, _, rest = text.partition(" needs ")
    feature, allowed = rest.split("; ")
    name, value = setting.split("=")
    with pytest.raises(NotImplementedError) as caught:
        resolve(EngineArgs(), {name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert f" needs {feature}, which has not landed in this version; allowed now: {allowed}" in message
    assert message.endswith(f"; change or unset {name}")
    land(feature)
    resolve(EngineArgs(), {name: value})


# Variable -> (field, text, value), for each that the engine reads; below, for each of sampling.
ENGINE = {
    "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K": ("prefill_max_key_tokens", "4096", 4096),
    "DEEPINFER_INDEX_ATTN_MEMORY_LIMIT": ("index_attn_memory_limit", "1GiB", GIB),
    "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL": ("decode_bucket_interval", "16", 16),
    "DEEPINFER_NUM_STATE_SLOTS_RATIO": ("state_slots_ratio", "1.5", 1.5),
    "DEEPINFER_PREFILL_STORE_EXTRA_STATE": ("store_extra_state", "1", True),
    "DEEPINFER_PREFILL_STORE_EXTRA_SIZE": ("store_extra_tokens", "256", 256),
    "DEEPINFER_PREFILL_ATTEMPT_INTERVAL": ("prefill_attempt_interval", "1", 1),
    "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL": ("prefill_any_attempt_interval", "2", 2),
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": ("async_scheduling", "0", False),
    "DEEPINFER_LOGGING_INTERVAL_STEP": ("logging_interval_steps", "10", 10),
    "DEEPINFER_GC_INTERVAL_STEP": ("gc_interval_step", "50", 50),
    "DEEPINFER_DISABLE_SYNC_GUARD": ("sync_guard_disabled", "1", True),
    "DEEPINFER_PROFILE_TORCH_CUDA_MEMORY": ("memory_profile_path", "/m/profile", "/m/profile"),
    "DEEPINFER_ENABLE_MEMORY_TRACING": ("memory_tracing", "1", True),
    "DEEPINFER_PROFILE_HTTP_ENABLE": ("profile_http_enable", "1", True),
    "DEEPINFER_PROFILE_HTTP_PORT_BASE": ("profile_http_port_base", "7000", 7000),
    "DEEPINFER_TORCH_PROFILER_DIR": ("trace_dir", "/traces", "/traces"),
    "DEEPINFER_JAX_PREFIX_CACHE": ("prefix_cache", "replay", "replay"),
}
SAMPLING = {
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS": ("sum_smaller_probs", "1", True),
    "DEEPINFER_SAMPLER_FORCE_TOPK": ("sampler_force_topk", "5", 5),
    "DEEPINFER_DECODE_TOKEN_BLACKLIST": ("token_blacklist", "3..5", "3..5"),
    "DEEPINFER_XGRAMMAR_DEBUG": ("xgrammar_debug", "1", True),
    "DEEPINFER_XGRAMMAR_TIMEOUT": ("xgrammar_timeout", "5", 5),
    "DEEPINFER_XGRAMMAR_DISABLE_CACHE": ("xgrammar_disable_cache", "1", True),
    "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES": ("grammar_cache_bytes", "-1", -1),
    "DEEPINFER_SO_BUILDER_CPUS": ("so_builder_cpus", "2", 2),
    "DEEPINFER_JAX_GRAMMAR_WHITESPACE": ("grammar_whitespace", "2", 2),
}
VISION = {
    "DEEPINFER_MULTI_MODAL_BUFFER_SIZE": ("multi_modal_buffer_size", "3", 3),
    "DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT": ("image_worker_timeout_s", "2.5", 2.5),
}
TABLES = {"engine": ENGINE, "sampling": SAMPLING, "vision": VISION}


@pytest.mark.parametrize("feature, table", TABLES.items(), ids=TABLES)
def test_every_variable_of_the_feature_has_a_field_of_its_own(feature, table):
    assert set(table) == {v.name for v in environ.VARIABLES.values() if v.lands_with == feature}
    for name, (field, _, _) in table.items():
        assert environ.VARIABLES[name].field == field


@pytest.mark.parametrize("name", [*ENGINE, *SAMPLING, *VISION])
def test_variable_of_the_feature_sets_its_field_and_no_other(name):
    field, text, value = {**ENGINE, **SAMPLING, **VISION}[name]
    default, config = resolve(EngineArgs(), {}), resolve(EngineArgs(), {name: text})
    assert config.value(field) == value != default.value(field)
    assert config.source(field) == f"environment variable {name}"
    assert dataclasses.replace(config, **{field: default.value(field)}) == default


@pytest.mark.parametrize("mode", ["off", "exact", "replay"])
def test_prefix_cache_takes_each_of_its_modes(mode):
    assert resolve(EngineArgs(), {"DEEPINFER_JAX_PREFIX_CACHE": mode}).prefix_cache == mode


INEFFECTIVE = {
    "DEEPINFER_NCCL_NUM_SMS": "16",
    "DEEPINFER_USERBUFFER_COMM_SMS": "4",
    "DEEPINFER_REARRANGE_P2P_GROUPS": "2",
    "DEEPINFER_NCCL_MEMORY_SAMPLE_INTERVAL_STEPS": "10",
    "DEEPINFER_RINGBUFFER_WARNING_INTERVAL": "30",
    "DEEPINFER_USE_MULTIMODAL_POOL": "1",
    "DEEPINFER_MULTIMODAL_POOL_SIZE_GB": "2",
    "DEEPINFER_CPP_LOG_LEVEL": "debug",
}


def test_ineffective_variables_are_those_marked_n():
    assert set(INEFFECTIVE) == {v.name for v in environ.VARIABLES.values() if v.kind == "N"}


@pytest.mark.parametrize("name", INEFFECTIVE)
def test_ineffective_variable_warns_once_and_changes_nothing_else(name):
    given = {name: INEFFECTIVE[name]}
    with pytest.warns(UserWarning, match=f"^{name}=.* is accepted and has no effect") as caught:
        config = resolve(EngineArgs(), given)
        resolve(EngineArgs(), given)
    assert len(caught) == 1
    assert dataclasses.replace(config, others=()) == dataclasses.replace(resolve(EngineArgs(), {}), others=())


@pytest.mark.parametrize("name", INEFFECTIVE)
def test_ineffective_variable_at_its_default_does_not_warn(name):
    default = environ.VARIABLES[name].default_value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(EngineArgs(), {name: "" if default is None else str(default)})


def test_documented_table_is_the_one_in_code():
    documented = Path(__file__).parents[2] / "docs" / "environment.md"
    assert documented.read_text(encoding="utf-8").endswith("\n\n" + environ.markdown_table())
