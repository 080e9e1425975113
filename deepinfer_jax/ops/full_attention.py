"""Attention of every row to every key of the same image (spec: vision 5)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.ops.invariant import repeat, round_to

KEY_BLOCK = 512  # keys that share one running maximum; part of the numerics
_FIRST_MAX = -1e30


def key_blocks(x: Float[Array, "T H K"]) -> Float[Array, "blocks H block K"]:
    """Keys or values in blocks of `KEY_BLOCK` rows, the last one filled up with zeros.

    There are two blocks at least: a slice of all there is would not depend on the block's index, and be moved out of
    the loop over blocks.
    """
    rows, heads, width = x.shape
    num_blocks = max(-(-rows // KEY_BLOCK), 2)
    padded = jnp.pad(x, ((0, num_blocks * KEY_BLOCK - rows), (0, 0), (0, 0)))
    return jnp.swapaxes(padded.reshape(num_blocks, KEY_BLOCK, heads, width), 1, 2)


def attend_all(
    q: Float[Array, "T H K"],
    keys: Float[Array, "blocks H block K"],
    values: Float[Array, "blocks H block K"],
    num_keys: Int[Array, ""],
    *,
    has_fixed_trips: bool = False,
) -> Float[Array, "T H K"]:
    """softmax(q k^T / sqrt(K)) v over the first `num_keys` keys of `key_blocks`; all of it in float32, rounded once.

    Blocks behind the last key are not computed, unless the trip count is fixed. There must be one key at least.
    """
    rows, heads, width = q.shape
    scale = jnp.float32(width**-0.5)
    places = jnp.arange(KEY_BLOCK, dtype=jnp.int32)

    def step(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        k, v = (lax.dynamic_index_in_dim(x, block, keepdims=False) for x in (keys, values))
        scores = _by_head(q, k, q_axis=1, contract=(2, 2)) * scale
        scores = jnp.where((block * KEY_BLOCK + places < num_keys)[None, None, :], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        summed = _by_head(weights, v.astype(jnp.float32), q_axis=0, contract=(2, 1))
        return new_peak, total * shrink + jnp.sum(weights, axis=-1), acc * shrink[..., None] + summed

    carry = (
        jnp.full((heads, rows), _FIRST_MAX, jnp.float32),
        jnp.zeros((heads, rows), jnp.float32),
        jnp.zeros((heads, rows, width), jnp.float32),
    )
    count = keys.shape[0] if has_fixed_trips else -(-num_keys // KEY_BLOCK)
    _, total, acc = repeat(count, step, carry, has_fixed_trips=has_fixed_trips)
    return jnp.swapaxes(round_to(acc / total[..., None], q.dtype), 0, 1)


def _by_head(
    a: Float[Array, "..."], b: Float[Array, "H block K"], *, q_axis: int, contract: tuple[int, int]
) -> Float32[Array, "H T N"]:
    """One product for each head, whose axis in `a` is `q_axis`; accumulated in float32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((q_axis,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
