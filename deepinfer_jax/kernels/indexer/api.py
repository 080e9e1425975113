"""The choice of entries by index score, by whatever the backend has for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.indexer import cann, mosaic_sm90, mosaic_sm100, topk
from deepinfer_jax.kernels.indexer.keys import EntryKeys, IndexScores, every_entry, take_keys
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.ops import indexer
from deepinfer_jax.ops.quant import ScaledArray, dequantize

OP = "indexer"


def _reference(
    queries: Float[Array, "B I K"],
    weights: Float[Array, "B I"],
    listed: Int[Array, "B N"] | None,
    num_visible: Int[Array, " B"],
    keys: EntryKeys,
    *,
    count: int,
    needs_scores: bool,
    has_fixed_trips: bool,
) -> IndexScores:
    listed = every_entry(keys) if listed is None else listed
    scores = indexer.score_entries(
        queries,
        weights,
        listed,
        lambda entries: dequantize(take_keys(keys, entries), queries.dtype),
        num_visible,
        has_fixed_trips=has_fixed_trips,
    )
    entries, gap = indexer.top_entries(scores, listed, count=count)
    return IndexScores(entries=entries, gap=gap, scores=scores)


def _kernel(module: Any) -> tuple[Callable[..., IndexScores], Callable[..., str | None]]:
    """Its `best_entries`, and why it refuses."""

    def run(
        queries: Float[Array, "B I K"],
        weights: Float[Array, "B I"],
        listed: Int[Array, "B N"] | None,
        num_visible: Int[Array, " B"],
        keys: EntryKeys,
        **static: Any,
    ) -> IndexScores:
        """The whole cache is an operand, read where it is."""
        keys = dataclasses.replace(keys, source=jnp.asarray(keys.source, jnp.int32))
        return shared_call(module.best_entries, **static)(queries, weights, listed, num_visible, keys)

    return run, module.refuses


IMPLS = (
    Impl(name="cann", fn=cann.best_entries, targets=(ASCEND,), refuses=cann.refuses),
    registry.mosaic_sm90(*_kernel(mosaic_sm90)),
    registry.mosaic_sm100(*_kernel(mosaic_sm100)),
    Impl(name=REFERENCE, fn=_reference),
)


def best_entries(
    queries: Float[Array, "B I K"],
    weights: Float[Array, "B I"],
    listed: Int[Array, "B N"] | None,
    num_visible: Int[Array, " B"],
    keys: EntryKeys,
    *,
    count: int,
    needs_scores: bool,
    has_fixed_trips: bool,
    backend: Backend,
) -> IndexScores:
    """The `count` listed entries of each row with the best index scores, see `ops.indexer.top_entries`.

    queries: on the grid of `quantize_index` where the numerics quantise caches. listed: ascending, then -1; its width
    is a multiple of 128. None stands for all entries that the pages have room for, of which scores, if they are needed,
    may have more (-inf). An entry counts if it is below the row's number of visible ones. needs_scores: somebody reads
    `IndexScores.scores`.
    """
    arrays = (queries, weights, listed, num_visible, keys)
    given = {"count": count, "needs_scores": needs_scores, "has_fixed_trips": has_fixed_trips}
    return select(OP, IMPLS, backend, *arrays, **given).fn(*arrays, **given)


def candidate_blocks(
    scores: Float[Array, "B N"], num_visible: Int[Array, " B"], *, block_size: int, count: int
) -> tuple[Int[Array, "B M"], Float32[Array, " B"]]:
    """`ops.indexer.candidate_blocks` of `IndexScores.scores`; of bfloat16, as kernels give them, without a sort."""
    if scores.dtype == jnp.bfloat16:
        run = shared_call(topk.candidate_blocks, block_size=block_size, count=count)
        return run(scores, num_visible)
    return indexer.candidate_blocks(scores, num_visible, block_size=block_size, count=count)


def in_kernel(
    queries: Float[Array, "B I K"],
    cache: ScaledArray,
    *,
    page_entries: int,
    num_listed: int | None,
    backend: Backend,
) -> bool:
    """Whether a kernel chooses for such queries (values do not count), which takes any number of rows at once.

    num_listed: the width of the lists, None where all entries are asked for.
    """
    if backend.kernels not in registry.COMPUTE_CAPABILITIES:
        return False
    rows = queries.shape[0]
    listed = None if num_listed is None else indexer.pad_entries(jnp.zeros((rows, num_listed), jnp.int32))
    keys = EntryKeys(cache=cache, source=0, pages=jnp.zeros((rows, 1), jnp.int32), page_entries=page_entries)
    arrays = (queries, queries[:, :, 0], listed, jnp.zeros(rows, jnp.int32), keys)
    return select(OP, IMPLS, backend, *arrays).name == backend.kernels
