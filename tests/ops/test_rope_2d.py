"""Two-dimensional rotation against complex numbers, and what it must keep."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.rope import frequencies
from deepinfer_jax.ops.rope_2d import angles_2d, rotate_halves
from deepinfer_jax.testing import compare

# Cosines, products and a sum in float32, at angles of a few thousand whose own float32 product is off by 1e-4.
ROTATION_REL_L2 = 2e-4
NEAR_REL_L2 = 1e-6
FREQS = frequencies(32, 10000.0, None)  # of heads of 64


def test_frequencies_are_those_of_the_specification():
    assert len(FREQS) == 16
    np.testing.assert_allclose(FREQS, 10000.0 ** (-2 * np.arange(16) / 32), rtol=1e-6)


@pytest.mark.parametrize("largest, tolerance", [(40, NEAR_REL_L2), (3063, ROTATION_REL_L2)], ids=["near", "longest"])
def test_pairs_turn_as_complex_numbers(exact_jit, seed_from_name: int, largest: int, tolerance: float):
    """Channel j + i * channel (j + 32): the first 16 by the row's angle, the others by the column's."""
    rng = np.random.default_rng(seed_from_name)
    rows, columns = rng.integers(0, largest, (2, 9))
    x = rng.standard_normal((9, 3, 64)).astype(np.float32)
    angles = np.concatenate([rows[:, None] * FREQS.astype(float), columns[:, None] * FREQS.astype(float)], axis=1)
    turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angles)[:, None, :]
    cos, sin = exact_jit(angles_2d)(jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32), FREQS)
    got = exact_jit(rotate_halves)(jnp.asarray(x), cos, sin)
    compare.assert_close(got, np.concatenate([turned.real, turned.imag], axis=-1), rel_l2=tolerance)


def test_the_first_patch_stays_as_it_is(exact_jit, seed_from_name: int):
    x = jnp.asarray(np.random.default_rng(seed_from_name).standard_normal((1, 2, 64)), jnp.bfloat16)
    zero = jnp.zeros(1, jnp.int32)
    compare.assert_bitwise(exact_jit(rotate_halves)(x, *angles_2d(zero, zero, FREQS)), x)
