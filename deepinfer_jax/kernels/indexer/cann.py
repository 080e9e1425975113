"""The choice of keys by index score with aclnnQuantLightningIndexerV2; `ops.indexer` has the references.

CANN scores all keys that it is given: candidate blocks are gathered first, and places are among the gathered keys. Its
intermediate rounding is not documented, so scores near a border may be chosen otherwise than by the reference.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, on_host, result
from deepinfer_jax.kernels.indexer.keys import EntryKeys, IndexScores, every_entry, take_keys
from deepinfer_jax.ops.quant import INDEX_GROUP, ScaledArray, quantize_index

TARGET = "deepinfer.cann.index_top_k.v2"
INDEX_DIM = 128  # the only key width of the operator
MAX_HEADS = 64
MAX_KEYS = 8192  # that one call can return


def pack_rows(rows: ScaledArray) -> tuple[Array, Array]:
    """Rows [B, N, 128] of `quantize_index` as the operator takes them: codes [B, N, 64] and scales [B, N, 2, 2]."""
    if rows.form != "fp4" or rows.scale is None or rows.block != (1, INDEX_GROUP):
        raise ValueError(
            f"the rows have form {rows.form} in blocks of {rows.block}; CANN takes fp4 in blocks of (1, 32)"
        )
    return rows.payload, rows.scale.reshape(*rows.scale.shape[:-1], -1, 2)


def best_keys(
    queries: tuple[Operand, Operand],
    weights: Operand,
    keys: tuple[Operand, Operand],
    key_len: Operand,
    *,
    count: int,
) -> tuple[Operand, Operand]:
    """Places [B, count] (int32, -1 where there are no more keys) and scores [B, count] (bfloat16, -inf there).

    queries of I heads and keys come from `pack_rows`, weights [B, I] are float32, key_len [B] (int32) says how many
    leading keys count. The order of the places is CANN's own.
    """
    shape = (weights.shape[0], count)
    results = [result(shape, jnp.int32), result(shape, jnp.bfloat16)]
    places, scores = ascend_call(TARGET, (*queries, weights, *keys, key_len), results, k=np.int64(count))
    return places, scores


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
) -> IndexScores:
    """`best_keys` among listed entries, whose packed keys the host gathers.

    Queries are packed again, which is exact. Where all scores are needed, all keys are asked for.
    """
    listed = every_entry(keys) if listed is None else listed
    rows, width = listed.shape
    asked = width if needs_scores else min(count + 1, width)
    key_len = jnp.sum((listed >= 0) & (listed < num_visible[:, None]), axis=1, dtype=jnp.int32)
    packed_queries, packed_keys = pack_rows(quantize_index(queries)), pack_rows(take_keys(keys, listed))
    found = best_keys(packed_queries, weights.astype(jnp.float32), packed_keys, key_len, count=asked)
    places, scores = (on_host(array) for array in found)
    scores = jnp.where(places >= 0, scores.astype(jnp.float32), -jnp.inf)
    everything = None
    if needs_scores:
        at_row, at = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.where(places >= 0, places, width)
        everything = jnp.full((rows, width), -jnp.inf, jnp.float32).at[at_row, at].set(scores, mode="drop")
    entries, gap = _kept(places, scores, listed, count=count)
    return IndexScores(entries=entries, gap=gap, scores=everything)


def _kept(
    places: Int[Array, "B M"], scores: Float[Array, "B M"], listed: Int[Array, "B N"], *, count: int
) -> tuple[Int[Array, "B K"], Float[Array, " B"]]:
    """The entries at the first `count` places, ascending, then -1; and how far the next one's score is below."""
    last = jnp.iinfo(jnp.int32).max
    first = places[:, :count]
    found = jnp.where(first >= 0, jnp.take_along_axis(listed, jnp.maximum(first, 0), axis=1), last)
    found = jnp.sort(found, axis=1)
    entries = jnp.where(found == last, -1, found)
    if scores.shape[1] <= count:
        return entries, jnp.full(places.shape[:1], jnp.inf)
    is_dropped = places[:, count] >= 0
    return entries, jnp.where(is_dropped, scores[:, count - 1] - scores[:, count], jnp.inf)


def refuses(
    queries: Array, weights: Array, listed: Array | None, num_visible: Array, keys: EntryKeys, **_: object
) -> str | None:
    """Why the operator cannot take these arguments, None if it can."""
    if queries.shape[-1] != INDEX_DIM:
        return f"index_head_dim={queries.shape[-1]}; the operator takes {INDEX_DIM} only"
    if queries.shape[1] > MAX_HEADS:
        return f"there are {queries.shape[1]} index heads; the operator takes up to {MAX_HEADS}"
    width = (every_entry(keys) if listed is None else listed).shape[1]
    if width > MAX_KEYS:
        return f"{width} entries are listed; the operator returns up to {MAX_KEYS}; lower max_model_len"
    return None if keys.cache.form == "fp4" else f"the cache has form {keys.cache.form}; the operator takes fp4"
