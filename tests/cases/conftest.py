"""The common ground of the cases: a model, and engines over it, for each of two weight seeds (one without --all)."""

from pathlib import Path

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.testing import tiny
from deepinfer_jax.testing.agreeing import write_agreeing_model

SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1), id=f"weights{seed}") for seed in tiny.CASE_SEEDS]


@pytest.fixture(scope="session", params=SEEDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TinyByte model."""
    return tiny.tiny_byte_model(tmp_path_factory.mktemp("case"), seed=request.param)


@pytest.fixture(scope="session", params=SEEDS)
def agreeing_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TinyByte model whose drafts are kept in part."""
    return write_agreeing_model(tmp_path_factory.mktemp("agreeing"), seed=request.param)


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    """Returns token objects."""
    return tiny.tiny_llm(model)


@pytest.fixture(scope="session")
def crowded_llm(model: Path) -> LLM:
    """Runs up to 33 requests at once."""
    return tiny.tiny_llm(model, **tiny.CROWDED)
