"""Shapes and dtypes in signatures are checked while tests run; without the checks a green run would mean less."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from deepinfer_jax.ops.norm import rms_norm


def test_a_shape_that_contradicts_a_signature_is_refused():
    with pytest.raises(TypeCheckError, match="weight"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(5), eps=1e-6)
