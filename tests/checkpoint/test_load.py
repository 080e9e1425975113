"""Loading: the right values in their packed form, on any mesh, and every fault found before compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint import transform
from deepinfer_jax.checkpoint.load import load_model, load_params, place_params
from deepinfer_jax.checkpoint.locate import locate_model
from deepinfer_jax.checkpoint.names import inventory
from deepinfer_jax.checkpoint.shards import read_file
from deepinfer_jax.config.released import load_config
from deepinfer_jax.model.params import init_params, leaf_at, schema
from deepinfer_jax.model.shardings import param_shardings, placed_params
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.parallel.mesh import make_mesh

# Arrays on the device against tensors of the file; the token map, which no file holds, is what differs.
LIVE_BYTES_TOLERANCE = 0.05
ROOT = Path(__file__).parents[2]


def bits(array: jax.Array) -> np.ndarray:
    values = np.asarray(array)
    return values.view(np.dtype(f"u{values.itemsize}"))


def assert_same_tree(got, want):
    """Same structure, dtypes and bits; rows that a mesh added must be zero."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(bits(a)[: b.shape[0]], bits(b), err_msg=str(path))
        assert not bits(a)[b.shape[0] :].any(), path


@pytest.fixture(scope="module")
def unpacked(tiny_dir, config):
    return load_params(tiny_dir, config, weights_file=tiny_dir / "weights_bf16.safetensors")


@pytest.mark.parametrize("dtype", [jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)], ids=str)
def test_packed_weights_equal_their_unpacked_form(params, unpacked, config, dtype):
    for spec in schema(config):
        got, want = leaf_at(params, spec.path), leaf_at(unpacked, spec.path)
        if spec.path == "engram.token_map":
            np.testing.assert_array_equal(got, want)
            continue
        assert isinstance(got, ScaledArray) == isinstance(want, ScaledArray)
        np.testing.assert_array_equal(bits(dequantize(got, dtype)), bits(dequantize(want, dtype)), err_msg=spec.path)


def test_unpacked_weights_have_no_scales(unpacked):
    assert unpacked.moe.experts.w1.scale is None
    assert unpacked.moe.experts.w1.payload.dtype == ml_dtypes.bfloat16


def test_token_map_is_the_recorded_one(params, tiny_dir):
    recorded = {t.name: t.data for t in read_file(tiny_dir / "prompts.safetensors")}["token_map"]
    np.testing.assert_array_equal(np.asarray(params.engram.token_map), recorded)


def test_leaves_have_the_shapes_of_the_schema(params, config):
    def describe(tree):
        return [(a.shape, a.dtype) for a in jax.tree.leaves(tree)]

    assert describe(params) == describe(placed_params(config, None))


def test_live_bytes_are_those_of_the_files(written, config):
    outside = {"mtp", "vision", "aligner", "image span"}
    file_bytes = sum(t.num_bytes for n, t in inventory(config).items() if n not in outside)
    before = {id(a) for a in jax.live_arrays()}
    loaded = load_params(written, config)
    live_bytes = sum(a.nbytes for a in jax.live_arrays() if id(a) not in before)
    assert live_bytes == sum(a.nbytes for a in jax.tree.leaves(loaded))
    assert abs(live_bytes / file_bytes - 1) < LIVE_BYTES_TOLERANCE


def test_several_files_equal_one(written, config, params):
    assert_same_tree(load_params(written, config), params)


@pytest.mark.parametrize("dp, cp", [(8, 1), (2, 2), (1, 8)])
def test_sharded_equals_unsharded(written, config, params, dp, cp):
    mesh = make_mesh(dp, cp)
    loaded = load_params(written, config, mesh=mesh)
    assert_same_tree(loaded, params)
    shardings = param_shardings(config, mesh)
    for array, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding
    experts = loaded.moe.experts.w1.payload
    assert experts.sharding.shard_shape(experts.shape)[1] == 8 // (dp * cp)


@pytest.mark.parametrize("mesh_shape", [None, (8, 1)], ids=["single", "8x1"])
def test_every_byte_is_read_once(written, config, monkeypatch, mesh_shape):
    read_bytes = 0
    original = transform._read

    def counted(source, tensor, inner):
        nonlocal read_bytes
        values = original(source, tensor, inner)
        read_bytes += values.nbytes
        return values

    monkeypatch.setattr(transform, "_read", counted)
    load_params(written, config, mesh=mesh_shape and make_mesh(*mesh_shape))
    assert read_bytes == sum(s.num_bytes for s in schema(config) if s.path != "engram.token_map")


def test_rules_can_be_overridden(written, config, params):
    loaded = load_params(written, config, mesh=make_mesh(2, 2), rules={"expert": None, "vocab": "dp"})
    assert loaded.moe.experts.w1.payload.sharding.is_fully_replicated
    assert loaded.embed.sharding.shard_shape(loaded.embed.shape) == (160, 64)
    assert_same_tree(loaded, params)


