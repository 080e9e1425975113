"""Index scores by XLA and the choice among them by a kernel, for an architecture without a kernel for scores."""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int

from deepinfer_jax.kernels.indexer.keys import EntryKeys, IndexScores, every_entry, take_keys
from deepinfer_jax.kernels.indexer.topk import best_listed, gap_behind
from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.ops import indexer
from deepinfer_jax.ops.quant import dequantize


def refuses(queries: Array, *_: Array | EntryKeys | None, **__: object) -> str | None:
    """Why the kernel cannot choose for these queries; None if it can."""
    if queries.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype}, so that scores are not on the grid of bfloat16"
    return None


def best_entries(
    queries: BFloat16[Array, "B I K"],
    weights: BFloat16[Array, "B I"],
    listed: Int[Array, "B N"] | None,
    num_visible: Int[Array, " B"],
    keys: EntryKeys,
    *,
    count: int,
    needs_scores: bool,
    has_fixed_trips: bool,
    interpret: Interpret = None,
) -> IndexScores:
    """`api.best_entries` by `score_entries` and `best_listed`; its scores are bfloat16, whose grid they are on."""
    scores = entry_scores(queries, weights, listed, num_visible, keys, has_fixed_trips=has_fixed_trips)
    scores = scores.astype(jnp.bfloat16)
    # Visible entries of a list are not counted: of the others all scores are -inf, wherever they are.
    visible = num_visible if listed is None else None
    places, entries = best_listed(scores, visible, listed, count=count, interpret=interpret)
    gap = gap_behind(scores, places)
    return IndexScores(entries=entries, gap=gap, scores=scores if needs_scores else None)


def entry_scores(
    queries: Array,
    weights: Array,
    listed: Int[Array, "B N"] | None,
    num_visible: Int[Array, " B"],
    keys: EntryKeys,
    *,
    has_fixed_trips: bool,
) -> Float32[Array, "B M"]:
    """Scores of the listed entries, or of `every_entry`, by `ops.indexer.score_entries`."""
    return indexer.score_entries(
        queries,
        weights,
        every_entry(keys) if listed is None else listed,
        lambda entries: dequantize(take_keys(keys, entries), queries.dtype),
        num_visible,
        has_fixed_trips=has_fixed_trips,
    )
