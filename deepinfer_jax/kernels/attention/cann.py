"""Attention over a window and selected keys by aclnnSparseFlashMla; `ops.attention.attend_blocks` is the reference.

CANN has no operator on this model's packed main KV rows: the keys come here gathered and in bfloat16.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, like, on_host
from deepinfer_jax.kernels.attention.keys import KeySources, LoadPlaces, RowPlaces, entry_loader, window_loader
from deepinfer_jax.ops.invariant import map_rows

TARGET = "deepinfer.cann.attention.v2"
HEAD_DIM = 512  # the only head width of the operator
MAX_HEADS = 128


def attend(
    q: Operand,
    window: Operand,
    window_len: Operand,
    sink: Operand,
    selected: tuple[Operand, Operand] | None = None,
) -> Operand:
    """One softmax of q [B, H, 512] over the leading window_len [B] rows of window [B, W, 512] and selected rows.

    selected is ([B, N, 512], lengths [B]). A key is also its value; sink [H] (float32) counts in the denominator only.
    q and keys are bfloat16, lengths int32; the score scale is 512 ** -0.5.
    """
    operands = (q, window, window_len, sink, *(selected or ()))
    return ascend_call(TARGET, operands, [like(q)], scale=np.float64(HEAD_DIM**-0.5))[0]


def attend_rows(
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
    """`attend` for rows of a step: the host gathers and unpacks the keys of one tile of rows after the other."""

    def on_tile(q: Array, at: RowPlaces, entries: Array) -> Float[Array, "B H K"]:
        # The operator counts keys from the front: a window that is cut starts at its first key.
        oldest = jnp.maximum(at.positions - (sources.window - 1), 0)
        window = window_loader(sources, at, q.dtype)
        cut = jnp.maximum(at.floor - oldest, 0)[:, None]
        keys, window_len = _load(lambda p: window(p + cut), q.shape[0], sources.window)
        if sources.cache is None:
            return on_host(attend(q, keys, window_len, sink))
        chosen = _load(entry_loader(sources, at, entries, q.dtype), q.shape[0], entries.shape[1])
        return on_host(attend(q, keys, window_len, sink, chosen))

    return map_rows(on_tile, q, places, entries, tile=tile, num_live=num_live, has_fixed_trips=has_fixed_trips)


def _load(load: LoadPlaces, num_rows: int, count: int) -> tuple[Float[Array, "B M K"], Int[Array, " B"]]:
    """The keys at the first `count` places of each row, and how many of them exist; those are in front."""
    places = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (num_rows, count))
    keys, exists = load(places)
    return keys, jnp.sum(exists, axis=1, dtype=jnp.int32)


def refuses(q: Array, sources: KeySources, *_: object, **__: object) -> str | None:
    """Why the operator cannot take these arguments, None if it can."""
    if q.shape[-1] != HEAD_DIM:
        return f"head_dim={q.shape[-1]}; the operator takes {HEAD_DIM} only"
    if q.shape[1] > MAX_HEADS:
        return f"there are {q.shape[1]} heads; the operator takes up to {MAX_HEADS}"
    return None if q.dtype == jnp.bfloat16 else f"q is {q.dtype}; the operator takes bfloat16 (numerics bf16 or q)"
