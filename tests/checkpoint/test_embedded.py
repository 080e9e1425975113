"""The embedded model: a part of the package, complete, and trained."""

import functools
import json
import re

import jax
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax import forward, init_state, load_model
from deepinfer_jax.checkpoint.embedded import embedded_model
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model import params
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.text.tokenizer import load_tokenizer
from deepinfer_jax.training.tokenizer import check_special_tokens

MEGABYTE = 10**6
CODE = '''def parse_header(line):
    """Return the name and the value of a header line."""
    name, _, value = line.partition(":")
    if not name:
        raise ValueError("missing name")
    return name.strip().lower(), value.strip()
'''
# Measured 0.89; weights that know nothing take log2(4096) bits for each of 57 tokens, which is 3.0.
MOST_BITS_PER_BYTE = 1.1


@pytest.fixture(scope="module")
def config():
    return load_config(embedded_model())


def test_it_is_a_part_of_the_package_and_small():
    directory = embedded_model()
    assert directory.is_relative_to(deepinfer_jax.__path__[0])
    sizes = {file.name: file.stat().st_size for file in directory.iterdir()}
    assert sum(sizes.values()) < 20 * MEGABYTE
    assert max(sizes.values()) < 16 * MEGABYTE


def test_its_shape_is_the_one_that_was_trained(config):
    assert config == load_config(shipped_config("model/tiny-code.json"))


def test_it_has_every_part_of_the_architecture(config):
    roles = layer_roles(config)
    assert {role.name for role in roles} == {"window", "full r2", "reuse r2", "full r1", "reuse r1", "reindex r1"}
    assert (config.sliding_window, config.hc_mult, config.dspark_block_size) == (128, 4, 5)
    assert config.n_routed_experts >= 16
    assert len(config.engram_layer_ids) == 2
    assert config.num_nextn_predict_layers > 0
    assert config.max_position_embeddings >= 4096


def test_its_tokenizer_names_every_id(config):
    check_special_tokens(config)
    tokenizer = load_tokenizer(embedded_model(), config=config)
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.token_text(config.image_token_id) == "<｜deepseek_image｜>"
    assert tokenizer.decode(tokenizer.encode_bare(CODE)) == CODE


def test_it_loads_with_every_part_and_knows_python():
    loaded, config = load_model(embedded_model(), with_draft=True, with_vision=True, progress=False)
    assert all(params.leaf_at(loaded, spec.path) is not None for spec in params.schema(config))
    assert loaded.draft is not None and loaded.vision is not None
    ids = load_tokenizer(embedded_model(), config=config).encode(CODE)
    runtime = RuntimeConfig(model=config, numerics="q")
    batch = make_batch([ids], starts=[0], slots=[0], page_table=np.array([[0]]), logits="all")
    state = init_state(runtime, num_slots=1, num_pages=1)
    output, _ = jax.jit(functools.partial(forward, config=runtime))(loaded, state, batch)
    logprobs = np.asarray(jax.nn.log_softmax(output.logits))[np.arange(len(ids) - 1), ids[1:]]
    assert -logprobs.sum() / np.log(2) / len(CODE.encode()) < MOST_BITS_PER_BYTE


def test_the_card_tells_the_files_that_are_there():
    directory = embedded_model()
    card = (directory / "MODEL_CARD.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \|", card, flags=re.MULTILINE))
    assert named == {file.name for file in directory.iterdir()} - {"MODEL_CARD.md"}
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) <= named
