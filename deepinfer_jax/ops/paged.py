"""Index arithmetic of pages and rings (spec: backbone 4.4, 4.8, 9)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.ops.scatter import put_where


def num_visible(positions: Int[Array, " T"], *, ratio: int) -> Int[Array, " T"]:
    """Compressed entries that a query at this position may see: floor((t + 1) / ratio)."""
    return (positions + 1) // ratio


def first_rows(slots: Int[Array, " T"]) -> Int[Array, " T"]:
    """For each row, the index of the first row of its request in this step; a request's rows are adjacent."""
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    starts = slots != jnp.concatenate([jnp.full((1,), -2, slots.dtype), slots[:-1]])
    return lax.cummax(jnp.where(starts, index, 0))


def rows_after(slots: Int[Array, " T"]) -> Int[Array, " T"]:
    """For each row, how many rows of the same request follow it in this step."""
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    ends = slots != jnp.concatenate([slots[1:], jnp.full((1,), -2, slots.dtype)])
    last = lax.cummin(jnp.where(ends, index, slots.shape[0]), reverse=True)
    return last - index


def num_leading(is_live: Bool[Array, " T"]) -> Int[Array, ""]:
    """Rows up to the last live one."""
    index = jnp.arange(1, is_live.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(is_live, index, 0), initial=0)


def entry_place(
    entries: Int[Array, "B N"], pages: Int[Array, "B M"], *, page_entries: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """Page and offset of each entry of a request; page -1 where the entry is negative or has no page."""
    column = entries // page_entries
    is_inside = (entries >= 0) & (column < pages.shape[1])
    page = jnp.take_along_axis(pages, jnp.where(is_inside, column, 0), axis=1)
    return jnp.where(is_inside, page, -1), jnp.where(is_inside, entries % page_entries, 0)


def pages_of(page_table: Int[Array, "S M"], slots: Int[Array, " B"]) -> Int[Array, "B M"]:
    """The page list of each row's request; -1 everywhere for a padding row."""
    return page_table.at[slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False)


def take_rows(cache: ScaledArray, *index: int | Int[Array, "..."]) -> ScaledArray:
    """Rows of a packed cache by its leading axes; a negative index gives a row of zeros."""
    arrays = [i for i in index if not isinstance(i, int) and i.ndim]
    exists = jnp.stack(jnp.broadcast_arrays(*[a >= 0 for a in arrays])).all(axis=0)
    # Without the barriers a compiler looks up the page again for every channel that it unpacks.
    exists, index = lax.optimization_barrier((exists, index))

    def take(array: Array) -> Array:
        rows = array[tuple(jnp.maximum(i, 0) for i in index)]
        return lax.optimization_barrier(jnp.where(exists[..., None], rows, jnp.zeros((), rows.dtype)))

    return _like(cache, take(cache.payload), None if cache.scale is None else take(cache.scale))


def put_rows(
    cache: ScaledArray, rows: ScaledArray, lead: int | Int[Array, ""], *index: Int[Array, " T"]
) -> ScaledArray:
    """The cache with rows written at (lead, *index); a row with a negative index is dropped.

    No two kept rows may have the same place.
    """
    scale = None
    if cache.scale is not None and rows.scale is not None:
        scale = put_array(cache.scale, rows.scale, lead, *index)
    return _like(cache, put_array(cache.payload, rows.payload, lead, *index), scale)


def put_array(cache: Array, rows: Array, lead: int | Int[Array, ""], *index: Int[Array, " T"]) -> Array:
    """`put_rows` for a plain array."""
    is_kept = jnp.stack([i >= 0 for i in index]).all(axis=0)
    return put_where(cache, (lead, *index), rows, is_kept)


def select_rows(condition: Bool[Array, "..."], a: ScaledArray, b: ScaledArray) -> ScaledArray:
    """Row by row `a` where the condition holds, else `b`."""
    scale = None
    if a.scale is not None and b.scale is not None:
        scale = jnp.where(condition[..., None], a.scale, b.scale)
    return _like(a, jnp.where(condition[..., None], a.payload, b.payload), scale)


def _like(cache: ScaledArray, payload: Array, scale: Array | None) -> ScaledArray:
    return ScaledArray(payload=payload, scale=scale, form=cache.form, block=cache.block)
