"""What training minimises, and what it reports."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int

from deepinfer_jax.ops.invariant import ordered_sum

# Weights of the drafter's losses and the decay over its positions (spec: dspark 7).
CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0


def token_losses(logits: Float32[Array, "*B V"], targets: Int[Array, "*B"]) -> Float32[Array, "*B"]:
    """Negative log-likelihood of each target, in nats."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """A sum of negative log-likelihoods as bits for each byte of the text."""
    return nats / math.log(2.0) / num_bytes


def draft_losses(
    logits: Float32[Array, "N G V"],
    confidence: Float32[Array, "N G"],
    target_logits: Float32[Array, "N G V"],
    targets: Int[Array, "N G"],
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """The drafter's loss over N blocks, and its parts as means over positions (spec: dspark 7).

    target_logits: of the frozen network at the same places; no gradient goes into them. The confidence head learns
    1 - TV, the chance that a drawn draft is accepted.
    """
    size = logits.shape[1]
    decay = jnp.exp(-jnp.arange(size, dtype=jnp.float32) / size)
    weights = (decay / jnp.sum(decay))[None]
    drawn = jax.nn.softmax(logits, axis=-1)
    wanted = jax.nn.softmax(lax.stop_gradient(target_logits), axis=-1)
    distance = 0.5 * jnp.sum(jnp.abs(drawn - wanted), axis=-1)
    accepted = lax.stop_gradient(1.0 - distance)
    entropy = jax.nn.softplus(confidence) - accepted * confidence
    parts = {"cross_entropy": token_losses(logits, targets), "total_variation": distance, "confidence": entropy}
    factors = {"cross_entropy": CROSS_ENTROPY, "total_variation": TOTAL_VARIATION, "confidence": CONFIDENCE}
    weighted = ordered_sum([factors[name] * jnp.sum(value * weights, axis=-1) for name, value in parts.items()])
    return jnp.mean(weighted), {name: jnp.mean(value) for name, value in parts.items()}
