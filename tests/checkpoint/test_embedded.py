"""The embedded model: a complete checkpoint, made once, the same everywhere."""

import filecmp
import json
import time
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax import load_model
from deepinfer_jax.checkpoint import embedded
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.model.params import init_params, leaf_at, schema
from deepinfer_jax.text.tokenizer import load_tokenizer


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_made_once_and_loads(cache):
    directory = embedded.embedded_model()
    assert directory.is_relative_to(cache)
    times = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert embedded.embedded_model() == directory
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == times
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]  # no drafts left behind
    params, config = load_model(directory)
    assert config == load_config(shipped_config(embedded.CONFIG_NAME))
    want = init_params(config, seed=embedded.SEED)
    np.testing.assert_array_equal(params.head, want.head)
    np.testing.assert_array_equal(params.moe.experts.w1.payload, want.moe.experts.w1.payload)
    assert all(leaf_at(params, spec.path) is not None for spec in schema(config))


def test_two_makings_are_the_same_files(tmp_path):
    for name in ("a", "b"):
        embedded.write_tiny_byte_model(tmp_path / name, seed=5)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False) == (names, [], [])


def test_making_it_takes_under_a_second(tmp_path):
    embedded.write_tiny_byte_model(tmp_path / "imports", seed=1)
    start_s = time.process_time()
    embedded.write_tiny_byte_model(tmp_path / "timed", seed=1)
    assert time.process_time() - start_s < 1


def test_unusable_cache_gives_a_temporary_directory(cache):
    cache.write_text("a file where the folder should be")
    directory = embedded.embedded_model()
    assert not directory.is_relative_to(cache)
    load_model(directory)


def test_a_changed_shape_is_another_model(cache, monkeypatch, tmp_path):
    directory = embedded.embedded_model()
    raw = json.loads(shipped_config(embedded.CONFIG_NAME).read_text())
    raw["text_config"]["max_position_embeddings"] = 8192
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(raw))
    monkeypatch.setattr(embedded, "shipped_config", lambda name: changed)
    assert embedded.embedded_model() != directory


def test_it_has_every_part_of_the_architecture():
    config = load_config(shipped_config(embedded.CONFIG_NAME))
    roles = layer_roles(config)
    assert {role.name for role in roles} == {"window", "full r2", "reuse r2", "full r1", "reuse r1", "reindex r1"}
    assert sum(not role.is_decoder for role in roles) >= 2
    assert sum(role.is_decoder for role in roles) >= 2
    assert (config.sliding_window, config.dspark_block_size, config.n_routed_experts) == (128, 5, 8)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert len(config.engram_layer_ids) == 2
    assert config.num_nextn_predict_layers > 0
    assert config.max_position_embeddings >= 4096


def test_its_tokenizer_names_every_id(cache):
    config = load_config(shipped_config(embedded.CONFIG_NAME))
    tokenizer = load_tokenizer(embedded.embedded_model(), config=config)
    assert tokenizer.vocab_size == config.vocab_size <= 320
    assert tokenizer.token_text(config.image_token_id) == "<｜image｜>"
    assert tokenizer.token_text(config.dspark_noise_token_id) == "<｜draft｜>"
