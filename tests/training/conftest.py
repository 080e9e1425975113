"""A small shape in which every mechanism is alive, its masters, and a small corpus."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.text.engram_vocab import bucket_primes, build_token_map
from deepinfer_jax.training.data import TrainingData, encode_corpus
from deepinfer_jax.training.init import initial_fixed, initial_masters
from deepinfer_jax.training.weights import Fixed, Masters

SEQ_LEN = 32  # four windows, and more entries than an indexer takes
VOCAB_SIZE = 320
PACKAGE = Path(__file__).parents[2] / "deepinfer_jax"


def small_shape() -> ModelConfig:
    """Both ratios, reindexing among candidates that filter, Engram twice, two draft stages."""
    primes = bucket_primes(2, 4, 1, 40)
    return dataclasses.replace(
        load_config(shipped_config("model/tiny-code.json")),
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        n_routed_experts=6,
        num_experts_per_tok=2,
        sliding_window=8,
        compress_ratios=(0, 2, 1, 1, 0, 0),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        index_n_heads=2,
        index_topk=6,
        candidate_source_layer_id=2,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        engram_layer_ids=(0, 3),
        engram_num_embeddings=tuple(sum(map(sum, layer)) for layer in primes),
        engram_max_ngram_size=4,
        engram_vocab_size=40,
        engram_n_heads=1,
        engram_compressed_vocab_size=VOCAB_SIZE,
        num_nextn_predict_layers=2,
        dspark_block_size=3,
        dspark_noise_token_id=VOCAB_SIZE - 12,
        dspark_target_layer_ids=(2, 3),
        dspark_markov_rank=16,
        dspark_n_routed_experts=4,
        image_token_id=VOCAB_SIZE - 1,
    )


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted((PACKAGE / "ops").glob("*.py"))}
    held_out = {"norm.py": texts.pop("norm.py")}
    return encode_corpus(texts, held_out, tmp_path_factory.mktemp("corpus"), vocab_size=VOCAB_SIZE, eos_id=1)


@pytest.fixture(scope="session")
def compressed(source: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(source.tokenizer, encoding="utf-8")
    return build_token_map(file, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def shape(compressed: np.ndarray) -> ModelConfig:
    return dataclasses.replace(small_shape(), engram_compressed_vocab_size=int(compressed.max()) + 1)


@pytest.fixture(scope="session")
def start(shape: ModelConfig, compressed: np.ndarray) -> tuple[Masters, Fixed]:
    return initial_masters(shape, seed=1), initial_fixed(shape, compressed)


@pytest.fixture(scope="session")
def tokens(shape: ModelConfig) -> np.ndarray:
    return np.random.default_rng(5).integers(3, shape.vocab_size, (3, SEQ_LEN)).astype(np.int32)
