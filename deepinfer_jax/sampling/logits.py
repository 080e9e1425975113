"""Logits rows to processed log-probabilities and tokens (spec: interface 4.1 to 4.3).

After the scaled distance of a logit below the row's best, `(best - logit) * (1 / T)`, which is one
subtraction and one multiplication, all arithmetic is in integers: probabilities are 42-bit weights, masses are
exact 64-bit sums. So a filter border, a log-probability and a token do not depend on the number of
rows, on how the vocabulary is summed, or on fused multiply-adds (there is no float addition to fuse into).

Errors: a weight within 2^-22 relative and 2^-41 absolute, a log-probability within 2^-20 plus its own
rounding to float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import draw

LOGPROB_FLOOR = -9999.0  # reported for every token outside the survivors
MAX_VOCAB = 2**18  # a sum of so many 14-bit limbs fits 32 bits

_U = np.uint32
_LIMB_BITS = 14
_LIMB_MASK = _U((1 << _LIMB_BITS) - 1)
_WEIGHT_BITS = 41  # the best token has weight 2^41
_TOP_P_BITS = 30
_MAX_DISTANCE_Q24 = 64.0  # a token so far below the best has weight 0 and cannot be drawn
_MAX_DISTANCE_Q17 = 12000.0  # beyond the floor of reported values
_LOG2E_Q31 = 0xB8AA3B29
# (2^g - 1) / g on [0, 1] as a polynomial in g, q31, lowest power first; relative error 2^-26.
_EXP2_RATIO_Q31 = (1488522215, 515883993, 119176803, 20727931, 2725622, 447061)

Limbs = tuple[UInt32[Array, "T V"], UInt32[Array, "T V"], UInt32[Array, "T V"]]
Mass = tuple[UInt32[Array, "T 1"], UInt32[Array, "T 1"]]  # high and low words


@pytree_dataclass
class SampleRows:
    """What each row of a sampling step asks for.

    Padding rows are greedy with top_p 1 and top_k -1: a step in which no row filters, or none samples,
    skips that work.
    """

    seed_lo: UInt32[Array, " T"]
    seed_hi: UInt32[Array, " T"]
    positions: Int32[Array, " T"]  # absolute position of the token being drawn
    inverse_temperature: Float32[Array, " T"]  # divided on the host: SamplingParams
    top_p: Float32[Array, " T"]  # 1 is off
    top_k: Int32[Array, " T"]  # -1 is off
    is_greedy: Bool[Array, " T"]  # argmax of the logits; top_p and top_k are off
    suppressed_ids: Int32[Array, " T"]  # a token that may not be drawn, -1 for none
    forced_ids: Int32[Array, " T"]  # the token to emit whatever the logits, -1 for none


@pytree_dataclass
class Processed:
    """A logits row after temperature and filters."""

    distances: Int32[Array, "T V"]  # scaled logit below the best one, units of 2^-24, at most 64
    survivors: Bool[Array, "T V"]  # tokens that may be drawn; at least one
    logprobs: Float32[Array, "T V"]  # log-softmax over the survivors, -9999 elsewhere


@pytree_dataclass
class SampleOutput:
    """The emitted tokens and the distributions they come from."""

    token_ids: Int32[Array, " T"]
    token_logprobs: Float32[Array, " T"]  # of the emitted token, NaN for a row without a finite best logit
    logprobs: Float32[Array, "T V"]  # every token's; free when the caller drops it inside the same jit


def sample(logits: Float32[Array, "T V"], rows: SampleRows) -> SampleOutput:
    """Chooses one token for each row: forced, else argmax for greedy rows, else the fresh draw.

    Logits that a blacklist or a grammar forbids are -inf. A forced token may be one that is filtered out;
    its log-probability is then the floor.
    """
    logits = suppress(logits, rows.suppressed_ids)
    processed = process(logits, rows)
    best = jnp.argmax(logits, axis=1).astype(jnp.int32)

    def drawn() -> Int32[Array, " T"]:
        return draw.draw(
            processed.distances,
            processed.survivors,
            rows.seed_lo,
            rows.seed_hi,
            rows.positions,
            purpose=draw.Purpose.FRESH,
        )

    token_ids = jax.lax.cond(jnp.all(rows.is_greedy), lambda: best, drawn)
    token_ids = jnp.where(rows.is_greedy, best, token_ids)
    token_ids = jnp.where(rows.forced_ids >= 0, rows.forced_ids, token_ids)
    token_logprobs = jnp.take_along_axis(processed.logprobs, token_ids[:, None], axis=1)[:, 0]
    return SampleOutput(token_ids=token_ids, token_logprobs=token_logprobs, logprobs=processed.logprobs)


def suppress(logits: Float32[Array, "T V"], suppressed_ids: Int32[Array, " T"]) -> Float32[Array, "T V"]:
    """Sets one token of each row to -inf; -1 leaves the row as it is."""
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(token_ids[None, :] == suppressed_ids[:, None], -jnp.inf, logits)


def unpack_masks(masks: UInt32[Array, "T W"], vocab_size: int) -> Bool[Array, "T V"]:
    """Which tokens of each row are allowed, from one bit for each, lowest first; ids beyond the mask are not."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, :vocab_size] != 0
    return jnp.pad(allowed, ((0, 0), (0, vocab_size - allowed.shape[1])))


