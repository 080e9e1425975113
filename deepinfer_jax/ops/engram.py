"""Engram: hashed n-gram rows and the gate that mixes them into the streams (spec: engram 2.3, 2.4, 4)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from deepinfer_jax.ops.invariant import round_to

DEAD = -1  # the compressed id of a token that takes no part in n-grams
GATE_EPS = 1e-20
GATE_FLOOR = 1e-6


def hash_rows(
    context: Int[Array, "T M"],
    exists: Bool[Array, "T M"],
    *,
    multipliers: tuple[int, ...],
    primes: tuple[tuple[int, ...], ...],
    pad: Int[Array, ""],
) -> Int[Array, "T N"]:
    """Table rows of one layer for each row of a step, N = (M - 1) * heads.

    context[t, s] is the compressed id of the token s places before row t (s = 0: the row itself), DEAD for image
    tokens; exists[t, s] is False before the start of the sequence. A missing or dead token blocks itself and every
    older one; blocked places hold the compressed id `pad`. Exact 64-bit arithmetic on pairs of uint32.
    """
    blocked = jnp.zeros(context.shape[:1], bool)
    rolling = None
    rows: list[Array] = []
    offset = 0
    for s, multiplier in enumerate(multipliers):
        blocked = blocked | ~exists[:, s] | (context[:, s] == DEAD)
        token = jnp.where(blocked, pad, context[:, s]).astype(jnp.uint32)
        term = _multiply(token, multiplier)
        rolling = term if rolling is None else (rolling[0] ^ term[0], rolling[1] ^ term[1])
        if s == 0:
            continue
        for prime in primes[s - 1]:
            rows.append(_remainder(rolling, prime).astype(jnp.int32) + offset)
            offset += prime
    return jnp.stack(rows, axis=1)


def _multiply(token: UInt32[Array, " T"], multiplier: int) -> tuple[UInt32[Array, " T"], UInt32[Array, " T"]]:
    """token * multiplier modulo 2^64 as (high, low)."""
    low_word, high_word = multiplier & 0xFFFFFFFF, multiplier >> 32
    a_low, a_high = token & 0xFFFF, token >> 16
    b_low, b_high = low_word & 0xFFFF, low_word >> 16
    mixed = a_low * b_high + ((a_low * b_low) >> 16)
    carried = (mixed & 0xFFFF) + a_high * b_low
    low = (carried << 16) | ((a_low * b_low) & 0xFFFF)
    high = a_high * b_high + (mixed >> 16) + (carried >> 16) + token * jnp.uint32(high_word)
    return high, low


def _remainder(value: tuple[UInt32[Array, " T"], UInt32[Array, " T"]], prime: int) -> UInt32[Array, " T"]:
    """value modulo a prime below 2^24, one byte at a time."""
    rest = jnp.zeros_like(value[0])
    for word in value:
        for shift in (24, 16, 8, 0):
            rest = ((rest << 8) | ((word >> shift) & 0xFF)) % jnp.uint32(prime)
    return rest


def gate(
    streams: Float[Array, "T C D"],
    keys: Float[Array, "T C D"],
    value: Float[Array, "T D"],
    q_weight: Float[Array, "C D"],
    k_weight: Float[Array, "C D"],
    is_text: Bool[Array, " T"],
) -> Float[Array, "T C D"]:
    """The streams plus the gated value, float32 inside, rounded once; image rows pass unchanged."""
    h, k, v = (x.astype(jnp.float32) for x in (streams, keys, value))
    w = q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32)
    width = h.shape[-1]
    dot = jnp.sum(h * w[None] * k, axis=-1)
    dot = dot * lax.rsqrt(jnp.mean(h * h, axis=-1) + GATE_EPS) * lax.rsqrt(jnp.mean(k * k, axis=-1) + GATE_EPS)
    dot = dot * jnp.float32(width**-0.5)
    size = jnp.sqrt(jnp.maximum(jnp.abs(dot), GATE_FLOOR))
    strength = jax.nn.sigmoid(jnp.where(jnp.signbit(dot), -size, size))
    strength = jnp.where(is_text[:, None], strength, 0.0)
    return round_to(h + strength[..., None] * v[:, None, :], streams.dtype)
