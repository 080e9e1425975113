"""Attention of a step's rows over a window and selected entries, by whatever the backend has for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.attention import cann, mosaic_sm90, mosaic_sm100
from deepinfer_jax.kernels.attention.keys import KeySources, LoadPlaces, RowPlaces, entry_loader, window_loader
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.ops.attention import KEY_BLOCK, LoadBlock, attend_blocks
from deepinfer_jax.ops.invariant import map_rows

OP = "attention"


def _reference(
    q: Float[Array, "T H K"],
    sources: KeySources,
    places: RowPlaces,
    entries: Int[Array, "T N"],
    sink: Float32[Array, " H"],
    num_live: Int[Array, ""],
    *,
    tile: int,
    has_fixed_trips: bool,
) -> Float[Array, "T H K"]:
    """Keys are loaded and unpacked in blocks of `KEY_BLOCK`, in the order of the list."""

    def on_tile(q: Array, at: RowPlaces, entries: Array) -> Float[Array, "B H K"]:
        segments = key_segments(
            window_loader(sources, at, q.dtype),
            entry_loader(sources, at, entries, q.dtype),
            num_rows=q.shape[0],
            num_window=sources.window,
            num_others=0 if sources.cache is None else entries.shape[1],
        )
        return attend_blocks(q, segments, sink, has_fixed_trips=has_fixed_trips)

    return map_rows(on_tile, q, places, entries, tile=tile, num_live=num_live, has_fixed_trips=has_fixed_trips)


def _kernel(module: Any) -> tuple[Callable[..., Array], Callable[..., str | None]]:
    """Its `attend`, and why it refuses."""

    def run(
        q: Float[Array, "T H K"],
        sources: KeySources,
        places: RowPlaces,
        entries: Int[Array, "T N"],
        sink: Float32[Array, " H"],
        num_live: Int[Array, ""],
        **static: Any,
    ) -> Float[Array, "T H K"]:
        """Whole rings and pages are operands, read where they are."""
        layer, source = (jnp.asarray(index, jnp.int32) for index in (sources.layer, sources.source))
        sources = dataclasses.replace(sources, layer=layer, source=source)
        return shared_call(module.attend, **static)(q, sources, places, entries, sink, num_live)

    return run, module.refuses


IMPLS = (
    Impl(name="cann", fn=cann.attend_rows, targets=(ASCEND,), refuses=cann.refuses),
    registry.mosaic_sm90(*_kernel(mosaic_sm90)),
    registry.mosaic_sm100(*_kernel(mosaic_sm100)),
    Impl(name=REFERENCE, fn=_reference),
)


def attend(
    q: Float[Array, "T H K"],
    sources: KeySources,
    places: RowPlaces,
    entries: Int[Array, "T N"],
    sink: Float32[Array, " H"],
    num_live: Int[Array, ""],
    *,
    tile: int,
    has_fixed_trips: bool,
    backend: Backend,
) -> Float[Array, "T H K"]:
    """Attention over the key list of each row: W window places in position order, then the entries, ascending, then -1.

    sink counts in the denominator only. num_live, tile, has_fixed_trips: see `ops.invariant.map_rows`; rows behind the
    last live one may give anything finite.
    """
    arrays = (q, sources, places, entries, sink, num_live)
    given = {"tile": tile, "has_fixed_trips": has_fixed_trips}
    return select(OP, IMPLS, backend, *arrays, **given).fn(*arrays, **given)


def key_segments(
    window_block: LoadPlaces, other_block: LoadPlaces, *, num_rows: int, num_window: int, num_others: int
) -> list[tuple[LoadBlock, int]]:
    """The key list of each row in blocks: places 0..num_window-1 of its window, then others from their place 0 on.

    `window_block` and `other_block` load keys by place; places outside their own range must not exist for them.
    """
    num_blocks = -(-(num_window + num_others) // KEY_BLOCK)

    def load(first_block: int, has_window: bool, has_others: bool) -> LoadBlock:
        def load_block(block: Array) -> tuple[Array, Bool[Array, "B M"]]:
            places = (first_block + block) * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32)
            places = jnp.broadcast_to(places, (num_rows, KEY_BLOCK))
            if not has_others:
                return window_block(places)
            if not has_window:
                return other_block(places - num_window)
            window, in_window = window_block(places)
            others, in_others = other_block(places - num_window)
            return jnp.where(in_window[..., None], window, others), in_window | in_others

        return load_block

    pure_window = num_window // KEY_BLOCK if num_others else num_blocks
    mixed = 1 if pure_window < num_blocks and num_window % KEY_BLOCK else 0
    segments = [
        (load(0, True, False), pure_window),
        (load(pure_window, True, True), mixed),
        (load(pure_window + mixed, False, True), num_blocks - pure_window - mixed),
    ]
    return [segment for segment in segments if segment[1]]
