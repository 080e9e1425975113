"""A linear layer with a bias rounds once, after the bias, and treats every row alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.affine import affine
from deepinfer_jax.testing import compare

# A float32 sum of 96 products in another order.
SUM_REL_L2 = 1e-6


def operands(seed: int, rows: int, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x, weight, bias = (rng.standard_normal(shape) for shape in ((rows, 96), (40, 96), (40,)))
    return jnp.asarray(x, dtype), jnp.asarray(weight, jnp.bfloat16), jnp.asarray(bias, jnp.bfloat16)


@pytest.mark.parametrize("rows", [0, 1, 5], ids=["empty", "one", "ragged"])
def test_float32_is_the_sum_and_the_bias(exact_jit, seed_from_name: int, rows: int):
    x, weight, bias = operands(seed_from_name, rows, jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(bias, np.float64)
    compare.assert_close(exact_jit(affine)(x, weight, bias), want, rel_l2=SUM_REL_L2)


def test_bfloat16_is_rounded_once_behind_the_bias(exact_jit):
    """1 + 2^-9 is no bf16 value: rounded in front of the bias, the small part would be lost."""
    x = jnp.asarray([[1.0, 2.0**-9]], jnp.bfloat16)
    weight, bias = jnp.ones((1, 2), jnp.bfloat16), jnp.asarray([-1.0], jnp.bfloat16)
    assert float(exact_jit(affine)(x, weight, bias)[0, 0]) == 2.0**-9
    assert exact_jit(affine)(x, weight, bias).dtype == jnp.bfloat16
