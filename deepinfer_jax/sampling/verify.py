"""Which drafts are kept, and the token behind them: rules match, rejection and block (spec: dspark 5).

A request has N = G + 1 verify rows: the row in front of each draft, and one behind the last. Row j draws the token at
`positions` + j. The arithmetic is in integers, as in `filters.py` and `draw.py`: probabilities are weights in units of
2^-41, their logarithms distances in units of 2^-24. So a row decides alone, and the same on every device.

Per vocabulary the rules look at one row of each request at a time; no array of R * N rows is made here.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import draw, filters
from deepinfer_jax.sampling.logits import LOGPROB_FLOOR

NO_TOKEN = -1  # in `Verified.token_ids`: behind the last token that is kept

_U = np.uint32
_ONE = 1 << draw.SCORE_BITS
_FARTHEST = 64 * _ONE  # of a token; a distance that makes a weight of 0
_NEVER = 32 * _ONE  # of a prefix; as above, and leaves room for a token's distance to be added
_LIMB_BITS = 14  # of `filters.Limbs`
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_WEIGHT_BITS = 41  # certainty has weight 2^41
_CERTAINTY = (_U(1 << (_WEIGHT_BITS - 32)), _U(0))


@pytree_dataclass
class VerifyRequests:
    """The requests of a verify step. Rows behind a request's last draft are not looked at, but for the one next to it.

    Padding requests have length 0 and fixed rows: a step in which every row is fixed skips the accept tests.
    """

    drawn: Int32[Array, "R N"]  # the target's own token of each row, from `logits.sample`
    is_fixed: Bool[Array, "R N"]  # whether that token is certain: the row is greedy, or its token forced
    drafts: Int32[Array, "R G"]
    lengths: Int32[Array, " R"]  # drafts to verify, 0..G
    seed_lo: UInt32[Array, " R"]
    seed_hi: UInt32[Array, " R"]
    positions: Int32[Array, " R"]  # absolute position of the token that row 0 draws


@pytree_dataclass
class Verified:
    """The tokens that a verify step emits."""

    token_ids: Int32[Array, "R N"]  # drafts that were accepted, then one more token, then -1
    num_kept: Int32[Array, " R"]  # 1..lengths + 1


def round_seeds(
    seed_lo: UInt32[Array, " R"], seed_hi: UInt32[Array, " R"], positions: Int32[Array, " R"]
) -> tuple[UInt32[Array, " R"], UInt32[Array, " R"]]:
    """Returns the two seed words of what a round draws and may leave behind: drafts, and accept tests.

    Whether a draft is accepted may depend on those behind it, whose positions come again in the next round: their
    noise must then be new. positions: of the first token after the newest one, which the round's row 0 draws.
    """
    no_token = jnp.full((1,), -1, jnp.int32)  # so that no token's noise is used
    words = draw.random_words(seed_lo, seed_hi, positions, no_token, purpose=draw.Purpose.DRAFT)
    return words[0][:, 0], words[1][:, 0]


def accept_matching(
    drawn: Int32[Array, "R N"], drafts: Int32[Array, "R G"], lengths: Int32[Array, " R"]
) -> Int32[Array, " R"]:
    """Returns how many of `drawn` are kept, 1..lengths + 1: one, and one for each leading draft that equals it.

    The tokens are those of the target alone, whatever the drafts are.
    """
    num_drafts = drafts.shape[1]
    return 1 + _num_leading((drawn[:, :num_drafts] == drafts) & _is_verified(num_drafts, lengths))


def verify_rejection(
    logprobs: Float32[Array, "R N V"], draft_logprobs: Float32[Array, "R G V"], requests: VerifyRequests
) -> Verified:
    """Accepts a draft with probability min(1, p / q); behind the first rejected one draws from max(p - q, 0).

    logprobs, draft_logprobs: log p and log q as `logits.process` gives them, of the distributions that `drawn` and
    `drafts` come from; -9999 for a token that cannot be drawn, NaN for a row that is not sound, which accepts nothing.
    A drafter that samples draws with `Purpose.DRAFT` and the `round_seeds` of the same positions.
    """

    def tested() -> Verified:
        is_accepted = _uniforms(requests) < rejection_chances(logprobs, draft_logprobs, requests)
        num_accepted = _num_leading(is_accepted & _is_verified(requests.drafts.shape[1], requests.lengths))
        certain = jnp.zeros_like(num_accepted)
        return _emit(logprobs, draft_logprobs, requests, num_accepted, certain)

    return jax.lax.cond(_all_fixed(requests), lambda: _matched(requests), tested)


def verify_block(
    logprobs: Float32[Array, "R N V"], draft_logprobs: Float32[Array, "R G V"], requests: VerifyRequests
) -> Verified:
    """Accepts the longest prefix of drafts whose test succeeds (block verification, Sun et al. 2024).

    Arguments as in `verify_rejection`, and the same distribution of tokens; never accepts fewer in the mean.
    """

    def tested() -> Verified:
        succeeds = _uniforms(requests) < block_chances(logprobs, draft_logprobs, requests)
        num_drafts = requests.drafts.shape[1]
        counts = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)[None, :]
        succeeds = succeeds & _is_verified(num_drafts, requests.lengths)
        num_accepted = jnp.max(jnp.where(succeeds, counts, 0), axis=1)
        prefixes = _prefix_distances(_ratio_distances(logprobs, draft_logprobs, requests))
        prefix = jnp.take_along_axis(prefixes, num_accepted[:, None], axis=1)[:, 0]
        return _emit(logprobs, draft_logprobs, requests, num_accepted, prefix)

    return jax.lax.cond(_all_fixed(requests), lambda: _matched(requests), tested)


def rejection_chances(
    logprobs: Float32[Array, "R N V"], draft_logprobs: Float32[Array, "R G V"], requests: VerifyRequests
) -> Float32[Array, "R G"]:
    """Returns the chance of each draft's accept test, min(1, p / q), a multiple of 2^-24."""
    return _chance(jnp.maximum(_ratio_distances(logprobs, draft_logprobs, requests), 0))


