"""One layer of the network (spec: backbone 3.3): mHC around attention and around the experts."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.hyper import api as mixing
from deepinfer_jax.model import attention as attending
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.engram import engram
from deepinfer_jax.model.moe import Routed, force_experts, needs_quantized_rows, route, run_experts, run_shared
from deepinfer_jax.model.params import DraftParams, HyperParams, Params, layer_slice
from deepinfer_jax.model.selection import Selection, select
from deepinfer_jax.model.sources import ring_places, write_sources
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import State
from deepinfer_jax.model.variants import Layer, RopeTables, layer_weights, rope_tables
from deepinfer_jax.ops import hyper, paged
from deepinfer_jax.ops.invariant import ordered_sum, round_to
from deepinfer_jax.ops.moe import combine
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.parallel import context
from deepinfer_jax.pytree import pytree_dataclass, static_field


@pytree_dataclass
class Carry:
    """What one layer hands to the next."""

    streams: Float[Array, "T C D"]
    pre: Float32[Array, "T C"]  # weights by which the next sublayer collapses the streams
    selection: Selection
    state: State
    features: Float[Array, "T F D"] | None = None  # stream means at the drafter's target layers, where wanted
    loads: Int[Array, "layers E"] | None = (
        None  # of each layer, this device's rows that chose each expert, where counted
    )


@pytree_dataclass
class Step:
    """What every layer of a step reads beside the parameters; all but `every_row` is of this device's rows."""

    rows: Rows
    every_row: Rows  # all rows of the step: the same where a device has them all
    is_text: Bool[Array, " T"]  # live rows that are no image rows
    memories: tuple[ScaledArray, ...]  # of each Engram table, packed: the rows [T, N, W] that were looked up
    has_images: bool = static_field(default=False)  # whether rows may be image rows

    @property
    def is_image(self) -> Bool[Array, " T"] | None:
        """Which rows belong to images; None where every row is text."""
        return self.rows.is_live & ~self.is_text if self.has_images else None


@pytree_dataclass
class Entered:
    """A layer's rows in front of its softmax."""

    streams: Float[Array, "T C D"]
    mix: hyper.Mix
    x: Float[Array, "T D"]
    projected: attending.Projected
    tables: RopeTables


def apply_layer(
    params: Params, step: Step, carry: Carry, layer: Layer, *, config: RuntimeConfig, stages: Stages
) -> Carry:
    """One layer on the rows of a step; both sublayers consume the pre-mix of the sublayer before them.

    Order: main KV and index K of this step, selection, attention over ring and new rows, then the ring.
    """
    rows, is_image = step.rows, step.is_image
    streams = engram(
        params.engram,
        carry.streams,
        step.memories,
        step.is_text,
        rows,
        layer,
        config=config,
        stages=stages,
    )
    features = carry.features
    if features is not None:
        features = features.at[:, layer.target_ordinal].set(_stream_mean(streams), mode="drop", unique_indices=True)
    attention_params = layer_weights(params.attention, layer.layer, dtype=streams.dtype, config=config)
    prefix = f"layers.{layer.layer}"
    entered = enter(
        params, attention_params, streams, carry.pre, rows, layer, prefix=prefix, config=config, stages=stages
    )
    new = entered.projected
    state = write_sources(params, carry.state, entered.x, rows, step.every_row, layer, config=config, stages=stages)
    selection = select(
        params.indexer,
        carry.selection,
        state,
        entered.x,
        new.q_latent,
        entered.tables,
        rows,
        layer,
        config=config,
        stages=stages,
    )
    new_kv = context.all_rows(new.new_kv, config=config)
    out = attending.attend(
        new.q, new_kv, state, selection.entries, attention_params.attn_sink, rows, layer, config=config
    )
    # The ring is written once it has been read: without the barrier a compiler keeps a copy of it for the reads.
    out, window = lax.optimization_barrier((out, state.window))
    slots, places = ring_places(step.every_row, config.ring_len)
    window = paged.put_rows(window, new_kv, layer.layer, slots, places)
    state = dataclasses.replace(state, window=window)
    streams, pre, expert_ids = finish(
        params, attention_params, out, entered, rows, layer, is_image, prefix=prefix, config=config, stages=stages
    )
    loads = carry.loads
    if loads is not None:
        of_layer = jnp.where(rows.is_live[:, None], layer.layer, loads.shape[0])  # outside: dropped
        loads = loads.at[of_layer, expert_ids].add(1, mode="drop")
    return Carry(streams=streams, pre=pre, selection=selection, state=state, features=features, loads=loads)