def process(logits: Float32[Array, "T V"], rows: SampleRows) -> Processed:
    """Applies temperature, then top-p, then top-k, then log-softmax over what is left.

    Top-p keeps a token while the mass strictly before it is <= p, in order of falling logit / T, lower ids
    first on ties; top-k keeps the first k of these. -inf logits never survive. A row whose best logit is not
    finite (NaN anywhere, +inf, or all -inf) gets NaN log-probabilities.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {logits.shape[1]} is above {MAX_VOCAB}")
    # Whatever made the logits is rounded before the subtraction below can be fused with it.
    logits = jax.lax.optimization_barrier(logits)
    scaled, is_possible = scaled_distances(logits, rows.inverse_temperature)
    distances = _fixed_point(scaled, draw.SCORE_BITS, _MAX_DISTANCE_Q24)
    limbs = _weight_limbs(distances, is_possible)
    survivors = is_possible & _top_p(scaled, limbs, rows.top_p) & _top_k(scaled, rows.top_k)
    log_mass = _log_mass_q24(_mass(survivors, limbs))
    logprobs = jnp.where(survivors, _logprobs(scaled, distances, log_mass), LOGPROB_FLOOR)
    is_sound = jnp.isfinite(jnp.max(logits, axis=1, keepdims=True))
    return Processed(
        distances=distances,
        survivors=survivors,
        logprobs=jnp.where(is_sound, logprobs, jnp.nan),
    )


def scaled_distances(
    logits: Float32[Array, "T V"], inverse_temperature: Float32[Array, " T"]
) -> tuple[Float32[Array, "T V"], Bool[Array, "T V"]]:
    """Returns (best - logit) / T, and which logits are above -inf; the others get +inf."""
    best = jnp.max(logits, axis=1, keepdims=True)
    is_possible = logits > -jnp.inf
    # No float addition may follow this product: XLA would fuse it and drop the rounding.
    scaled = jnp.where(is_possible, best - logits, 0.0) * inverse_temperature[:, None]
    return jnp.where(is_possible, scaled, jnp.inf), is_possible


def top_logprobs(logprobs: Float32[Array, "T V"], k: int) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
    """Returns the k best log-probabilities of each row and their tokens, lowest id first on ties.

    With k above the vocabulary the list is padded with the floor and token -1.
    """
    num_real = min(k, logprobs.shape[1])
    values, token_ids = jax.lax.top_k(logprobs, num_real)
    padding = ((0, 0), (0, k - num_real))
    return (
        jnp.pad(values, padding, constant_values=LOGPROB_FLOOR),
        jnp.pad(token_ids, padding, constant_values=-1),
    )


def _fixed_point(value: Float32[Array, "T V"], fraction_bits: int, limit: float) -> Int32[Array, "T V"]:
    """Returns min(value, limit) in units of 2^-fraction_bits, rounded down."""
    return (jnp.minimum(value, limit) * np.float32(2.0**fraction_bits)).astype(jnp.int32)


def _weight_limbs(distances: Int32[Array, "T V"], is_possible: Bool[Array, "T V"]) -> Limbs:
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


def _mass(selected: Bool[Array, "T V"], limbs: Limbs) -> Mass:
    """Returns the exact sum of the selected weights, below 2^59, as two words."""
    low, mid, high = (
        jnp.sum(jnp.where(selected, limb, _U(0)), axis=1, keepdims=True, dtype=jnp.uint32) for limb in limbs
    )
    mid = mid + (low >> _U(_LIMB_BITS))
    high = high + (mid >> _U(_LIMB_BITS))
    low_words = (low & _LIMB_MASK) | ((mid & _LIMB_MASK) << _U(_LIMB_BITS))
    return high >> _U(4), (high << _U(28)) | low_words


def _top_p(scaled: Float32[Array, "T V"], limbs: Limbs, top_p: Float32[Array, " T"]) -> Bool[Array, "T V"]:
    """Returns the tokens with at most top_p of the mass strictly before them."""

    def kept() -> Bool[Array, "T V"]:
        p = jnp.minimum(top_p, 1.0) * np.float32(2.0**_TOP_P_BITS)
        p = p.astype(jnp.int32).astype(jnp.uint32)[:, None]
        high, low = _mass(jnp.ones(scaled.shape, bool), limbs)
        # budget = p * mass >> 30, through the 96-bit product
        carry, word0 = draw.mul_wide(p, low)
        word2, word1 = draw.mul_wide(p, high)
        word1 = word1 + carry
        word2 = word2 + (word1 < carry).astype(jnp.uint32)
        budget_low = (word0 >> _U(_TOP_P_BITS)) | (word1 << _U(32 - _TOP_P_BITS))
        budget_high = (word1 >> _U(_TOP_P_BITS)) | (word2 << _U(32 - _TOP_P_BITS))

        def fits(selected: Bool[Array, "T V"]) -> Bool[Array, "T 1"]:
            high, low = _mass(selected, limbs)
            return (high < budget_high) | ((high == budget_high) & (low <= budget_low))

        return _longest_prefix(scaled, fits)

    return jax.lax.cond(jnp.any(top_p < 1.0), kept, lambda: jnp.ones(scaled.shape, bool))


def _top_k(scaled: Float32[Array, "T V"], top_k: Int32[Array, " T"]) -> Bool[Array, "T V"]:
    """Returns the top_k best tokens, all of them for -1."""
    vocab_size = scaled.shape[1]
    limit = jnp.where(top_k < 0, vocab_size, top_k)[:, None]

    def fits(selected: Bool[Array, "T V"]) -> Bool[Array, "T 1"]:
        return jnp.sum(selected, axis=1, keepdims=True, dtype=jnp.int32) < limit

    return jax.lax.cond(
        jnp.any(limit < vocab_size),
        lambda: _longest_prefix(scaled, fits),
        lambda: jnp.ones(scaled.shape, bool),
    )


def _longest_prefix(
    scaled: Float32[Array, "T V"],
    fits: Callable[[Bool[Array, "T V"]], Bool[Array, "T 1"]],
) -> Bool[Array, "T V"]:
    """Returns the tokens for which the set strictly before them fits, in order of (scaled, token id).

    `fits` is true for the empty set and monotone. Two bisections, over the bits of the distance (which order
    like the distance, for it is not negative) and over token ids among equal distances, replace a sort.
    """
    keys = jax.lax.bitcast_convert_type(scaled, jnp.int32)
    token_ids = jnp.arange(scaled.shape[1], dtype=jnp.int32)[None, :]
    last_key = _largest(31, scaled.shape[0], lambda key: fits(keys < key))
    is_before, is_tied = keys < last_key, keys == last_key
    last_id = _largest(
        (scaled.shape[1] - 1).bit_length(),
        scaled.shape[0],
        lambda token_id: fits(is_before | (is_tied & (token_ids < token_id))),
    )
    return is_before | (is_tied & (token_ids <= last_id))


def _largest(
    num_bits: int,
    num_rows: int,
    is_allowed: Callable[[Int32[Array, "T 1"]], Bool[Array, "T 1"]],
) -> Int32[Array, "T 1"]:
    """Returns each row's largest number of num_bits bits that a monotone predicate allows."""

    def try_bit(step: Int32[Array, ""], found: Int32[Array, "T 1"]) -> Int32[Array, "T 1"]:
        tried = found | (1 << (num_bits - 1 - step))
        return jnp.where(is_allowed(tried), tried, found)

    return jax.lax.fori_loop(0, num_bits, try_bit, jnp.zeros((num_rows, 1), jnp.int32))


