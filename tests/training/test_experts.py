"""All experts on all rows against rows grouped by expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import moe
from deepinfer_jax.ops.quant import fp8_roundtrip
from deepinfer_jax.testing import compare

ROWS, WIDTH, INNER, EXPERTS = 19, 32, 64, 5
# One float32 sum over chosen experts and their inner width, in another order.
FP32_REL_L2 = 1e-6
# Reference: each expert's output is rounded to bfloat16 before the sum (2^-9 each); here the sum is rounded once.
BF16_REL_L2 = 5e-3


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("dtype, rel_l2", [(jnp.float32, FP32_REL_L2), (jnp.bfloat16, BF16_REL_L2)])
def test_equals_grouped_rows(dtype, rel_l2: float, quantizes: bool):
    rng = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / 4, dtype)  # noqa: E731
    u, w1, w2, w3 = (
        draw(ROWS, WIDTH),
        draw(EXPERTS, INNER, WIDTH),
        draw(EXPERTS, WIDTH, INNER),
        draw(EXPERTS, INNER, WIDTH),
    )
    u = fp8_roundtrip(u) if quantizes else u
    ids = jnp.asarray(np.argsort(rng.random((ROWS, EXPERTS)), axis=1)[:, :2], jnp.int32)
    weights = jnp.asarray(rng.random((ROWS, 2), np.float32))
    options = {"limit": 0.5, "quantizes": quantizes}

    def grouped(u, w1, w2, w3):
        apply = lambda e, x, weight: moe.expert(x, w1[e], w2[e], w3[e], weight, **options)  # noqa: E731
        made = moe.routed_experts(u, ids, weights, jnp.ones(ROWS, bool), apply, num_experts=EXPERTS, tile=8)
        return jnp.sum(made.astype(jnp.float32), axis=1)

    want = jax.jit(grouped)(u, w1, w2, w3)
    got = jax.jit(lambda *arrays: moe.every_expert(arrays[0], ids, weights, *arrays[1:], **options))(u, w1, w2, w3)
    assert got.dtype == dtype
    compare.assert_close(got.astype(jnp.float32), want, rel_l2=rel_l2)


def test_an_expert_that_nobody_chose_gets_no_gradient():
    rng = np.random.default_rng(4)
    u, w1, w2, w3 = (
        jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((4, 8), (3, 16, 8), (3, 8, 16), (3, 16, 8))
    )
    ids, weights = jnp.asarray([[0], [2], [2], [0]], jnp.int32), jnp.ones((4, 1))
    loss = lambda w1: jnp.sum(moe.every_expert(u, ids, weights, w1, w2, w3, limit=10.0, quantizes=False))  # noqa: E731
    slope = np.asarray(jax.grad(loss)(w1))
    assert np.abs(slope[[0, 2]]).max(axis=(1, 2)).min() > 0
    assert not slope[1].any()
