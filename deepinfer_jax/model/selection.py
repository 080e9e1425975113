"""Which compressed entries each row attends to: index keys, scores, candidates, top-k (spec: backbone 5)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.indexer import api as index_choice
from deepinfer_jax.kernels.indexer.keys import EntryKeys
from deepinfer_jax.kernels.linear.api import Weight, linear
from deepinfer_jax.kernels.rope.api import rotate
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import IndexerParams, layer_slice
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.model.variants import (
    Layer,
    RopeTables,
    SelectionKind,
    layer_weights,
    pick,
    rows_for,
    selection_kinds,
)
from deepinfer_jax.ops import indexer, paged
from deepinfer_jax.ops.invariant import round_to
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_index
from deepinfer_jax.pytree import pytree_dataclass

MAX_TOGETHER_BYTES = 2 << 30  # of scores and lists of the rows that a kernel scores at once


@pytree_dataclass
class Selection:
    """What index sources hand to the layers after them, for this step only; ascending, then -1."""

    entries: Int[Array, "T N"]  # compressed entries selected by the last index source
    blocks: Int[Array, "T M"]  # candidate blocks of the candidate source


def empty_selection(rows: Rows, *, config: RuntimeConfig) -> Selection:
    """The selection before the first index source, in the sizes that a page table of this width can fill."""
    num_rows, width = rows.positions.shape[0], context_width(rows, ratio=1, config=config)
    num_blocks = min(config.model.candidate_topk_blocks, -(-width // config.model.candidate_block_size))
    return Selection(
        entries=jnp.full((num_rows, min(config.model.index_topk, width)), -1, jnp.int32),
        blocks=jnp.full((num_rows, num_blocks), -1, jnp.int32),
    )


def context_width(rows: Rows, *, ratio: int, config: RuntimeConfig) -> int:
    """Compressed entries that the step's page table has room for."""
    return rows.page_table.shape[1] * config.page_tokens // ratio


def index_rows(key: Float[Array, "..."], *, config: RuntimeConfig) -> ScaledArray:
    """Index queries or keys in the form of the cache."""
    if config.policy.quantizes_caches:
        return quantize_index(key)
    return ScaledArray(payload=key.astype(jnp.float32), scale=None)


