"""The attention sublayer of one layer: projections, caches, one softmax, output (spec: backbone 4)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.layer import RATIO_OF_KIND, Layer, RopeTables, pick
from deepinfer_jax.model.params import AttentionParams, Params, layer_slice
from deepinfer_jax.model.selection import Selection, select
from deepinfer_jax.model.sources import ring_places, write_sources
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.ops import paged, rope
from deepinfer_jax.ops.attention import KEY_BLOCK, LoadBlock, attend_blocks
from deepinfer_jax.ops.invariant import map_rows
from deepinfer_jax.ops.linear import grouped_linear, linear
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip, quantize_fp8


def attention(
    params: Params,
    state: State,
    x: Float[Array, "T D"],
    selection: Selection,
    rows: Rows,
    tables: RopeTables,
    layer: Layer,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Float[Array, "T D"], State, Selection]:
    """The sublayer's output for normed inputs x, with the caches of these rows written.

    Order: main KV and index K of this step, selection, attention over ring and new rows, then the ring: a chunk may
    overwrite ring rows that its own first queries need.
    """
    model, tile, prefix = config.model, config.product_tile, f"layers.{layer.layer}"
    own = layer_slice(params.attention, layer.layer)
    cos, sin = tables.of(layer)

    x_in = fp8_roundtrip(x) if config.policy.quantizes_activations else x
    q_latent = rms_norm(linear(x_in, own.wq_a, tile=tile), own.q_norm, eps=model.rms_norm_eps)
    q_latent = stages.note(f"{prefix}.q_latent", q_latent)
    q_in = fp8_roundtrip(q_latent) if config.policy.quantizes_activations else q_latent
    q = linear(q_in, own.wq_b, tile=tile).reshape(-1, model.num_attention_heads, model.head_dim)
    q = rope.rotate(q, cos, sin)
    kv = rms_norm(linear(x_in, own.wkv, tile=tile), own.kv_norm, eps=model.rms_norm_eps)
    new_kv = window_rows(rope.rotate(kv, cos, sin), config=config)
    stages.note(f"{prefix}.window_kv", dequantize(new_kv, x.dtype))

    state = write_sources(params, state, x, rows, layer, config=config, stages=stages)
    selection = select(
        params.indexer, selection, state, x, q_latent, (cos, sin), rows, layer, config=config, stages=stages
    )
    variants = [
        lambda ratio=ratio: _attend(
            q, new_kv, state, selection.entries, own.attn_sink, rows, layer, ratio=ratio, config=config
        )
        for ratio in RATIO_OF_KIND
    ]
    out = rope.rotate(pick(layer.ratio_kind, variants), cos, sin, inverse=True)
    slots, places = ring_places(rows, config.ring_len)
    state = dataclasses.replace(state, window=paged.put_rows(state.window, new_kv, layer.layer, slots, places))
    return _project_out(own, out, config=config), state, selection


def window_rows(kv: Float[Array, "T L"], *, config: RuntimeConfig) -> ScaledArray:
    """Rotated window latents in the form of the ring."""
    if config.policy.quantizes_caches:
        return quantize_fp8(kv)
    return ScaledArray(payload=kv.astype(jnp.float32), scale=None)


def _attend(
    q: Float[Array, "T H K"],
    new_kv: ScaledArray,
    state: State,
    entries: Int[Array, "T N"],
    sink: Float[Array, " H"],
    rows: Rows,
    layer: Layer,
    *,
    ratio: int,
    config: RuntimeConfig,
) -> Float[Array, "T H K"]:
    """Attention over the key list of each row: W window places in position order, then the selected entries."""
    window_size, ring_len = config.model.sliding_window, config.ring_len
    num_keys = window_size + (entries.shape[1] if ratio else 0)
    num_blocks = -(-num_keys // KEY_BLOCK)

    def tile_of_rows(
        q: Array, slots: Array, positions: Array, first_row: Array, first_position: Array, entries: Array
    ) -> Float[Array, "B H K"]:
        oldest = jnp.maximum(positions - (window_size - 1), 0)
        pages = paged.pages_of(rows.page_table, slots)

        def window_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            position = oldest[:, None] + places
            exists = (position <= positions[:, None]) & (places < window_size) & (slots >= 0)[:, None]
            is_new = position >= first_position[:, None]
            here = jnp.where(exists & is_new, first_row[:, None] + position - first_position[:, None], -1)
            slot = jnp.where(exists, slots[:, None], -1)
            ring = paged.take_rows(state.window, layer.layer, slot, position % ring_len)
            fresh = paged.take_rows(new_kv, here)
            return dequantize(paged.select_rows(is_new, fresh, ring), q.dtype), exists

        def selected_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            is_listed = (places >= 0) & (places < entries.shape[1])
            at = jnp.clip(places, 0, entries.shape[1] - 1)
            listed = jnp.where(is_listed, jnp.take_along_axis(entries, at, axis=1), -1)
            page, offset = paged.entry_place(listed, pages, page_entries=config.page_tokens // ratio)
            cache = state.main_kv[RATIOS.index(ratio)]
            return dequantize(paged.take_rows(cache, layer.cache_ordinal, page, offset), q.dtype), page >= 0

        def load(first_block: int, has_window: bool, has_selected: bool) -> LoadBlock:
            def load_block(block: Array) -> tuple[Array, Bool[Array, "B M"]]:
                places = (first_block + block) * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32)
                places = jnp.broadcast_to(places, (slots.shape[0], KEY_BLOCK))
                if not has_selected:
                    return window_block(places)
                if not has_window:
                    return selected_block(places - window_size)
                window, in_window = window_block(places)
                selected, in_selected = selected_block(places - window_size)
                return jnp.where(in_window[..., None], window, selected), in_window | in_selected

            return load_block

        pure_window = window_size // KEY_BLOCK if ratio else num_blocks
        mixed = 1 if pure_window < num_blocks and window_size % KEY_BLOCK else 0
        segments = [
            (load(0, True, False), pure_window),
            (load(pure_window, True, True), mixed),
            (load(pure_window + mixed, False, True), num_blocks - pure_window - mixed),
        ]
        return attend_blocks(q, [s for s in segments if s[1]], sink, has_fixed_trips=config.has_fixed_trips)

    return map_rows(
        tile_of_rows,
        q,
        rows.slots,
        rows.positions,
        rows.first_row,
        rows.first_position,
        entries,
        tile=config.row_tile,
        has_fixed_trips=config.has_fixed_trips,
    )


def _project_out(own: AttentionParams, out: Float[Array, "T H K"], *, config: RuntimeConfig) -> Float[Array, "T D"]:
    """Grouped low-rank output projection; the first factor is never quantised (spec: backbone 4.7)."""
    groups = config.model.o_groups
    low = grouped_linear(out.reshape(out.shape[0], groups, -1), own.wo_a, tile=config.product_tile)
    low = low.reshape(out.shape[0], -1)
    low = fp8_roundtrip(low) if config.policy.quantizes_activations else low
    return linear(low, own.wo_b, tile=config.product_tile)
