"""The keys of a step's rows: which there are, and loading them from this step, from window rings and from pages."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.ops import paged
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.pytree import pytree_dataclass, static_field

Index = int | Int[Array, ""]
# Keys of each row at places of its list, and which of them exist.
LoadPlaces = Callable[[Int[Array, "B M"]], tuple[Float[Array, "B M K"], Bool[Array, "B M"]]]


@pytree_dataclass
class RowPlaces:
    """Where rows stand: what attention knows of each."""

    slots: Int[Array, " T"]  # -1 for a padding row, which has no keys
    positions: Int[Array, " T"]
    first_row: Int[Array, " T"]  # the first row of the same request in this step, and its position
    first_position: Int[Array, " T"]
    floor: Int[Array, " T"]  # no window key in front of this position


@pytree_dataclass
class KeySources:
    """Where keys come from. Window keys at positions of this step are in `new`, older ones in the ring.

    new: rotated window latents of all rows of this step. ring: [layers, S, ring, L], without this step's rows: a chunk
    may overwrite ring rows that its own first queries need. cache: compressed entries, [sources, P, page entries, L],
    None where a layer has a window only; page_table: the pages of each slot.
    """

    new: ScaledArray
    ring: ScaledArray
    layer: Index
    cache: ScaledArray | None
    source: Index
    page_table: Int[Array, "S M"]
    window: int = static_field()  # positions
    ring_len: int = static_field()
    page_entries: int = static_field()


def window_loader(sources: KeySources, at: RowPlaces, dtype: Any) -> LoadPlaces:
    """Loads window keys in `dtype` by place: place 0 is the oldest position of the window."""
    oldest = jnp.maximum(at.positions - (sources.window - 1), 0)

    def load(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
        position = oldest[:, None] + places
        exists = (position <= at.positions[:, None]) & (places < sources.window) & (at.slots >= 0)[:, None]
        exists = exists & (position >= at.floor[:, None])
        is_new = position >= at.first_position[:, None]
        here = jnp.where(exists & is_new, at.first_row[:, None] + position - at.first_position[:, None], -1)
        slot = jnp.where(exists, at.slots[:, None], -1)
        ring = paged.take_rows(sources.ring, sources.layer, slot, position % sources.ring_len)
        fresh = paged.take_rows(sources.new, here)
        return dequantize(paged.select_rows(is_new, fresh, ring), dtype), exists

    return load


def entry_loader(sources: KeySources, at: RowPlaces, entries: Int[Array, "B N"], dtype: Any) -> LoadPlaces:
    """Loads selected entries in `dtype` by their place in the list of each row."""
    pages = paged.pages_of(sources.page_table, at.slots)

    def load(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
        assert sources.cache is not None
        is_listed = (places >= 0) & (places < entries.shape[1])
        listed_at = jnp.clip(places, 0, entries.shape[1] - 1)
        listed = jnp.where(is_listed, jnp.take_along_axis(entries, listed_at, axis=1), -1)
        page, offset = paged.entry_place(listed, pages, page_entries=sources.page_entries)
        return dequantize(paged.take_rows(sources.cache, sources.source, page, offset), dtype), page >= 0

    return load
