"""Rotary positions: interleaved pairs on the last channels of a vector (spec: backbone 4.1)."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.config.model import RopeScaling
from deepinfer_jax.ops.invariant import round_to


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Float32[np.ndarray, " F"]:
    """Angle per position of each of the dim / 2 pairs, float32; YaRN-scaled when `scaling` is given.

    The power is taken in float64 and rounded once, and its reciprocal taken in float32: one ulp here is 0.03 in the
    cosine at position 1e6.
    """
    exponent = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    plain = np.float32(1.0) / np.power(float(theta), exponent).astype(np.float32)
    if scaling is None:
        return plain
    low = max(math.floor(_correction(scaling.beta_fast, dim, theta, scaling)), 0)
    high = min(math.ceil(_correction(scaling.beta_slow, dim, theta, scaling)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    factor = np.float32(scaling.factor)
    return (plain / factor * ramp + plain * (np.float32(1.0) - ramp)).astype(np.float32)


def _correction(rotations: float, dim: int, theta: float, scaling: RopeScaling) -> float:
    original = scaling.original_max_position_embeddings
    return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def angles(
    positions: Int[Array, " T"], freqs: Float32[Array | np.ndarray, " F"]
) -> tuple[Float32[Array, "T F"], Float32[Array, "T F"]]:
    """Cosine and sine of the float32 product position times frequency, for F pairs."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(freqs)[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "T *H N"],
    cos: Float32[Array, "T F"],
    sin: Float32[Array, "T F"],
    *,
    inverse: bool = False,
    may_contract: bool = False,
) -> Float[Array, "T *H N"]:
    """x with its last 2 F channels rotated by row, adjacent channels forming a pair; rounded to x.dtype.

    may_contract: a compiler may fuse a product and a sum into one operation, which rounds once less, and update x where
    it is instead of copying what stays.
    """
    split = x.shape[-1] - 2 * cos.shape[-1]
    tail = x[..., split:].astype(jnp.float32)
    middle = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, middle), jnp.expand_dims(sin, middle)
    if inverse:
        sin = -sin
    a, b = tail[..., 0::2], tail[..., 1::2]
    products = (a * cos, b * sin, a * sin, b * cos)
    # The barrier keeps a compiler from contracting a product and a sum into one fused operation.
    a_cos, b_sin, a_sin, b_cos = products if may_contract else lax.optimization_barrier(products)
    rotated = jnp.stack([a_cos - b_sin, a_sin + b_cos], axis=-1).reshape(tail.shape)
    rotated = round_to(rotated, x.dtype)
    if may_contract:
        return lax.dynamic_update_slice_in_dim(x, rotated, split, axis=-1)
    return jnp.concatenate([x[..., :split], rotated], axis=-1)
