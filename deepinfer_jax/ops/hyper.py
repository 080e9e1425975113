"""Single-pass mHC: how the residual streams are mixed around each sublayer (spec: backbone 3)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.ops.invariant import ordered_sum, round_to, row_product
from deepinfer_jax.pytree import pytree_dataclass

NORM_EPS = 1e-20


@pytree_dataclass
class Mix:
    """Mixing coefficients of one sublayer, float32. comb[t, i, j] carries stream i into stream j."""

    pre: Float32[Array, "T C"]
    post: Float32[Array, "T C"]
    comb: Float32[Array, "T C C"]


@pytree_dataclass
class Mixer:
    """Weights of one sublayer: of its mix, M = C * (2 + C), and of the norm in front of it."""

    fn: Float32[Array, "M CD"]
    scale: Float32[Array, " three"]
    base: Float32[Array, " M"]
    norm: Float[Array, " D"]


def coefficients(
    streams: Float[Array, "T C D"],
    fn: Float32[Array, "M CD"],
    scale: Float32[Array, " three"],
    base: Float32[Array, " M"],
    *,
    iterations: int,
    eps: float,
) -> Mix:
    """The mix of one sublayer from all streams of a row jointly, M = C * (2 + C) (spec: backbone 3.1)."""
    rows, num_streams, width = streams.shape
    flat = streams.astype(jnp.float32).reshape(rows, num_streams * width)
    mean_square = jnp.mean(flat * flat, axis=-1, keepdims=True)
    mixes = row_product(flat, fn) * lax.rsqrt(mean_square + NORM_EPS)
    sizes = (num_streams, num_streams, num_streams * num_streams)
    parts = jnp.split(mixes, (sizes[0], sizes[0] + sizes[1]), axis=1)
    bases = jnp.split(base, (sizes[0], sizes[0] + sizes[1]))
    a, b, m = (part * scale[i] + bases[i][None, :] for i, part in enumerate(parts))
    comb = sinkhorn(m.reshape(rows, num_streams, num_streams), iterations=iterations, eps=eps)
    return Mix(pre=jax.nn.sigmoid(a) + eps, post=2.0 * jax.nn.sigmoid(b), comb=comb)


def sinkhorn(logits: Float32[Array, "T C C"], *, iterations: int, eps: float) -> Float32[Array, "T C C"]:
    """Row softmax, then alternating column and row normalisation, ending on columns."""
    peak = jnp.max(logits, axis=2, keepdims=True)
    raised = jnp.exp(logits - peak)
    comb = raised / _sum_over(raised, axis=2) + eps
    comb = comb / (_sum_over(comb, axis=1) + eps)

    def step(_: Int[Array, ""], comb: Float32[Array, "T C C"]) -> Float32[Array, "T C C"]:
        comb = comb / (_sum_over(comb, axis=2) + eps)
        return comb / (_sum_over(comb, axis=1) + eps)

    return lax.fori_loop(0, iterations - 1, step, comb)


def _sum_over(x: Float32[Array, "T C C"], *, axis: int) -> Float32[Array, "..."]:
    return ordered_sum([lax.slice_in_dim(x, i, i + 1, axis=axis) for i in range(x.shape[axis])])


def collapse(streams: Float[Array, "T C D"], pre: Float32[Array, "T C"]) -> Float[Array, "T D"]:
    """The streams weighted by `pre` and added in stream order, rounded to the streams' dtype."""
    terms = [pre[:, k, None] * streams[:, k].astype(jnp.float32) for k in range(streams.shape[1])]
    return round_to(ordered_sum(terms), streams.dtype)


def expand(out: Float[Array, "T D"], streams: Float[Array, "T C D"], mix: Mix) -> Float[Array, "T C D"]:
    """The new streams: each takes its share of the sublayer's output and a mixture of the old streams."""
    out32, streams32 = out.astype(jnp.float32), streams.astype(jnp.float32)
    num_streams = streams.shape[1]
    new = []
    for j in range(num_streams):
        mixed = ordered_sum([mix.comb[:, i, j, None] * streams32[:, i] for i in range(num_streams)])
        new.append(mix.post[:, j, None] * out32 + mixed)
    return round_to(jnp.stack(new, axis=1), streams.dtype)
