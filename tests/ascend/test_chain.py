"""Several operators in one program: the experts of a layer, staged, resident, and against `ops.moe`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels.experts import cann as experts
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.swiglu import cann as swiglu
from deepinfer_jax.ops import moe, norm, quant
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.ascend_cases import run_resident, run_staged

WIDTH, INNER, EXPERTS = 64, 256, 3
COUNTS = (2, 0, 3)
LIMIT, EPS = 10.0, 1e-6
# Three products and a norm with bf16 results; a turned-over rounding in front of a quantiser moves a whole code.
CHAIN_REL_L2 = 1e-2


def fp4_weights(rng: np.random.Generator, rows: int, cols: int) -> quant.ScaledArray:
    payload = jnp.asarray(rng.integers(0, 256, (EXPERTS, rows, cols // 2)), jnp.uint8)
    scale = jnp.asarray(rng.integers(122, 126, (EXPERTS, rows, cols // 32)), jnp.uint8)
    return quant.ScaledArray(payload=payload, scale=scale, form="fp4", block=(1, 32))


@pytest.fixture
def layer(seed_from_name):
    """Rows sorted by expert, their weights, the norm's weight, gate and up in one weight, and the way back."""
    rng = np.random.default_rng(seed_from_name)
    x = jnp.asarray(rng.standard_normal((sum(COUNTS), WIDTH), np.float32), jnp.bfloat16)
    shares = jnp.asarray(rng.random(sum(COUNTS), np.float32))
    norm_weight = jnp.asarray(rng.standard_normal(WIDTH, np.float32))
    return x, shares, norm_weight, fp4_weights(rng, 2 * INNER, WIDTH), fp4_weights(rng, WIDTH, INNER)


def through_the_bridge(x, shares, norm_weight, gate_up, down, counts):
    codes, scale = linear.quantize_fp8(rms_norm.rms_norm(x, norm_weight, eps=EPS))
    hidden = experts.expert_products(codes, scale, gate_up, counts)
    codes, scale, _ = swiglu.swiglu(hidden, shares, limit=LIMIT)
    return experts.expert_products(codes, scale, down, counts)


@jax.jit
def reference(x, shares, norm_weight, gate_up, down):
    rows = quant.fp8_roundtrip(norm.rms_norm(x, norm_weight, eps=EPS))
    made = []
    for expert, start in enumerate(np.cumsum((0, *COUNTS[:-1]))):
        here = slice(int(start), int(start) + COUNTS[expert])
        w13, w2 = quant.dequantize(gate_up, jnp.bfloat16)[expert], quant.dequantize(down, jnp.bfloat16)[expert]
        w1, w3 = w13[:INNER], w13[INNER:]
        made.append(moe.expert(rows[here], w1, w2, w3, shares[here], limit=LIMIT, quantizes=True))
    return jnp.concatenate(made)


def test_experts_of_a_layer(bridge, layer):
    x, shares, norm_weight, gate_up, down = layer
    counts = experts.count_words(jnp.asarray(COUNTS, jnp.int32))
    arrays = (x, shares, norm_weight, experts.pack_experts(gate_up), experts.pack_experts(down), counts)
    staged = run_staged(through_the_bridge, arrays)
    compare.assert_close(staged, reference(*layer), rel_l2=CHAIN_REL_L2)
    compare.assert_bitwise(run_resident(bridge, through_the_bridge, arrays), np.asarray(staged))
    assert bridge.usage() == (0, 0)


def test_a_row_does_not_depend_on_the_rows_beside_it(bridge, layer):
    """The first group alone gives the bits that it has among the others."""
    x, shares, norm_weight, gate_up, down = layer
    packed = experts.pack_experts(gate_up), experts.pack_experts(down)
    together = through_the_bridge(x, shares, norm_weight, *packed, experts.count_words(jnp.asarray(COUNTS, jnp.int32)))
    alone = jax.jit(through_the_bridge)(
        x[:2], shares[:2], norm_weight, *packed, experts.count_words(jnp.asarray([2, 0, 0], jnp.int32))
    )
    compare.assert_bitwise(alone, together[:2])
