"""Writes to places that all differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.scatter import put_where

PUT = jax.jit(put_where)


def test_only_what_is_kept_is_written():
    row = jnp.arange(3, dtype=jnp.int32)[:, None]
    column = jnp.asarray([[1, -1], [0, 3], [-1, -1]], jnp.int32)
    values = jnp.asarray([[10, 11], [12, 13], [14, 15]], jnp.int32)
    got = PUT(jnp.zeros((3, 4), jnp.int32), (row, column), values, column >= 0)
    np.testing.assert_array_equal(got, [[0, 10, 0, 0], [12, 0, 0, 13], [0, 0, 0, 0]])


def test_every_dropped_element_has_a_place_of_its_own():
    def places(is_kept):
        return put_where(jnp.zeros((4, 2)), (jnp.asarray([2, 2, 2, 2]), 1), jnp.ones(4), is_kept)

    [scatter] = [each for each in jax.make_jaxpr(places)(jnp.zeros(4, bool)).eqns if each.primitive.name == "scatter"]
    assert scatter.params["unique_indices"]
    got = places(jnp.asarray([False, True, False, False]))
    np.testing.assert_array_equal(got, [[0, 0], [0, 0], [0, 1], [0, 0]])


@pytest.mark.parametrize("lead", [1, jnp.asarray(1)], ids=["int", "scalar"])
def test_slices_and_single_indices_stand_beside_arrays(lead):
    array = jnp.zeros((2, 3, 4))
    got = put_where(array, (lead, jnp.asarray([2, -1]), slice(1, 3)), jnp.ones((2, 2)), jnp.asarray([True, False]))
    want = np.zeros((2, 3, 4))
    want[1, 2, 1:3] = 1
    np.testing.assert_array_equal(got, want)


def test_without_a_condition_everything_is_kept():
    order = jnp.asarray([2, 0, 1])
    np.testing.assert_array_equal(put_where(jnp.zeros(3, jnp.int32), (order,), jnp.arange(3)), [1, 2, 0])
