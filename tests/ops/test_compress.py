"""The compressor against recorded latents: prefill, decode from a kept row, and the rows that are kept.

The release has ratios 1 and 2 only (config.model refuses others), so the ratio-4 recording has no counterpart here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.compress import pool_pair
from deepinfer_jax.ops.linear import linear, linear_f32
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.testing import compare

EPS = 1e-20
# A float32 projection over 64 channels in another order, then a pooling of two rows and a norm.
LATENT_REL_L2 = 5e-7
PAIR_REL_L2 = 4e-7


def latents(x: jax.Array, wkv: jax.Array, wgate: jax.Array, norm: jax.Array) -> jax.Array:
    """Ratio-2 latents of rows that begin at an even position; an open last row gives none."""
    pairs = linear_f32(x, jnp.concatenate([wkv, wgate]))
    closed = len(x) // 2
    return rms_norm(pool_pair(pairs[: 2 * closed : 2], pairs[1 : 2 * closed : 2]), norm, eps=EPS)


@pytest.mark.parametrize("length", [7, 11])
def test_recorded_ratio_1_latents_are_met(component, exact_jit, length: int):
    fixture = component("compressor_ratio1")
    run = exact_jit(lambda x, wkv, norm: rms_norm(linear(x, wkv), norm, eps=EPS))
    for request in range(2):
        made = run(fixture["x"][request, :length], fixture["wkv"], fixture["norm"])
        compare.assert_close(made, fixture[f"prefill{length}"][request], rel_l2=LATENT_REL_L2)
        for position in range(7, length):
            want = fixture[f"decode_pos{position:02}"][request]
            one = run(fixture["x"][request, position : position + 1], fixture["wkv"], fixture["norm"])
            compare.assert_close(one, want, rel_l2=LATENT_REL_L2)
            compare.assert_close(made[position : position + 1], want, rel_l2=LATENT_REL_L2)


@pytest.mark.parametrize("length", [7, 11])
def test_recorded_ratio_2_latents_are_met(component, exact_jit, length: int):
    fixture = component("compressor_ratio2")
    for request in range(2):
        x = fixture["x"][request, :length]
        made = exact_jit(latents)(x, fixture["wkv"], fixture["wgate"], fixture["norm"])
        compare.assert_close(made, fixture[f"prefill{length}"][request], rel_l2=LATENT_REL_L2)


@pytest.mark.parametrize("length", [7, 11])
def test_recorded_open_row_is_met(component, exact_jit, length: int):
    """Slot 0 of the recorded state: the unrounded [kv | score] row of the last, even position."""
    fixture = component("compressor_ratio2")
    weights = np.concatenate([fixture["wkv"], fixture["wgate"]])
    for request in range(2):
        row = exact_jit(linear_f32)(fixture["x"][request, length - 1 : length], weights)
        kept = [fixture[f"{part}_state_after{length}"][request, 0] for part in ("kv", "score")]
        compare.assert_close(row[0], np.concatenate(kept), rel_l2=PAIR_REL_L2)


@pytest.mark.parametrize("position", [7, 9])
def test_recorded_decode_pools_the_kept_row_with_the_new_one(component, exact_jit, position: int):
    fixture = component("compressor_ratio2")
    weights = np.concatenate([fixture["wkv"], fixture["wgate"]])
    for request in range(2):
        pair = exact_jit(linear_f32)(fixture["x"][request, position - 1 : position + 1], weights)
        if position == 7:
            kept = [fixture[f"{part}_state_after7"][request, 0] for part in ("kv", "score")]
            pair = jnp.stack([np.concatenate(kept), pair[1]])
        made = exact_jit(lambda a, b, norm: rms_norm(pool_pair(a, b), norm, eps=EPS))(
            pair[:1], pair[1:], fixture["norm"]
        )
        compare.assert_close(made, fixture[f"decode_pos{position:02}"][request], rel_l2=LATENT_REL_L2)


def test_pooling_weighs_each_channel_on_its_own(exact_jit):
    first = np.asarray([[1, 1, 1, 0, 100, -100]], np.float32)
    second = np.asarray([[3, 3, 3, 0, -100, 100]], np.float32)
    compare.assert_bitwise(exact_jit(pool_pair)(first, second), np.asarray([[2, 1, 3]], np.float32))


def test_pooling_takes_scores_of_any_size(exact_jit):
    rows = [np.asarray([[2, 1e30]], np.float32), np.asarray([[4, 1e30]], np.float32)]
    compare.assert_bitwise(exact_jit(pool_pair)(*rows), np.asarray([[3]], np.float32))


def test_no_rows_give_no_rows():
    assert pool_pair(jnp.zeros((0, 8)), jnp.zeros((0, 8))).shape == (0, 4)
