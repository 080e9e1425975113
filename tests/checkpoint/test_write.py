"""The writer's files are what the reader, and the released config form, expect."""

import json

import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.checkpoint.names import expected_tensors, inventory
from deepinfer_jax.checkpoint.shards import check_coverage, open_shards, read_file
from deepinfer_jax.checkpoint.write import released_config, write_released
from deepinfer_jax.config.released import load_config, parse_config
from deepinfer_jax.parallel.mesh import make_mesh


def test_backbone_bytes_equal_the_original_file(written, tiny_dir, config):
    original = {t.name: t for t in read_file(tiny_dir / "weights_released.safetensors")}
    outside = {"mtp", "vision", "aligner", "image span"}
    expected = expected_tensors(config)
    shards = open_shards(written)
    names = [name for name, spec in expected.items() if spec.group not in outside]
    assert names
    for name in names:
        got, want = shards.tensors[name], original[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.data.tobytes() == want.data.tobytes(), name


def test_inventory_is_complete(written, config):
    shards = open_shards(written)
    check_coverage(shards, expected_tensors(config))
    assert shards.num_bytes == sum(t.num_bytes for t in inventory(config).values())


@pytest.mark.parametrize("num_shards", [1, 3, 50])
def test_files_hold_about_equal_shares(params, config, tmp_path, num_shards):
    write_released(params, config, tmp_path, num_shards=num_shards)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{num_shards:05d}.safetensors" for i in range(1, num_shards + 1)
    ]
    if num_shards == 3:
        sizes = [f.stat().st_size for f in files]
        assert max(sizes) < 1.2 * min(sizes)


def test_without_extras_only_the_backbone_is_written(params, config, tmp_path, tiny_dir):
    write_released(params, config, tmp_path, extras="none", tokenizer=tiny_dir / "tokenizer.json")
    with pytest.raises(ValueError, match="tensor mtp.0.attn_norm.weight is missing"):
        load_params(tmp_path, config)


def test_rows_that_a_mesh_added_are_not_written(written, config, tmp_path):
    write_released(load_params(written, config, mesh=make_mesh(8, 1)), config, tmp_path)
    got, want = open_shards(tmp_path), open_shards(written)
    assert got.tensors.keys() == want.tensors.keys()
    for name, tensor in want.tensors.items():
        np.testing.assert_array_equal(got.tensors[name].data.view(np.uint8), tensor.data.view(np.uint8))


def test_unpacked_parameters_are_refused(config, tiny_dir, tmp_path):
    unpacked = load_params(tiny_dir, config, weights_file=tiny_dir / "weights_bf16.safetensors")
    with pytest.raises(ValueError, match="attention.wq_a is bfloat16"):
        write_released(unpacked, config, tmp_path)


def test_number_of_files_is_checked(params, config, tmp_path):
    with pytest.raises(ValueError, match="num_shards=0"):
        write_released(params, config, tmp_path, num_shards=0)


def test_config_survives(written, config):
    assert parse_config(json.loads(json.dumps(released_config(config)))) == config
    assert load_config(written) == config