def block_chances(
    logprobs: Float32[Array, "R N V"], draft_logprobs: Float32[Array, "R G V"], requests: VerifyRequests
) -> Float32[Array, "R G"]:
    """Returns the chance of each prefix's test, which ends with that draft.

    With P the prefix's weight and E the mass of max(P p - q, 0) in the next row: P for the last draft to verify,
    E / (E + 1 - P) for one before it.
    """
    num_drafts = requests.drafts.shape[1]
    prefixes = _prefix_distances(_ratio_distances(logprobs, draft_logprobs, requests))

    def going_on(row: Int32[Array, ""]) -> Float32[Array, " R"]:
        index = jnp.broadcast_to(row, requests.lengths.shape)
        prefix = jax.lax.dynamic_index_in_dim(prefixes, row, axis=1, keepdims=False)
        excess, is_positive = residual_weights(logprobs, draft_logprobs, requests, index, prefix)
        part = filters.mass_of(is_positive, excess)
        whole = _add64(part, _subtract64(_CERTAINTY, _words(_weights(prefix[:, None]))))
        is_certain = (whole[0] == part[0]) & (whole[1] == part[1])
        return jnp.where(is_certain, 1.0, filters.ratio(part, whole))[:, 0]

    inner = jax.lax.map(going_on, jnp.arange(1, num_drafts, dtype=jnp.int32)).T
    inner = jnp.pad(inner, ((0, 0), (0, 1)))  # the last place has no next row
    is_last = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)[None, :] == requests.lengths[:, None]
    return jnp.where(is_last, _chance(prefixes[:, 1:]), inner)


