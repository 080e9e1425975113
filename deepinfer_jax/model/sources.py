"""What a KV source writes for the layers after it: main KV, index K, compressor rows (spec: backbone 4.3, 5.1)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.linear.api import linear, linear_f32
from deepinfer_jax.kernels.rms_norm.api import rms_norm
from deepinfer_jax.kernels.rope.api import rotate
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import Params, layer_slice
from deepinfer_jax.model.selection import index_rows
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.model.variants import Layer, compressed_frequencies, pick
from deepinfer_jax.ops import compress, paged, rope
from deepinfer_jax.ops.invariant import round_to
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_main_kv
from deepinfer_jax.parallel import context
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class SourceRows:
    """What one source layer hands to its caches: one candidate entry for each row of the step."""

    main_kv: ScaledArray
    index_key: ScaledArray
    pairs: Float32[Array, "T L2"]  # unrounded [kv | score]; zeros at ratio 1


def write_sources(
    params: Params,
    state: State,
    x: Float[Array, "T D"],
    rows: Rows,
    every_row: Rows,
    layer: Layer,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> State:
    """The state with this step's entries of a source layer; unchanged at other layers.

    x, rows: of this device; every_row: all rows of the step, which all devices of a dp rank write.

    The rows are computed by the layer's variant only; the writes themselves always run, with every index at -1 where
    there is nothing to write, so that the caches are updated in place.
    """

    def variant(ratio: int) -> SourceRows:
        return _source_rows(params, state, x, rows, layer, ratio=ratio, config=config, stages=stages)

    def nothing() -> SourceRows:
        num_rows = every_row.positions.shape[0]
        blank = jnp.zeros((num_rows, config.model.head_dim), x.dtype)
        key = jnp.zeros((num_rows, config.model.index_head_dim), x.dtype)
        return SourceRows(
            main_kv=_main_rows(blank, config=config),
            index_key=index_rows(key, config=config),
            pairs=jnp.zeros((num_rows, 2 * config.model.head_dim), jnp.float32),
        )

    made = pick(layer.source_kind, [nothing, lambda: variant(2), lambda: variant(1)])
    main_kv, index_k = list(state.main_kv), list(state.index_k)
    for which, ratio in enumerate(RATIOS):
        if isinstance(layer.source_kind, int) and layer.source_kind != which + 1:
            continue
        at = _entry_places(every_row, layer, ratio=ratio, which=which, config=config)
        main_kv[which] = paged.put_rows(main_kv[which], made.main_kv, layer.cache_ordinal, *at)
        index_k[which] = paged.put_rows(index_k[which], made.index_key, layer.cache_ordinal, *at)
    tails = state.tails
    if not isinstance(layer.source_kind, int) or layer.source_kind == 1:
        slots, places = ring_places(every_row, config.tail_len)
        slots = jnp.where(jnp.asarray(layer.source_kind) == 1, slots, -1)
        tails = paged.put_array(tails, made.pairs, layer.cache_ordinal, slots, places)
    return dataclasses.replace(state, main_kv=tuple(main_kv), index_k=tuple(index_k), tails=tails)


def ring_places(rows: Rows, ring_len: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Slot and ring row of each row of the step; slot -1 where a later row of this step takes the same place."""
    is_kept = rows.is_live & (rows.num_after < ring_len)
    return jnp.where(is_kept, rows.slots, -1), rows.positions % ring_len


def _main_rows(latent: Float[Array, "T L"], *, config: RuntimeConfig) -> ScaledArray:
    if config.policy.quantizes_caches:
        return quantize_main_kv(latent)
    return ScaledArray(payload=latent.astype(jnp.float32), scale=None)


