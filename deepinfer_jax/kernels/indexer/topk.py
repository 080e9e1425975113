"""The best of many scores without sorting them: `ops.indexer.top_entries` and `candidate_blocks` are the references.

Roofline: every score is read once, 2 bytes each. Rows of up to 98,304 bfloat16 scores are chosen from by one kernel
(`choice`). In longer ones, runs of neighbouring scores are worth their best one: the `count` best scores lie in
the `count` best runs, ties to the earlier run. So one maximum over runs reads everything, and the two choices that
follow, of runs and of scores, are among thousands, not a million.

What the kernel does not take, and what is interpreted, is plain JAX: a choice finds the last kept score digit by digit,
by counting how many scores reach each of 15 candidates, and then places what is kept by a running count; nothing is
sorted and no order of additions matters, since all are counts.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from deepinfer_jax.kernels.indexer import choice
from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.ops.scatter import put_where

_DIGIT_BITS = 4
_LINE = 128  # scores whose running count is one row of a product
_RUN_LIMIT = 32768  # scores that one choice of plain JAX may be among before runs pay


def best_places(scores: Float[Array, "B N"], *, count: int, interpret: Interpret = None) -> Int[Array, "B K"]:
    """Places of the `count` best scores of each row ascending, then -1; ties go to the earlier place.

    -inf is never taken, and scores must not be NaN. float32 or bfloat16.
    """
    return best_listed(scores, None, None, count=count, interpret=interpret)[0]


def best_listed(
    scores: Float[Array, "B N"],
    num_visible: Int[Array, " B"] | None,
    listed: Int[Array, "B N"] | None,
    *,
    count: int,
    interpret: Interpret = None,
) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """`best_places` of rows whose scores are -inf from num_visible on; and what the list has there, -1 for none.

    num_visible: None stands for all. listed: None stands for the places themselves.
    """
    width = scores.shape[1]
    count = min(count, width)
    if _is_for_kernel(scores, interpret):
        return choice.choose(scores, num_visible, listed, count=count)
    run = run_length(width, count)
    places = _choose(scores, count) if run == 1 else _best_of_best_runs(scores, run, count, interpret)
    if listed is None:
        return places, places
    entries = jnp.take_along_axis(listed, jnp.maximum(places, 0), axis=1)
    return places, jnp.where(places >= 0, entries, -1)


def _best_of_best_runs(scores: Float[Array, "B N"], run: int, count: int, interpret: Interpret) -> Int[Array, "B K"]:
    """`best_places` by a choice of runs and one of their scores."""
    runs, best = _best_of_runs(scores, run)
    chosen = _one_choice(best, min(count, best.shape[1]), interpret)
    kept = jnp.take_along_axis(runs, jnp.maximum(chosen, 0)[..., None], axis=1)
    kept = jnp.where(chosen[..., None] >= 0, kept, -jnp.inf).reshape(scores.shape[0], -1)
    among = _one_choice(kept, count, interpret)
    first = jnp.take_along_axis(chosen, jnp.maximum(among, 0) // run, axis=1) * run
    return jnp.where(among >= 0, first + among % run, -1)


def _is_for_kernel(scores: Float[Array, "B N"], interpret: Interpret) -> bool:
    return interpret is None and choice.refuses(scores) is None


def _one_choice(scores: Float[Array, "B N"], count: int, interpret: Interpret) -> Int[Array, "B K"]:
    """`best_places` with all scores in one choice; count is at most N."""
    if not _is_for_kernel(scores, interpret):
        return _choose(scores, count)
    return choice.choose(scores, None, None, count=count)[0]


def gap_behind(scores: Float[Array, "B N"], places: Int[Array, "B K"]) -> Float32[Array, " B"]:
    """Between the worst of the chosen places and the best score that was left; inf where nothing was left."""
    count = places.shape[1]
    kept = jnp.take_along_axis(scores, jnp.maximum(places, 0), axis=1)
    worst = jnp.min(jnp.where(places >= 0, kept, jnp.inf), axis=1)
    is_tied = jnp.sum(scores >= worst[:, None], axis=1, dtype=jnp.int32) > count
    below = jnp.max(jnp.where(scores < worst[:, None], scores, -jnp.inf), axis=1)
    best_left = jnp.where(is_tied, worst, below).astype(jnp.float32)
    has_left = (places[:, -1] >= 0) & (best_left > -jnp.inf)
    return jnp.where(has_left, worst.astype(jnp.float32) - best_left, jnp.inf)


def candidate_blocks(
    scores: Float[Array, "B N"],
    num_visible: Int[Array, " B"],
    *,
    block_size: int,
    count: int,
    interpret: Interpret = None,
) -> tuple[Int[Array, "B M"], Float32[Array, " B"]]:
    """`ops.indexer.candidate_blocks`: ids of the best blocks of entries ascending, then -1, and the gap behind them."""
    num_blocks = -(-scores.shape[1] // block_size)
    best = _best_of_runs(scores, block_size)[1]
    newest = (num_visible - 1) // block_size
    ids = jnp.arange(num_blocks, dtype=jnp.int32)[None, :]
    is_pinned = (ids == newest[:, None]) & (num_visible[:, None] > 0)
    worth = jnp.where(is_pinned, jnp.inf, best)
    num_visible_blocks = -(-num_visible // block_size)
    blocks = best_listed(worth, num_visible_blocks, None, count=min(count, num_blocks), interpret=interpret)[0]
    return blocks, gap_behind(worth, blocks)


def _best_of_runs(scores: Float[Array, "B N"], run: int) -> tuple[Float[Array, "B M R"], Float[Array, "B M"]]:
    """Runs of neighbouring scores, the last one filled up with -inf, and the best score of each."""
    padded = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % run)), constant_values=-jnp.inf)
    runs = padded.reshape(scores.shape[0], -1, run)
    return runs, jnp.max(runs, axis=-1)


def run_length(width: int, count: int) -> int:
    """Scores of a run: 1 where one choice is among few enough, else what makes both choices about equally large."""
    run = 1
    while width > _RUN_LIMIT and run * run * count < width:
        run *= 2
    return run


def _choose(scores: Float[Array, "B N"], count: int) -> Int[Array, "B K"]:
    """`_one_choice` in plain JAX."""
    rows, width = scores.shape
    keys, num_digits = _ordered_keys(scores)
    lowest = _ordered_keys(jnp.full((rows, 1), -jnp.inf, scores.dtype))[0]
    last = jnp.maximum(_last_kept(keys, count, num_digits), lowest)
    better = keys > last
    equal = (keys == last) & (last > lowest)
    allowed = count - jnp.sum(better, axis=1, keepdims=True, dtype=jnp.int32)
    equal_before = _count_before(equal)
    place = _count_before(better) + jnp.minimum(equal_before, allowed)
    is_kept = better | (equal & (equal_before < allowed))
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], scores.shape)
    return put_where(jnp.full((rows, count), -1, jnp.int32), (row, place), index, is_kept)


def _ordered_keys(scores: Float[Array, "*N"]) -> tuple[UInt32[Array, "*N"], int]:
    """Unsigned integers in the order of the scores, and their digits; both zeros are one key."""
    bits = 8 * scores.dtype.itemsize
    unsigned = jnp.uint16 if bits == 16 else jnp.uint32
    found = jnp.where(scores == 0, jnp.zeros((), scores.dtype), scores)
    words = lax.bitcast_convert_type(found, unsigned).astype(jnp.uint32)
    sign, every = jnp.uint32(1 << (bits - 1)), jnp.uint32((1 << bits) - 1)
    return jnp.where(words >= sign, words ^ every, words ^ sign), bits // _DIGIT_BITS


def _last_kept(keys: UInt32[Array, "B N"], count: int, num_digits: int) -> UInt32[Array, "B one"]:
    """The key of the count-th best: the greatest that `count` keys reach."""
    found = jnp.zeros((keys.shape[0], 1), jnp.uint32)
    digits = jnp.arange(1, 1 << _DIGIT_BITS, dtype=jnp.uint32)[None, :]
    for place in reversed(range(num_digits)):
        tried = found + (digits << (place * _DIGIT_BITS))
        reached = jnp.sum(keys[:, None, :] >= tried[:, :, None], axis=-1, dtype=jnp.int32)
        digit = jnp.sum(reached >= count, axis=1, keepdims=True, dtype=jnp.int32).astype(jnp.uint32)
        found += digit << (place * _DIGIT_BITS)
    return found


def _count_before(mask: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """How many are true in front of each place, by two products; exact, since all sums are below 2^24."""
    rows, width = mask.shape
    lines = jnp.pad(mask, ((0, 0), (0, -width % _LINE))).reshape(rows, -1, _LINE).astype(jnp.bfloat16)
    within = _prefix_sums(lines)
    sums = within[..., -1] + lines[..., -1].astype(jnp.float32)
    before = within + _prefix_sums(sums)[..., None]
    return before.reshape(rows, -1)[:, :width].astype(jnp.int32)


def _prefix_sums(values: Float[Array, "*B N"]) -> Float32[Array, "*B N"]:
    """For each place the sum of all values in front of it."""
    index = jnp.arange(values.shape[-1], dtype=jnp.int32)
    triangle = (index[:, None] < index[None, :]).astype(values.dtype)
    return jnp.matmul(values, triangle, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
