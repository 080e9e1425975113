"""The text network: one forward for prefill chunks, decode rows and verify rows (spec: backbone 2, 3.3, 8)."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from deepinfer_jax.config.roles import LayerRole, layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model import engram as memory
from deepinfer_jax.model.attention import attention
from deepinfer_jax.model.batch import Rows, StepBatch, derive_rows, pad_rows
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
    streams, pre, state = _embed(params, state, padded, rows, config=config, stages=stages)
    context, exists, state = memory.token_context(params.engram.token_map, state, padded.tokens, rows, config=config)
    selection = empty_selection(padded.tokens.shape[0])
    targets: list[Array] = []
    for role in layer_roles(config.model):
        if role.engram_ordinal >= 0:
            streams = stages.note(f"layers.{role.layer}.engram_in", streams)
            hashed = memory.table_rows(
                params.engram.token_map, context, exists, ordinal=role.engram_ordinal, config=config.model
            )
            hashed = stages.note(f"layers.{role.layer}.engram_rows", hashed)
            streams = memory.engram(params.engram, streams, hashed, rows.is_live, role=role, config=config)
            streams = stages.note(f"layers.{role.layer}.engram_out", streams)
        if role.layer in config.model.dspark_target_layer_ids:
            targets.append(streams)
        streams, pre, state, selection = block(
            params, state, streams, pre, selection, rows, role=role, config=config, stages=stages
        )
    if stages.wants("main_hidden") and targets:
        stages.note("main_hidden", jnp.concatenate([_stream_mean(s) for s in targets], axis=-1))
    else:
        stages.mark("main_hidden")
    logits = _head(params, streams, pre, batch, config=config, stages=stages)
    captured = {name: value[:num_rows] for name, value in stages.finish().items()}
    return StepOutput(logits=logits, stages=captured), state


def block(
    params: Params,
    state: State,
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    selection: Selection,
    rows: Rows,
    *,
    role: LayerRole,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"], State, Selection]:
    """One layer: both sublayers consume the pre-mix of the sublayer before them (spec: backbone 3.3)."""
    model, layer, prefix = config.model, role.layer, f"layers.{role.layer}"
    streams = stages.note(f"{prefix}.stream_in", streams)
    pre = stages.note(f"{prefix}.pre_mix_in", pre)
    attn_mix = _mix(params.hc_attn, streams, layer, "attn", config=config, stages=stages)
    x = rms_norm(hyper.collapse(streams, pre), params.attn_norm[layer], eps=model.rms_norm_eps)
    x = stages.note(f"{prefix}.attn_in", x)
    out, state, selection = attention(params, state, x, selection, rows, role=role, config=config, stages=stages)
    out = stages.note(f"{prefix}.attn_out", out)
    streams = stages.note(f"{prefix}.stream_mid", hyper.expand(out, streams, attn_mix))

    ffn_mix = _mix(params.hc_ffn, streams, layer, "ffn", config=config, stages=stages)
    u = rms_norm(hyper.collapse(streams, attn_mix.pre), params.ffn_norm[layer], eps=model.rms_norm_eps)
    u = stages.note(f"{prefix}.ffn_in", u)
    out = moe(params.moe, u, rows, layer=layer, config=config, stages=stages)
    out = stages.note(f"{prefix}.ffn_out", out)
    streams = stages.note(f"{prefix}.stream_out", hyper.expand(out, streams, ffn_mix))
    pre = stages.note(f"{prefix}.pre_mix_out", ffn_mix.pre)
    return streams, pre, state, selection


def _embed(
    params: Params, state: State, batch: StepBatch, rows: Rows, *, config: RuntimeConfig, stages: Stages
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"], State]:
    """Equal streams holding the embedding, and the one-hot pre-mix that hands stream 0 to the first sublayer."""
    model = config.model
    hidden = params.embed[batch.tokens].astype(config.activation_dtype)
    hidden = stages.note("embed", hidden)
    streams = jnp.repeat(hidden[:, None, :], model.hc_mult, axis=1)
    pre = jnp.zeros((hidden.shape[0], model.hc_mult), jnp.float32).at[:, 0].set(1.0)
    return streams, pre, state


def _mix(
    params: HyperParams,
    streams: Float[Array, "T C D"],
    layer: int,
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
    params: Params,
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    batch: StepBatch,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> Float32[Array, "N V"]:
    """Float32 logits of the wanted rows, from the last sublayer's pre-mix (spec: backbone 8)."""
    hidden = rms_norm(hyper.collapse(streams, pre), params.norm, eps=config.model.rms_norm_eps)
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
