"""Small shapes in which every mechanism is alive, and their masters."""

import numpy as np
import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.testing.random_config import random_config
from deepinfer_jax.training.init import initial_fixed, initial_masters
from deepinfer_jax.training.weights import Fixed, Masters

SEQ_LEN = 48  # above every window below 48, and more entries than an indexer takes


@pytest.fixture(scope="session")
def shape() -> ModelConfig:
    """A window of 5, two ratio-2 sources, candidate blocks that filter, Engram in two layers."""
    return random_config(3)


@pytest.fixture(scope="session")
def start(shape: ModelConfig) -> tuple[Masters, Fixed]:
    token_map = np.arange(shape.vocab_size, dtype=np.int32) % shape.engram_compressed_vocab_size
    return initial_masters(shape, seed=1), initial_fixed(shape, token_map)


@pytest.fixture(scope="session")
def tokens(shape: ModelConfig) -> np.ndarray:
    return np.random.default_rng(5).integers(5, shape.vocab_size, (3, SEQ_LEN)).astype(np.int32)