def select(
    params: IndexerParams,
    previous: Selection,
    state: State,
    x: Float[Array, "T D"],
    q_latent: Float[Array, "T Q"],
    tables: RopeTables,
    rows: Rows,
    layer: Layer,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> Selection:
    """The selection to use from this layer on: an index source's own, otherwise the previous one."""

    def variant(kind: SelectionKind) -> Selection:
        return _select_variant(
            params, previous, state, x, q_latent, tables, rows, layer, kind=kind, config=config, stages=stages
        )

    variants = [lambda kind=kind: variant(kind) for kind in selection_kinds(config.model)]
    return pick(layer.selection_kind, [lambda: previous, *variants])


def index_queries(
    wq_b: Weight,
    weights_proj: Weight,
    x: Float[Array, "T D"],
    q_latent: Float[Array, "T Q"],
    tables: RopeTables,
    *,
    config: RuntimeConfig,
) -> tuple[Float[Array, "T I K"], Float[Array, "T I"]]:
    """Rotated, quantised index queries and the weight of each index head (spec: backbone 5.2)."""
    model = config.model
    latent = rows_for(q_latent, wq_b, config=config)
    queries = linear(latent, wq_b, backend=config.backend).reshape(-1, model.index_n_heads, model.index_head_dim)
    queries = rotate(queries, tables.cos, tables.sin, backend=config.backend)
    queries = dequantize(index_rows(queries, config=config), x.dtype)
    weights = linear(x, weights_proj, backend=config.backend)
    factor = (model.index_head_dim * model.index_n_heads) ** -0.5
    return queries, round_to(weights.astype(jnp.float32) * jnp.float32(factor), x.dtype)


def _select_variant(
    params: IndexerParams,
    previous: Selection,
    state: State,
    x: Float[Array, "T D"],
    q_latent: Float[Array, "T Q"],
    tables: RopeTables,
    rows: Rows,
    layer: Layer,
    *,
    kind: SelectionKind,
    config: RuntimeConfig,
    stages: Stages,
) -> Selection:
    """The top entries of an index source and, at the candidate source, the candidate blocks.

    A layer that uses candidates scores the entries of `previous.blocks` only.
    """
    model, prefix = config.model, f"layers.{layer.layer}"
    cache = state.index_k[RATIOS.index(kind.ratio)]
    wants_scores = stages.wants(f"{prefix}.index_score")
    width = context_width(rows, ratio=kind.ratio, config=config)
    count, room = min(model.index_topk, width), previous.entries.shape[1]
    wq_b = layer_weights(params.wq_b, layer.index_ordinal, dtype=x.dtype, config=config)
    weights_proj = layer_slice(params.weights_proj, layer.index_ordinal)
    num_listed = previous.blocks.shape[1] * model.candidate_block_size if kind.uses_candidates else None
    # A list with room for all entries names all that are visible, and a kernel reads keys fastest where they are.
    names_all = num_listed is not None and num_listed >= width and not _forces_candidates(stages, model)
    in_kernel = _in_kernel(x, cache, kind, None if names_all else num_listed, config=config)
    has_list = kind.uses_candidates and not (in_kernel and names_all)

    def on_tile(
        stages: Stages, x: Array, q_latent: Array, tables: RopeTables, slots: Array, positions: Array, blocks: Array
    ) -> tuple[Array, Array]:
        queries, weights = index_queries(wq_b, weights_proj, x, q_latent, tables, config=config)
        stages.show(f"{prefix}.index_q", queries)
        stages.show(f"{prefix}.index_weight", weights)
        keys = EntryKeys(
            cache=cache,
            source=layer.cache_ordinal,
            pages=paged.pages_of(rows.page_table, slots),
            page_entries=config.page_tokens // kind.ratio,
        )
        visible = paged.num_visible(positions, ratio=kind.ratio)
        listed = indexer.block_entries(blocks, block_size=model.candidate_block_size) if has_list else None
        best = index_choice.best_entries(
            queries,
            weights,
            listed,
            visible,
            keys,
            count=count,
            needs_scores=wants_scores or kind.is_candidate_source,
            has_fixed_trips=config.has_fixed_trips,
            backend=config.backend,
        )
        scores = best.scores
        stages.show(f"{prefix}.topk_margin", best.gap)
        if wants_scores and scores is not None:
            own = scores.astype(jnp.float32)
            own = own[:, :width] if listed is None else indexer.spread(own, listed, width=width)
            stages.show(f"{prefix}.index_score", own)
        if kind.is_candidate_source and scores is not None:
            blocks, gap = index_choice.candidate_blocks(
                scores[:, :width],
                visible,
                block_size=model.candidate_block_size,
                count=model.candidate_topk_blocks,
            )
            stages.show(f"{prefix}.candidate_margin", gap)
        return jnp.pad(best.entries, ((0, 0), (0, room - count)), constant_values=-1), blocks

    entries, blocks = stages.map_rows(
        on_tile,
        x,
        q_latent,
        tables,
        rows.slots,
        rows.positions,
        previous.blocks,
        num_live=rows.num_live,
        config=config,
        tile=_rows_at_once(x.shape[0], width, num_listed if has_list else None, config=config)
        if in_kernel
        else config.row_tile,
    )
    entries = stages.note(f"{prefix}.topk_idxs", entries)
    if kind.is_candidate_source:
        blocks = _note_candidates(blocks, width, f"{prefix}.candidate_mask", config=config, stages=stages)
    return Selection(entries=entries, blocks=blocks)


def _in_kernel(
    x: Float[Array, "T D"], cache: ScaledArray, kind: SelectionKind, num_listed: int | None, *, config: RuntimeConfig
) -> bool:
    """Whether a kernel chooses the entries, with lists of such a width or without."""
    model = config.model
    return index_choice.in_kernel(
        jnp.zeros((x.shape[0], model.index_n_heads, model.index_head_dim), x.dtype),
        cache,
        page_entries=config.page_tokens // kind.ratio,
        num_listed=num_listed,
        backend=config.backend,
    )


def _forces_candidates(stages: Stages, model: ModelConfig) -> bool:
    """Whether the caller gives the candidate blocks, which may be fewer than there is room for."""
    sources = [role.layer for role in layer_roles(model) if role.is_candidate_source]
    return any(stages.is_forced(f"layers.{layer}.candidate_mask") for layer in sources)


def _rows_at_once(num_rows: int, width: int, num_listed: int | None, *, config: RuntimeConfig) -> int | None:
    """Rows that a kernel scores together, None for all: bounds the memory of lists, gathered keys and scores."""
    if config.is_invariant:
        return config.row_tile
    # Of each entry two forms of its score; of a listed one its number and the copy of its key too.
    row_bytes = 8 * width if num_listed is None else 84 * num_listed
    most = max(config.row_tile, MAX_TOGETHER_BYTES // row_bytes // config.row_tile * config.row_tile)
    return None if num_rows <= most else most


def _note_candidates(
    blocks: Int[Array, "T M"], width: int, name: str, *, config: RuntimeConfig, stages: Stages
) -> Int[Array, "T M"]:
    """The candidate blocks, seen and forced as a mask over entries."""
    size = config.model.candidate_block_size
    if not stages.wants(name) and not stages.is_forced(name):
        stages.mark(name)
        return blocks
    entries = indexer.block_entries(blocks, block_size=size)
    mask = indexer.spread(jnp.zeros(entries.shape, jnp.float32), entries, width=width) == 0
    if not stages.is_forced(name):
        stages.note(name, mask)
        return blocks
    return indexer.blocks_of_mask(stages.note(name, mask), block_size=size, count=config.model.candidate_topk_blocks)
