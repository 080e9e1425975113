"""The text network: one forward for prefill chunks, decode rows and verify rows (spec: backbone 2, 3.3, 8)."""

import dataclasses
import functools
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model import engram as memory
from deepinfer_jax.model.attention import attention
from deepinfer_jax.model.batch import Rows, StepBatch, derive_rows, pad_rows
from deepinfer_jax.model.layer import Index, Layer, RopeTables, all_layers, rope_tables, stacked_layers
from deepinfer_jax.model.moe import moe
from deepinfer_jax.model.params import HyperParams, Params
from deepinfer_jax.model.selection import Selection, empty_selection
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import State
from deepinfer_jax.ops import hyper
from deepinfer_jax.ops.invariant import ordered_sum, round_to, row_product
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class StepOutput:
    """What a forward returns beside the state."""

    logits: Float32[Array, "N V"]  # for the batch's logit rows
    stages: dict[str, Array]  # the stages that `capture` asked for; rows of the step lead, padding rows cut


def forward(
    params: Params,
    state: State,
    batch: StepBatch,
    *,
    config: RuntimeConfig,
    capture: tuple[str, ...] = (),
    forced_selection: Mapping[str, Array] | None = None,
) -> tuple[StepOutput, State]:
    """Logits of the wanted rows, and the state with every row of the batch written.

    A pure function for any jit. capture: patterns of stage names to return (see `Stages`; `capture=("*",)` returns
    all). forced_selection: stage name -> value used instead of the computed one, for ids ("layers.4.topk_idxs",
    "layers.4.candidate_mask", "layers.4.router_ids") and for any other stage. A donated state must not be used again.
    Raises ValueError for names that match no stage.
    """
    num_rows = batch.tokens.shape[0]
    pad = -num_rows % config.row_tile
    forced = {k: jnp.pad(v, [(0, pad)] + [(0, 0)] * (v.ndim - 1)) for k, v in (forced_selection or {}).items()}
    stages = Stages(capture, forced)
    padded = pad_rows(batch, multiple=config.row_tile)
    rows = derive_rows(padded)
    streams, pre = _embed(params, padded, config=config, stages=stages)
    context, exists, state = memory.token_context(params.engram.token_map, state, padded.tokens, rows, config=config)
    tables = rope_tables(rows, config=config)
    step = _Step(params=params, rows=rows, tables=tables, context=context, exists=exists)
    carry = Carry(streams=streams, pre=pre, selection=empty_selection(rows, config=config), state=state)
    if config.loops_layers and not stages.is_active:
        carry = _loop_layers(step, carry, config=config, stages=stages)
    else:
        carry = _unroll_layers(step, carry, config=config, stages=stages)
    logits = _head(params, carry, batch, config=config, stages=stages)
    captured = {name: value[:num_rows] for name, value in stages.finish().items()}
    return StepOutput(logits=logits, stages=captured), carry.state


@pytree_dataclass
class Carry:
    """What one layer hands to the next."""

    streams: Float[Array, "T C D"]
    pre: Float32[Array, "T C"]
    selection: Selection
    state: State


@pytree_dataclass
class _Step:
    """What every layer of a step reads."""

    params: Params
    rows: Rows
    tables: RopeTables
    context: Int[Array, "T M"]
    exists: Bool[Array, "T M"]


def _loop_layers(step: _Step, carry: Carry, *, config: RuntimeConfig, stages: Stages) -> Carry:
    """All layers by one compiled body: a layer's variants are chosen on the device."""
    body = functools.partial(_layer, step, config=config, stages=stages)
    return lax.scan(lambda c, layer: (body(c, layer), None), carry, stacked_layers(config.model))[0]


def _unroll_layers(step: _Step, carry: Carry, *, config: RuntimeConfig, stages: Stages) -> Carry:
    """All layers one after the other: every stage has a name and can be captured or forced."""
    targets: list[Array] = []
    for layer in all_layers(config.model):
        carry = _enter(step, carry, layer, config=config, stages=stages)
        if layer.layer in config.model.dspark_target_layer_ids:
            targets.append(_stream_mean(carry.streams))
        carry = block(step.params, carry, step.rows, step.tables, layer, config=config, stages=stages)
    if targets:
        stages.note("main_hidden", jnp.concatenate(targets, axis=-1))
    return carry


def _layer(step: _Step, carry: Carry, layer: Layer, *, config: RuntimeConfig, stages: Stages) -> Carry:
    carry = _enter(step, carry, layer, config=config, stages=stages)
    return block(step.params, carry, step.rows, step.tables, layer, config=config, stages=stages)


def _enter(step: _Step, carry: Carry, layer: Layer, *, config: RuntimeConfig, stages: Stages) -> Carry:
    """Engram at the entry of a layer."""
    streams = memory.engram(
        step.params.engram,
        carry.streams,
        step.context,
        step.exists,
        step.rows.is_live,
        layer,
        config=config,
        stages=stages,
    )
    return dataclasses.replace(carry, streams=streams)


