"""Attention of whole sequences as masked products: the keys of serving, without a gather for each row.

B sequences, R rows in each, N compressed entries. Serving gathers the keys of every row; at training lengths products
with all keys and a mask are faster and need less memory.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from deepinfer_jax.ops.invariant import round_to

MASKED = -1e30  # a score that no key with a real score is near; finite, so that rows without keys have gradients


def attend_sequences(
    q: Float[Array, "B R H K"],
    window_kv: Float[Array, "B R K"],
    entries: Float[Array, "B N K"],
    selected: Bool[Array, "B R N"],
    sink: Float32[Array, " H"],
    *,
    window_size: int,
) -> Float[Array, "B R H K"]:
    """Attention of every row to its window and its selected entries, one softmax with the sink in the denominator.

    Rows are cut into blocks of the window's length: a window lies inside a block and the one before it. Scores and sums
    are float32, probabilities are rounded to q.dtype for the value product.
    """
    batch, num_rows, heads, width = q.shape
    num_blocks = -(-num_rows // window_size)
    room = ((0, 0), (0, num_blocks * window_size - num_rows), (0, 0))
    blocked_q = jnp.pad(q, (*room, (0, 0))).reshape(batch, num_blocks, window_size, heads, width)
    near = _window_keys(jnp.pad(window_kv, room), window_size=window_size)
    window_scores = _product("bnrhk,bnmk->bnhrm", blocked_q, near) * jnp.float32(width**-0.5)
    window_scores = jnp.where(_in_window(num_blocks, window_size)[None, :, None], window_scores, MASKED)
    entry_scores = _product("bnrhk,bmk->bnhrm", blocked_q, entries) * jnp.float32(width**-0.5)
    chosen = jnp.pad(selected, room).reshape(batch, num_blocks, 1, window_size, entries.shape[1])
    entry_scores = jnp.where(chosen, entry_scores, MASKED)
    peak = jnp.maximum(jnp.max(window_scores, axis=-1), jnp.max(entry_scores, axis=-1, initial=MASKED))
    own_sink = sink[None, None, :, None]
    peak = lax.stop_gradient(jnp.maximum(peak, own_sink))
    near_weights, far_weights = jnp.exp(window_scores - peak[..., None]), jnp.exp(entry_scores - peak[..., None])
    total = jnp.sum(near_weights, axis=-1) + jnp.sum(far_weights, axis=-1) + jnp.exp(own_sink - peak)
    values = _product("bnhrm,bnmk->bnrhk", round_to(near_weights, q.dtype), near)
    values = values + _product("bnhrm,bmk->bnrhk", round_to(far_weights, q.dtype), entries)
    out = round_to(values / total.swapaxes(2, 3)[..., None], q.dtype)
    return out.reshape(batch, num_blocks * window_size, heads, width)[:, :num_rows]


def attend_blocks_of_rows(
    q: Float[Array, "M G H K"],
    keys: Float[Array, "M N K"],
    exists: Bool[Array, "M N"],
    sink: Float32[Array, " H"],
) -> Float[Array, "M G H K"]:
    """Attention of M blocks of G rows, each to its own N keys, which all rows of the block see."""
    scores = _product("mghk,mnk->mhgn", q, keys) * jnp.float32(q.shape[-1] ** -0.5)
    scores = jnp.where(exists[:, None, None], scores, MASKED)
    own_sink = sink[None, :, None]
    peak = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), own_sink))
    weights = jnp.exp(scores - peak[..., None])
    total = jnp.sum(weights, axis=-1) + jnp.exp(own_sink - peak)
    values = _product("mhgn,mnk->mghk", round_to(weights, q.dtype), keys)
    return round_to(values / total.swapaxes(1, 2)[..., None], q.dtype)


def entry_shares(
    q: Float[Array, "B R H K"], entries: Float[Array, "B N K"], visible: Bool[Array, "B R N"]
) -> Float32[Array, "B R N"]:
    """How attention would be spread over all visible entries, as a mean over heads: what an indexer should find."""
    scores = _product("brhk,bmk->bhrm", q, entries) * jnp.float32(q.shape[-1] ** -0.5)
    return jnp.mean(jax.nn.softmax(jnp.where(visible[:, None], scores, MASKED), axis=-1), axis=1)


def _window_keys(kv: Float[Array, "B R K"], *, window_size: int) -> Float[Array, "B M W2 K"]:
    """For each block of rows the keys of the block before it and its own; W2 = 2 window_size."""
    batch, num_rows, width = kv.shape
    blocks = kv.reshape(batch, num_rows // window_size, window_size, width)
    before = jnp.pad(blocks, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    return jnp.concatenate([before, blocks], axis=2)


def _in_window(num_blocks: int, window_size: int) -> Bool[Array, "M W W2"]:
    """Which keys of `_window_keys` each row of a block sees: `window_size` positions up to its own."""
    row = jnp.arange(window_size)[:, None]
    key = jnp.arange(2 * window_size)[None, :] - window_size
    seen = (key <= row) & (key > row - window_size)
    exists = (jnp.arange(num_blocks)[:, None, None] > 0) | (key >= 0)[None]
    return seen[None] & exists


def _product(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
