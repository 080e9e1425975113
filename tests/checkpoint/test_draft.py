"""Draft stages in checkpoints: read on demand, written back byte for byte, damage named."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_model, load_params
from deepinfer_jax.checkpoint.names import expected_tensors, inventory, num_lead_axes, payload_name
from deepinfer_jax.checkpoint.shards import open_shards, read_file
from deepinfer_jax.checkpoint.write import write_released
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.model.draft_params import draft_schema, param_schema, with_random_draft
from deepinfer_jax.model.params import Params, init_params, leaf_at
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.parallel.mesh import make_mesh


def bits(array: jax.Array) -> np.ndarray:
    values = np.asarray(array)
    return values.view(np.dtype(f"u{values.itemsize}"))


def assert_same_tree(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(path))


@pytest.fixture(scope="module")
def drafting(tiny_dir, config) -> Params:
    weights = tiny_dir / "weights_released.safetensors"
    return load_params(tiny_dir, config, weights_file=weights, with_draft=True)


@pytest.fixture(scope="module")
def complete(drafting, config, tiny_dir, tmp_path_factory) -> Path:
    """A checkpoint written from parameters with draft stages."""
    directory = tmp_path_factory.mktemp("drafting")
    write_released(drafting, config, directory, num_shards=3, tokenizer=tiny_dir / "tokenizer.json")
    return directory


def test_schema_covers_every_published_draft_byte():
    flash = load_config(shipped_config("model/deepseek-v4.1-flash.json"))
    assert sum(spec.num_bytes for spec in draft_schema(flash)) == inventory(flash)["mtp"].num_bytes == 7_932_874_632
    names = [n for n in expected_tensors(flash) if n.startswith("mtp.")]
    assert len(names) == 2_401
    by_path = {spec.path: spec for spec in draft_schema(flash)}
    assert by_path["draft.moe.experts.w1"].shape == (3, 128, 2304, 5120)
    assert by_path["draft.moe.gate"].shape == (3, 128, 5120)
    assert by_path["draft.main_proj"].scale_shape == (160, 480)
    assert payload_name(by_path["draft.moe.experts.w2"], flash, (2, 127)) == "mtp.2.ffn.experts.127.w2.weight"
    assert payload_name(by_path["draft.norm"], flash) == "mtp.2.norm.weight"


def test_drafting_adds_the_draft_and_nothing_else(drafting, params, config):
    assert params.draft is None
    assert_same_tree(dataclasses.replace(drafting, draft=None), params)
    for spec in draft_schema(config):
        leaf = leaf_at(drafting, spec.path)
        payload = leaf.payload if isinstance(leaf, ScaledArray) else leaf
        assert (payload.shape, payload.dtype) == (spec.payload_shape, spec.dtype), spec.path


def test_leaves_hold_the_tensors_of_the_independent_file(drafting, tiny_dir, config):
    original = {t.name: t.data for t in read_file(tiny_dir / "weights_bf16.safetensors")}
    seen = set()
    for spec in draft_schema(config):
        values = np.asarray(dequantize(leaf_at(drafting, spec.path), np.dtype(np.float32)))
        for lead in np.ndindex(*spec.shape[: num_lead_axes(spec)]):
            name = payload_name(spec, config, lead)
            seen.add(name)
            np.testing.assert_array_equal(values[lead], original[name].astype(np.float32), err_msg=name)
    assert seen == {name for name in original if name.startswith("mtp.")}


def test_written_draft_equals_the_original_file(complete, tiny_dir):
    original = {t.name: t for t in read_file(tiny_dir / "weights_released.safetensors") if t.name.startswith("mtp.")}
    tensors = open_shards(complete).tensors
    assert {name for name in tensors if name.startswith("mtp.")} == original.keys()
    for name, want in original.items():
        got = tensors[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.data.tobytes() == want.data.tobytes(), name


@pytest.mark.parametrize("mesh_shape", [None, (2, 2), (4, 1)], ids=str)
def test_round_trip_on_any_mesh(complete, drafting, config, mesh_shape):
    loaded = load_params(complete, config, mesh=mesh_shape and make_mesh(*mesh_shape), with_draft=True)
    assert loaded.draft is not None
    if mesh_shape:
        experts = loaded.draft.moe.experts.w1.payload
        assert experts.sharding.shard_shape(experts.shape)[1] == config.dspark_n_routed_experts // 4
    assert_same_tree(loaded.draft, drafting.draft)


def test_unpacked_draft_is_read(tiny_dir, config, drafting):
    unpacked = load_params(tiny_dir, config, weights_file=tiny_dir / "weights_bf16.safetensors", with_draft=True)
    for spec in draft_schema(config):
        got, want = (dequantize(leaf_at(p, spec.path), np.dtype(np.float32)) for p in (unpacked, drafting))
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=spec.path)


@pytest.mark.parametrize("with_draft", [False, True], ids=["backbone", "drafting"])
@pytest.mark.parametrize(
    "name",
    ["mtp.1.ffn.experts.3.w2.weight", "mtp.0.main_norm.weight", "mtp.1.markov_head.embed.weight", "mtp.0.hc_attn_fn"],
)
def test_missing_draft_tensor_is_named(checkpoint, config, name, with_draft):
    file = checkpoint.file_of(name)
    checkpoint.edit(file, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match="missing from") as error:
        load_params(checkpoint.directory, config, with_draft=with_draft)
    assert name in str(error.value) and str(file) in str(error.value)


def test_damaged_draft_scale_is_named_when_it_is_read(checkpoint, config):
    name = "mtp.0.main_proj.scale"

    def spoil(tensors):
        tensors[name].reshape(-1).view(np.uint8)[-1] = 255

    checkpoint.edit(checkpoint.file_of(name), spoil)
    assert load_params(checkpoint.directory, config).draft is None
    with pytest.raises(ValueError, match="1 NaN scales") as error:
        load_params(checkpoint.directory, config, with_draft=True)
    assert name in str(error.value)


def test_model_without_draft_stages_has_none(config):
    bare = dataclasses.replace(config, num_nextn_predict_layers=0, compress_ratios=config.backbone_ratios)
    assert draft_schema(bare) == ()
    assert with_random_draft(init_params(bare, seed=0), bare, seed=0).draft is None


@pytest.mark.parametrize("mesh_shape", [None, (2, 2)], ids=str)
def test_random_draft_leaves_the_backbone_alone(tiny_dir, config, mesh_shape):
    mesh = mesh_shape and make_mesh(*mesh_shape)
    drafting, _ = load_model(tiny_dir / "config.json", seed=3, mesh=mesh, with_draft=True)
    backbone = init_params(config, seed=3)
    want = with_random_draft(backbone, config, seed=3)
    assert_same_tree(jax.tree.leaves(drafting.draft), jax.tree.leaves(want.draft))
    assert_same_tree(want.attention, backbone.attention)
    assert len(param_schema(config, with_draft=True)) == len(param_schema(config, with_draft=False)) + len(
        draft_schema(config)
    )