def test_size_that_the_mesh_does_not_divide_is_refused(written, config):
    with pytest.raises(ValueError, match=r"embed \(payload\): axis 'vocab' of size 320 .*'dp': 3"):
        load_params(written, config, mesh=make_mesh(3, 1), rules={"vocab": "dp"})


@pytest.mark.parametrize("spare, places", [(0, 9), (2, 12)])
def test_places_for_experts_are_filled_up_with_zeros(written, config, params, spare, places):
    loaded = load_params(written, config, mesh=make_mesh(3, 1), spare_experts=spare)
    placed = place_params(params, config, mesh=make_mesh(3, 1), spare_experts=spare)
    assert_same_tree(loaded, placed)
    for whole, own in zip(jax.tree.leaves(loaded.moe.experts), jax.tree.leaves(params.moe.experts), strict=True):
        assert whole.shape[1] == places
        np.testing.assert_array_equal(whole[:, :8], own)
        assert not np.asarray(whole[:, 8:]).any()


def test_norms_and_compressors_may_be_float32(checkpoint, config, params):
    names = [n for n in checkpoint.weight_map if n.endswith("q_norm.weight") or ".compressor.wkv" in n]

    def widen(tensors):
        for name in set(names) & set(tensors):
            tensors[name] = tensors[name].astype(np.float32)

    for file in set(checkpoint.weight_map.values()):
        checkpoint.edit(checkpoint.directory / file, widen)
    loaded = load_params(checkpoint.directory, config)
    for path in ("attention.q_norm", "compressor.wkv"):
        got, want = leaf_at(loaded, path), leaf_at(params, path)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(jnp.float32)))


# Faults: tensor, damage, what the error must say besides tensor and file.
NAN_BYTE = 255


def drop(tensors, name):
    del tensors[name]


def add(tensors, name):
    tensors["layers.0.attn.extra.weight"] = tensors[name]


def reshape(tensors, name):
    tensors[name] = tensors[name].reshape(-1)


def transpose(tensors, name):
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def widen(tensors, name):
    tensors[name] = tensors[name].astype(np.float32)


def spoil_scale(tensors, name):
    tensors[name].reshape(-1).view(np.uint8)[-1] = NAN_BYTE


EXPERT = "layers.5.ffn.experts.7.w2"


@pytest.mark.parametrize(
    "name, damage, message",
    [
        pytest.param(f"{EXPERT}.weight", drop, "missing from", id="missing"),
        pytest.param("vision.blocks.1.attn.wo.bias", drop, "missing from", id="missing-vision"),
        pytest.param("layers.0.attn.wkv.weight", reshape, "has shape .4096.", id="shape"),
        pytest.param("mtp.0.main_proj.scale", transpose, "asks for .2, 6.", id="shape-draft"),
        pytest.param("layers.3.engram.q_weight", widen, "is F32; it must be BF16", id="dtype"),
        pytest.param("layers.1.attn.indexer.wq_b.weight", widen, "it must be F8_E4M3", id="dtype-fp8"),
        pytest.param(f"{EXPERT}.scale", spoil_scale, "1 NaN scales", id="nan-expert"),
        pytest.param("layers.3.engram.embed.scale", spoil_scale, "1 NaN scales", id="nan-engram"),
        pytest.param("layers.7.attn.wo_b.scale", spoil_scale, "1 NaN scales", id="nan-fp8"),
    ],
)
@pytest.mark.parametrize("mesh_shape", [None, (2, 2)], ids=["single", "2x2"])
def test_damaged_tensor_is_named(checkpoint, config, name, damage, message, mesh_shape):
    file = checkpoint.file_of(name)
    checkpoint.edit(file, lambda tensors: damage(tensors, name))
    with pytest.raises(ValueError, match=message) as error:
        load_params(checkpoint.directory, config, mesh=mesh_shape and make_mesh(*mesh_shape))
    assert name in str(error.value) and str(file) in str(error.value)


def test_unexpected_tensor_is_named(checkpoint, config):
    name = "layers.0.attn.extra.weight"
    file = checkpoint.file_of("head.weight")
    checkpoint.edit(file, lambda tensors: add(tensors, "head.weight"))
    with pytest.raises(ValueError, match="lists it in no file") as error:
        load_params(checkpoint.directory, config)
    assert name in str(error.value) and str(file) in str(error.value)
    checkpoint.edit_index(lambda weight_map: weight_map.update({name: file.name}))
    with pytest.raises(ValueError, match="unexpected") as error:
        load_params(checkpoint.directory, config)
    assert name in str(error.value) and str(file) in str(error.value)


