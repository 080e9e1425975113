"""Which compressed entries each row attends to: index keys, scores, candidates, top-k (spec: backbone 5)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepinfer_jax.config.roles import LayerRole
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import IndexerParams
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.ops import indexer, paged
from deepinfer_jax.ops.invariant import map_rows, round_to
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip, quantize_index
from deepinfer_jax.ops.rope import rotate
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class Selection:
    """What index sources hand to the layers after them, for this step only; ascending, then -1."""

    entries: Int[Array, "T N"]  # selected compressed entries of the last index source
    blocks: Int[Array, "T M"]  # candidate blocks of the candidate source


def empty_selection(num_rows: int) -> Selection:
    """The selection before the first index source."""
    nothing = jnp.full((num_rows, 0), -1, jnp.int32)
    return Selection(entries=nothing, blocks=nothing)


def index_rows(key: Float[Array, "T K"], *, config: RuntimeConfig) -> ScaledArray:
    """Index queries or keys in the form of the cache."""
    if config.policy.quantizes_caches:
        return quantize_index(key)
    return ScaledArray(payload=key.astype(jnp.float32), scale=None)


def index_queries(
    params: IndexerParams,
    x: Float[Array, "T D"],
    q_latent: Float[Array, "T Q"],
    cos: Float[Array, "T F"],
    sin: Float[Array, "T F"],
    *,
    role: LayerRole,
    config: RuntimeConfig,
) -> tuple[Float[Array, "T I K"], Float[Array, "T I"]]:
    """Rotated, quantised index queries and the weight of each index head (spec: backbone 5.2)."""
    model, tile = config.model, config.product_tile
    ordinal = role.index_ordinal
    wq_b = ScaledArray(
        payload=params.wq_b.payload[ordinal],
        scale=None if params.wq_b.scale is None else params.wq_b.scale[ordinal],
        block=params.wq_b.block,
    )
    latent = fp8_roundtrip(q_latent) if config.policy.quantizes_activations else q_latent
    queries = linear(latent, wq_b, tile=tile).reshape(-1, model.index_n_heads, model.index_head_dim)
    queries = rotate(queries, cos, sin)
    queries = dequantize(index_rows(queries, config=config), x.dtype)
    weights = linear(x, params.weights_proj[ordinal], tile=tile)
    factor = (model.index_head_dim * model.index_n_heads) ** -0.5
    return queries, round_to(weights.astype(jnp.float32) * jnp.float32(factor), x.dtype)


def select(
    queries: Float[Array, "T I K"],
    weights: Float[Array, "T I"],
    previous: Selection,
    state: State,
    rows: Rows,
    *,
    role: LayerRole,
    config: RuntimeConfig,
    stages: Stages,
    prefix: str,
) -> Selection:
    """The selection of one index source: its own top entries and, at the candidate source, the candidate blocks.

    A layer that uses candidates scores only the entries of `previous.blocks`. Where fewer entries can exist than may
    be selected, all visible ones are taken and nothing is scored.
    """
    model = config.model
    keys = state.index_k[RATIOS.index(role.ratio)]
    page_entries = config.page_tokens // role.ratio
    width = rows.page_table.shape[1] * page_entries
    count = min(model.index_topk, width)

    def tile_of_rows(queries: Array, weights: Array, slots: Array, positions: Array, blocks: Array) -> dict[str, Array]:
        pages = rows.page_table.at[slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        visible = paged.num_visible(positions, ratio=role.ratio)

        def load_keys(entries: Int[Array, "B M"]) -> Float[Array, "B M K"]:
            page, offset = paged.entry_place(entries, pages, page_entries=page_entries)
            return dequantize(paged.take_rows(keys, role.cache_ordinal, page, offset), queries.dtype)

        if role.uses_candidates:
            listed = indexer.block_entries(blocks, block_size=model.candidate_block_size)
        else:
            everything = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (slots.shape[0], width))
            listed = indexer.pad_entries(everything)
        scores = indexer.score_entries(queries, weights, listed, load_keys, visible)
        entries, gap = indexer.top_entries(scores, listed, count=count)
        result = {"entries": entries, "topk_margin": gap}
        if role.is_candidate_source:
            result["blocks"], result["candidate_margin"] = indexer.candidate_blocks(
                scores[:, :width], visible, block_size=model.candidate_block_size, count=model.candidate_topk_blocks
            )
        if stages.wants(f"{prefix}.index_score"):
            blank = jnp.full((slots.shape[0], width), -jnp.inf, jnp.float32)
            place = jnp.where(listed >= 0, listed, width)
            at_row = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
            result["index_score"] = blank.at[at_row, place].set(scores, mode="drop")
        return result

    chosen = map_rows(tile_of_rows, queries, weights, rows.slots, rows.positions, previous.blocks, tile=config.row_tile)
    for name in ("index_score", "topk_margin", "candidate_margin"):
        if name in chosen:
            stages.note(f"{prefix}.{name}", chosen[name])
    entries = stages.note(f"{prefix}.topk_idxs", chosen["entries"])
    blocks = previous.blocks
    if role.is_candidate_source:
        blocks = _note_candidates(chosen["blocks"], width, config=config, stages=stages, prefix=prefix)
    return Selection(entries=entries, blocks=blocks)


def _note_candidates(
    blocks: Int[Array, "T M"], width: int, *, config: RuntimeConfig, stages: Stages, prefix: str
) -> Int[Array, "T M"]:
    """The candidate blocks, seen and forced as a mask over entries."""
    name = f"{prefix}.candidate_mask"
    size = config.model.candidate_block_size
    if not stages.wants(name) and not stages.is_forced(name):
        stages.mark(name)
        return blocks
    entries = indexer.block_entries(blocks, block_size=size)
    place = jnp.where(entries >= 0, entries, width)
    at_row = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    mask = jnp.zeros((blocks.shape[0], width), bool).at[at_row, place].set(True, mode="drop")
    if not stages.is_forced(name):
        stages.note(name, mask)
        return blocks
    return indexer.blocks_of_mask(stages.note(name, mask), block_size=size, count=config.model.candidate_topk_blocks)
