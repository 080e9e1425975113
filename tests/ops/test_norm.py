"""The root-mean-square norm against the recorded one, and its edges."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.testing import compare

EPS = 1e-20
# A float32 mean in another order and a reciprocal root that may be one ulp off.
F32_REL_L2 = 2e-7
# One bf16 rounding (2^-9 relative at worst) that such an ulp turns over now and then.
BF16_REL_L2 = 2e-3


def test_recorded_norm_is_met(component, exact_jit):
    fixture = component("rmsnorm")
    made = exact_jit(lambda x, w: rms_norm(x, w, eps=EPS))(fixture["x"], fixture["weight"])
    compare.assert_close(made, fixture["out"], rel_l2=F32_REL_L2)
    for row in range(len(made)):  # rows of 1e-15 do not hide behind large ones
        compare.assert_close(made[row], fixture["out"][row], rel_l2=F32_REL_L2)


def test_recorded_bf16_norm_is_bit_equal(component, exact_jit):
    fixture = component("rmsnorm")
    made = exact_jit(lambda x, w: rms_norm(x, w, eps=EPS))(fixture["x_bf16"], fixture["weight"])
    compare.assert_bitwise(made, fixture["out_bf16"])


def test_weight_is_multiplied_before_the_only_rounding(exact_jit):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 128), np.float32).astype(ml_dtypes.bfloat16)
    w = rng.standard_normal(128, np.float32).astype(ml_dtypes.bfloat16)
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    want = (w64 * (x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True)))).astype(ml_dtypes.bfloat16)
    made = np.asarray(exact_jit(lambda x, w: rms_norm(x, w, eps=EPS))(x, w))
    compare.assert_close(made, want, rel_l2=BF16_REL_L2 / 100)


def test_zero_rows_give_zero():
    for dtype in (jnp.float32, jnp.bfloat16):
        zeros = jnp.zeros((2, 32), dtype)
        compare.assert_bitwise(rms_norm(zeros, jnp.ones(32), eps=EPS), zeros)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (0, 8)], ids=["vector", "one", "deep", "empty"])
def test_leading_axes_are_rows(shape: tuple[int, ...]):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    weight = jnp.arange(8, dtype=jnp.float32)
    rows = [rms_norm(row[None], weight, eps=EPS)[0] for row in x.reshape(-1, 8)]
    made = rms_norm(x, weight, eps=EPS)
    assert made.shape == shape
    if rows:
        compare.assert_close(made.reshape(-1, 8), jnp.stack(rows), rel_l2=F32_REL_L2)