def test_tensor_in_two_files_is_named(checkpoint, config):
    name, other = "norm.weight", checkpoint.file_of("image_end")
    data = np.zeros(64, ml_dtypes.bfloat16)
    assert other != checkpoint.file_of(name)
    checkpoint.edit(other, lambda tensors: tensors.update({name: data}))
    with pytest.raises(ValueError, match=f"tensor {name} is in {other}, but .* lists it in"):
        load_params(checkpoint.directory, config)


def test_tensor_missing_everywhere_is_named(checkpoint, config):
    name = f"{EXPERT}.scale"
    checkpoint.edit(checkpoint.file_of(name), lambda tensors: drop(tensors, name))
    checkpoint.edit_index(lambda weight_map: weight_map.pop(name))
    with pytest.raises(ValueError, match=f"tensor {name} is missing from {checkpoint.directory}"):
        load_params(checkpoint.directory, config)


def test_packed_weights_without_any_scale_are_refused(checkpoint, config):
    def drop_scales(tensors):
        for name in [n for n in tensors if n.endswith(".scale")]:
            del tensors[name]

    for file in set(checkpoint.weight_map.values()):
        checkpoint.edit(checkpoint.directory / file, drop_scales)
    scales = [n for n in checkpoint.weight_map if n.endswith(".scale")]
    checkpoint.edit_index(lambda weight_map: [weight_map.pop(n) for n in scales])
    with pytest.raises(ValueError, match="tensor layers.0.attn.wq_a.scale is missing"):
        load_params(checkpoint.directory, config)


def test_absent_and_truncated_files_are_named(checkpoint, config):
    file = checkpoint.file_of("layers.2.attn.wkv.weight")
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=f"{file} is truncated: tensor .* ends at"):
        load_params(checkpoint.directory, config)
    file.unlink()
    with pytest.raises(ValueError, match=f"file {file} is absent"):
        load_params(checkpoint.directory, config)


def test_out_of_range_offsets_are_named(checkpoint, config):
    file = checkpoint.file_of("embed.weight")

    def shift(header):
        last = max(header, key=lambda name: header[name]["data_offsets"])
        begin, end = header[last]["data_offsets"]
        header[last]["data_offsets"] = [begin + 4096, end + 4096]

    checkpoint.edit_header(file, shift)
    with pytest.raises(ValueError, match="leaves a gap") as error:
        load_params(checkpoint.directory, config)
    assert str(file) in str(error.value)


def test_tokenizer_of_another_model_is_refused(checkpoint, config):
    (checkpoint.directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json is absent"):
        load_params(checkpoint.directory, config)


def test_load_model_of_a_directory(written, config, params):
    loaded, got_config = load_model(written, progress=False)
    assert got_config == config
    assert_same_tree(loaded, params)


@pytest.mark.parametrize("mesh_shape", [None, (8, 1)], ids=["single", "8x1"])
def test_config_file_and_dummy_format_give_random_weights(tiny_dir, config, mesh_shape):
    mesh = mesh_shape and make_mesh(*mesh_shape)
    want = init_params(config, seed=3)
    bare, _ = load_model(tiny_dir / "config.json", seed=3, mesh=mesh)
    dummy, _ = load_model(tiny_dir, load_format="dummy", seed=3, mesh=mesh)
    assert_same_tree(bare, want)
    assert_same_tree(dummy, want)
    if mesh is not None:
        assert bare.moe.experts.w1.payload.sharding == param_shardings(config, mesh).moe.experts.w1.payload


def test_unreadable_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no existing directory or config file"):
        load_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="config.json"):
        load_model(tmp_path)


def run_locate(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    """`locate_model` in a process of its own: the hub reads its environment on import."""
    code = f"from deepinfer_jax.checkpoint.locate import locate_model; print(locate_model({name!r}))"
    environ = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)


def test_hugging_face_cache_is_used_offline(written, config, params, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).symlink_to(written, target_is_directory=True)
    found = run_locate("someone/tiny", tmp_path)
    assert found.returncode == 0, found.stderr
    directory = Path(found.stdout.strip())
    assert directory.resolve() == written.resolve()
    assert_same_tree(load_params(directory, load_config(directory)), params)


def test_uncached_model_offline_says_what_to_do(tmp_path):
    found = run_locate("someone/absent", tmp_path)
    assert found.returncode == 1
    assert "ValueError: model 'someone/absent' is no local path" in found.stderr
    assert "HF_HOME" in found.stderr


def test_local_path_wins_over_an_id(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model("owner/name") == Path("owner/name")


def test_index_lists_every_file(checkpoint):
    index = json.loads((checkpoint.directory / "model.safetensors.index.json").read_text())
    total = sum(t.data.nbytes for f in set(index["weight_map"].values()) for t in read_file(checkpoint.directory / f))
    assert index["metadata"]["total_size"] == total
