"""An orbax checkpoint gives the same bits on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.checkpoint.store import restore_params, save_params
from deepinfer_jax.checkpoint.write import write_released
from deepinfer_jax.model.params import Params
from deepinfer_jax.parallel.mesh import make_mesh


def bits(array: jax.Array) -> np.ndarray:
    values = np.asarray(array)
    return values.view(np.dtype(f"u{values.itemsize}"))


def assert_same_arrays(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(path))


@pytest.fixture(scope="module")
def saved(written, config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store") / "params"
    save_params(load_params(written, config, mesh=make_mesh(8, 1)), config, directory)
    return directory


@pytest.mark.parametrize("mesh_shape", [(8, 1), (2, 2), (1, 1), None], ids=str)
def test_restores_under_another_mesh(saved, written, config, mesh_shape):
    mesh = mesh_shape and make_mesh(*mesh_shape)
    got = restore_params(saved, config, mesh=mesh)
    want = load_params(written, config, mesh=mesh)
    assert_same_arrays(got, want)
    if mesh is not None:
        assert [a.sharding for a in jax.tree.leaves(got)] == [a.sharding for a in jax.tree.leaves(want)]


def test_chain_of_meshes_keeps_the_bits(saved, params, config, tmp_path):
    middle = restore_params(saved, config, mesh=make_mesh(2, 2))
    save_params(middle, config, tmp_path / "middle")
    assert_same_arrays(restore_params(tmp_path / "middle", config), params)


@pytest.fixture(scope="module")
def drafting(tiny_dir, config) -> Params:
    return load_params(tiny_dir, config, weights_file=tiny_dir / "weights_released.safetensors", with_draft=True)


@pytest.fixture(scope="module")
def written_draft(drafting, config, tiny_dir, tmp_path_factory):
    """A released-format checkpoint whose draft stages are those of `drafting`."""
    directory = tmp_path_factory.mktemp("drafting")
    write_released(drafting, config, directory, tokenizer=tiny_dir / "tokenizer.json")
    return directory


@pytest.fixture(scope="module")
def saved_draft(written_draft, config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store_draft") / "params"
    save_params(load_params(written_draft, config, mesh=make_mesh(4, 1), with_draft=True), config, directory)
    return directory


@pytest.mark.parametrize("mesh_shape", [(4, 1), (2, 2), (2, 1), (1, 1), None], ids=str)
def test_draft_stages_come_back_under_another_mesh(saved_draft, written_draft, drafting, config, mesh_shape):
    mesh = mesh_shape and make_mesh(*mesh_shape)
    got = restore_params(saved_draft, config, mesh=mesh)
    assert got.draft is not None
    assert_same_arrays(got.draft, drafting.draft)
    want = load_params(written_draft, config, mesh=mesh, with_draft=True)
    assert_same_arrays(got, want)
    if mesh is not None:
        assert [a.sharding for a in jax.tree.leaves(got)] == [a.sharding for a in jax.tree.leaves(want)]


def test_only_what_was_saved_decides_whether_there_is_a_draft(saved, saved_draft, params, config, tmp_path):
    assert config.num_nextn_predict_layers > 0
    assert restore_params(saved, config).draft is None
    bare = dataclasses.replace(restore_params(saved_draft, config), draft=None)
    save_params(bare, config, tmp_path / "bare")
    assert_same_arrays(restore_params(tmp_path / "bare", config), params)


def test_unpacked_draft_stages_survive(tiny_dir, config, tmp_path):
    unpacked = load_params(tiny_dir, config, weights_file=tiny_dir / "weights_bf16.safetensors", with_draft=True)
    save_params(unpacked, config, tmp_path / "p")
    assert_same_arrays(restore_params(tmp_path / "p", config), unpacked)


def test_unpacked_parameters_survive(tiny_dir, config, tmp_path):
    unpacked = load_params(tiny_dir, config, weights_file=tiny_dir / "weights_bf16.safetensors")
    save_params(unpacked, config, tmp_path / "p")
    assert_same_arrays(restore_params(tmp_path / "p", config), unpacked)


def test_another_config_is_refused(saved, config):
    other = dataclasses.replace(config, rope_theta=5e5)
    with pytest.raises(ValueError, match=r"another config: text_config.rope_theta differ"):
        restore_params(saved, other)


def test_wrong_directories_are_refused(saved, params, config, tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        save_params(params, config, saved)
    with pytest.raises(ValueError, match="is no directory"):
        restore_params(tmp_path / "absent", config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no parameters that save_params wrote"):
        restore_params(tmp_path / "empty", config)