def residual_weights(
    logprobs: Float32[Array, "R N V"],
    draft_logprobs: Float32[Array, "R G V"],
    requests: VerifyRequests,
    row: Int32[Array, " R"],
    prefix: Int32[Array, " R"],
) -> tuple[filters.Limbs, Bool[Array, "R V"]]:
    """Returns max(exp(-prefix) p - q, 0) of one row of each request, below G, and where it is positive.

    p is all on the row's own token where that is fixed. `prefix` is a distance, at most 32.
    """
    each = jnp.arange(row.shape[0])
    distances, is_possible = _distances(logprobs[each, row])
    token_ids = jnp.arange(distances.shape[1], dtype=jnp.int32)[None, :]
    is_fixed, is_own = requests.is_fixed[each, row][:, None], token_ids == requests.drawn[each, row][:, None]
    distances = jnp.where(is_fixed, 0, distances) + prefix[:, None]
    target = filters.weight_limbs(distances, jnp.where(is_fixed, is_own, is_possible))
    draft = filters.weight_limbs(*_distances(draft_logprobs[each, row]))
    # Limbs of the difference; a negative one borrows from the next.
    low, mid, high = (a.astype(jnp.int32) - b.astype(jnp.int32) for a, b in zip(target, draft, strict=True))
    mid = mid + (low >> _LIMB_BITS)
    high = high + (mid >> _LIMB_BITS)
    low, mid = low & _LIMB_MASK, mid & _LIMB_MASK
    is_positive = (high >= 0) & ((low | mid | high) != 0)
    return (low.astype(jnp.uint32), mid.astype(jnp.uint32), high.astype(jnp.uint32)), is_positive


def _matched(requests: VerifyRequests) -> Verified:
    num_kept = accept_matching(requests.drawn, requests.drafts, requests.lengths)
    places = jnp.arange(requests.drawn.shape[1], dtype=jnp.int32)[None, :]
    return Verified(token_ids=jnp.where(places < num_kept[:, None], requests.drawn, NO_TOKEN), num_kept=num_kept)


def _emit(
    logprobs: Float32[Array, "R N V"],
    draft_logprobs: Float32[Array, "R G V"],
    requests: VerifyRequests,
    num_accepted: Int32[Array, " R"],
    prefix: Int32[Array, " R"],
) -> Verified:
    """Puts the last token behind the accepted drafts.

    It is the target's own where all drafts were accepted, and where rounding left nothing of the residual.
    """
    own = requests.drawn[jnp.arange(num_accepted.shape[0]), num_accepted]
    is_rejected = num_accepted < requests.lengths

    def redrawn() -> Int32[Array, " R"]:
        row = jnp.minimum(num_accepted, requests.drafts.shape[1] - 1)
        excess, is_positive = residual_weights(logprobs, draft_logprobs, requests, row, prefix)
        token_ids = draw.draw(
            _log_distances(excess),
            is_positive,
            requests.seed_lo,
            requests.seed_hi,
            requests.positions + num_accepted,
            purpose=draw.Purpose.RESIDUAL,
        )
        return jnp.where(is_rejected & jnp.any(is_positive, axis=1), token_ids, own)

    last = jax.lax.cond(jnp.any(is_rejected), redrawn, lambda: own)
    places = jnp.arange(requests.drawn.shape[1], dtype=jnp.int32)[None, :]
    token_ids = jnp.where(places == num_accepted[:, None], last[:, None], NO_TOKEN)
    drafts = jnp.pad(requests.drafts, ((0, 0), (0, 1)))
    return Verified(token_ids=jnp.where(places < num_accepted[:, None], drafts, token_ids), num_kept=num_accepted + 1)


def _ratio_distances(
    logprobs: Float32[Array, "R N V"], draft_logprobs: Float32[Array, "R G V"], requests: VerifyRequests
) -> Int32[Array, "R G"]:
    """Returns -ln(p / q) of each draft, at most 32, which stands for p = 0."""
    num_requests, num_drafts = requests.drafts.shape
    index = jnp.arange(num_requests)[:, None], jnp.arange(num_drafts)[None, :], requests.drafts
    distances, is_possible = _distances(logprobs[index])
    is_fixed, is_own = requests.is_fixed[:, :num_drafts], requests.drafts == requests.drawn[:, :num_drafts]
    distances = jnp.where(is_fixed, 0, distances)
    draft_distances, _ = _distances(draft_logprobs[index])
    is_possible = jnp.where(is_fixed, is_own, is_possible)
    return jnp.where(is_possible, jnp.minimum(distances - draft_distances, _NEVER), _NEVER)


