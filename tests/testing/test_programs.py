"""Compiled programs are forgotten when there are many, and only then."""

import jax
import jax.numpy as jnp

from deepinfer_jax.testing.programs import forget_programs


def test_programs_are_forgotten_where_maps_are_many():
    double = jax.jit(lambda x: 2 * x)
    assert double(jnp.ones(3)).sum() == 6 and double._cache_size() == 1
    assert not forget_programs(max_maps=10_000_000)
    assert double._cache_size() == 1
    assert forget_programs(max_maps=0)
    assert double._cache_size() == 0 and double(jnp.ones(3)).sum() == 6
