"""Single-pass mHC against the recorded coefficients and streams, and the anchors of backbone 3.5."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops import hyper
from deepinfer_jax.testing import compare

HC_EPS = 1e-6
SINKHORN = {"iterations": 20, "eps": HC_EPS}
# Float32 in another order through a projection over 256 channels, sigmoid, exp and 20 normalisations.
COEFFICIENT_REL_L2 = 1e-6
# A weighted sum of four float32 values.
MIX_REL_L2 = 2e-7
# The same with logits up to 160, whose relative error exp makes an absolute one.
LARGE_LOGIT_REL_L2 = 2e-6
# Anchors are printed with five decimals.
ANCHOR_ABS = 6e-6
ANCHOR_LOGITS = [[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, 0], [0.5, 0, 0, 3]]
ANCHOR_COMB = [
    [0.58049, 0.11924, 0.24360, 0.05667],
    [0.11176, 0.46109, 0.34654, 0.08061],
    [0.22832, 0.34654, 0.26045, 0.16469],
    [0.07944, 0.07313, 0.14940, 0.69803],
]


def flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])


@pytest.fixture
def recorded_mix(component) -> hyper.Mix:
    fixture = component("mhc")
    return hyper.Mix(**{name: jnp.asarray(flat(fixture[name])) for name in ("pre", "post", "comb")})


def test_recorded_coefficients_are_met(component, exact_jit):
    fixture = component("mhc")
    made = exact_jit(lambda *a: hyper.coefficients(*a, iterations=20, eps=HC_EPS))(
        flat(fixture["stream"]), fixture["fn"], fixture["scale"], fixture["base"]
    )
    for name in ("pre", "post", "comb"):
        compare.assert_close(getattr(made, name), flat(fixture[name]), rel_l2=COEFFICIENT_REL_L2)


def test_recorded_collapse_is_met(component, exact_jit):
    fixture = component("mhc")
    streams, pre = flat(fixture["stream"]), flat(fixture["pre_mix_prev"])
    compare.assert_close(exact_jit(hyper.collapse)(streams, pre), flat(fixture["collapsed"]), rel_l2=MIX_REL_L2)
    rounded = exact_jit(hyper.collapse)(streams.astype(ml_dtypes.bfloat16), pre)
    compare.assert_bitwise(rounded, flat(fixture["collapsed_bf16"]))


def test_recorded_expansion_is_met(component, exact_jit, recorded_mix):
    fixture = component("mhc")
    out, streams = flat(fixture["sublayer_out"]), flat(fixture["stream"])
    made = exact_jit(hyper.expand)(out, streams, recorded_mix)
    compare.assert_close(made, flat(fixture["expanded"]), rel_l2=MIX_REL_L2)
    rounded = exact_jit(hyper.expand)(out.astype(ml_dtypes.bfloat16), streams.astype(ml_dtypes.bfloat16), recorded_mix)
    compare.assert_bitwise(rounded, flat(fixture["expanded_bf16"]))


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_recorded_sinkhorn_is_met_with_large_logits(component, exact_jit, iterations: int):
    fixture = component("mhc")
    mixes, scale, base = fixture["sinkhorn.mixes"], fixture["scale"], fixture["base"]
    logits = (mixes[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4)
    made = exact_jit(lambda x: hyper.sinkhorn(x, iterations=iterations, eps=HC_EPS))(logits)
    compare.assert_close(made, fixture[f"sinkhorn.iters{iterations}.comb"], rel_l2=COEFFICIENT_REL_L2)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_recorded_mixes_go_through_the_whole_formula(component, exact_jit, iterations: int):
    """Streams of mean square 1 whose projection is the recorded mix: the first 24 channels, padded to the norm."""
    fixture = component("mhc")
    mixes = fixture["sinkhorn.mixes"].astype(np.float64)
    width = 4 * 16384
    rest = np.sqrt((width - np.sum(mixes**2, axis=1)) / (width - 24))
    streams = np.concatenate([mixes, np.repeat(rest[:, None], width - 24, axis=1)], axis=1).astype(np.float32)
    fn = np.eye(24, width, dtype=np.float32)
    made = exact_jit(lambda *a: hyper.coefficients(*a, iterations=iterations, eps=HC_EPS))(
        streams.reshape(-1, 4, width // 4), fn, fixture["scale"], fixture["base"]
    )
    for name in ("pre", "post", "comb"):
        want = fixture[f"sinkhorn.iters{iterations}.{name}"]
        compare.assert_close(getattr(made, name), want, rel_l2=LARGE_LOGIT_REL_L2)


def test_zero_mix_gives_the_anchors(exact_jit):
    zeros, ones = jnp.zeros((24, 32)), jnp.ones(3)
    made = exact_jit(lambda x: hyper.coefficients(x, zeros, ones, jnp.zeros(24), **SINKHORN))(jnp.ones((2, 4, 8)))
    for value, anchor in ((made.pre, 0.500001), (made.post, 1.0), (made.comb, 0.25)):
        assert np.abs(np.asarray(value) - anchor).max() <= HC_EPS


def test_sinkhorn_gives_the_anchor_of_the_specification(exact_jit):
    made = exact_jit(lambda x: hyper.sinkhorn(x, **SINKHORN))(jnp.asarray([ANCHOR_LOGITS], jnp.float32))
    assert np.abs(np.asarray(made)[0] - np.asarray(ANCHOR_COMB)).max() <= ANCHOR_ABS


def test_sinkhorn_ends_on_columns():
    logits = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (32, 4, 4)).astype(np.float32))
    once = np.asarray(hyper.sinkhorn(logits, iterations=1, eps=HC_EPS))
    assert np.abs(once.sum(axis=1) - 1).max() <= 5 * HC_EPS
    assert np.abs(once.sum(axis=2) - 1).max() > 0.1


def test_comb_carries_row_i_into_column_j():
    streams = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 8), np.float32))
    comb = np.zeros((1, 4, 4), np.float32)
    comb[0, 0, 3] = 1.0
    mix = hyper.Mix(pre=jnp.zeros((1, 4)), post=jnp.zeros((1, 4)), comb=jnp.asarray(comb))
    made = hyper.expand(jnp.zeros((1, 8)), streams, mix)
    compare.assert_bitwise(made[:, 3], streams[:, 0])
    compare.assert_bitwise(made[:, :3], np.zeros((1, 3, 8), np.float32))


def test_one_hot_pre_mix_takes_a_stream_exactly():
    streams = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 8), np.float32)).astype(jnp.bfloat16)
    pre = jnp.zeros((3, 4)).at[:, 0].set(1.0)
    compare.assert_bitwise(hyper.collapse(streams, pre), streams[:, 0])


def test_no_rows_give_no_rows():
    streams = jnp.zeros((0, 4, 8))
    mix = hyper.coefficients(streams, jnp.zeros((24, 32)), jnp.ones(3), jnp.zeros(24), **SINKHORN)
    assert mix.comb.shape == (0, 4, 4)
    assert hyper.collapse(streams, mix.pre).shape == (0, 8)
    assert hyper.expand(jnp.zeros((0, 8)), streams, mix).shape == (0, 4, 8)
