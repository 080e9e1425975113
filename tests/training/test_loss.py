"""Losses against their formulas in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.acceptance import repeated_share
from deepinfer_jax.training.loss import bits_per_byte, draft_losses, token_losses
from deepinfer_jax.training.optimise import balanced
from deepinfer_jax.training.selection import index_distance


def softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def test_token_losses_are_log_likelihoods():
    logits = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)
    targets = np.array([[0, 6, 2], [1, 1, 5]], np.int32)
    want = -np.log(np.take_along_axis(softmax(logits), targets[..., None], axis=-1)[..., 0])
    assert np.allclose(token_losses(jnp.asarray(logits), jnp.asarray(targets)), want, rtol=1e-5)
    assert bits_per_byte(8 * np.log(2.0), 4) == pytest.approx(2.0)


def test_draft_losses_follow_the_specification():
    rng = np.random.default_rng(1)
    logits, target = (rng.standard_normal((4, 5, 9)).astype(np.float32) for _ in range(2))
    z, ids = rng.standard_normal((4, 5)).astype(np.float32), rng.integers(0, 9, (4, 5)).astype(np.int32)
    q, p, c = softmax(logits), softmax(target), 1 / (1 + np.exp(-z))
    distance = 0.5 * np.abs(q - p).sum(-1)
    entropy = -((1 - distance) * np.log(c) + distance * np.log(1 - c))
    cross = -np.log(np.take_along_axis(q, ids[..., None], axis=-1)[..., 0])
    weights = np.exp(-np.arange(5) / 5)
    want = ((0.1 * cross + 0.9 * distance + entropy) * weights / weights.sum()).sum(-1).mean()
    arrays = [jnp.asarray(a) for a in (logits, z, target, ids)]
    value, parts = draft_losses(*arrays)
    assert float(value) == pytest.approx(want, rel=1e-5)
    assert float(parts["total_variation"]) == pytest.approx(distance.mean(), rel=1e-5)
    slope = jax.grad(lambda target: draft_losses(arrays[0], arrays[1], target, arrays[3])[0])(arrays[2])
    assert not np.any(slope), "the frozen network got a gradient"


def test_index_distance_is_zero_where_scores_match_and_skips_rows_without_a_choice():
    shares = jnp.asarray([[[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]])
    pool = jnp.asarray([[[True, True, False], [True, False, False]]])
    inside = np.array([0.5, 0.3]) / 0.8
    fitting = jnp.asarray([[[*np.log(inside), 9.0], [3.0, 2.0, 1.0]]])
    assert float(index_distance(fitting, shares, pool)) == pytest.approx(0.0, abs=1e-6)
    even = jnp.zeros((1, 2, 3))
    want = (inside * np.log(inside / 0.5)).sum() / 2  # a mean over two rows, one of which has no choice
    assert float(index_distance(even, shares, pool)) == pytest.approx(want, rel=1e-5)


def test_biases_rise_for_idle_experts():
    fixed = {"draft.moe.bias": jnp.zeros((1, 3)), "draft.moe.bias_vl": jnp.ones((1, 3))}
    moved = balanced(fixed, {"draft.moe.bias": jnp.asarray([[9, 3, 6]])}, rate=0.5)
    assert moved["draft.moe.bias"].tolist() == [[-0.5, 0.5, 0.0]]
    assert np.array_equal(moved["draft.moe.bias_vl"], moved["draft.moe.bias"])


def test_repeated_share_finds_loops():
    assert repeated_share(np.arange(50)) == 0.0
    assert repeated_share(np.tile([1, 2], 30)) > 0.9
