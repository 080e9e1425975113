"""The position-keyed Gumbel draw, in integers from the seed to the winner (spec: interface 4.2).

A token's noise is a function of (seed, position, purpose, token id) and of nothing else: Threefry-2x32-20
(Salmon et al. 2011, 20 rounds) gives 64 bits, and G = -ln(-ln U) of them is computed in 32-bit integer
arithmetic. The score of a token is its noise minus its distance below the row's best logit, both with 24
fractional bits, and the largest score wins. Integer arithmetic has one answer, so neither the backend, the
row's company, the mesh nor the way XLA fuses a program can change a token.

The noise is within 2^-23 of -ln(-ln U). U has 63 bits and is symmetric, (2j + 1) / 2^64, so G lies
between -3.8 and 44.4; 1 - U still has 23 significant bits at G = 27.7, which one draw in 2^40 reaches.

Words are uint32 with the number of fractional bits in the name or comment (q31: value = word / 2^31).
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

SCORE_BITS = 24  # fractional bits of noises, distances and scores
NOT_DRAWABLE = -(2**31)  # score of a token outside the survivors

_U = np.uint32
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA

_LN2_Q24 = 11_629_080  # ln 2 = (11629080 - 2094 / 65536) / 2^24
_LN2_Q24_REST = 2_094
_LN2_Q26 = 46_516_320
# -ln(1 - r) / r on [0, 1/2] as a polynomial in r - 1/4, q30, lowest power first; relative error 2^-27.8.
# Chebyshev interpolation of degree 9; every partial Horner sum stays inside int32.
_LOG_RATIO_Q30 = (
    1235585097,
    784282695,
    680614586,
    671078502,
    709650002,
    783417101,
    871735761,
    1012080800,
    1547976020,
    1861451667,
)


class Purpose(enum.IntEnum):
    """What the noise at a position is for. The counter has room for four."""

    FRESH = 0  # the draw of a token
    RESIDUAL = 1  # the draw from the residual after a rejected draft
    ACCEPT = 2  # the accept test of a draft
    DRAFT = 3  # the drafter's draw where it must be independent of the three above


def threefry2x32(
    key: tuple[UInt32[Array, "*#N"], UInt32[Array, "*#N"]],
    counter: tuple[UInt32[Array, "*#N"], UInt32[Array, "*#N"]],
) -> tuple[UInt32[Array, "*N"], UInt32[Array, "*N"]]:
    """Returns the two words of Threefry-2x32-20, the published generator of Random123."""
    keys = (*key, key[0] ^ key[1] ^ _U(_KEY_PARITY))
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << _U(distance)) | (x1 >> _U(32 - distance))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + _U(group + 1)
    return x0, x1


def random_words(
    seed_lo: UInt32[Array, " T"],
    seed_hi: UInt32[Array, " T"],
    positions: Int32[Array, " T"],
    token_ids: Int32[Array, " V"],
    *,
    purpose: Purpose,
) -> tuple[UInt32[Array, "T V"], UInt32[Array, "T V"]]:
    """Returns 64 random bits of each (row, token). Positions are below 2^30."""
    slot = positions.astype(jnp.uint32) * _U(4) + _U(purpose)
    key = (seed_lo[:, None], seed_hi[:, None])
    return threefry2x32(key, (token_ids.astype(jnp.uint32)[None, :], slot[:, None]))


def accept_uniforms(
    seed_lo: UInt32[Array, " T"], seed_hi: UInt32[Array, " T"], positions: Int32[Array, " T"]
) -> Float32[Array, " T"]:
    """Returns the uniform number of each row's accept test, a multiple of 2^-24 in [0, 1)."""
    token = jnp.zeros((1,), jnp.int32)
    word, _ = random_words(seed_lo, seed_hi, positions, token, purpose=Purpose.ACCEPT)
    return (word[:, 0] >> _U(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def gumbel_noise(
    seed_lo: UInt32[Array, " T"],
    seed_hi: UInt32[Array, " T"],
    positions: Int32[Array, " T"],
    token_ids: Int32[Array, " V"],
    *,
    purpose: Purpose,
) -> Int32[Array, "T V"]:
    """Returns the Gumbel noise of each (row, token) in units of 2^-24.

    `token_ids` may be any part of the vocabulary: a shard passes its own ids.
    """
    return gumbel_of_words(*random_words(seed_lo, seed_hi, positions, token_ids, purpose=purpose))


def gumbel_of_words(hi: UInt32[Array, "*N"], lo: UInt32[Array, "*N"]) -> Int32[Array, "*N"]:
    """Returns -ln(-ln U) in units of 2^-24, where 1 - U = (the 64-bit word with its last bit set) / 2^64."""
    # small = min(1 - U, U) as 64 bits below 2^63; `is_low` says that it is U.
    is_low = hi >= _U(1 << 31)
    small_hi = jnp.where(is_low, ~hi, hi)
    small_lo = jnp.where(is_low, ~lo, lo) | _U(1)
    mantissa, zeros = normalize64(small_hi, small_lo)  # small = mantissa 2^-32 2^-zeros
    # E = -ln U. U > 1/2: small (-ln(1 - small) / small), relative precision kept for the upper tail.
    #            U < 1/2: zeros ln 2 - ln(mantissa).
    rest = jnp.where(is_low, -mantissa, small_hi)  # q32, <= 1/2
    product = mul_high(jnp.where(is_low, rest, mantissa), _log_ratio_q31(rest))  # q31
    exponential = jnp.where(is_low, zeros * _U(_LN2_Q26) + (product >> _U(5)), product)
    fraction_bits = jnp.where(is_low, _U(26), _U(31) + zeros)
    # G = -ln E.
    zeros = jax.lax.clz(exponential)
    exponent = (zeros + fraction_bits).astype(jnp.int32) - 32
    return ln2_multiple_q24(exponent) + neg_log1m_q24(-(exponential << zeros))


def draw_scores(
    distances: Int32[Array, "T V"],
    survivors: Bool[Array, "T V"],
    noise: Int32[Array, "T V"],
) -> Int32[Array, "T V"]:
    """Returns noise minus distance for survivors, in units of 2^-24.

    A distance is how far the token's scaled logit lies below the row's best, at most 64 (which no noise can
    make up for), so no score overflows. A vocabulary shard needs the best logit of all shards for its
    distances; the winner over shards is the largest score, then the lowest id.
    """
    return jnp.where(survivors, noise - distances, NOT_DRAWABLE)


def draw(
    distances: Int32[Array, "T V"],
    survivors: Bool[Array, "T V"],
    seed_lo: UInt32[Array, " T"],
    seed_hi: UInt32[Array, " T"],
    positions: Int32[Array, " T"],
    *,
    purpose: Purpose,
) -> Int32[Array, " T"]:
    """Draws one token for each row from softmax(-distances) over the survivors; lowest id on ties.

    `positions` is the absolute position (prompt + output) of the token being drawn.
    """
    token_ids = jnp.arange(distances.shape[1], dtype=jnp.int32)
    noise = gumbel_noise(seed_lo, seed_hi, positions, token_ids, purpose=purpose)
    scores = draw_scores(distances, survivors, noise)
    # Without the barrier XLA:CPU computes the noise one token at a time inside argmax, eight times slower.
    return jnp.argmax(jax.lax.optimization_barrier(scores), axis=1).astype(jnp.int32)


def mul_wide(a: UInt32[Array, "*#N"], b: UInt32[Array, "*#N"]) -> tuple[UInt32[Array, "*N"], UInt32[Array, "*N"]]:
    """Returns the high and low words of the 64-bit product."""
    a_hi, a_lo = a >> _U(16), a & _U(0xFFFF)
    b_hi, b_lo = b >> _U(16), b & _U(0xFFFF)
    cross = a_hi * b_lo + ((a_lo * b_lo) >> _U(16))  # at most 2^32 - 2^16, no carry is lost
    other = a_lo * b_hi + (cross & _U(0xFFFF))
    return a_hi * b_hi + (cross >> _U(16)) + (other >> _U(16)), a * b


def mul_high(a: UInt32[Array, "*#N"], b: UInt32[Array, "*#N"]) -> UInt32[Array, "*N"]:
    """Returns the high word of the 64-bit product."""
    return mul_wide(a, b)[0]


def normalize64(hi: UInt32[Array, "*N"], lo: UInt32[Array, "*N"]) -> tuple[UInt32[Array, "*N"], UInt32[Array, "*N"]]:
    """Returns the top 32 bits after the leading zeros, and the number of leading zeros.

    The value is not 0 and below 2^63. The bits below the top 32 are dropped.
    """
    hi_zeros, lo_zeros = jax.lax.clz(hi), jax.lax.clz(lo)
    is_short = hi == _U(0)
    # The shift amounts of the branch not taken are reduced so that none reaches 32.
    long = (hi << (hi_zeros & _U(31))) | (lo >> ((_U(32) - hi_zeros) & _U(31)))
    short = lo << (lo_zeros & _U(31))
    return jnp.where(is_short, short, long), jnp.where(is_short, _U(32) + lo_zeros, hi_zeros)


def ln2_multiple_q24(n: Int32[Array, "*N"]) -> Int32[Array, "*N"]:
    """Returns n ln 2 rounded to units of 2^-24, for |n| <= 127."""
    return n * _LN2_Q24 - ((n * _LN2_Q24_REST + (1 << 15)) >> 16)


def neg_log1m_q24(rest: UInt32[Array, "*N"]) -> Int32[Array, "*N"]:
    """Returns -ln(1 - rest) in units of 2^-24, for rest (q32) <= 1/2; 0 gives 0."""
    product = mul_high(rest, _log_ratio_q31(rest))
    return ((product + _U(1 << 6)) >> _U(7)).astype(jnp.int32)


def _log_ratio_q31(rest: UInt32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """Returns -ln(1 - rest) / rest in units of 2^-31, for rest (q32) <= 1/2."""
    centred = jax.lax.bitcast_convert_type(rest - _U(1 << 30), jnp.int32)  # -1/4 .. 1/4, q32
    total = jnp.full_like(centred, _LOG_RATIO_Q30[-1])
    for coefficient in reversed(_LOG_RATIO_Q30[:-1]):
        total = coefficient + _signed_mul_high(centred, total)
    return total.astype(jnp.uint32) << _U(1)


def _signed_mul_high(a: Int32[Array, "*N"], b: Int32[Array, "*N"]) -> Int32[Array, "*N"]:
    """Returns a * b / 2^32, low by at most 3 units: the product of the low halves is dropped."""
    a_hi, a_lo = a >> 16, a & 0xFFFF
    b_hi, b_lo = b >> 16, b & 0xFFFF
    return a_hi * b_hi + ((a_hi * b_lo) >> 16) + ((a_lo * b_hi) >> 16)
