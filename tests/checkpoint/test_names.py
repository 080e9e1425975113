"""The name table reproduces the published inventory, tensor for tensor and byte for byte."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from deepinfer_jax.checkpoint.names import GroupTotals, expected_tensors, inventory, scale_name
from deepinfer_jax.checkpoint.shards import read_file
from deepinfer_jax.config.released import load_config

FLASH = Path(__file__).parents[2] / "configs" / "model" / "deepseek-v4.1-flash.json"

# spec: checkpoint 2
GROUPS = {
    "routed experts": (92_160, 288_777_830_400),
    "Engram": (12, 203_073_076_240),
    "mtp": (2_401, 7_932_874_632),
    "attention": (520, 5_069_721_600),
    "shared experts": (240, 1_416_960_000),
    "embed and head": (2, 2_647_654_400),
    "router": (120, 157_409_280),
    "mHC": (240, 157_295_040),
    "compressor": (11, 36_704_256),
    "indexer": (32, 45_130_752),
    "vision": (259, 823_685_120),
    "aligner": (4, 146_821_120),
    "image span": (3, 30_720),
    "norms": (81, 829_440),
}
DTYPE_BYTES = {
    "I8": 278_585_671_680,
    "F8_E4M3": 204_015_223_296,
    "F8_E8M0": 23_563_015_184,
    "BF16": 3_952_883_712,
    "F32": 169_229_128,
}


@pytest.fixture(scope="module")
def flash():
    return load_config(FLASH)


@pytest.fixture(scope="module")
def flash_tensors(flash):
    return expected_tensors(flash)


@pytest.fixture(scope="module")
def flash_inventory(flash):
    return inventory(flash)


def test_groups_are_the_published_ones(flash_inventory):
    got = {name: (t.num_tensors, t.num_bytes) for name, t in flash_inventory.items()}
    assert got == GROUPS


def test_totals_are_the_published_ones(flash_tensors):
    assert len(flash_tensors) == 96_085
    assert sum(t.num_bytes for t in flash_tensors.values()) == 510_286_023_000


def test_bytes_by_dtype_are_the_published_ones(flash_tensors):
    got = Counter()
    for tensor in flash_tensors.values():
        got[tensor.dtypes[0]] += tensor.num_bytes
    assert dict(got) == DTYPE_BYTES


def test_backbone_has_551_57_billion_parameters(flash_inventory):
    outside = {"Engram", "mtp", "vision", "aligner", "image span"}
    total = sum(t.num_parameters for name, t in flash_inventory.items() if name not in outside)
    assert total == 551_566_180_464


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("embed.weight", (129280, 5120), "BF16"),
        ("layers.39.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.39.attn.wo_a.scale", (256, 128), "F8_E8M0"),
        ("layers.0.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.0.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.36.attn.indexer.weights_proj.weight", (32, 5120), "BF16"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("mtp.1.ffn.gate.bias_vl", (128,), "F32"),
        ("mtp.2.ffn.experts.127.w1.weight", (2304, 2560), "I8"),
        ("vision.patch_embed.proj.weight", (1024, 588), "BF16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
        ("image_newline", (5120,), "BF16"),
    ],
)
def test_shape_and_dtype(flash_tensors, name, shape, dtype):
    assert flash_tensors[name].shape == shape
    assert flash_tensors[name].dtypes[0] == dtype


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.24.attn.indexer.wk.weight",  # reads the keys of layer 20
        "layers.0.engram.wkv.weight",
        "mtp.0.attn.indexer.wq_b.weight",
    ],
)
def test_absent_where_the_role_has_none(flash_tensors, name):
    assert name not in flash_tensors


def test_numbers_follow_the_config(flash):
    smaller = dataclasses.replace(flash, n_routed_experts=192)
    got = inventory(smaller)
    assert got["routed experts"].num_bytes * 2 == GROUPS["routed experts"][1]
    assert got["mtp"] == inventory(flash)["mtp"]
    no_draft = dataclasses.replace(flash, num_nextn_predict_layers=0, compress_ratios=flash.backbone_ratios)
    assert inventory(no_draft).get("mtp", GroupTotals()) == GroupTotals()


@pytest.mark.parametrize("file, is_quantized", [("released", True), ("bf16", False)])
def test_names_of_an_independent_checkpoint(config, tiny_dir, file, is_quantized):
    expected = expected_tensors(config, is_quantized=is_quantized)
    tensors = {t.name: t for t in read_file(tiny_dir / f"weights_{file}.safetensors")}
    assert tensors.keys() == expected.keys()
    assert all(tensors[n].shape == s.shape for n, s in expected.items())


def test_scale_name():
    assert scale_name("layers.1.engram.embed.weight") == "layers.1.engram.embed.scale"
