"""Reading a model's config: the released nested form and the flat form of its inference code (spec: checkpoint 4)."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.config.model import ModelConfig, RopeScaling, VisionConfig

# Released nested name -> name in the release's flat inference/config.json; absent means the same name.
_FLAT_NAMES: dict[str, str] = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "moe_intermediate_size": "moe_inter_dim",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
_FLAT_VISION: dict[str, str] = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}


def load_config(path: str | Path) -> ModelConfig:
    """The model config of a checkpoint directory or of a JSON file in either released form.

    Raises ValueError when the file is absent, is not JSON, or lacks or contradicts a key, naming the key.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"cannot read the model config {file}: {error.strerror}; give a checkpoint directory or a config file"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON text: {error}; give a released config.json") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}; a model config is a JSON object")
    try:
        return parse_config(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The model config from parsed JSON, nested (config.json) or flat (inference/config.json)."""
    if "text_config" in raw:
        return _parse_nested(raw)
    if "dim" in raw:
        return _parse_flat(raw)
    raise ValueError(
        "the config has neither 'text_config' (released config.json) nor 'dim' (the flat inference config); "
        "give one of these two forms"
    )


def _parse_nested(raw: Mapping[str, Any]) -> ModelConfig:
    _expect(raw, "architectures", ["DeepseekV41ForCausalLM"])
    _expect(raw, "model_type", "deepseek_v41")
    _expect(raw, "dtype", "bfloat16")
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise ValueError("quantization_config is missing; released checkpoints are FP8 with FP4 experts")
    _expect(quantization, "quant_method", "fp8", "quantization_config.")
    _expect(quantization, "weight_block_size", [32, 32], "quantization_config.")
    _expect(quantization, "scale_fmt", "ue8m0", "quantization_config.")
    _expect(quantization, "expert_dtype", "fp4", "quantization_config.")
    _expect(quantization, "activation_scheme", "dynamic", "quantization_config.")
    text = raw["text_config"]
    if not isinstance(text, Mapping):
        raise ValueError("text_config must be an object")
    for key, allowed in (
        ("model_type", "deepseek_v41_text"),
        ("num_key_value_heads", 1),
        ("hidden_act", "silu"),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
    ):
        _expect(text, key, allowed, "text_config.")
    for part, prefix, keys in (
        (text, "text_config.", ("attention_bias", "tie_word_embeddings")),
        (raw, "", ("tie_word_embeddings",)),
    ):
        for key in keys:
            if part.get(key, False):
                raise ValueError(f"{prefix}{key}={part[key]!r} is not supported; the architecture has it false")
    values = {name: _take(text, name, "text_config.") for name in _model_fields()}
    values["rope_scaling"] = _rope_scaling(_take(text, "rope_scaling", "text_config."))
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ValueError("vision_config is missing; the architecture is multimodal and always has one")
    values["vision"] = _build(
        VisionConfig, {f.name: vision.get(f.name) for f in dataclasses.fields(VisionConfig)}, "vision_config."
    )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if key in raw:
            values[key] = raw[key]
    values["tokenizer_compatibility"] = raw.get("tokenizer_compatibility", "release")
    return _build(ModelConfig, values, "")


def _parse_flat(raw: Mapping[str, Any]) -> ModelConfig:
    _expect(raw, "dtype", "fp8")
    _expect(raw, "expert_dtype", "fp4")
    _expect(raw, "score_func", "sqrtsoftplus")
    if raw.get("gate_temp", 1.0) != 1.0:
        raise ValueError(f"gate_temp={raw['gate_temp']!r} is not supported; released models have 1.0")
    values: dict[str, Any] = {}
    for name in _model_fields():
        key = _FLAT_NAMES.get(name, name)
        if name == "norm_topk_prob":
            values[name] = raw.get(key, True)
        elif name == "max_position_embeddings":
            values[name] = raw.get("max_seq_len", 1 << 20)
        elif name != "rope_scaling":
            values[name] = _take(raw, key)
    values["rope_scaling"] = _rope_scaling(
        {
            "rope_type": "yarn",
            "factor": _take(raw, "rope_factor"),
            "beta_fast": _take(raw, "beta_fast"),
            "beta_slow": _take(raw, "beta_slow"),
            "original_max_position_embeddings": _take(raw, "original_seq_len"),
        }
    )
    vision = {name: raw.get(key) for name, key in _FLAT_VISION.items()}
    values["vision"] = _build(VisionConfig, vision, "vision_")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if key in raw:
            values[key] = raw[key]
    return _build(ModelConfig, values, "")


def _model_fields() -> tuple[str, ...]:
    outside = {
        "vision",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "image_token_id",
        "expert_dtype",
        "tokenizer_compatibility",
    }
    return tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name not in outside)


def _take(raw: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if key not in raw:
        raise ValueError(f"{prefix}{key} is missing")
    return raw[key]


def _expect(raw: Mapping[str, Any], key: str, allowed: Any, prefix: str = "") -> None:
    value = _take(raw, key, prefix)
    if value != allowed:
        raise ValueError(f"{prefix}{key}={value!r} is not supported; it must be {allowed!r}")


def _rope_scaling(raw: Any) -> RopeScaling:
    if not isinstance(raw, Mapping):
        raise ValueError(f"rope_scaling={raw!r} must be an object with rope_type 'yarn'")
    kind = raw.get("rope_type", raw.get("type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling.rope_type={kind!r} is not supported; it must be 'yarn'")
    values = {f.name: _take(raw, f.name, "rope_scaling.") for f in dataclasses.fields(RopeScaling)}
    return _build(RopeScaling, values, "rope_scaling.")


def _build[C](cls: type[C], values: Mapping[str, Any], prefix: str) -> C:
    """An instance whose values have the annotated kinds; JSON numbers become int or float as declared."""
    typed: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            typed[field.name] = _typed(f"{prefix}{field.name}", values[field.name], field.type)
    return cls(**typed)


def _typed(key: str, value: Any, kind: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_number = is_number and abs(value) <= sys.float_info.max  # neither nan, inf nor an integer beyond both
    if kind is int:
        if not is_number or value != int(value):
            raise ValueError(f"{key}={value!r} must be an integer")
        return int(value)
    if kind is float:
        if not is_number:
            raise ValueError(f"{key}={value!r} must be a finite number")
        return float(value)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{key}={value!r} must be a string")
    if kind == tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{key}={value!r} must be a list of integers")
        return tuple(_typed(f"{key}[{i}]", item, int) for i, item in enumerate(value))
    if kind == float | None:
        return None if value is None else _typed(key, value, float)
    return value
