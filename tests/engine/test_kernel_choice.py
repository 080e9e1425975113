"""Kernels that an engine is asked for by name: refused on other devices, and told op by op."""

import types

import pytest

from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import setup
from deepinfer_jax.engine.kernel_choice import check_kernels, log_choices, step_choices
from deepinfer_jax.kernels.catalog import OPS

NAME = "mosaic_sm90"


def runtime(model: str, **options) -> RuntimeConfig:
    shape = load_config(shipped_config(f"model/{model}.json"))
    return RuntimeConfig(model=shape, **{"target": "nvidia", "is_invariant": False, "kernels": NAME, **options})


def gpu(compute_capability: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(compute_capability=compute_capability, device_kind="NVIDIA X")


def test_kernels_for_another_device_are_refused(tiny_model):
    config = resolve(EngineArgs(model=tiny_model), {"DEEPINFER_JAX_KERNELS": NAME})
    with pytest.raises(ValueError, match="'mosaic_sm90' is no implementation for cpu; choose one of auto, reference$"):
        setup.load_engine_model(config)
    check_kernels(config, gpu("9.0"), target="nvidia")
    with pytest.raises(ValueError, match="compute capability 9.0, and NVIDIA X has 10.0; set kernels"):
        check_kernels(config, gpu("10.0"), target="nvidia")
    check_kernels(resolve(EngineArgs(), {}), gpu("10.0"), target="nvidia")
    config = resolve(EngineArgs(), {"DEEPINFER_JAX_KERNELS": "mosaic_sm100"})
    check_kernels(config, gpu("10.0"), target="nvidia")
    with pytest.raises(ValueError, match="kernels=mosaic_sm100 is for GPUs of compute capability 10.0, and .* has 9.0"):
        check_kernels(config, gpu("9.0"), target="nvidia")


def test_released_shape_decodes_through_every_kernel():
    choices = step_choices(runtime("deepseek-v4.1-flash"), num_rows=128)
    assert choices.keys() == OPS.keys()
    others = {op for op, choice in choices.items() if choice != NAME}
    assert others == {"rms_norm"}
    assert {choices[op] for op in others} == {"reference (there is no mosaic_sm90 of this op)"}


def test_released_shape_multiplies_through_kernels_for_blackwell():
    choices = step_choices(runtime("deepseek-v4.1-flash", kernels="mosaic_sm100"), num_rows=128)
    taken = {op for op, choice in choices.items() if choice == "mosaic_sm100"}
    assert taken == OPS.keys() - {"rms_norm"}


def test_prompts_go_through_the_same_kernels():
    choices = step_choices(runtime("deepseek-v4.1-flash"), num_rows=8192)
    assert choices["experts"] == choices["attention"] == choices["linear"] == NAME


def test_other_numerics_leave_weights_to_the_reference():
    choices = step_choices(runtime("deepseek-v4.1-flash", numerics="bf16"), num_rows=8)
    assert "not FP8 in this numerics policy" in choices["experts"]
    assert choices["linear"].startswith("reference (mosaic_sm90 refuses: weights are not E4M3")


def test_an_engine_tells_what_runs_through_what(caplog):
    caplog.set_level("INFO")
    log_choices(runtime("tiny"), decode_rows=4, prefill_rows=16)
    decode, prefill = caplog.records
    assert (decode.levelname, prefill.levelname) == ("WARNING", "WARNING")
    assert "decode step of 4 rows: attention: reference (mosaic_sm90 refuses: queries have" in decode.message
    caplog.clear()
    log_choices(runtime("deepseek-v4.1-flash"), decode_rows=4, prefill_rows=64)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    caplog.clear()
    log_choices(runtime("tiny", kernels="auto"), decode_rows=4, prefill_rows=16)
    assert not caplog.records
