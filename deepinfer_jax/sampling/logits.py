"""Logits rows to processed log-probabilities and tokens (spec: interface 4.1 to 4.3, docs/sampling.md).

After the edits, one product and one sum for each edited logit, and the scaled distance of a logit below the row's
best, `(best - logit) * (1 / T)`, which is one subtraction and one multiplication, all arithmetic is in integers
(`filters.py`, `draw.py`). So a filter border, a log-probability and a token do not depend on the number of
rows, on how the vocabulary is summed, or on fused multiply-adds.

A log-probability is within 2^-20 plus its own rounding to float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from deepinfer_jax.ops.scatter import put_where
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import draw, filters

LOGPROB_FLOOR = -9999.0  # reported for every token outside the survivors
NO_MASS = -1.0  # smaller_mass where it is not computed
MAX_VOCAB = filters.MAX_VOCAB

_MAX_DISTANCE_Q24 = 64.0  # a token so far below the best has weight 0 and cannot be drawn
_MAX_DISTANCE_Q17 = 12000.0  # beyond the floor of reported values
_MAX_FLOAT = np.finfo(np.float32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """What a deployment fixes for every request; part of the compiled program."""

    blacklist: tuple[tuple[int, int], ...] = ()  # first and last ids of ranges that are never drawn
    force_top_k: int = 0  # all work is in so many best tokens, 0 for off
    computes_smaller: bool = False  # whether `SampleOutput.smaller_mass` is wanted

    def __post_init__(self) -> None:
        for first, last in self.blacklist:
            if not 0 <= first <= last:
                raise ValueError(f"blacklist has ({first}, {last}); give (first, last) with 0 <= first <= last")
        if self.force_top_k < 0:
            raise ValueError(f"force_top_k={self.force_top_k} must be >= 0; 0 is off")


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
    is_greedy: Bool[Array, " T"]  # argmax of the logits; top_p, top_k and min_p are off
    suppressed_ids: Int32[Array, " T"]  # a token that may not be drawn, -1 for none
    forced_ids: Int32[Array, " T"]  # the token to emit whatever the logits, -1 for none
    min_p_distance: Float32[Array, " T"] | None = None  # -ln(min_p), of the host; +inf is off, None for all rows


@pytree_dataclass
class Edits:
    """Changes of single logits: (logit * up if logit > 0 else logit * down) + add. Forbidden tokens stay so."""

    token_ids: Int32[Array, "T K"]  # each id once in a row; -1 for none
    up: Float32[Array, "T K"]
    down: Float32[Array, "T K"]
    add: Float32[Array, "T K"]


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
    smaller_mass: Float32[Array, " T"]  # of the survivors less likely than the emitted token; -1 if not computed


def sample(
    logits: Float32[Array, "T V"],
    rows: SampleRows,
    *,
    edits: Edits | None = None,
    allowed: Bool[Array, "T V"] | None = None,
    settings: SampleSettings = SampleSettings(),
    purpose: draw.Purpose = draw.Purpose.FRESH,
) -> SampleOutput:
    """Chooses one token for each row: forced, else argmax for greedy rows, else the draw with the noise of `purpose`.

    Order: blacklist, suppressed token, allowed, edits, force_top_k, then as `process`, then the draw. A forced token
    may be one that is filtered out; its log-probability is then the floor. A row in which everything is forbidden has
    NaN log-probabilities, and its token means nothing unless it is forced.
    """
    logits = suppress(logits, rows.suppressed_ids)
    if settings.blacklist:
        logits = jnp.where(_blacklisted(settings.blacklist, logits.shape[1])[None, :], -jnp.inf, logits)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)
    if edits is not None:
        logits = apply_edits(logits, edits)
    if settings.force_top_k > 0:
        logits = filters.preselect(logits, settings.force_top_k)
    processed = process(logits, rows)
    token_ids = _choose(logits, processed, rows, purpose)
    token_logprobs = jnp.take_along_axis(processed.logprobs, token_ids[:, None], axis=1)[:, 0]
    smaller = (
        smaller_mass(processed, token_ids) if settings.computes_smaller else jnp.full_like(token_logprobs, NO_MASS)
    )
    return SampleOutput(
        token_ids=token_ids, token_logprobs=token_logprobs, logprobs=processed.logprobs, smaller_mass=smaller
    )


def _choose(
    logits: Float32[Array, "T V"], processed: Processed, rows: SampleRows, purpose: draw.Purpose
) -> Int32[Array, " T"]:
    best = jnp.argmax(logits, axis=1).astype(jnp.int32)

    def drawn() -> Int32[Array, " T"]:
        return draw.draw(
            processed.distances,
            processed.survivors,
            rows.seed_lo,
            rows.seed_hi,
            rows.positions,
            purpose=purpose,
        )

    token_ids = jax.lax.cond(jnp.all(rows.is_greedy), lambda: best, drawn)
    token_ids = jnp.where(rows.is_greedy, best, token_ids)
    return jnp.where(rows.forced_ids >= 0, rows.forced_ids, token_ids)


def suppress(logits: Float32[Array, "T V"], suppressed_ids: Int32[Array, " T"]) -> Float32[Array, "T V"]:
    """Sets one token of each row to -inf; -1 leaves the row as it is."""
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(token_ids[None, :] == suppressed_ids[:, None], -jnp.inf, logits)


def unpack_masks(masks: UInt32[Array, "T W"], vocab_size: int) -> Bool[Array, "T V"]:
    """Which tokens of each row are allowed, from one bit for each, lowest first; ids beyond the mask are not."""
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, :vocab_size] != 0
    return jnp.pad(allowed, ((0, 0), (0, vocab_size - allowed.shape[1])))


def apply_edits(logits: Float32[Array, "T V"], edits: Edits) -> Float32[Array, "T V"]:
    """Returns the logits with a product and a sum, each rounded, at the edited tokens.

    Logits that are not finite stay as they are, and an edit makes no such logit: it ends at the largest number.
    """
    if edits.token_ids.shape[1] == 0:
        return logits
    places = jnp.maximum(edits.token_ids, 0)
    # The barriers keep XLA from fusing the product with the sum, which would drop its rounding.
    found = jax.lax.optimization_barrier(jnp.take_along_axis(logits, places, axis=1))
    product = jax.lax.optimization_barrier(found * jnp.where(found > 0.0, edits.up, edits.down))
    edited = jnp.clip(product + edits.add, -_MAX_FLOAT, _MAX_FLOAT)
    edited = jnp.where(jnp.isfinite(found), edited, found)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return put_where(logits, (rows, edits.token_ids), edited, edits.token_ids >= 0)


def _blacklisted(ranges: tuple[tuple[int, int], ...], vocab_size: int) -> np.ndarray:
    forbidden = np.zeros(vocab_size, bool)
    for first, last in ranges:
        forbidden[first : last + 1] = True
    return forbidden


def process(logits: Float32[Array, "T V"], rows: SampleRows) -> Processed:
    """Applies temperature, then top-p, then top-k, then min-p, then log-softmax over what is left.

    Top-p keeps a token while the mass strictly before it is <= p, in order of falling logit / T, lower ids
    first on ties; top-k keeps the first k of these; min-p keeps what is at most its distance below the best.
    -inf logits never survive. A row whose best logit is not finite (NaN anywhere, +inf, or all -inf) gets NaN
    log-probabilities.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {logits.shape[1]} is above {MAX_VOCAB}")
    # Whatever made the logits is rounded before the subtraction below can be fused with it.
    logits = jax.lax.optimization_barrier(logits)
    scaled, is_possible = scaled_distances(logits, rows.inverse_temperature)
    distances = _fixed_point(scaled, draw.SCORE_BITS, _MAX_DISTANCE_Q24)
    limbs = filters.weight_limbs(distances, is_possible)
    survivors = filters.top_p_survivors(scaled, limbs, rows.top_p) & filters.top_k_survivors(scaled, rows.top_k)
    survivors = survivors & is_possible
    if rows.min_p_distance is not None:
        survivors = survivors & (scaled <= rows.min_p_distance[:, None])
    log_mass = filters.log_mass_q24(filters.mass_of(survivors, limbs))
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
    """Returns (best - logit) / T, finite, and which logits are above -inf; the others get +inf."""
    best = jnp.max(logits, axis=1, keepdims=True)
    is_possible = logits > -jnp.inf
    # No float addition may follow this product: XLA would fuse it and drop the rounding.
    scaled = jnp.where(is_possible, best - logits, 0.0) * inverse_temperature[:, None]
    return jnp.where(is_possible, jnp.minimum(scaled, _MAX_FLOAT), jnp.inf), is_possible


def smaller_mass(processed: Processed, token_ids: Int32[Array, " T"]) -> Float32[Array, " T"]:
    """Returns the mass, in the processed distribution, of what is strictly less likely than each row's token.

    The quotient of two exact sums, rounded once. 0 for a token that is filtered out, -1 for a row without a finite
    best logit.
    """
    limbs = filters.weight_limbs(processed.distances, processed.survivors)
    distance = jnp.take_along_axis(processed.distances, token_ids[:, None], axis=1)
    part = filters.mass_of(processed.survivors & (processed.distances > distance), limbs)
    whole = filters.mass_of(processed.survivors, limbs)
    is_sound = jnp.any(processed.logprobs > LOGPROB_FLOOR, axis=1)
    return jnp.where(is_sound, filters.ratio(part, whole)[:, 0], NO_MASS)


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
