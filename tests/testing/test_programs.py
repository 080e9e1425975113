"""Compiled programs are forgotten when there are many or when they take much memory, and only then."""

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.testing.programs import forget_programs

NO_LIMITS = {"max_maps": 10_000_000, "max_bytes": 1 << 60}


@pytest.mark.parametrize("limit", ["max_maps", "max_bytes"])
def test_programs_are_forgotten_above_a_limit(limit):
    double = jax.jit(lambda x: 2 * x)
    assert double(jnp.ones(3)).sum() == 6 and double._cache_size() == 1
    assert not forget_programs(**NO_LIMITS)
    assert double._cache_size() == 1
    assert forget_programs(**NO_LIMITS | {limit: 0})
    assert double._cache_size() == 0 and double(jnp.ones(3)).sum() == 6