def _log_mass_q24(mass: Mass) -> Int32[Array, "T 1"]:
    """Returns ln(mass / 2^41) in units of 2^-24; exactly 0 for the best token alone, never below."""
    mantissa, zeros = draw.normalize64(*mass)  # mass = mantissa 2^(32 - zeros), up to dropped bits
    is_power = mantissa == _U(1 << 31)
    rest = jnp.where(is_power, _U(0), -mantissa)
    exponent = 64 - _WEIGHT_BITS - zeros.astype(jnp.int32) - is_power.astype(jnp.int32)
    log_mass = draw.ln2_multiple_q24(exponent) - draw.neg_log1m_q24(rest)
    return jnp.maximum(log_mass, 0)


def _logprobs(
    scaled: Float32[Array, "T V"],
    distances: Int32[Array, "T V"],
    log_mass: Int32[Array, "T 1"],
) -> Float32[Array, "T V"]:
    """Returns -(distance + log mass), rounded once, not below the floor.

    Distances from 64 on are multiples of 2^-17 as float32 numbers, so they are added in those units.
    """
    near = _to_float(distances + log_mass) * np.float32(2.0**-24)
    far_distances = _fixed_point(scaled, 17, _MAX_DISTANCE_Q17)
    far = _to_float(far_distances + (log_mass >> 7)) * np.float32(2.0**-17)
    return jnp.maximum(jnp.where(scaled < _MAX_DISTANCE_Q24, near, far), LOGPROB_FLOOR)


def _to_float(value: Int32[Array, "T V"]) -> Float32[Array, "T V"]:
    """Returns -value for value >= 0, rounded here to 24 bits (half up), so that the conversion is exact."""
    dropped = jnp.maximum(8 - jax.lax.clz(value), 0)
    half = (1 << dropped) >> 1
    return (-(((value + half) >> dropped) << dropped)).astype(jnp.float32)