def _prefix_distances(ratios: Int32[Array, "R G"]) -> Int32[Array, "R N"]:
    """Returns -ln P of each prefix, the empty one first: P = min(1, P of the one before * p / q), 0 once it is 0."""
    prefixes = [jnp.zeros(ratios.shape[0], jnp.int32)]
    for place in range(ratios.shape[1]):
        before = prefixes[-1]
        longer = jnp.clip(before + ratios[:, place], 0, _NEVER)
        prefixes.append(jnp.where(before < _NEVER, longer, _NEVER))
    return jnp.stack(prefixes, axis=1)


def _uniforms(requests: VerifyRequests) -> Float32[Array, "R G"]:
    """The uniform number of each draft's position, from the seed of the round."""
    shape = requests.drafts.shape
    positions = requests.positions[:, None] + jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    seeds = round_seeds(requests.seed_lo, requests.seed_hi, requests.positions)
    seed_lo, seed_hi = (jnp.repeat(words, shape[1]) for words in seeds)
    return draw.accept_uniforms(seed_lo, seed_hi, positions.reshape(-1)).reshape(shape)


def _is_verified(num_drafts: int, lengths: Int32[Array, " R"]) -> Bool[Array, "R G"]:
    return jnp.arange(num_drafts, dtype=jnp.int32)[None, :] < lengths[:, None]


def _num_leading(flags: Bool[Array, "R G"]) -> Int32[Array, " R"]:
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _all_fixed(requests: VerifyRequests) -> Bool[Array, ""]:
    places = jnp.arange(requests.drawn.shape[1], dtype=jnp.int32)[None, :]
    return jnp.all(requests.is_fixed | (places > requests.lengths[:, None]))


def _distances(logprobs: Float32[Array, "*N"]) -> tuple[Int32[Array, "*N"], Bool[Array, "*N"]]:
    """Returns -logprob in units of 2^-24, at most 64, and which tokens can be drawn. Exact: `process` rounds so."""
    is_possible = logprobs > LOGPROB_FLOOR
    distances = jnp.minimum(jnp.where(is_possible, -logprobs, 64.0), 64.0)
    return (distances * np.float32(_ONE)).astype(jnp.int32), is_possible


def _weights(distances: Int32[Array, "R N"]) -> filters.Limbs:
    return filters.weight_limbs(distances, jnp.ones(distances.shape, bool))


def _chance(distances: Int32[Array, "R G"]) -> Float32[Array, "R G"]:
    """Returns exp(-distance) rounded down to a multiple of 2^-24."""
    _, mid, high = _weights(distances)
    top = (high << _U(11)) | (mid >> _U(3))  # 24 of the bits behind 2^41
    return top.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def _log_distances(limbs: filters.Limbs) -> Int32[Array, "R V"]:
    """Returns -ln(weight / 2^41) in units of 2^-24; means nothing for a weight of 0."""
    mantissa, zeros = draw.normalize64(*_words(limbs))
    return draw.neg_log1m_q24(-mantissa) - draw.ln2_multiple_q24(64 - _WEIGHT_BITS - zeros.astype(jnp.int32))


def _words(limbs: filters.Limbs) -> tuple[UInt32[Array, "R V"], UInt32[Array, "R V"]]:
    """Returns the high and low words of a weight."""
    low, mid, high = limbs
    return high >> _U(32 - 2 * _LIMB_BITS), low | (mid << _U(_LIMB_BITS)) | (high << _U(2 * _LIMB_BITS))


def _add64(a: filters.Mass, b: filters.Mass) -> filters.Mass:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def _subtract64(a: tuple[np.uint32, np.uint32], b: filters.Mass) -> filters.Mass:
    return a[0] - b[0] - (a[1] < b[1]).astype(jnp.uint32), a[1] - b[1]
