"""A reduction that depends on the batch, to be planted in one layer."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.model import layer as layers
from deepinfer_jax.testing import microscope


def plant(monkeypatch: pytest.MonkeyPatch, *, faulty_layer: int) -> Iterator[None]:
    """While it is planted, rows at odd places of a step round the sum of their first two experts on its way.

    Compiled programs are forgotten before and after, since none of them knows of it.
    """
    right = layers.run_experts

    def rounded(moe, routed, is_live, *, layer, **options):
        outputs = right(moe, routed, is_live, layer=layer, **options)
        partial = outputs[:, 0] + outputs[:, 1]
        in_two_steps = outputs.at[:, 0].set(partial).at[:, 1].set(0)
        is_wrong = (jnp.arange(outputs.shape[0]) % 2 == 1) & (jnp.asarray(layer) == faulty_layer)
        return jnp.where(is_wrong[:, None, None], in_two_steps, outputs)

    monkeypatch.setattr(layers, "run_experts", rounded)
    _forget_programs()
    yield
    _forget_programs()


def _forget_programs() -> None:
    microscope._compiled.cache_clear()
    jax.clear_caches()
