"""Pooling of latent groups (spec: backbone 4.3)."""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def pool_pair(first: Float32[Array, "T L2"], second: Float32[Array, "T L2"]) -> Float32[Array, "T L"]:
    """The softmax-weighted mean of two rows, channel by channel.

    Each row holds [kv | score], L2 = 2 L: the scores of the two rows weigh their values.
    """
    kv_a, score_a = jnp.split(first, 2, axis=-1)
    kv_b, score_b = jnp.split(second, 2, axis=-1)
    peak = jnp.maximum(score_a, score_b)
    raised_a, raised_b = jnp.exp(score_a - peak), jnp.exp(score_b - peak)
    total = raised_a + raised_b
    return kv_a * (raised_a / total) + kv_b * (raised_b / total)
