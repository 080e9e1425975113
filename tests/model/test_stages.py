"""Stages can be seen and replaced; what nothing reads cannot be replaced."""

import functools

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.model.params import Params
from tests.model.running import new_state


def traced(tiny_a: tuple[Params, RuntimeConfig], **options):
    params, config = tiny_a
    state, pages = new_state(config)
    batch = make_batch([[5, 6, 7]], [0], [0], pages)
    return jax.eval_shape(functools.partial(forward, config=config, **options), params, state, batch)


@pytest.mark.parametrize("name", ["layers.1.index_k"])
def test_a_view_of_packed_rows_cannot_be_forced(tiny_a, name):
    output, _ = traced(tiny_a, capture=(name,))
    value = output.stages[name]
    with pytest.raises(ValueError, match="would have no effect"):
        traced(tiny_a, forced_selection={name: jnp.zeros(value.shape, value.dtype)})


def test_unknown_names_are_refused(tiny_a):
    with pytest.raises(ValueError, match="match no stage"):
        traced(tiny_a, capture=("layers.99.attn_in",))
    with pytest.raises(ValueError, match="does not have"):
        traced(tiny_a, forced_selection={"layers.99.attn_in": jnp.zeros((3, 4))})
