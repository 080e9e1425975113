"""The attention sublayer of one layer: projections, caches, one softmax, output (spec: backbone 4)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.roles import LayerRole
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model import selection as selecting
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import AttentionParams, Params, layer_slice
from deepinfer_jax.model.selection import Selection
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.ops import compress, paged, rope
from deepinfer_jax.ops.attention import KEY_BLOCK, LoadBlock, attend_blocks
from deepinfer_jax.ops.invariant import map_rows, round_to
from deepinfer_jax.ops.linear import grouped_linear, linear, linear_f32
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip, quantize_fp8, quantize_main_kv


def attention(
    params: Params,
    state: State,
    x: Float[Array, "T D"],
    selection: Selection,
    rows: Rows,
    *,
    role: LayerRole,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Float[Array, "T D"], State, Selection]:
    """The sublayer's output for normed inputs x, with the caches of these rows written.

    Order: main KV and index K of this step, selection, attention over ring and new rows, then the ring: a chunk may
    overwrite ring rows that its own first queries need.
    """
    model, tile, prefix = config.model, config.product_tile, f"layers.{role.layer}"
    own = layer_slice(params.attention, role.layer)
    freqs = layer_frequencies(role, config)
    cos, sin = rope.angles(rows.positions, freqs)

    x_in = fp8_roundtrip(x) if config.policy.quantizes_activations else x
    q_latent = rms_norm(linear(x_in, own.wq_a, tile=tile), own.q_norm, eps=model.rms_norm_eps)
    q_latent = stages.note(f"{prefix}.q_latent", q_latent)
    q_in = fp8_roundtrip(q_latent) if config.policy.quantizes_activations else q_latent
    q = linear(q_in, own.wq_b, tile=tile).reshape(-1, model.num_attention_heads, model.head_dim)
    q = rope.rotate(q, cos, sin)
    kv = rms_norm(linear(x_in, own.wkv, tile=tile), own.kv_norm, eps=model.rms_norm_eps)
    new_kv = window_rows(rope.rotate(kv, cos, sin), config=config)
    stages.note(f"{prefix}.window_kv", dequantize(new_kv, x.dtype))

    if role.owns_kv:
        state = _write_sources(params, state, x, rows, role=role, config=config, stages=stages)
    if role.index_ordinal >= 0:
        queries, weights = selecting.index_queries(params.indexer, x, q_latent, cos, sin, role=role, config=config)
        selection = selecting.select(
            queries, weights, selection, state, rows, role=role, config=config, stages=stages, prefix=prefix
        )
    entries = selection.entries if role.ratio else jnp.full((x.shape[0], 0), -1, jnp.int32)
    out = _attend(q, new_kv, state, entries, own.attn_sink, rows, role=role, config=config)
    out = rope.rotate(out, cos, sin, inverse=True)
    state = dataclasses.replace(state, window=_write_ring(state.window, new_kv, rows, role=role, config=config))
    return _project_out(own, out, config=config), state, selection


def layer_frequencies(role: LayerRole, config: RuntimeConfig) -> Array:
    """Rotary frequencies of every rotation in a layer: plain in window layers, YaRN in the others."""
    model = config.model
    if role.ratio == 0:
        return rope.frequencies(model.qk_rope_head_dim, model.rope_theta, None)
    return rope.frequencies(model.qk_rope_head_dim, model.compress_rope_theta, model.rope_scaling)


def window_rows(kv: Float[Array, "T L"], *, config: RuntimeConfig) -> ScaledArray:
    """Rotated window latents in the form of the ring."""
    if config.policy.quantizes_caches:
        return quantize_fp8(kv)
    return ScaledArray(payload=kv.astype(jnp.float32), scale=None)


def _write_sources(
    params: Params,
    state: State,
    x: Float[Array, "T D"],
    rows: Rows,
    *,
    role: LayerRole,
    config: RuntimeConfig,
    stages: Stages,
) -> State:
    """The state with the main KV, index K and compressor rows of this step (spec: backbone 4.3, 5.1)."""
    model, tile, prefix, ratio = config.model, config.product_tile, f"layers.{role.layer}", role.ratio
    wkv = params.compressor.wkv[role.kv_ordinal]
    tails = state.tails
    if ratio == 1:
        pooled = linear(x, wkv, tile=tile)
    else:
        wgate = params.compressor.wgate[role.cache_ordinal]
        pairs = jnp.concatenate([linear_f32(x, wkv, tile=tile), linear_f32(x, wgate, tile=tile)], axis=-1)
        stages.note(f"{prefix}.compress_pairs", pairs)
        before = _row_before(pairs, tails[role.cache_ordinal], rows, config=config)
        pooled = round_to(compress.pool_pair(before, pairs), x.dtype)
        ring_rows = _kept_ring_rows(rows, config.tail_len)
        place = paged.put_rows(
            ScaledArray(payload=tails, scale=None),
            ScaledArray(payload=pairs, scale=None),
            role.cache_ordinal,
            *ring_rows,
        )
        tails = place.payload
    latent = rms_norm(pooled, params.compressor.norm[role.kv_ordinal], eps=model.rms_norm_eps)
    latent = stages.note(f"{prefix}.compress_latent", latent)

    # Row t closes the group that starts at t - ratio + 1, where its entry is rotated.
    starts = rows.positions - (ratio - 1)
    cos, sin = rope.angles(starts, layer_frequencies(role, config))
    rotated = rope.rotate(latent, cos, sin)
    main = quantize_main_kv(rotated) if config.policy.quantizes_caches else ScaledArray(payload=rotated, scale=None)
    key = rms_norm(
        linear(latent, params.indexer.wk[role.kv_ordinal], tile=tile),
        params.indexer.k_norm[role.kv_ordinal],
        eps=model.rms_norm_eps,
    )
    index_key = selecting.index_rows(rope.rotate(key, cos, sin), config=config)
    stages.note(f"{prefix}.compress_kv", dequantize(main, x.dtype))
    stages.note(f"{prefix}.index_k", dequantize(index_key, x.dtype))

    closes = rows.is_live & ((rows.positions + 1) % ratio == 0)
    entries = jnp.where(closes, starts // ratio, -1)
    pages = rows.page_table.at[rows.slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    page, offset = paged.entry_place(entries[:, None], pages, page_entries=config.page_tokens // ratio)
    at = (role.cache_ordinal, page[:, 0], offset[:, 0])
    which = RATIOS.index(ratio)
    main_kv, index_k = list(state.main_kv), list(state.index_k)
    main_kv[which] = paged.put_rows(main_kv[which], main, *at)
    index_k[which] = paged.put_rows(index_k[which], index_key, *at)
    return dataclasses.replace(state, main_kv=tuple(main_kv), index_k=tuple(index_k), tails=tails)


def _row_before(
    pairs: Float[Array, "T L2"], tail: Float[Array, "S Q L2"], rows: Rows, *, config: RuntimeConfig
) -> Float[Array, "T L2"]:
    """The compressor row of the position before each row: from this step, or from the request's tail."""
    index = jnp.arange(pairs.shape[0], dtype=jnp.int32)
    is_here = rows.first_row < index
    kept = tail[jnp.maximum(rows.slots, 0), jnp.maximum(rows.positions - 1, 0) % config.tail_len]
    return jnp.where(is_here[:, None], pairs[jnp.maximum(index - 1, 0)], kept)


