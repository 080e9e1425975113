"""One softmax over a row's window and selected keys, in the order of the specification (spec: backbone 4.6)."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from deepinfer_jax.ops.invariant import repeat, round_to

KEY_BLOCK = 64  # keys that share one running maximum; part of the numerics
_FIRST_MAX = -1e30


LoadBlock = Callable[[Array], tuple[Float[Array, "B M K"], Bool[Array, "B M"]]]


def attend_blocks(
    q: Float[Array, "B H K"],
    segments: Sequence[tuple[LoadBlock, int]],
    sink: Float32[Array, " H"],
    *,
    has_fixed_trips: bool = False,
) -> Float[Array, "B H K"]:
    """Attention of B rows over blocks of 64 keys each; a key is also its value.

    Each segment is (load_block, count): `load_block(i)` gives the keys of the segment's block i in q.dtype and which
    of them exist. Scores and sums are float32; a probability is rounded to q.dtype for the value product only; the
    sink counts in the denominator only. A row with no key at all gives zeros.
    """
    rows, heads, width = q.shape
    scale = jnp.float32(width**-0.5)

    def step(carry: tuple[Array, Array, Array], loaded: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        keys, exists = loaded
        scores = _batched(q, keys, contract_keys=False) * scale
        scores = jnp.where(exists[:, None, :], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        total = total * shrink + jnp.sum(weights, axis=-1)
        values = _batched(round_to(weights, q.dtype), keys, contract_keys=True)
        return new_peak, total, acc * shrink[..., None] + values

    carry = (
        jnp.full((rows, heads), _FIRST_MAX, jnp.float32),
        jnp.zeros((rows, heads), jnp.float32),
        jnp.zeros((rows, heads, width), jnp.float32),
    )
    for load_block, count in segments:
        carry = repeat(count, lambda i, c, load=load_block: step(c, load(i)), carry, has_fixed_trips=has_fixed_trips)
    peak, total, acc = carry
    total = total + jnp.exp(sink[None, :] - peak)
    return round_to(acc / total[..., None], q.dtype)


def _batched(a: Float[Array, "B H X"], keys: Float[Array, "B M K"], *, contract_keys: bool) -> Float32[Array, "B H Y"]:
    """q . k for each key, or weights . k summed over keys, one row at a time."""
    contract = ((2,), (1,)) if contract_keys else ((2,), (2,))
    return lax.dot_general(
        a, keys, (contract, ((0,), (0,))), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
