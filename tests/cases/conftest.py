"""The common ground of the cases: a model, and engines over it, for each of two weight seeds."""

from pathlib import Path

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.testing import tiny


@pytest.fixture(scope="session", params=tiny.CASE_SEEDS, ids=lambda seed: f"weights{seed}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TinyByte model."""
    return tiny.tiny_byte_model(tmp_path_factory.mktemp("case"), seed=request.param)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    """Returns token objects."""
    return tiny.tiny_llm(model)


@pytest.fixture(scope="session")
def crowded_llm(model: Path) -> LLM:
    """Runs up to 33 requests at once."""
    return tiny.tiny_llm(model, **tiny.CROWDED)
