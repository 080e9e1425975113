"""The TinyByte model of the tests: a complete checkpoint, the same everywhere, made in a moment."""

import filecmp
import time

import numpy as np
import pytest

from deepinfer_jax import load_model
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.model.params import init_params, leaf_at, schema
from deepinfer_jax.testing import tiny
from deepinfer_jax.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.tiny_byte_model(tmp_path_factory.mktemp("tiny"), seed=5)


def test_it_loads_with_the_weights_of_its_seed(directory):
    params, config = load_model(directory)
    assert config == load_config(shipped_config(tiny.CONFIG_NAME))
    want = init_params(config, seed=5)
    np.testing.assert_array_equal(params.head, want.head)
    np.testing.assert_array_equal(params.moe.experts.w1.payload, want.moe.experts.w1.payload)
    assert all(leaf_at(params, spec.path) is not None for spec in schema(config))


def test_two_makings_are_the_same_files(directory, tmp_path):
    tiny.tiny_byte_model(tmp_path, seed=5)
    names = sorted(path.name for path in directory.iterdir())
    assert filecmp.cmpfiles(directory, tmp_path, names, shallow=False) == (names, [], [])


def test_making_it_takes_under_a_second(directory, tmp_path):
    start_s = time.process_time()
    tiny.tiny_byte_model(tmp_path, seed=1)
    assert time.process_time() - start_s < 1


def test_it_has_every_part_of_the_architecture():
    config = load_config(shipped_config(tiny.CONFIG_NAME))
    roles = layer_roles(config)
    assert {role.name for role in roles} == {"window", "full r2", "reuse r2", "full r1", "reuse r1", "reindex r1"}
    assert sum(not role.is_decoder for role in roles) >= 2
    assert sum(role.is_decoder for role in roles) >= 2
    assert (config.sliding_window, config.dspark_block_size, config.n_routed_experts) == (128, 5, 8)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert len(config.engram_layer_ids) == 2
    assert config.num_nextn_predict_layers > 0
    assert config.max_position_embeddings >= 4096


def test_its_tokenizer_names_every_id(directory):
    config = load_config(directory)
    tokenizer = load_tokenizer(directory, config=config)
    assert tokenizer.vocab_size == config.vocab_size <= 320
    assert tokenizer.token_text(config.image_token_id) == "<｜image｜>"
    assert tokenizer.token_text(config.dspark_noise_token_id) == "<｜draft｜>"
