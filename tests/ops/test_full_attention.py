"""Attention over all keys of an image: against float64, over the edges of key blocks, with keys that do not exist."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.full_attention import KEY_BLOCK, attend_all, key_blocks
from deepinfer_jax.testing import compare

# Float32 scores of size 1 to 5 and float32 sums.
FLOAT32_REL_L2 = 2e-6
# One rounding of the output.
BF16_REL_L2 = 3e-3
COUNTS = {"one": 1, "ragged": 37, "block": KEY_BLOCK, "two_blocks": KEY_BLOCK + 1, "three": 2 * KEY_BLOCK + 100}


def inputs(seed: int, num_keys: int, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(2 * rng.standard_normal((n, 3, 16)), dtype) for n in (5, num_keys, num_keys))
    return q, k, v


def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> np.ndarray:
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("qhw,khw->hqk", q64, k64) / np.sqrt(q64.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khw->qhw", weights / weights.sum(axis=-1, keepdims=True), v64)


@pytest.mark.parametrize("name, has_fixed_trips", [*((name, False) for name in COUNTS), ("three", True)])
def test_equals_one_softmax_in_float64(exact_jit, seed_from_name: int, name: str, has_fixed_trips: bool):
    q, k, v = inputs(seed_from_name, COUNTS[name], jnp.float32)
    attend = exact_jit(functools.partial(attend_all, has_fixed_trips=has_fixed_trips))
    got = attend(q, key_blocks(k), key_blocks(v), jnp.int32(COUNTS[name]))
    compare.assert_close(got, reference(q, k, v), rel_l2=FLOAT32_REL_L2)


def test_probabilities_are_not_rounded(exact_jit, seed_from_name: int):
    q, k, v = inputs(seed_from_name, 600, jnp.bfloat16)
    got = exact_jit(attend_all)(q, key_blocks(k), key_blocks(v), jnp.int32(600))
    assert got.dtype == jnp.bfloat16
    compare.assert_close(got, reference(q, k, v), rel_l2=BF16_REL_L2)
    exact = exact_jit(attend_all)(*(x.astype(jnp.float32) for x in (q, key_blocks(k), key_blocks(v))), jnp.int32(600))
    compare.assert_bitwise(got, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_bits_do_not_depend_on_room_behind_the_keys(exact_jit, seed_from_name: int, dtype):
    """Two blocks of room against four, with values in them that would be seen."""
    q, k, v = inputs(seed_from_name, 4 * KEY_BLOCK, dtype)
    num_keys = KEY_BLOCK + 70
    short = exact_jit(attend_all)(q, key_blocks(k[:num_keys]), key_blocks(v[:num_keys]), jnp.int32(num_keys))
    wide = exact_jit(attend_all)(q, key_blocks(k), key_blocks(v), jnp.int32(num_keys))
    compare.assert_bitwise(wide, short)
    compare.assert_close(short, reference(q, k[:num_keys], v[:num_keys]), rel_l2=BF16_REL_L2)
