"""The choice of experts for SM90: the kernel's product interpreted on the CPU with race detection."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.linear import mosaic_sm90
from deepinfer_jax.kernels.registry import MOSAIC_SM90, NVIDIA, REFERENCE, explain
from deepinfer_jax.kernels.router import api
from deepinfer_jax.testing import compare

SCORES_REL_L2 = 1e-6  # exact products; float32 sums in another order
EXPERTS, WIDTH = 128, 256
GIVEN = {"count": 6, "scaling": 1.5, "needs_scores": False}
BACKEND = Backend(target=NVIDIA, kernels=MOSAIC_SM90)


@pytest.fixture
def interpreted(monkeypatch):
    given = {"num_sms": 2, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    monkeypatch.setattr(mosaic_sm90, "linear_bf16", functools.partial(mosaic_sm90.linear_bf16, **given))


def make(num_rows, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(num_rows), 3)
    gate = jax.random.normal(keys[1], (EXPERTS, WIDTH), jnp.float32) * WIDTH**-0.5
    bias = jax.random.normal(keys[2], (1, EXPERTS), jnp.float32) * 0.1
    return jax.random.normal(keys[0], (num_rows, WIDTH), jnp.float32).astype(dtype), gate.astype(dtype), bias


def routed(inputs, kernels):
    shown = {}
    ids, weights = api.route(
        *inputs,
        note=lambda name, value: shown.setdefault(name, value),
        backend=Backend(target=NVIDIA, kernels=kernels),
        **GIVEN,
    )
    return ids, weights, shown


@pytest.mark.parametrize("num_rows", [1, 5, 16, 33, 128])
def test_matches_reference(interpreted, capfd, num_rows):
    inputs = make(num_rows)
    ids, weights, shown = routed(inputs, MOSAIC_SM90)
    want_ids, want_weights, want = routed(inputs, REFERENCE)
    compare.assert_close(shown["router_scores"], want["router_scores"], rel_l2=SCORES_REL_L2)
    compare.assert_bitwise(ids, want_ids)
    compare.assert_close(weights, want_weights, rel_l2=SCORES_REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_no_rows_choose_nothing(interpreted):
    ids, weights, _ = routed(make(0), MOSAIC_SM90)
    assert ids.shape == weights.shape == (0, 6)


def test_forced_scores_are_what_is_chosen_from(interpreted):
    forced = jnp.tile(jnp.arange(EXPERTS, dtype=jnp.float32)[None, :], (2, 1))
    u, gate, bias = make(2)

    def note(name, value):
        return forced if name == "router_scores" else value

    ids, _ = api.route(u, gate, 0 * bias, note=note, backend=BACKEND, **GIVEN)
    compare.assert_bitwise(ids, jnp.asarray([[127, 126, 125, 124, 123, 122]] * 2, jnp.int32))


def test_what_is_not_bfloat16_or_does_not_fit_goes_through_the_reference():
    def told(u, gate, bias):
        return explain(api.OP, api.IMPLS, BACKEND, u, gate, bias, **GIVEN)

    u, gate, bias = make(2)
    assert told(u, gate, bias) == "mosaic_sm90"
    assert "float32" in told(u.astype(jnp.float32), gate.astype(jnp.float32), bias)
    assert "100 x 256" in told(u, gate[:100], bias[:, :100])
