"""The common ground of the cases: an engine for each of two weight seeds."""

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.testing import tiny


@pytest.fixture(scope="session", params=tiny.CASE_SEEDS, ids=lambda seed: f"weights{seed}")
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Returns token objects."""
    return tiny.tiny_llm(tiny.tiny_byte_model(tmp_path_factory.mktemp("case"), seed=request.param))
