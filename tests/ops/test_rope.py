"""Rotary tables and rotation against the recorded ones, the anchors of backbone 4.1, and an exact power."""

import decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.model import RopeScaling
from deepinfer_jax.ops import rope
from deepinfer_jax.testing import compare

FLASH_SCALING = RopeScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
TABLES = {"swa": (1e4, None), "compressed": (1.6e5, FLASH_SCALING)}
# Two float32 implementations of cos and sin, each within half an ulp of 1 or a little more.
TABLE_REL_L2 = 6e-8
# Products and a sum in float32.
ROTATION_REL_L2 = 1e-7
# Half a unit of the seventh digit, the last one printed for some anchors.
ANCHOR_REL = 5e-7
YARN_ANCHORS = [1, 0.687656045, 0.003635538509, 0.002265624935, 2.969778e-4, 5.372312e-6, 5.680529e-7]
PLAIN_ANCHORS = [1, 0.749894202, 0.013335214928, 0.00999999978, 3.162278e-3, 7.498942e-4, 1.333522e-4]
ANCHOR_PAIRS = [0, 1, 15, 16, 20, 25, 31]


@pytest.mark.parametrize("kind, anchors", [("compressed", YARN_ANCHORS), ("swa", PLAIN_ANCHORS)])
def test_frequencies_equal_the_anchors_of_the_specification(kind: str, anchors: list[float]):
    made = rope.frequencies(64, *TABLES[kind])[ANCHOR_PAIRS]
    assert np.abs(made / np.asarray(anchors) - 1).max() <= ANCHOR_REL


def test_yarn_scales_pairs_from_25_on_and_keeps_those_up_to_15():
    plain = rope.frequencies(64, 1.6e5, None)
    scaled = rope.frequencies(64, 1.6e5, FLASH_SCALING)
    compare.assert_bitwise(scaled[:16], plain[:16])
    compare.assert_bitwise(scaled[25:], plain[25:] / np.float32(16))
    assert np.all((scaled[16:25] < plain[16:25]) & (scaled[16:25] > plain[16:25] / 16))


@pytest.mark.parametrize("theta", [1e4, 1.6e5])
@pytest.mark.parametrize("dim", [16, 64])
def test_power_is_correctly_rounded(theta: float, dim: int):
    with decimal.localcontext(prec=60):
        exponents = [decimal.Decimal(float(np.float32(i) / np.float32(dim))) for i in range(0, dim, 2)]
        powers = [np.float32(float(decimal.Decimal(theta) ** e)) for e in exponents]
    compare.assert_bitwise(rope.frequencies(dim, theta, None), np.float32(1) / np.asarray(powers))


@pytest.mark.parametrize("kind", TABLES)
def test_recorded_tables_are_met_at_every_position(component, exact_jit, kind: str):
    fixture = component("rope")
    positions = jnp.asarray(fixture["positions"], jnp.int32)
    cos, sin = exact_jit(rope.angles)(positions, rope.frequencies(64, *TABLES[kind]))
    for row in range(len(positions)):
        compare.assert_close(cos[row], fixture[f"{kind}.cos"][row], rel_l2=TABLE_REL_L2)
        compare.assert_close(sin[row], fixture[f"{kind}.sin"][row], rel_l2=TABLE_REL_L2)


def test_recorded_rotation_and_its_inverse_are_met(component, exact_jit):
    fixture = component("rope")
    scaling = RopeScaling(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=8)
    cos, sin = exact_jit(rope.angles)(jnp.arange(6, dtype=jnp.int32), rope.frequencies(64, 1.6e5, scaling))
    compare.assert_close(cos, fixture["apply.cos"], rel_l2=TABLE_REL_L2)
    compare.assert_close(sin, fixture["apply.sin"], rel_l2=TABLE_REL_L2)
    turned = exact_jit(rope.rotate)(jnp.asarray(fixture["apply.x"][0]), fixture["apply.cos"], fixture["apply.sin"])
    compare.assert_close(turned, fixture["apply.y"][0], rel_l2=ROTATION_REL_L2)
    back = exact_jit(rope.rotate, static_argnames="inverse")(
        jnp.asarray(fixture["apply.y"][0]), fixture["apply.cos"], fixture["apply.sin"], inverse=True
    )
    compare.assert_close(back, fixture["apply.roundtrip"][0], rel_l2=ROTATION_REL_L2)


def test_products_are_not_contracted_into_fused_operations(exact_jit):
    """Every value is the float32 difference or sum of two float32 products."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 32), np.float32)
    cos, sin = (rng.uniform(-1, 1, (64, 16)).astype(np.float32) for _ in range(2))
    a, b = x[:, 0::2], x[:, 1::2]
    want = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    compare.assert_bitwise(exact_jit(rope.rotate)(x, cos, sin), want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_the_last_channels_turn_and_position_0_turns_nothing(dtype):
    x = jax.random.normal(jax.random.key(0), (3, 2, 48), dtype)
    cos, sin = rope.angles(jnp.asarray([0, 5, 9], jnp.int32), rope.frequencies(16, 1e4, None))
    turned = rope.rotate(x, cos, sin)
    compare.assert_bitwise(turned[..., :32], x[..., :32])
    compare.assert_bitwise(turned[0], x[0])
    assert np.any(np.asarray(turned[1:, :, 32:]) != np.asarray(x[1:, :, 32:]))


def test_bf16_rotation_rounds_once(exact_jit):
    x = jax.random.normal(jax.random.key(1), (5, 64), jnp.bfloat16)
    cos, sin = rope.angles(jnp.arange(5, dtype=jnp.int32), rope.frequencies(64, 1e4, None))
    want = rope.rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16)
    compare.assert_bitwise(exact_jit(rope.rotate)(x, cos, sin), want)


@pytest.mark.parametrize("shape", [(0, 64), (0, 4, 64), (2, 0, 64)], ids=["no row", "no row of heads", "no head"])
def test_empty_inputs_stay_empty(shape: tuple[int, ...]):
    cos, sin = rope.angles(jnp.arange(shape[0], dtype=jnp.int32), rope.frequencies(64, 1e4, None))
    assert rope.rotate(jnp.zeros(shape), cos, sin).shape == shape


def test_contracted_rotation_differs_by_a_rounding_at_most():
    x = jax.random.normal(jax.random.key(0), (5, 3, 16), jnp.float32)
    cos, sin = rope.angles(jnp.arange(5, dtype=jnp.int32), np.ones(4, np.float32))
    rotate = jax.jit(rope.rotate, static_argnames=("inverse", "may_contract"))
    for inverse in (False, True):
        want = rotate(x, cos, sin, inverse=inverse)
        compare.assert_close(rotate(x, cos, sin, inverse=inverse, may_contract=True), want, rel_l2=ROTATION_REL_L2)