def enter(
    params: Params | DraftParams,
    own: attending.AttentionParams,
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    rows: Rows,
    layer: Layer,
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
) -> Entered:
    """Mix of the attention sublayer, its normed input, and the projections of it."""
    mixer = _mixer(params.hc_attn, params.attn_norm, layer)

    def on_tile(stages: Stages, streams: Array, pre: Array, positions: Array) -> Entered:
        streams = stages.note(f"{prefix}.stream_in", streams)
        pre = stages.note(f"{prefix}.pre_mix_in", pre)
        mix, x = mixing.mix(streams, pre, mixer, **_mix_options(config))
        mix = _noted(mix, f"{prefix}.hc_attn", stages)
        x = stages.note(f"{prefix}.attn_in", x)
        tables = rope_tables(positions, layer, config=config.model)
        projected = attending.project(own, x, tables, prefix=prefix, config=config, stages=stages)
        return Entered(streams=streams, mix=mix, x=x, projected=projected, tables=tables)

    return stages.map_rows(on_tile, streams, pre, rows.positions, num_live=rows.num_live, config=config)


def finish(
    params: Params | DraftParams,
    own: attending.AttentionParams,
    attended: Float[Array, "T H K"],
    entered: Entered,
    rows: Rows,
    layer: Layer,
    is_image: Bool[Array, " T"] | None = None,
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"], Int[Array, "T A"]]:
    """Output projection, expert sublayer; streams and pre-mix for the next layer, and the chosen experts.

    Image rows choose their experts by a bias of their own; is_image None: every row is text.
    """
    index = layer.layer
    mixer = _mixer(params.hc_ffn, params.ffn_norm, layer)
    shared = layer_weights(params.moe.shared, index, dtype=attended.dtype, config=config)
    gate, bias = layer_slice(params.moe.gate, index), params.moe.bias[index][None, :]

    # All rows count: the choice of kernels is made for all of them.
    every_u = jnp.zeros((attended.shape[0], config.model.hidden_size), attended.dtype)
    quantizes = needs_quantized_rows(params.moe, shared, every_u, config=config)

    def before_experts(
        stages: Stages, attended: Array, entered: Entered, is_image: Array | None
    ) -> tuple[Array, hyper.Mix, Routed]:
        out = attending.project_out(own, attended, entered.tables, config=config)
        out = stages.note(f"{prefix}.attn_out", out)
        middle = f"{prefix}.stream_mid"
        stages.mark(middle)
        is_seen = stages.wants(middle) or stages.is_forced(middle)
        streams, mix, u = mixing.expand_and_mix(
            out,
            entered.streams,
            entered.mix,
            mixer,
            note=functools.partial(stages.note, middle) if is_seen else None,
            **_mix_options(config),
        )
        mix = _noted(mix, f"{prefix}.hc_ffn", stages)
        u = stages.note(f"{prefix}.ffn_in", u)
        own_bias = bias
        if is_image is not None:
            own_bias = jnp.where(is_image[:, None], params.moe.bias_vl[index][None, :], bias)
        routed = route(gate, own_bias, u, prefix=prefix, config=config, stages=stages, quantizes=quantizes)
        return streams, mix, routed

    def after_experts(
        stages: Stages, outputs: Array, shared_out: Array, streams: Array, mix: hyper.Mix
    ) -> tuple[Array, Array]:
        out = stages.note(f"{prefix}.ffn_out", combine(outputs, shared_out))
        streams = mixing.expand(out, streams, mix, backend=config.backend)
        streams = stages.note(f"{prefix}.stream_out", streams)
        return streams, stages.note(f"{prefix}.pre_mix_out", mix.pre)

    live = rows.num_live
    streams, mix, routed = stages.map_rows(before_experts, attended, entered, is_image, num_live=live, config=config)
    routed = force_experts(routed, config=config)
    shared_out = stages.map_rows(
        lambda stages, u: run_shared(shared, u, prefix=prefix, config=config, stages=stages),
        routed.u,
        num_live=live,
        config=config,
    )
    outputs = run_experts(params.moe, routed, rows.is_live, layer=index, config=config)
    streams, pre = stages.map_rows(after_experts, outputs, shared_out, streams, mix, num_live=live, config=config)
    return streams, pre, routed.expert_ids


def _stream_mean(streams: Float[Array, "T C D"]) -> Float[Array, "T D"]:
    """Mean over the streams in float32, rounded to their dtype: the drafter's context feature (spec: dspark 3)."""
    terms = [streams[:, k].astype(jnp.float32) for k in range(streams.shape[1])]
    return round_to(ordered_sum(terms) * jnp.float32(1.0 / len(terms)), streams.dtype)


def _mixer(params: HyperParams, norms: Float[Array, "N D"], layer: Layer) -> hyper.Mixer:
    own = layer_slice(params, layer.layer)
    return hyper.Mixer(fn=own.fn, scale=own.scale, base=own.base, norm=norms[layer.layer])


def _mix_options(config: RuntimeConfig) -> dict[str, Any]:
    model = config.model
    return {
        "iterations": model.hc_sinkhorn_iters,
        "eps": model.hc_eps,
        "norm_eps": model.rms_norm_eps,
        "backend": config.backend,
    }


def _noted(mix: hyper.Mix, prefix: str, stages: Stages) -> hyper.Mix:
    return hyper.Mix(
        pre=stages.note(f"{prefix}_pre", mix.pre),
        post=stages.note(f"{prefix}_post", mix.post),
        comb=stages.note(f"{prefix}_comb", mix.comb),
    )
