"""Selection of compressed entries for whole sequences, and how far an indexer is from what attention wants."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import LayerRole
from deepinfer_jax.ops import indexer, paged
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.training.attention import MASKED


@pytree_dataclass
class Chosen:
    """What index sources hand to the layers after them, as masks over the entries of each row's sequence."""

    entries: Bool[Array, "B R N"]
    candidates: Bool[Array, "B R M"]  # entries of the candidate blocks, once the candidate source has run


def visible_entries(num_sequences: int, num_rows: int, *, ratio: int) -> Bool[Array, "B R N"]:
    """Which entries each row may see: those whose group is complete at its position."""
    count = paged.num_visible(jnp.arange(num_rows, dtype=jnp.int32), ratio=ratio)
    seen = jnp.arange(num_rows // ratio, dtype=jnp.int32)[None, :] < count[:, None]
    return jnp.broadcast_to(seen[None], (num_sequences, *seen.shape))


def index_scores(
    queries: Float[Array, "B R I K"], weights: Float[Array, "B R I"], keys: Float[Array, "B N K"]
) -> Float32[Array, "B R N"]:
    """The score of every entry for every row (spec: backbone 5.2)."""
    return jax.vmap(indexer.score_block, in_axes=(1, 1, None), out_axes=1)(queries, weights, keys)


def choose(
    scores: Float32[Array, "B R N"],
    visible: Bool[Array, "B R N"],
    previous: Chosen,
    role: LayerRole,
    *,
    config: ModelConfig,
) -> tuple[Chosen, Bool[Array, "B R N"]]:
    """The selection from an index source on, and which entries it chose from.

    The rules of serving: the best `index_topk`, at a later indexer of the same cache among the candidates only.
    """
    pool = visible & previous.candidates if role.uses_candidates else visible
    width, rows = scores.shape[-1], scores.shape[0] * scores.shape[1]
    flat = lax.stop_gradient(jnp.where(pool, scores, -jnp.inf)).reshape(rows, width)
    listed = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), flat.shape)
    best, _ = indexer.top_entries(flat, listed, count=min(config.index_topk, width))
    entries = _mask(best, width=width).reshape(scores.shape)
    candidates = previous.candidates
    if role.is_candidate_source:
        count = jnp.sum(visible, axis=-1, dtype=jnp.int32).reshape(rows)
        blocks, _ = indexer.candidate_blocks(
            flat, count, block_size=config.candidate_block_size, count=config.candidate_topk_blocks
        )
        listed = indexer.block_entries(blocks, block_size=config.candidate_block_size)
        candidates = _mask(listed, width=width).reshape(scores.shape)
    return Chosen(entries=entries, candidates=candidates), pool


def index_distance(
    scores: Float32[Array, "B R N"], shares: Float32[Array, "B R N"], pool: Bool[Array, "B R N"]
) -> Float32[Array, ""]:
    """Mean Kullback-Leibler divergence, in nats, of the softmax of the scores from attention's shares of the pool.

    Rows with fewer than two entries in their pool have nothing to choose and count as 0.
    """
    inside = jnp.where(pool, lax.stop_gradient(shares), 0.0)
    inside = inside / jnp.maximum(jnp.sum(inside, axis=-1, keepdims=True), 1e-9)
    found = jax.nn.log_softmax(jnp.where(pool, scores, MASKED), axis=-1)
    gap = jnp.where(inside > 0, inside * (jnp.log(jnp.maximum(inside, 1e-30)) - found), 0.0)
    has_choice = jnp.sum(pool, axis=-1) > 1
    return jnp.mean(jnp.where(has_choice, jnp.sum(gap, axis=-1), 0.0))


def _mask(ids: Int[Array, "T N"], *, width: int) -> Bool[Array, "T M"]:
    return indexer.spread(jnp.zeros(ids.shape, jnp.float32), ids, width=width) == 0
