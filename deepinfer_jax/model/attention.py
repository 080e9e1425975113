"""Attention of one layer: projections, one softmax over window and selected keys, output (spec: backbone 4)."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import AttentionParams
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.model.variants import RATIO_OF_KIND, Layer, RopeTables, pick
from deepinfer_jax.ops import paged, rope
from deepinfer_jax.ops.attention import KEY_BLOCK, LoadBlock, attend_blocks
from deepinfer_jax.ops.invariant import map_rows
from deepinfer_jax.ops.linear import grouped_linear, linear
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip, quantize_fp8
from deepinfer_jax.pytree import pytree_dataclass

# Keys of each row at places of its list, and which of them exist.
LoadPlaces = Callable[[Int[Array, "B M"]], tuple[Float[Array, "B M K"], Bool[Array, "B M"]]]


@pytree_dataclass
class Projected:
    """What the projections of one layer make of its inputs."""

    q_latent: Float[Array, "T Q"]  # normed; also the indexer's input
    q: Float[Array, "T H K"]  # rotated
    new_kv: ScaledArray  # rotated window latents in the form of the ring


def project(
    own: AttentionParams,
    x: Float[Array, "T D"],
    tables: RopeTables,
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
) -> Projected:
    """Queries and window KV of normed inputs x (spec: backbone 4.2)."""
    model = config.model
    x_in = fp8_roundtrip(x) if config.policy.quantizes_activations else x
    q_latent = rms_norm(linear(x_in, own.wq_a), own.q_norm, eps=model.rms_norm_eps)
    q_latent = stages.note(f"{prefix}.q_latent", q_latent)
    q_in = fp8_roundtrip(q_latent) if config.policy.quantizes_activations else q_latent
    q = linear(q_in, own.wq_b).reshape(-1, model.num_attention_heads, model.head_dim)
    new_kv = window_latents(x_in, own.wkv, own.kv_norm, tables, config=config)
    stages.show(f"{prefix}.window_kv", dequantize(new_kv, x.dtype))
    return Projected(q_latent=q_latent, q=rope.rotate(q, tables.cos, tables.sin), new_kv=new_kv)


def window_latents(
    x_in: Float[Array, "T D"],
    wkv: ScaledArray | Array,
    kv_norm: Float[Array, " L"],
    tables: RopeTables,
    *,
    config: RuntimeConfig,
) -> ScaledArray:
    """Rotated window latents of inputs in the form that products read, in the form of the ring."""
    kv = rms_norm(linear(x_in, wkv), kv_norm, eps=config.model.rms_norm_eps)
    return window_rows(rope.rotate(kv, tables.cos, tables.sin), config=config)


def window_rows(kv: Float[Array, "T L"], *, config: RuntimeConfig) -> ScaledArray:
    """Rotated window latents in the form of the ring."""
    if config.policy.quantizes_caches:
        return quantize_fp8(kv)
    return ScaledArray(payload=kv.astype(jnp.float32), scale=None)


def attend(
    q: Float[Array, "T H K"],
    new_kv: ScaledArray,
    state: State,
    entries: Int[Array, "T N"],
    sink: Float[Array, " H"],
    rows: Rows,
    layer: Layer,
    *,
    config: RuntimeConfig,
) -> Float[Array, "T H K"]:
    """Attention over the key list of each row: W window places in position order, then the selected entries.

    Window keys at positions of this step come from `new_kv`, older ones from the ring, which must not hold this step's
    rows yet: a chunk may overwrite ring rows that its own first queries need.
    """

    def variant(ratio: int) -> Float[Array, "T H K"]:
        return _attend_variant(q, new_kv, state, entries, sink, rows, layer, ratio=ratio, config=config)

    return pick(layer.ratio_kind, [lambda ratio=ratio: variant(ratio) for ratio in RATIO_OF_KIND])


def _attend_variant(
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
    window_size, ring_len = config.model.sliding_window, config.ring_len

    def tile_of_rows(
        q: Array, slots: Array, positions: Array, first_row: Array, first_position: Array, floor: Array, entries: Array
    ) -> Float[Array, "B H K"]:
        oldest = jnp.maximum(positions - (window_size - 1), 0)
        pages = paged.pages_of(rows.page_table, slots)

        def window_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            position = oldest[:, None] + places
            exists = (position <= positions[:, None]) & (places < window_size) & (slots >= 0)[:, None]
            exists = exists & (position >= floor[:, None])
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

        segments = key_segments(
            window_block,
            selected_block,
            num_rows=slots.shape[0],
            num_window=window_size,
            num_others=entries.shape[1] if ratio else 0,
        )
        return attend_blocks(q, segments, sink, has_fixed_trips=config.has_fixed_trips)

    # Rows in front of the tail see their own window, whatever it is: nobody reads what they make of it.
    floor = jnp.where(rows.positions >= rows.tail_start, rows.tail_start, 0) * layer.decoder_kind
    floor = jnp.maximum(floor, rows.window_start)
    return map_rows(
        tile_of_rows,
        q,
        rows.slots,
        rows.positions,
        rows.first_row,
        rows.first_position,
        floor,
        entries,
        tile=config.row_tile,
        num_live=rows.num_live,
        has_fixed_trips=config.has_fixed_trips,
    )


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


def project_out(
    own: AttentionParams, out: Float[Array, "T H K"], tables: RopeTables, *, config: RuntimeConfig
) -> Float[Array, "T D"]:
    """Inverse rotation and grouped low-rank output projection, whose first factor is never quantised (backbone 4.7)."""
    out = rope.rotate(out, tables.cos, tables.sin, inverse=True)
    low = grouped_linear(out.reshape(out.shape[0], config.model.o_groups, -1), own.wo_a)
    low = low.reshape(out.shape[0], -1)
    low = fp8_roundtrip(low) if config.policy.quantizes_activations else low
    return linear(low, own.wo_b)
