"""What a configuration becomes: device, compilation cache, static settings of the steps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.config.released import load_config
from deepinfer_jax.engine import setup
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.testing import tiny

CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def jax_cache_settings():
    """Puts JAX's cache settings back afterwards."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    yield before
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def model(tiny_model):
    return load_config(tiny_model)


def test_compiled_programs_are_kept_where_the_variable_says(jax_cache_settings, tmp_path):
    setup.keep_compiled_programs(str(tmp_path / "jit"))
    jax.jit(lambda x: x * 3 + 41)(jnp.arange(7)).block_until_ready()
    assert any((tmp_path / "jit").rglob("*-cache"))


def test_a_cache_that_takes_no_files_is_refused(jax_cache_settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="DEEPINFER_JIT_CACHE_DIR=.*takes no files"):
        setup.keep_compiled_programs(str(tmp_path / "file"))


def test_the_default_cache_gives_way_to_jax_and_warns_without_a_folder(jax_cache_settings, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    setup.keep_compiled_programs(None)
    assert {name: getattr(jax.config, name) for name in CACHE_SETTINGS} == jax_cache_settings
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.warns(UserWarning, match="compiled anew in every process"):
        setup.keep_compiled_programs(None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setup.keep_compiled_programs(None)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "deepinfer_jax" / "compiled")


def test_devices_are_named():
    assert setup.choose_device("auto") == (jax.devices()[0], "cpu")
    assert setup.choose_device("cpu") == (jax.devices("cpu")[0], "cpu")
    with pytest.raises(ValueError, match="device='nvidia' is not attached"):
        setup.choose_device("nvidia")


def test_runtime_follows_the_configuration(model):
    def runtime(args: EngineArgs, environ: dict[str, str] | None = None, target: str = "cpu"):
        return setup.make_runtime(resolve(args, environ or {}), model, target=target)

    default = runtime(EngineArgs())
    assert (default.numerics, default.is_invariant, default.rollback_tokens) == ("q", True, 6)
    assert not runtime(EngineArgs(), target="nvidia").is_invariant
    assert not runtime(EngineArgs(), {"DEEPINFER_BATCH_INVARIANT": "0"}).is_invariant
    on_gpu = runtime(EngineArgs(), {"DEEPINFER_BATCH_INVARIANT": "1"}, target="nvidia")
    assert on_gpu.is_invariant and on_gpu.is_repeatable and on_gpu.row_tile == 128
    with pytest.raises(NotImplementedError, match="cannot be promised on tpu"):
        runtime(EngineArgs(), {"DEEPINFER_BATCH_INVARIANT": "1"}, target="tpu")
    assert runtime(EngineArgs(), {"DEEPINFER_JAX_NUMERICS": "bf16"}).numerics == "bf16"
    assert runtime(EngineArgs(dtype="float32")).numerics == "fp32"
    assert runtime(EngineArgs(numerics="fp32_noqdq")).numerics == "fp32_noqdq"


def test_engram_pad_token_is_the_checkpoints_unless_the_variable_is_set(tiny_model, model):
    def loaded(environ: dict[str, str]):
        config = resolve(EngineArgs(model=tiny_model), environ)
        return setup.load_engine_model(config).runtime.model

    assert loaded({}) == model
    assert loaded({"DEEPINFER_ENGRAM_PAD_TOKEN": "7"}) == dataclasses.replace(model, engram_pad_token_id=7)


@pytest.mark.parametrize("value, num_warm_ups", [("0", 1), ("1", 0)])
def test_eager_engines_compile_nothing_ahead(tiny_model, monkeypatch, value, num_warm_ups):
    calls = []
    monkeypatch.setattr(Pipeline, "warm_up", lambda self, *_: calls.append(self))
    monkeypatch.setenv("DEEPINFER_ENFORCE_EAGER", value)
    tiny.tiny_llm(tiny_model)
    assert len(calls) == num_warm_ups


def test_an_unusable_tokenizer_is_refused(tiny_model, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer.json"):
        tiny.tiny_llm(tiny_model, tokenizer=tmp_path)
