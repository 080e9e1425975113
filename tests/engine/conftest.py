"""One TinyByte model and one engine over it for all engine tests of a process."""

from pathlib import Path

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.testing import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_byte_model(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> LLM:
    """Returns token objects; four slots, steps of 8 and 64 rows."""
    return tiny.tiny_llm(tiny_model)


@pytest.fixture(scope="session")
def text_llm(tiny_model: Path) -> LLM:
    """Returns texts; the same compiled steps."""
    return tiny.tiny_llm(tiny_model, decode_sequence=True)
