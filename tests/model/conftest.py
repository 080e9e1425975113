"""The recorded tiny model, loaded once."""

from pathlib import Path

import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import Params

TINY_A = Path(__file__).parents[1] / "data" / "tiny_a"


@pytest.fixture(scope="session")
def tiny_a() -> tuple[Params, RuntimeConfig]:
    config = load_config(TINY_A)
    params = load_params(TINY_A, config, weights_file=TINY_A / "weights_released.safetensors", progress=False)
    return params, RuntimeConfig(model=config)
