"""Router and single experts against recorded ones, and the rules that the fixtures do not reach."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops import moe
from deepinfer_jax.ops.quant import fp8_roundtrip
from deepinfer_jax.testing import compare

SCALING = 1.5
# Float32 projections over 64 channels, a softplus or silu, and a norm over 6 weights.
ROUTER_REL_L2 = 5e-7
EXPERT_REL_L2 = 1e-6


def test_recorded_scores_are_met(component, exact_jit):
    fixture = component("router")
    made = exact_jit(moe.router_scores)(fixture["x"], fixture["weight"])
    compare.assert_close(made, fixture["scores"], rel_l2=ROUTER_REL_L2)


@pytest.mark.parametrize("kind", ["text", "vl"])
def test_recorded_choice_and_weights_are_met(component, exact_jit, kind: str):
    """`vl`: image rows are chosen with their own bias; weights come from unbiased scores in both."""
    fixture = component("router")
    is_image = fixture["image_mask"].astype(bool)[:, None] & (kind == "vl")
    bias = np.where(is_image, fixture["bias_vl"], fixture["bias"])

    def route(x, weight, bias):
        scores = moe.router_scores(x, weight)
        ids = moe.choose_experts(scores, bias, count=6)
        return ids, moe.expert_weights(scores, ids, scaling=SCALING)

    ids, weights = exact_jit(route)(fixture["x"], fixture["weight"], bias)
    compare.assert_bitwise(ids, fixture[f"{kind}_ids"])
    compare.assert_close(weights, fixture[f"{kind}_weights"], rel_l2=ROUTER_REL_L2)


def test_equal_scores_go_to_the_lower_ids_in_order():
    scores = jnp.asarray([[1.0, 2.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    compare.assert_bitwise(moe.choose_experts(scores, jnp.zeros((1, 5)), count=3), np.int32([[1, 2, 4], [0, 1, 2]]))


def test_bias_moves_the_choice_but_not_the_weights():
    scores = jnp.asarray([[1.0, 2.0, 4.0]])
    ids = moe.choose_experts(scores, jnp.asarray([[10.0, 0.0, 0.0]]), count=2)
    compare.assert_bitwise(ids, np.int32([[0, 2]]))
    weights = moe.expert_weights(scores, ids, scaling=1.5)
    compare.assert_close(weights, np.asarray([[0.3, 1.2]]), rel_l2=ROUTER_REL_L2)


def test_zero_scores_give_zero_weights():
    """The 1e-20 in the denominator is a normal float32: no 0 / 0."""
    made = moe.expert_weights(jnp.zeros((1, 4)), jnp.asarray([[0, 1]], jnp.int32), scaling=1.5)
    compare.assert_bitwise(made, np.zeros((1, 2), np.float32))


@pytest.mark.parametrize("is_weighted", [False, True], ids=["shared", "routed"])
def test_recorded_expert_is_met(component, exact_jit, is_weighted: bool):
    fixture = component("expert")
    weight = fixture["route_weight"][:, 0] if is_weighted else None
    made = exact_jit(lambda u, w1, w2, w3, w: moe.expert(u, w1, w2, w3, w, limit=10.0, quantizes=False))(
        fixture["x"], fixture["w1"], fixture["w2"], fixture["w3"], weight
    )
    compare.assert_close(made, fixture["out_weighted" if is_weighted else "out"], rel_l2=EXPERT_REL_L2)


def test_recorded_activation_is_met_where_the_clamp_bites(component, exact_jit):
    fixture = component("expert")
    gate, up = fixture["gate_pre"], fixture["up_pre"]
    assert (gate > 10).any() and (gate < -10).any() and (np.abs(up) > 10).any()
    made = exact_jit(lambda g, u: moe.swiglu(g, u, None, limit=10.0))(gate, up)
    want = np.minimum(gate, 10) / (1 + np.exp(-np.minimum(gate, 10).astype(np.float64))) * np.clip(up, -10, 10)
    compare.assert_close(made, want, rel_l2=EXPERT_REL_L2)
    compare.assert_close(made @ fixture["w2"].T, fixture["out"], rel_l2=EXPERT_REL_L2)


def test_gate_has_no_lower_clamp():
    """silu(-20) is -4e-8, silu(-10) is -4.5e-4: a clamp from below would show."""
    made = float(moe.swiglu(jnp.asarray([[-20.0]]), jnp.asarray([[1.0]]), None, limit=10.0)[0, 0])
    assert -1e-7 < made < 0


def test_routing_weight_is_applied_before_the_activation_is_quantised(exact_jit):
    """With a weight that is no power of two the codes in front of w2 differ from those of the unweighted value."""
    rng = np.random.default_rng(0)
    u, w1, w3 = (jnp.asarray(rng.standard_normal((32, 32)), jnp.bfloat16) for _ in range(3))
    w2 = jnp.eye(32, dtype=jnp.bfloat16)
    weight = jnp.full(32, 0.7, jnp.float32)
    run = exact_jit(lambda u, w: moe.expert(u, w1, w2, w3, w, limit=10.0, quantizes=True))
    inner = exact_jit(lambda: fp8_roundtrip(moe.swiglu(moe.linear(u, w1), moe.linear(u, w3), weight, limit=10.0)))()
    compare.assert_bitwise(run(u, weight), inner + 0)  # a sum has no -0
    after = (run(u, None).astype(jnp.float32) * 0.7).astype(jnp.bfloat16)
    assert np.any(np.asarray(run(u, weight)) != np.asarray(after))


def test_combine_adds_in_slot_order_and_rounds_once(exact_jit):
    rng = np.random.default_rng(0)
    routed = rng.standard_normal((64, 6, 32), np.float32).astype(ml_dtypes.bfloat16)
    shared = rng.standard_normal((64, 32), np.float32).astype(ml_dtypes.bfloat16)
    total = np.zeros((64, 32), np.float32)
    for choice in range(6):
        total = total + routed[:, choice].astype(np.float32)
    want = (total + shared.astype(np.float32)).astype(ml_dtypes.bfloat16)
    compare.assert_bitwise(exact_jit(moe.combine)(routed, shared), want)
    rounded_twice = (total.astype(ml_dtypes.bfloat16).astype(np.float32) + shared).astype(ml_dtypes.bfloat16)
    assert np.any(want != rounded_twice)


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 3.0])
def test_forced_experts_load_the_first_shard_as_told_and_the_others_alike(imbalance: float):
    shards, experts, count, rows = 4, 32, 2, 512
    ids = np.asarray(moe.forced_experts(rows, num_experts=experts, count=count, num_shards=shards, imbalance=imbalance))
    assert (ids[:, 0] != ids[:, 1]).all()
    loads = np.bincount(ids.reshape(-1), minlength=experts).reshape(shards, -1)
    by_shard = loads.sum(axis=1)
    assert by_shard[0] == pytest.approx(imbalance * rows * count / shards, abs=1)
    assert np.ptp(by_shard[1:]) <= 1
    assert np.ptp(loads, axis=1).max() <= 1, "experts of a shard take turns"


def test_few_forced_rows_are_even_over_the_shards():
    ids = np.asarray(moe.forced_experts(4, num_experts=32, count=2, num_shards=4, imbalance=1.0))
    assert np.bincount(ids.reshape(-1) // 8, minlength=4).tolist() == [2, 2, 2, 2]


def test_an_impossible_imbalance_is_refused_with_the_largest():
    with pytest.raises(ValueError, match="give at most 2"):
        moe.forced_experts(8, num_experts=8, count=2, num_shards=2, imbalance=2.5)
    with pytest.raises(ValueError, match="give at most 4"):
        moe.forced_experts(8, num_experts=8, count=2, num_shards=8, imbalance=6.0)


def test_no_rows_give_no_rows():
    u, weight = jnp.zeros((0, 8)), jnp.zeros((5, 8))
    scores = moe.router_scores(u, weight)
    ids = moe.choose_experts(scores, jnp.zeros((1, 5)), count=2)
    assert moe.expert_weights(scores, ids, scaling=1.5).shape == (0, 2)
    square = jnp.zeros((8, 8))
    assert moe.expert(u, square, square, square, None, limit=10.0, quantizes=False).shape == (0, 8)
    assert moe.combine(jnp.zeros((0, 2, 8)), u).shape == (0, 8)
    assert jax.eval_shape(moe.router_scores, u, weight).shape == (0, 5)