def block(
    params: Params,
    carry: Carry,
    rows: Rows,
    tables: RopeTables,
    layer: Layer,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> Carry:
    """One layer: both sublayers consume the pre-mix of the sublayer before them (spec: backbone 3.3)."""
    eps, index, prefix = config.model.rms_norm_eps, layer.layer, f"layers.{layer.layer}"
    streams = stages.note(f"{prefix}.stream_in", carry.streams)
    pre = stages.note(f"{prefix}.pre_mix_in", carry.pre)
    attn_mix = _mix(params.hc_attn, streams, index, "attn", config=config, stages=stages)
    x = rms_norm(hyper.collapse(streams, pre), params.attn_norm[index], eps=eps)
    x = stages.note(f"{prefix}.attn_in", x)
    out, state, selection = attention(
        params, carry.state, x, carry.selection, rows, tables, layer, config=config, stages=stages
    )
    out = stages.note(f"{prefix}.attn_out", out)
    streams = stages.note(f"{prefix}.stream_mid", hyper.expand(out, streams, attn_mix))

    ffn_mix = _mix(params.hc_ffn, streams, index, "ffn", config=config, stages=stages)
    u = rms_norm(hyper.collapse(streams, attn_mix.pre), params.ffn_norm[index], eps=eps)
    u = stages.note(f"{prefix}.ffn_in", u)
    out = moe(params.moe, u, rows, layer=index, config=config, stages=stages)
    out = stages.note(f"{prefix}.ffn_out", out)
    streams = stages.note(f"{prefix}.stream_out", hyper.expand(out, streams, ffn_mix))
    pre = stages.note(f"{prefix}.pre_mix_out", ffn_mix.pre)
    return Carry(streams=streams, pre=pre, selection=selection, state=state)


def _embed(
    params: Params, batch: StepBatch, *, config: RuntimeConfig, stages: Stages
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"]]:
    """Equal streams holding the embedding, and the one-hot pre-mix that hands stream 0 to the first sublayer."""
    model = config.model
    hidden = params.embed[batch.tokens].astype(config.activation_dtype)
    hidden = stages.note("embed", hidden)
    streams = jnp.repeat(hidden[:, None, :], model.hc_mult, axis=1)
    pre = jnp.zeros((hidden.shape[0], model.hc_mult), jnp.float32).at[:, 0].set(1.0)
    return streams, pre


def _mix(
    params: HyperParams,
    streams: Float[Array, "T C D"],
    layer: Index,
    kind: str,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> hyper.Mix:
    model, prefix = config.model, f"layers.{layer}.hc_{kind}"
    mix = hyper.coefficients(
        streams,
        params.fn[layer],
        params.scale[layer],
        params.base[layer],
        iterations=model.hc_sinkhorn_iters,
        eps=model.hc_eps,
        tile=config.product_tile,
    )
    return hyper.Mix(
        pre=stages.note(f"{prefix}_pre", mix.pre),
        post=stages.note(f"{prefix}_post", mix.post),
        comb=stages.note(f"{prefix}_comb", mix.comb),
    )


def _stream_mean(streams: Float[Array, "T C D"]) -> Float[Array, "T D"]:
    """Mean over the streams in float32, rounded to their dtype: the drafter's context feature."""
    terms = [streams[:, k].astype(jnp.float32) for k in range(streams.shape[1])]
    return round_to(ordered_sum(terms) * jnp.float32(1.0 / len(terms)), streams.dtype)


def _head(
    params: Params, carry: Carry, batch: StepBatch, *, config: RuntimeConfig, stages: Stages
) -> Float32[Array, "N V"]:
    """Float32 logits of the wanted rows, from the last sublayer's pre-mix (spec: backbone 8)."""
    hidden = rms_norm(hyper.collapse(carry.streams, carry.pre), params.norm, eps=config.model.rms_norm_eps)
    hidden = stages.note("final_hidden", hidden)
    wanted = hidden.at[batch.logit_rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return row_product(wanted, params.head.astype(wanted.dtype), tile=config.product_tile)


def prefill(
    params: Params, state: State, batch: StepBatch, *, config: RuntimeConfig
) -> tuple[Float32[Array, "N V"], State]:
    """Logits and state after a chunk of one or more prompts: `forward` without stages."""
    output, state = forward(params, state, batch, config=config)
    return output.logits, state


def decode_step(
    params: Params, state: State, batch: StepBatch, *, config: RuntimeConfig
) -> tuple[Float32[Array, "N V"], State]:
    """Logits and state after one row for each request: the same computation as `prefill`, under its usual name."""
    return prefill(params, state, batch, config=config)
