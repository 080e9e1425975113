"""The common ground of the cases: a model whose drafts are kept in part, and engines over it, without drafts and with.

Every case runs without drafts on one model by default, and without and with them on two models under --all.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_jax import LLM
from deepinfer_jax.testing import tiny
from deepinfer_jax.testing.agreeing import write_agreeing_model

DRAFTS = (5, 0)
VARIANTS = [
    pytest.param(
        (seed, drafts),
        marks=[pytest.mark.slow] * ((seed, drafts) != (tiny.CASE_SEEDS[0], 0)),
        id=f"weights{seed}-drafts{drafts}",
    )
    for seed in tiny.CASE_SEEDS
    for drafts in DRAFTS
]


@functools.cache
def model_of(seed: int, folder: Path) -> Path:
    """The TinyByte model of a weight seed."""
    return write_agreeing_model(folder / f"weights{seed}", seed=seed)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this process are."""
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Weight seed and number of drafts."""
    return request.param


@pytest.fixture(
    scope="session", params=[pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in tiny.CASE_SEEDS]
)
def agreeing_model(request: pytest.FixtureRequest, models: Path) -> Path:
    """A model for cases that choose their number of drafts themselves."""
    return model_of(request.param, models)


@pytest.fixture(scope="session")
def model(variant: tuple[int, int], models: Path) -> Path:
    """The model of a variant."""
    return model_of(variant[0], models)


@pytest.fixture(scope="session")
def make_llm(variant: tuple[int, int], model: Path) -> Callable[..., LLM]:
    """Makes an engine of a variant."""
    return functools.partial(tiny.tiny_llm, model, num_draft_tokens=variant[1])


@pytest.fixture(scope="session")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    """Returns token objects."""
    return make_llm()


@pytest.fixture(scope="session")
def crowded_llm(make_llm: Callable[..., LLM]) -> LLM:
    """Runs up to 33 requests at once."""
    return make_llm(**tiny.CROWDED)
