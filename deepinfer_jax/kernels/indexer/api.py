"""The choice of entries by index score, by whatever the backend has for it."""

from jaxtyping import Array, Float, Int

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.indexer import cann
from deepinfer_jax.kernels.indexer.keys import EntryKeys, IndexScores, take_keys
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.ops import indexer
from deepinfer_jax.ops.quant import dequantize

OP = "indexer"


def _reference(
    queries: Float[Array, "B I K"],
    weights: Float[Array, "B I"],
    listed: Int[Array, "B N"],
    num_visible: Int[Array, " B"],
    keys: EntryKeys,
    *,
    count: int,
    needs_scores: bool,
    has_fixed_trips: bool,
) -> IndexScores:
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


IMPLS = (
    Impl(name="cann", fn=cann.best_entries, targets=(ASCEND,), refuses=cann.refuses),
    Impl(name=REFERENCE, fn=_reference),
)


def best_entries(
    queries: Float[Array, "B I K"],
    weights: Float[Array, "B I"],
    listed: Int[Array, "B N"],
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
    is a multiple of 128. An entry counts if it is below the row's number of visible ones. needs_scores: somebody reads
    `IndexScores.scores`.
    """
    arrays = (queries, weights, listed, num_visible, keys)
    given = {"count": count, "needs_scores": needs_scores, "has_fixed_trips": has_fixed_trips}
    return select(OP, IMPLS, backend, *arrays, **given).fn(*arrays, **given)
