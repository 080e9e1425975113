"""Index keys in pages, and what a choice among them gives."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.ops import indexer, paged
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.pytree import pytree_dataclass, static_field

Index = int | Int[Array, ""]


@pytree_dataclass
class EntryKeys:
    """Index keys of rows: cache [sources, P, page entries, width], and the pages of each row's request."""

    cache: ScaledArray
    source: Index
    pages: Int[Array, "B M"]
    page_entries: int = static_field()


@pytree_dataclass
class IndexScores:
    """What an index source finds among the entries that it was given."""

    entries: Int[Array, "B K"]  # the best ones, ascending, then -1
    gap: Float32[Array, " B"]  # between the last kept and the first dropped score, inf where nothing was dropped
    # Of all listed entries, -inf where one is not visible; None: not asked for. bfloat16 from kernels.
    scores: Float[Array, "B N"] | None


def every_entry(keys: EntryKeys) -> Int[Array, "B N"]:
    """The list of all entries that the pages have room for, the same for each row."""
    rows, width = keys.pages.shape[0], keys.pages.shape[1] * keys.page_entries
    return indexer.pad_entries(jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width)))


def take_keys(keys: EntryKeys, entries: Int[Array, "B N"]) -> ScaledArray:
    """The packed keys of entries; zeros for -1."""
    page, offset = paged.entry_place(entries, keys.pages, page_entries=keys.page_entries)
    return paged.take_rows(keys.cache, keys.source, page, offset)
