"""What kernels for index scores share: which arguments they take, their operands, and the choice that follows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int, UInt8

from deepinfer_jax.kernels.indexer.keys import EntryKeys, IndexScores, take_keys
from deepinfer_jax.kernels.indexer.topk import best_listed, gap_behind
from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.ops.quant import FP8_MAX, INDEX_GROUP, pow2ceil_exponent

WIDTH, HEADS = 128, 32
GROUPS = WIDTH // INDEX_GROUP
TILE = 64  # entries that lie in one page, or in two


def refuses(
    queries: Array, weights: Array, listed: Array | None, num_visible: Array, keys: EntryKeys, **_: Any
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    if listed is not None and listed.shape[1] % TILE:
        return f"a list of {listed.shape[1]} entries for each row is no multiple of {TILE}"
    if queries.dtype != jnp.bfloat16 or weights.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype} and weights {weights.dtype}, not bfloat16"
    if queries.shape[1:] != (HEADS, WIDTH):
        return f"queries have {queries.shape[1]} heads of {queries.shape[2]}, not {HEADS} of {WIDTH}"
    cache = keys.cache
    if cache.scale is None or cache.form != "fp4" or cache.block != (1, INDEX_GROUP):
        return f"keys are packed as {cache.form} in blocks of {cache.block}, not fp4 in blocks of (1, {INDEX_GROUP})"
    if listed is None and keys.page_entries != TILE // 2 and keys.page_entries % TILE:
        return f"pages of {keys.page_entries} entries are neither {TILE // 2} nor a multiple of {TILE}"
    return None


def best_entries(
    queries: BFloat16[Array, "B I K"],
    weights: BFloat16[Array, "B I"],
    listed: Int[Array, "B N"] | None,
    num_visible: Int[Array, " B"],
    keys: EntryKeys,
    *,
    score: Callable[..., BFloat16[Array, "B N"]],
    count: int,
    needs_scores: bool,
    has_fixed_trips: bool,
    interpret: Interpret = None,
) -> IndexScores:
    """`api.best_entries`, by `score`, which is a kernel's `scores_of_pages`, and `best_listed`.

    listed: None stands for all entries, whose keys are read where they are. Keys of a list are gathered first, packed.
    """
    del has_fixed_trips
    if listed is not None:
        keys, num_visible = _listed_keys(keys, listed, num_visible)
    scores = score(queries, weights, keys, num_visible, interpret=interpret)
    places, entries = best_listed(scores, num_visible, listed, count=count, interpret=interpret)
    gap = gap_behind(scores, places)
    return IndexScores(entries=entries, gap=gap, scores=scores if needs_scores else None)


def _listed_keys(
    keys: EntryKeys, listed: Int[Array, "B N"], num_visible: Int[Array, " B"]
) -> tuple[EntryKeys, Int[Array, " B"]]:
    """The keys of a list in pages of their own, and how many leading ones are visible: lists are ascending."""
    taken = take_keys(keys, listed)
    pages = jnp.arange(listed.size // TILE, dtype=jnp.int32).reshape(listed.shape[0], -1)
    cache = jax.tree.map(lambda a: a.reshape(1, pages.size, TILE, a.shape[-1]), taken)
    is_visible = (listed >= 0) & (listed < num_visible[:, None])
    own = EntryKeys(cache=cache, source=0, pages=pages, page_entries=TILE)
    return own, jnp.sum(is_visible, axis=1, dtype=jnp.int32)


def page_operands(keys: EntryKeys, tile: int) -> tuple[Any, Any, Int[Array, "B M"], Int[Array, " one"]]:
    """Keys and scales of all pages of all sources, the pages of each row, and the first page of the source.

    Rows of pages are filled up with -1 to whole tiles of so many entries.
    """
    per_page = keys.page_entries
    missing = -keys.pages.shape[1] * per_page % tile
    pages = jnp.pad(keys.pages, ((0, 0), (0, -(-missing // per_page))), constant_values=-1)
    payload, scale = keys.cache.payload, keys.cache.scale
    assert scale is not None
    num_pages = payload.shape[0] * payload.shape[1]
    return (
        payload.reshape(num_pages, per_page, WIDTH // 2),
        scale.reshape(num_pages, per_page * GROUPS),
        pages,
        jnp.reshape(jnp.asarray(keys.source, jnp.int32) * payload.shape[1], 1),
    )


def packed_queries(
    queries: BFloat16[Array, "B I K"], weights: BFloat16[Array, "B I"], *, key_factor: float
) -> tuple[UInt8[Array, "B I K"], BFloat16[Array, "B I"]]:
    """E4M3 codes of each query head times a power of two, and weights that undo it, times `key_factor`.

    That is by how much decoded keys are less than their values. Powers of two leave every later rounding as it is.
    """
    values = queries.astype(jnp.float32)
    amax = jnp.maximum(jnp.max(jnp.abs(values), axis=-1), jnp.finfo(jnp.float32).tiny * FP8_MAX)
    exponent = pow2ceil_exponent(amax * jnp.float32(1 / FP8_MAX))
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    codes = (values * inverse[..., None]).astype(jnp.float8_e4m3fn)
    factors = lax.bitcast_convert_type(exponent << 23, jnp.float32) * key_factor
    return lax.bitcast_convert_type(codes, jnp.uint8), (weights.astype(jnp.float32) * factors).astype(jnp.bfloat16)


def share(count: Array, part: Array, num_parts: int) -> tuple[Array, Array]:
    """The part's share of `count` things: first and behind the last."""
    size = lax.div(count + (num_parts - 1), num_parts)
    return jnp.minimum(part * size, count), jnp.minimum((part + 1) * size, count)
