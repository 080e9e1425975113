"""Both released forms give one config, and every impossible value is refused with its key."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax.config.model import ModelConfig, VisionConfig
from deepinfer_jax.config.released import load_config, parse_config

ROOT = Path(__file__).parent.parent.parent
FLASH_FILE = ROOT / "configs" / "model" / "deepseek-v4.1-flash.json"
TINY_DIR = ROOT / "tests" / "data" / "tiny_a"
NESTED = json.loads(FLASH_FILE.read_text())
FLASH = load_config(FLASH_FILE)

# The released inference/config.json (spec: backbone 1.1): the same values under the release code's names.
FLASH_FLAT: dict[str, Any] = {
    "dtype": "fp8", "expert_dtype": "fp4", "vocab_size": 129280, "dim": 5120, "moe_inter_dim": 2304, "n_layers": 40,
    "n_mtp_layers": 3, "n_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1, "n_activated_experts": 6,
    "score_func": "sqrtsoftplus", "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1280, "head_dim": 512,
    "rope_head_dim": 64, "norm_eps": 1e-20, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36], "compress_rope_theta": 160000, "original_seq_len": 65536,
    "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 512, "candidate_source_layer": 20, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682], "engram_max_ngram_size": 4, "engram_vocab_size": 16000000,
    "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_id": 2, "engram_compressed_vocab_size": 99092,
    "vision_n_layers": 32, "vision_dim": 1024, "vision_n_heads": 16, "vision_inter_dim": 2816,
    "vision_patch_size": 14, "vision_rope_theta": 10000, "vision_downsample_ratio": 3, "vision_max_n_token": 1024,
    "vision_min_pixels": 295936, "vision_max_wh_ratio": None, "dspark_block_size": 5,
    "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_n_activated_experts": 3,
}  # fmt: skip
TEXT_KEYS = [f.name for f in dataclasses.fields(ModelConfig) if f.name in NESTED["text_config"]]
INT_KEYS = [f.name for f in dataclasses.fields(ModelConfig) if f.type is int and f.name in TEXT_KEYS]
FLOAT_KEYS = [f.name for f in dataclasses.fields(ModelConfig) if f.type is float]
LIST_KEYS = [f.name for f in dataclasses.fields(ModelConfig) if f.type == tuple[int, ...]]
MAY_BE_ZERO = {"num_nextn_predict_layers", "candidate_source_layer_id", "engram_pad_token_id", "dspark_noise_token_id"}


def nested(**text: Any) -> dict[str, Any]:
    """The Flash config with these keys of its text part replaced."""
    raw = copy.deepcopy(NESTED)
    raw["text_config"].update(text)
    return raw


def changed(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    *parents, last = path.split(".")
    node = raw
    for parent in parents:
        node = node[parent]
    node[last] = value
    return raw


def without(raw: dict[str, Any], path: str) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    *parents, last = path.split(".")
    node = raw
    for parent in parents:
        node = node[parent]
    del node[last]
    return raw


def refusal(raw: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parse_config(raw)
    return str(caught.value)


def test_both_forms_of_the_released_config_are_equal():
    assert parse_config(FLASH_FLAT) == FLASH
    assert hash(parse_config(FLASH_FLAT)) == hash(FLASH)


def test_both_forms_of_the_tiny_config_are_equal():
    tiny = load_config(TINY_DIR)
    assert tiny == load_config(TINY_DIR / "config.json")
    assert tiny == load_config(TINY_DIR / "inference_config.json")


def test_ids_may_stand_in_the_flat_form():
    ids = {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9, "image_token_id": 10}
    assert parse_config(FLASH_FLAT | ids) == parse_config(NESTED | ids)
    assert parse_config(FLASH_FLAT | ids).image_token_id == 10


def test_ratios_may_leave_out_the_draft_layers():
    short = parse_config(nested(compress_ratios=NESTED["text_config"]["compress_ratios"][:40]))
    assert short.backbone_ratios == FLASH.backbone_ratios


def test_unknown_keys_are_accepted():
    assert parse_config(nested(attention_dropout=0.0, initializer_range=0.02, some_future_key=[1])) == FLASH


def test_integers_may_be_written_as_floats_and_floats_as_integers():
    assert parse_config(nested(rope_theta=10000, hidden_size=5120.0)) == FLASH
    assert type(parse_config(nested(hidden_size=5120.0)).hidden_size) is int
    assert type(FLASH.rope_theta) is float


@pytest.mark.parametrize("key", TEXT_KEYS)
def test_missing_text_key_is_named(key: str):
    assert f"text_config.{key} is missing" in refusal(without(NESTED, f"text_config.{key}"))


@pytest.mark.parametrize("key", [k for k in FLASH_FLAT if not k.startswith("vision_")])
def test_missing_flat_key_is_named(key: str):
    raw = without(FLASH_FLAT, key)
    if key == "dim":
        assert "'dim'" in refusal(raw)
    else:
        assert f"{key} is missing" in refusal(raw)


@pytest.mark.parametrize("value", ["8", 1.5, True, None, [8], float("nan"), float("inf")], ids=repr)
@pytest.mark.parametrize("key", INT_KEYS)
def test_what_is_no_integer_is_refused(key: str, value: Any):
    assert f"{key}={value!r} must be an integer" in refusal(nested(**{key: value}))


@pytest.mark.parametrize("value", ["1.0", True, None, float("nan"), float("-inf")], ids=repr)
@pytest.mark.parametrize("key", FLOAT_KEYS)
def test_what_is_no_finite_number_is_refused(key: str, value: Any):
    assert f"{key}={value!r} must be a finite number" in refusal(nested(**{key: value}))


def test_number_beyond_every_type_is_refused():
    assert "hidden_size=1000" in refusal(nested(hidden_size=10**400))
    assert "rope_theta=1000" in refusal(nested(rope_theta=10**400))


@pytest.mark.parametrize("value", [3, "1,2", None, {"0": 1}], ids=repr)
@pytest.mark.parametrize("key", LIST_KEYS)
def test_what_is_no_list_is_refused(key: str, value: Any):
    assert f"{key}={value!r} must be a list of integers" in refusal(nested(**{key: value}))


@pytest.mark.parametrize("key", LIST_KEYS)
def test_item_that_is_no_integer_is_named_with_its_place(key: str):
    value = [*NESTED["text_config"][key]]
    value[1] = "x"
    assert f"{key}[1]='x' must be an integer" in refusal(nested(**{key: value}))


@pytest.mark.parametrize("key", [k for k in INT_KEYS + FLOAT_KEYS if k not in MAY_BE_ZERO])
def test_zero_and_negative_sizes_are_refused(key: str):
    for value in (0, -1):
        assert f"{key}={value}" in refusal(nested(**{key: value}))


@pytest.mark.parametrize("key", sorted(MAY_BE_ZERO))
def test_negative_ids_are_refused(key: str):
    assert f"{key}=-1" in refusal(nested(**{key: -1}))


RATIOS = NESTED["text_config"]["compress_ratios"]
# (changed keys, what the message names)
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 60}, "num_attention_heads=60 is not a multiple of o_groups=8"),
    ({"o_groups": 7}, "o_groups=7"),
    ({"head_dim": 500}, "head_dim=500"),
    ({"index_head_dim": 100}, "index_head_dim=100"),
    ({"index_head_dim": 32}, "qk_rope_head_dim=64 is larger than index_head_dim=32"),
    ({"qk_rope_head_dim": 1024}, "qk_rope_head_dim=1024 is larger than head_dim=512"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
    ({"hidden_size": 5000}, "hidden_size=5000"),
    ({"q_lora_rank": 1281}, "q_lora_rank=1281"),
    ({"moe_intermediate_size": 2300}, "moe_intermediate_size=2300"),
    ({"o_lora_rank": 1001}, "o_lora_rank=8008"),
    ({"engram_head_dim": 250}, "engram_head_dim=250"),
    ({"compress_ratios": RATIOS[:39]}, "compress_ratios has 39 entries"),
    ({"compress_ratios": [*RATIOS, 0]}, "compress_ratios has 44 entries"),
    ({"compress_ratios": [0, 0, 4, *RATIOS[3:]]}, "compress_ratios=[0, 0, 4"),
    ({"compress_ratios": [*RATIOS[:40], 0, 1, 0]}, "compress_ratios of draft layers"),
    ({"compress_ratios": [0] * 2 + [1] * 38, "candidate_source_layer_id": 2}, "kv_source_layer_ids [8, 14, 20]"),
    ({"compress_ratios": [0, 2, *RATIOS[2:]]}, "layer 1 has ratio 2 but no kv_source_layer_ids"),
    ({"compress_ratios": [*RATIOS[:9], 1, *RATIOS[10:]]}, "compress_ratios[9]=1"),
    ({"num_hidden_layers": 41}, "num_hidden_layers=41"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
    ({"kv_source_layer_ids": []}, "kv_source_layer_ids is empty"),
    ({"kv_source_layer_ids": [2, 14, 8, 20]}, "kv_source_layer_ids=[2, 14, 8, 20] must rise"),
    ({"kv_source_layer_ids": [2, 2, 8, 14, 20]}, "kv_source_layer_ids=[2, 2, 8, 14, 20] must rise"),
    ({"kv_source_layer_ids": [2, 8, 14, 40]}, "kv_source_layer_ids=[2, 8, 14, 40] has an id outside"),
    ({"kv_source_layer_ids": [-1, 2, 8, 14, 20]}, "kv_source_layer_ids=[-1"),
    ({"kv_source_layer_ids": [1, 2, 8, 14, 20]}, "kv_source_layer_ids=[1, 2, 8, 14, 20] names a layer"),
    ({"kv_source_layer_ids": [2, 8, 10, 14, 20]}, "kv_source_layer_ids [10] are not in index_source_layer_ids"),
    ({"kv_source_layer_ids": [2, 8, 14, 21]}, "kv_source_layer_ids [21] are not in index_source_layer_ids"),
    ({"kv_source_layer_ids": [2, 8, 14, 20, 24]}, "kv_source_layer_ids [24] come after"),
    ({"index_source_layer_ids": []}, "index_source_layer_ids is empty"),
    ({"index_source_layer_ids": [2, 8, 14, 24, 20]}, "index_source_layer_ids=[2, 8, 14, 24, 20] must rise"),
    ({"index_source_layer_ids": [2, 8, 14, 20, 40]}, "index_source_layer_ids=[2, 8, 14, 20, 40] has an id outside"),
    ({"index_source_layer_ids": [0, 2, 8, 14, 20]}, "index_source_layer_ids=[0, 2, 8, 14, 20] names a layer"),
    ({"index_source_layer_ids": [2, 8, 10, 14, 20]}, "index_source_layer_ids [10] have no cache"),
    ({"candidate_source_layer_id": 14}, "candidate_source_layer_id=14"),
    ({"candidate_source_layer_id": 24}, "candidate_source_layer_id=24"),
    ({"candidate_source_layer_id": 99}, "candidate_source_layer_id=99"),
    ({"candidate_topk_blocks": 64}, "candidate_topk_blocks=64"),
    ({"candidate_block_size": 1, "candidate_topk_blocks": 511}, "candidate_block_size=1"),
    ({"index_topk": 16378}, "index_topk=16378"),
    ({"num_experts_per_tok": 385}, "num_experts_per_tok=385"),
    ({"dspark_num_experts_per_tok": 129}, "dspark_num_experts_per_tok=129"),
    ({"n_shared_experts": 2}, "n_shared_experts=2"),
    ({"norm_topk_prob": False}, "norm_topk_prob=False"),
    ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
    ({"engram_layer_ids": [1]}, "engram_layer_ids has 1 entries"),
    ({"engram_layer_ids": [14, 1]}, "engram_layer_ids=[14, 1]"),
    ({"engram_layer_ids": [1, 40]}, "engram_layer_ids=[1, 40]"),
    ({"engram_num_embeddings": [384006168, 1 << 31]}, "engram_num_embeddings=2147483648"),
    ({"engram_num_embeddings": [0, 384016682]}, "engram_num_embeddings=0"),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size=1"),
    ({"engram_vocab_size": 1 << 24}, "engram_vocab_size=16777216"),
    ({"engram_compressed_vocab_size": 129281}, "engram_compressed_vocab_size=129281"),
    ({"engram_pad_token_id": 129280}, "engram_pad_token_id=129280"),
    ({"dspark_target_layer_ids": [37, 38, 40]}, "dspark_target_layer_ids=[37, 38, 40]"),
    ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id=129280"),
    ({"vocab_size": 129264}, "image_token_id=129264 is outside vocab_size=129264"),
    ({"rope_scaling": None}, "rope_scaling=None"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type='linear'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 16}}, "rope_scaling.beta_fast is missing"),
    ({"num_key_value_heads": 2}, "text_config.num_key_value_heads=2"),
    ({"hidden_act": "gelu"}, "text_config.hidden_act='gelu'"),
    ({"scoring_func": "sigmoid"}, "text_config.scoring_func='sigmoid'"),
    ({"topk_method": "greedy"}, "text_config.topk_method='greedy'"),
    ({"model_type": "deepseek_v4"}, "text_config.model_type='deepseek_v4'"),
    ({"attention_bias": True}, "text_config.attention_bias=True"),
    ({"tie_word_embeddings": True}, "text_config.tie_word_embeddings=True"),
]  # fmt: skip


@pytest.mark.parametrize("keys, named", IMPOSSIBLE, ids=[named[:48] for _, named in IMPOSSIBLE])
def test_impossible_value_is_refused_with_its_key(keys: dict[str, Any], named: str):
    assert named in refusal(nested(**keys))


OUTSIDE_TEXT: list[tuple[str, Any, str]] = [
    ("architectures", ["DeepseekV4ForCausalLM"], "architectures"),
    ("model_type", "deepseek_v3", "model_type='deepseek_v3'"),
    ("dtype", "float16", "dtype='float16'"),
    ("tie_word_embeddings", True, "tie_word_embeddings=True"),
    ("quantization_config", None, "quantization_config is missing"),
    ("quantization_config.quant_method", "awq", "quantization_config.quant_method='awq'"),
    ("quantization_config.weight_block_size", [128, 128], "quantization_config.weight_block_size=[128, 128]"),
    ("quantization_config.scale_fmt", "float", "quantization_config.scale_fmt='float'"),
    ("quantization_config.expert_dtype", "fp8", "quantization_config.expert_dtype='fp8'"),
    ("quantization_config.activation_scheme", "static", "quantization_config.activation_scheme='static'"),
    ("text_config", [], "text_config must be an object"),
    ("vision_config", None, "vision_config is missing"),
    ("bos_token_id", -1, "bos_token_id=-1"),
    ("eos_token_id", 129280, "eos_token_id=129280"),
    ("pad_token_id", "2", "pad_token_id='2' must be an integer"),
    ("image_token_id", 129280, "image_token_id=129280"),
    ("tokenizer_compatibility", "other", "tokenizer_compatibility='other'"),
    ("tokenizer_compatibility", 3, "tokenizer_compatibility=3 must be a string"),
]


@pytest.mark.parametrize("path, value, named", OUTSIDE_TEXT, ids=[f"{p}={v!r}"[:48] for p, v, _ in OUTSIDE_TEXT])
def test_impossible_value_outside_the_text_part_is_refused(path: str, value: Any, named: str):
    assert named in refusal(changed(NESTED, path, value))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(VisionConfig) if f.name != "max_wh_ratio"])
def test_vision_values_are_needed_and_positive(field: str):
    assert f"vision_config.{field}=None" in refusal(without(NESTED, f"vision_config.{field}"))
    assert f"vision_config.{field}=0" in refusal(changed(NESTED, f"vision_config.{field}", 0))


@pytest.mark.parametrize("key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_rope_scaling_values_are_needed_and_positive(key: str):
    path = f"text_config.rope_scaling.{key}"
    assert f"rope_scaling.{key} is missing" in refusal(without(NESTED, path))
    assert f"rope_scaling.{key}=" in refusal(changed(NESTED, path, -1))
    assert f"rope_scaling.{key}='x'" in refusal(changed(NESTED, path, "x"))


@pytest.mark.parametrize(
    "key, value", [("dtype", "bf16"), ("expert_dtype", "fp8"), ("score_func", "softmax"), ("gate_temp", 0.5)]
)
def test_flat_form_of_another_model_is_refused(key: str, value: Any):
    assert f"{key}={value!r}" in refusal(FLASH_FLAT | {key: value})


def test_object_of_neither_form_is_refused():
    assert "neither 'text_config'" in refusal({"hidden_size": 5120})


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda file: None, "cannot read the model config"),
        (lambda file: file.write_text("{"), "is not a JSON text"),
        (lambda file: file.write_text("[1]"), "holds a list; a model config is a JSON object"),
        (lambda file: file.write_text(json.dumps(nested(hidden_size=0))), "hidden_size=0 must be positive"),
        (lambda file: file.write_bytes(b"\xff\xfe{}"), "is not a JSON text"),
    ],
    ids=["absent", "cut", "list", "impossible", "not utf-8"],
)
def test_unreadable_file_is_named(tmp_path: Path, prepare: Callable[[Path], None], message: str):
    file = tmp_path / "config.json"
    prepare(file)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(tmp_path)
    assert str(file) in str(caught.value)


def test_derived_sizes_of_the_released_model():
    assert FLASH.backbone_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20
    assert FLASH.engram_columns == 24


def test_constructor_checks_as_the_parser_does():
    with pytest.raises(ValueError, match="hidden_size=5001"):
        dataclasses.replace(FLASH, hidden_size=5001)