def _kept_ring_rows(rows: Rows, ring_len: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Slot and ring row of each row of the step; slot -1 where a later row of this step takes the same place."""
    is_kept = rows.is_live & (rows.num_after < ring_len)
    return jnp.where(is_kept, rows.slots, -1), rows.positions % ring_len


def _write_ring(
    window: ScaledArray, new_kv: ScaledArray, rows: Rows, *, role: LayerRole, config: RuntimeConfig
) -> ScaledArray:
    return paged.put_rows(window, new_kv, role.layer, *_kept_ring_rows(rows, config.ring_len))


def _attend(
    q: Float[Array, "T H K"],
    new_kv: ScaledArray,
    state: State,
    entries: Int[Array, "T N"],
    sink: Float[Array, " H"],
    rows: Rows,
    *,
    role: LayerRole,
    config: RuntimeConfig,
) -> Float[Array, "T H K"]:
    """Attention over the key list of each row: W window places in position order, then the selected entries."""
    window_size, ring_len = config.model.sliding_window, config.ring_len
    num_keys = window_size + entries.shape[1]
    num_blocks = -(-num_keys // KEY_BLOCK)
    entries = jnp.pad(entries, ((0, 0), (0, num_blocks * KEY_BLOCK - num_keys)), constant_values=-1)
    page_entries = config.page_tokens // max(role.ratio, 1)

    def tile_of_rows(
        q: Array, slots: Array, positions: Array, first_row: Array, first_position: Array, entries: Array
    ) -> Float[Array, "B H K"]:
        oldest = jnp.maximum(positions - (window_size - 1), 0)
        pages = rows.page_table.at[slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False)

        def window_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            position = oldest[:, None] + places
            exists = (position <= positions[:, None]) & (places < window_size) & (slots >= 0)[:, None]
            is_new = position >= first_position[:, None]
            here = jnp.where(exists & is_new, first_row[:, None] + position - first_position[:, None], -1)
            slot = jnp.where(exists, slots[:, None], -1)
            ring = paged.take_rows(state.window, role.layer, slot, position % ring_len)
            fresh = paged.take_rows(new_kv, here)
            return dequantize(paged.select_rows(is_new, fresh, ring), q.dtype), exists

        def selected_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            at = jnp.clip(places, 0, max(entries.shape[1] - 1, 0))
            listed = jnp.where(places >= 0, jnp.take_along_axis(entries, at, axis=1), -1)
            page, offset = paged.entry_place(listed, pages, page_entries=page_entries)
            cache = state.main_kv[RATIOS.index(role.ratio)]
            return dequantize(paged.take_rows(cache, role.cache_ordinal, page, offset), q.dtype), page >= 0

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

        pure_window = window_size // KEY_BLOCK if role.ratio else num_blocks
        mixed = 1 if pure_window < num_blocks and window_size % KEY_BLOCK else 0
        segments = [
            (load(0, True, False), pure_window),
            (load(pure_window, True, True), mixed),
            (load(pure_window + mixed, False, True), num_blocks - pure_window - mixed),
        ]
        return attend_blocks(q, [s for s in segments if s[1]], sink)

    return map_rows(
        tile_of_rows, q, rows.slots, rows.positions, rows.first_row, rows.first_position, entries, tile=config.row_tile
    )


def _project_out(own: AttentionParams, out: Float[Array, "T H K"], *, config: RuntimeConfig) -> Float[Array, "T D"]:
    """Grouped low-rank output projection; the first factor is never quantised (spec: backbone 4.7)."""
    groups = config.model.o_groups
    low = grouped_linear(out.reshape(out.shape[0], groups, -1), own.wo_a, tile=config.product_tile)
    low = low.reshape(out.shape[0], -1)
    low = fp8_roundtrip(low) if config.policy.quantizes_activations else low
    return linear(low, own.wo_b, tile=config.product_tile)
