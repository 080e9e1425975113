"""Which tokens of a row may be drawn, and their masses, in exact integers (spec: interface 4.1).

Probabilities are 42-bit weights and masses exact 64-bit sums, so a filter's border does not depend on the number of
rows, on how the vocabulary is summed, or on fused multiply-adds (there is no float addition to fuse into).
A weight is within 2^-22 relative and 2^-41 absolute.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from deepinfer_jax.sampling import draw

MAX_VOCAB = 2**18  # a sum of so many 14-bit limbs fits 32 bits

_U = np.uint32
_LIMB_BITS = 14
_LIMB_MASK = _U((1 << _LIMB_BITS) - 1)
_WEIGHT_BITS = 41  # the best token has weight 2^41
_TOP_P_BITS = 30
_LOG2E_Q31 = 0xB8AA3B29
# (2^g - 1) / g on [0, 1] as a polynomial in g, q31, lowest power first; relative error 2^-26.
_EXP2_RATIO_Q31 = (1488522215, 515883993, 119176803, 20727931, 2725622, 447061)
_DISTANCE_BITS = 31  # of a distance as a key: it is not negative
_QUOTIENT_BITS = 26  # 24 of a float32, one that may be 0, one to round by

Limbs = tuple[UInt32[Array, "T V"], UInt32[Array, "T V"], UInt32[Array, "T V"]]
Mass = tuple[UInt32[Array, "T 1"], UInt32[Array, "T 1"]]  # high and low words
Key = Int32[Array, "T 1"] | UInt32[Array, "T 1"]
Keys = Int32[Array, "T V"] | UInt32[Array, "T V"]


def weight_limbs(distances: Int32[Array, "T V"], is_possible: Bool[Array, "T V"]) -> Limbs:
    """Returns exp(-distance) in units of 2^-41 as three 14-bit limbs, low first."""
    high, low = draw.mul_wide(distances.astype(jnp.uint32), jnp.full((1, 1), _U(_LOG2E_Q31)))
    # distance / ln 2 = whole + fraction = halvings - rise, with rise in [0, 1)
    whole, fraction = high >> _U(23), (high << _U(9)) | (low >> _U(23))
    rise = -fraction  # q32
    halvings = whole + (fraction != _U(0)).astype(jnp.uint32)
    ratio = jnp.full_like(rise, _U(_EXP2_RATIO_Q31[-1]))
    for coefficient in reversed(_EXP2_RATIO_Q31[:-1]):
        ratio = _U(coefficient) + draw.mul_high(rise, ratio)
    power = _U(1 << 30) + (draw.mul_high(rise, ratio) >> _U(1))  # 2^rise, q30
    # weight = power * 2^11 >> halvings
    spare = _WEIGHT_BITS - 30
    left = jnp.maximum(spare - halvings.astype(jnp.int32), 0).astype(jnp.uint32)
    low_limb = _shift_right(power << left, jnp.maximum(halvings, _U(spare)) - _U(spare))
    mid_limb = _shift_right(power, halvings + _U(_LIMB_BITS - spare))
    high_limb = _shift_right(power, halvings + _U(2 * _LIMB_BITS - spare))
    return (
        jnp.where(is_possible, low_limb & _LIMB_MASK, _U(0)),
        jnp.where(is_possible, mid_limb & _LIMB_MASK, _U(0)),
        jnp.where(is_possible, high_limb, _U(0)),
    )


def _shift_right(value: UInt32[Array, "T V"], amount: UInt32[Array, "T V"]) -> UInt32[Array, "T V"]:
    return jnp.where(amount < _U(32), value >> jnp.minimum(amount, _U(31)), _U(0))


def mass_of(selected: Bool[Array, "T V"], limbs: Limbs) -> Mass:
    """Returns the exact sum of the selected weights, below 2^59, as two words."""
    low, mid, high = (
        jnp.sum(jnp.where(selected, limb, _U(0)), axis=1, keepdims=True, dtype=jnp.uint32) for limb in limbs
    )
    mid = mid + (low >> _U(_LIMB_BITS))
    high = high + (mid >> _U(_LIMB_BITS))
    low_words = (low & _LIMB_MASK) | ((mid & _LIMB_MASK) << _U(_LIMB_BITS))
    return high >> _U(4), (high << _U(28)) | low_words


def top_p_survivors(scaled: Float32[Array, "T V"], limbs: Limbs, top_p: Float32[Array, " T"]) -> Bool[Array, "T V"]:
    """Returns the tokens with at most top_p of the mass strictly before them."""

    def kept() -> Bool[Array, "T V"]:
        p = jnp.minimum(top_p, 1.0) * np.float32(2.0**_TOP_P_BITS)
        p = p.astype(jnp.int32).astype(jnp.uint32)[:, None]
        high, low = mass_of(jnp.ones(scaled.shape, bool), limbs)
        # budget = p * mass >> 30, through the 96-bit product
        carry, word0 = draw.mul_wide(p, low)
        word2, word1 = draw.mul_wide(p, high)
        word1 = word1 + carry
        word2 = word2 + (word1 < carry).astype(jnp.uint32)
        budget_low = (word0 >> _U(_TOP_P_BITS)) | (word1 << _U(32 - _TOP_P_BITS))
        budget_high = (word1 >> _U(_TOP_P_BITS)) | (word2 << _U(32 - _TOP_P_BITS))

        def fits(selected: Bool[Array, "T V"]) -> Bool[Array, "T 1"]:
            high, low = mass_of(selected, limbs)
            return (high < budget_high) | ((high == budget_high) & (low <= budget_low))

        return _longest_prefix(_distance_keys(scaled), fits, num_bits=_DISTANCE_BITS)

    return jax.lax.cond(jnp.any(top_p < 1.0), kept, lambda: jnp.ones(scaled.shape, bool))


def top_k_survivors(scaled: Float32[Array, "T V"], top_k: Int32[Array, " T"]) -> Bool[Array, "T V"]:
    """Returns the top_k best tokens, all of them for -1."""
    vocab_size = scaled.shape[1]
    limit = jnp.where(top_k < 0, vocab_size, top_k)[:, None]

    def fits(selected: Bool[Array, "T V"]) -> Bool[Array, "T 1"]:
        return jnp.sum(selected, axis=1, keepdims=True, dtype=jnp.int32) < limit

    return jax.lax.cond(
        jnp.any(limit < vocab_size),
        lambda: _longest_prefix(_distance_keys(scaled), fits, num_bits=_DISTANCE_BITS),
        lambda: jnp.ones(scaled.shape, bool),
    )


def preselect(logits: Float32[Array, "T V"], count: int) -> Float32[Array, "T V"]:
    """Sets all but the `count` best logits of each row to -inf, lower ids first on ties. NaN stays."""
    if count >= logits.shape[1]:
        return logits
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0.0, 0.0, logits), jnp.uint32)  # -0 is 0
    keys = jnp.where(bits >= _U(1 << 31), bits, bits ^ _U(2**31 - 1))  # rise as logits fall

    def fits(selected: Bool[Array, "T V"]) -> Bool[Array, "T 1"]:
        return jnp.sum(selected, axis=1, keepdims=True, dtype=jnp.int32) < count

    kept = _longest_prefix(keys, fits, num_bits=32) | jnp.isnan(logits)
    return jnp.where(kept, logits, -jnp.inf)


def ratio(part: Mass, whole: Mass) -> Float32[Array, "T 1"]:
    """Returns part / whole rounded once, to the nearest and to even on ties; part is below whole.

    Long division, for not every device divides with correct rounding: the quotient without leading zeros has 25 or
    26 bits here, of which a float32 keeps 24.
    """
    shift = jnp.maximum(_clz64(part).astype(jnp.int32) - _clz64(whole).astype(jnp.int32), 0).astype(jnp.uint32)

    def next_bit(_: Int32[Array, ""], carry: tuple[Mass, Int32[Array, "T 1"]]) -> tuple[Mass, Int32[Array, "T 1"]]:
        (high, low), quotient = carry
        is_one = (high > whole[0]) | ((high == whole[0]) & (low >= whole[1]))
        borrow = (low < whole[1]).astype(jnp.uint32)
        high = jnp.where(is_one, high - whole[0] - borrow, high)
        low = jnp.where(is_one, low - whole[1], low)
        doubled = (high << _U(1)) | (low >> _U(31)), low << _U(1)
        return doubled, (quotient << 1) | is_one.astype(jnp.int32)

    start = _shift_left64(part, shift), jnp.zeros(part[0].shape, jnp.int32)
    (high, low), quotient = jax.lax.fori_loop(0, _QUOTIENT_BITS, next_bit, start)
    dropped = jnp.where(quotient >> (_QUOTIENT_BITS - 1) > 0, 2, 1)
    rest = quotient & ((1 << dropped) - 1)
    kept = quotient >> dropped
    half = 1 << (dropped - 1)
    has_more = (high | low) != _U(0)
    is_up = (rest > half) | ((rest == half) & (has_more | (kept % 2 == 1)))
    rounded = ((kept + is_up.astype(jnp.int32)) << dropped).astype(jnp.float32)
    scale = jax.lax.bitcast_convert_type((_U(127) - shift) << _U(23), jnp.float32)  # 2^-shift
    return rounded * np.float32(2.0 ** (1 - _QUOTIENT_BITS)) * scale


def _clz64(value: Mass) -> UInt32[Array, "T 1"]:
    return jnp.where(value[0] != _U(0), jax.lax.clz(value[0]), _U(32) + jax.lax.clz(value[1]))


def _shift_left64(value: Mass, amount: UInt32[Array, "T 1"]) -> Mass:
    """Returns value << amount for amounts below 64."""
    high, low = value
    is_far = amount >= _U(32)
    high, low = jnp.where(is_far, low, high), jnp.where(is_far, _U(0), low)
    amount = amount & _U(31)
    carried = jnp.where(amount == _U(0), _U(0), low >> ((_U(32) - amount) & _U(31)))
    return (high << amount) | carried, low << amount


def _distance_keys(scaled: Float32[Array, "T V"]) -> Int32[Array, "T V"]:
    """The bits of a distance, which order like it, for it is not negative."""
    return jax.lax.bitcast_convert_type(scaled, jnp.int32)


def _longest_prefix(
    keys: Keys, fits: Callable[[Bool[Array, "T V"]], Bool[Array, "T 1"]], *, num_bits: int
) -> Bool[Array, "T V"]:
    """Returns the tokens for which the set strictly before them fits, in order of (key, token id).

    `fits` is true for the empty set and monotone. Two bisections, over the bits of the key and over token ids among
    equal keys, replace a sort.
    """
    token_ids = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :]
    blank = jnp.zeros((keys.shape[0], 1), keys.dtype)
    last_key = _largest(num_bits, blank, lambda key: fits(keys < key))
    is_before, is_tied = keys < last_key, keys == last_key
    last_id = _largest(
        (keys.shape[1] - 1).bit_length(),
        jnp.zeros((keys.shape[0], 1), jnp.int32),
        lambda token_id: fits(is_before | (is_tied & (token_ids < token_id))),
    )
    return is_before | (is_tied & (token_ids <= last_id))


def _largest(num_bits: int, blank: Key, is_allowed: Callable[[Any], Bool[Array, "T 1"]]) -> Key:
    """Returns each row's largest number of num_bits bits that a monotone predicate allows; blank: zeros."""

    def try_bit(step: Int32[Array, ""], found: Key) -> Key:
        one = jnp.ones((), blank.dtype)
        tried = found | (one << (num_bits - 1 - step).astype(blank.dtype))
        return jnp.where(is_allowed(tried), tried, found)

    return jax.lax.fori_loop(0, num_bits, try_bit, blank)


def log_mass_q24(mass: Mass) -> Int32[Array, "T 1"]:
    """Returns ln(mass / 2^41) in units of 2^-24; exactly 0 for the best token alone, never below."""
    mantissa, zeros = draw.normalize64(*mass)  # mass = mantissa 2^(32 - zeros), up to dropped bits
    is_power = mantissa == _U(1 << 31)
    rest = jnp.where(is_power, _U(0), -mantissa)
    exponent = 64 - _WEIGHT_BITS - zeros.astype(jnp.int32) - is_power.astype(jnp.int32)
    log_mass = draw.ln2_multiple_q24(exponent) - draw.neg_log1m_q24(rest)
    return jnp.maximum(log_mass, 0)
