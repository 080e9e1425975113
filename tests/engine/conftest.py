"""One TinyByte model for all engine tests of a process, and engines over it that share their compiled step."""

from pathlib import Path

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.testing import tiny
from deepinfer_jax.testing.agreeing import write_agreeing_model
from tests.engine import driving


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_byte_model(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def agreeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose drafts are kept in part."""
    return write_agreeing_model(tmp_path_factory.mktemp("agreeing"), seed=1)


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> LLM:
    """Returns token objects; four slots."""
    return tiny.tiny_llm(tiny_model)


@pytest.fixture(scope="session")
def text_llm(tiny_model: Path) -> LLM:
    """Returns texts; the same compiled step."""
    return tiny.tiny_llm(tiny_model, decode_sequence=True)


@pytest.fixture(scope="session")
def undisturbed(tiny_model: Path) -> dict[str, driving.Facts]:
    """What `driving.add_many` gives in an engine where nothing else happens."""
    engine = tiny.tiny_engine(tiny_model)
    driving.add_many(engine)
    return driving.facts(driving.drain(engine))
