"""The recorded component fixtures, and `jax.jit` as the product's steps use it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax.checkpoint.shards import read_file

COMPONENTS = Path(__file__).parent.parent / "data" / "components"

type Reader = Callable[[str], dict[str, np.ndarray]]
type Jit = Callable[..., Any]


@pytest.fixture(scope="session")
def component() -> Reader:
    """The tensors of one component fixture, by name."""

    @functools.cache
    def read(name: str) -> dict[str, np.ndarray]:
        return {tensor.name: np.array(tensor.data) for tensor in read_file(COMPONENTS / f"{name}.safetensors")}

    return read


@pytest.fixture(scope="session")
def exact_jit() -> Jit:
    """`jax.jit` without excess precision, as every step is compiled."""
    return functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