def _source_rows(
    params: Params,
    state: State,
    x: Float[Array, "T D"],
    rows: Rows,
    layer: Layer,
    *,
    ratio: int,
    config: RuntimeConfig,
    stages: Stages,
) -> SourceRows:
    """The entry that each row of the step would close, rotated at the first position of its group."""
    model, backend, prefix = config.model, config.backend, f"layers.{layer.layer}"
    wkv = params.compressor.wkv[layer.kv_ordinal]
    before = pairs = jnp.zeros((x.shape[0], 2 * model.head_dim), jnp.float32)
    if ratio == 2:
        weights = (wkv, params.compressor.wgate[layer.cache_ordinal])
        pairs = stages.map_rows(
            lambda _, x: linear_f32(x, weights, backend=backend), x, num_live=rows.num_live, config=config
        )
        pairs = stages.note(f"{prefix}.compress_pairs", pairs)
        before = _row_before(pairs, state, rows, layer, config=config)
    norm = params.compressor.norm[layer.kv_ordinal]
    wk, k_norm = layer_slice(params.indexer.wk, layer.kv_ordinal), params.indexer.k_norm[layer.kv_ordinal]

    def on_tile(
        stages: Stages, x: Array, before: Array, pairs: Array, positions: Array
    ) -> tuple[ScaledArray, ScaledArray, Array]:
        pooled = linear(x, wkv, backend=backend) if ratio == 1 else round_to(compress.pool_pair(before, pairs), x.dtype)
        latent = rms_norm(pooled, norm, eps=model.rms_norm_eps, backend=backend)
        latent = stages.note(f"{prefix}.compress_latent", latent)
        cos, sin = rope.angles(positions - (ratio - 1), compressed_frequencies(model))
        main = _main_rows(rotate(latent, cos, sin, backend=backend), config=config)
        key = linear(latent, wk, backend=backend)
        key = rms_norm(key, k_norm, eps=model.rms_norm_eps, backend=backend)
        index_key = index_rows(rotate(key, cos, sin, backend=backend), config=config)
        stages.show(f"{prefix}.compress_kv", dequantize(main, x.dtype))
        stages.show(f"{prefix}.index_k", dequantize(index_key, x.dtype))
        return main, index_key, pairs

    # The pairs leave the loop that reads the row before: a compiler cannot write them to the tail any earlier.
    main, index_key, pairs = stages.map_rows(
        on_tile, x, before, pairs, rows.positions, num_live=rows.num_live, config=config
    )
    if ratio == 1:  # no pairs: nothing of them travels
        main, index_key = context.all_rows((main, index_key), config=config)
        pairs = jnp.zeros((main.payload.shape[0], pairs.shape[1]), pairs.dtype)
        return SourceRows(main_kv=main, index_key=index_key, pairs=pairs)
    return context.all_rows(SourceRows(main_kv=main, index_key=index_key, pairs=pairs), config=config)


def _row_before(
    pairs: Float32[Array, "T L2"], state: State, rows: Rows, layer: Layer, *, config: RuntimeConfig
) -> Float32[Array, "T L2"]:
    """The compressor row of the position before each row: from this step, or from the request's tail."""
    is_here = rows.first_row < rows.index
    place = jnp.maximum(rows.positions - 1, 0) % config.tail_len
    kept = state.tails[layer.cache_ordinal, jnp.maximum(rows.slots, 0), place]
    return jnp.where(is_here[:, None], context.rows_before(pairs, rows.index, config=config), kept)


def _entry_places(
    rows: Rows, layer: Layer, *, ratio: int, which: int, config: RuntimeConfig
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Page and offset of the entry that each row closes; page -1 where it closes none in this ratio's cache."""
    closes = rows.is_live & ((rows.positions + 1) % ratio == 0) & (jnp.asarray(layer.source_kind) == which + 1)
    entries = jnp.where(closes, rows.positions // ratio, -1)
    column = jnp.maximum(entries, 0) * ratio // config.page_tokens
    page = rows.page_table.at[rows.slots, column].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    return jnp.where(closes, page, -1), jnp.maximum(entries, 0) % (config.page_tokens // ratio)
