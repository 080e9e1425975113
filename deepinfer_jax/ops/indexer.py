"""Index scores, candidate blocks and the selection of compressed entries (spec: backbone 5)."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.ops.invariant import repeat, round_to
from deepinfer_jax.ops.scatter import put_where

SCORE_BLOCK = 128  # keys of one score product: fixed, so that a score's bits do not depend on the context length


def score_block(
    queries: Float[Array, "B I K"], weights: Float[Array, "B I"], keys: Float[Array, "B M K"]
) -> Float32[Array, "B M"]:
    """Index scores of M keys for B rows: relu dot products weighted and added over the I index heads.

    With bfloat16 inputs each dot product, each weighted term and the sum over heads are rounded to bfloat16
    (reference mode of U1); with float32 inputs nothing is rounded.
    """
    dtype = queries.dtype
    dots = lax.dot_general(
        queries,
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    dots = jnp.maximum(round_to(dots, dtype), jnp.zeros((), dtype)).astype(jnp.float32)
    terms = round_to(dots * weights.astype(jnp.float32)[..., None], dtype).astype(jnp.float32)
    return round_to(jnp.sum(terms, axis=1), dtype).astype(jnp.float32)


def score_entries(
    queries: Float[Array, "B I K"],
    weights: Float[Array, "B I"],
    entries: Int[Array, "B N"],
    load_keys: Callable[[Int[Array, "B M"]], Float[Array, "B M K"]],
    num_visible: Int[Array, " B"],
    *,
    has_fixed_trips: bool = False,
) -> Float32[Array, "B N"]:
    """Index scores of the listed entries, -inf where an entry is -1 or not visible; N is a multiple of 128."""
    width = entries.shape[1]
    # One block of room beyond the end, so that a list of one block is still sliced (see `map_rows`).
    roomy = jnp.pad(entries, ((0, 0), (0, SCORE_BLOCK)), constant_values=-1)

    def step(block: Array, scores: Float32[Array, "B M"]) -> Float32[Array, "B M"]:
        listed = lax.dynamic_slice_in_dim(roomy, block * SCORE_BLOCK, SCORE_BLOCK, axis=1)
        made = score_block(queries, weights, load_keys(listed))
        return lax.dynamic_update_slice_in_dim(scores, made, block * SCORE_BLOCK, axis=1)

    blank = jnp.zeros(roomy.shape, jnp.float32)
    scores = repeat(width // SCORE_BLOCK, step, blank, has_fixed_trips=has_fixed_trips)[:, :width]
    visible = (entries >= 0) & (entries < num_visible[:, None])
    return jnp.where(visible, scores, -jnp.inf)


def top_entries(
    scores: Float32[Array, "B N"], entries: Int[Array, "B N"], *, count: int
) -> tuple[Int[Array, "B K"], Float32[Array, " B"]]:
    """The `count` best entries ascending, then -1; and the gap between the last kept and the first dropped score.

    Ties go to the earlier entry of the list. Entries with score -inf are never taken. The gap is inf where nothing
    was dropped.
    """
    kept, order = lax.top_k(scores, min(count + 1, scores.shape[1]))
    chosen = jnp.take_along_axis(entries, order[:, :count], axis=1)
    chosen = jnp.where(kept[:, :count] > -jnp.inf, chosen, jnp.iinfo(jnp.int32).max)
    chosen = jnp.sort(chosen, axis=1)
    chosen = jnp.where(chosen == jnp.iinfo(jnp.int32).max, -1, chosen)
    return chosen, _gap(kept, count)


def _gap(kept: Float32[Array, "B N"], count: int) -> Float32[Array, " B"]:
    if kept.shape[1] <= count:
        return jnp.full(kept.shape[:1], jnp.inf)
    dropped = kept[:, count]
    return jnp.where(dropped > -jnp.inf, kept[:, count - 1] - dropped, jnp.inf)


def candidate_blocks(
    scores: Float32[Array, "B N"], num_visible: Int[Array, " B"], *, block_size: int, count: int
) -> tuple[Int[Array, "B M"], Float32[Array, " B"]]:
    """Ids of the best blocks of entries ascending, then -1 (spec: backbone 5.4), and the gap as in `top_entries`.

    A block is worth its best score; the block with the newest visible entry is always kept and counts.
    """
    rows, width = scores.shape
    num_blocks = -(-width // block_size)
    padded = jnp.pad(scores, ((0, 0), (0, num_blocks * block_size - width)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(rows, num_blocks, block_size), axis=-1)
    newest = (num_visible - 1) // block_size
    ids = jnp.broadcast_to(jnp.arange(num_blocks, dtype=jnp.int32)[None, :], best.shape)
    is_pinned = (ids == newest[:, None]) & (num_visible[:, None] > 0)
    return top_entries(jnp.where(is_pinned, jnp.inf, best), ids, count=min(count, num_blocks))


def block_entries(blocks: Int[Array, "B M"], *, block_size: int) -> Int[Array, "B N"]:
    """The entries of the listed blocks, ascending, -1 for those of missing blocks, padded to a multiple of 128."""
    offsets = jnp.arange(block_size, dtype=jnp.int32)
    entries = jnp.where(blocks[..., None] >= 0, blocks[..., None] * block_size + offsets[None, None, :], -1)
    return pad_entries(entries.reshape(blocks.shape[0], -1))


def pad_entries(entries: Int[Array, "B N"]) -> Int[Array, "B M"]:
    """The list filled up with -1 to a multiple of 128."""
    missing = -entries.shape[1] % SCORE_BLOCK
    return jnp.pad(entries, ((0, 0), (0, missing)), constant_values=-1)


def spread(values: Float32[Array, "B N"], entries: Int[Array, "B N"], *, width: int) -> Float32[Array, "B M"]:
    """Values of the listed entries at their own places among `width`, -inf elsewhere."""
    at_row = jnp.arange(entries.shape[0], dtype=jnp.int32)[:, None]
    blank = jnp.full((entries.shape[0], width), -jnp.inf, jnp.float32)
    return put_where(blank, (at_row, entries), values, entries >= 0)


def blocks_of_mask(mask: Bool[Array, "B N"], *, block_size: int, count: int) -> Int[Array, "B M"]:
    """Block ids ascending, then -1, from a mask over entries: the form in which recorded candidates come."""
    rows, width = mask.shape
    num_blocks = -(-width // block_size)
    padded = jnp.pad(mask, ((0, 0), (0, num_blocks * block_size - width)))
    is_kept = jnp.any(padded.reshape(rows, num_blocks, block_size), axis=-1)
    ids = jnp.where(is_kept, jnp.arange(num_blocks, dtype=jnp.int32)[None, :], jnp.iinfo(jnp.int32).max)
    ids = jnp.sort(ids, axis=1)[:, : min(count, num_blocks)]
    return jnp.where(ids == jnp.iinfo(jnp.int32).max, -1, ids)
