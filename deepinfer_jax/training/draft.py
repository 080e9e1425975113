"""The drafter on whole sequences: many blocks at once, each behind a known token (spec: dspark 3, 4, 7).

Serving keeps the context of one newest token for each request in a ring; here every position of a sequence has its
context row, and a block takes the window in front of it.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.attention import window_latents
from deepinfer_jax.model.backbone import embed_tokens
from deepinfer_jax.model.batch import Rows, rows_at
from deepinfer_jax.model.layer import enter, finish
from deepinfer_jax.model.params import DRAFT_PREFIX, DraftParams, Params
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.variants import Layer, layer_weights, rope_tables
from deepinfer_jax.ops import hyper
from deepinfer_jax.ops.invariant import row_product
from deepinfer_jax.ops.linear import linear, linear_f32
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import dequantize, quantize_fp8
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.training.attention import attend_blocks_of_rows
from deepinfer_jax.training.forward import expert_loads, run_sequences
from deepinfer_jax.training.loss import draft_losses
from deepinfer_jax.training.numerics import TrainingConfig, straight_through
from deepinfer_jax.training.optimise import Measured
from deepinfer_jax.training.weights import Fixed, Masters, training_params


@pytree_dataclass
class Blocks:
    """What the stages make of M blocks of G rows, in front of the Markov head."""

    base: Float32[Array, "M G V"]
    hidden: Float[Array, "M G D"]  # the collapsed streams, not normed
    loads: Int[Array, "N E"]


@pytree_dataclass
class _Places:
    """Where M blocks stand."""

    rows: Rows  # of all M * G rows
    sequence: Int[Array, " M"]
    context: Int[Array, "M W"]  # positions of the window in front of each block; negative ones do not exist


def draft_loss(
    masters: Masters,
    fixed: Fixed,
    rows: Int[Array, "B R1"],
    anchors: Int[Array, "B A"],
    *,
    frozen: Params,
    config: TrainingConfig,
) -> tuple[Float32[Array, ""], Measured]:
    """The drafter's loss on blocks behind the tokens at `anchors`, against the frozen network's distributions.

    rows: R + 1 tokens each; an anchor is at most R - G. frozen: from `plain_params`.
    """
    full = jnp.float32(1.0)
    params = training_params(masters, fixed, config.model, strength=full, frozen=frozen)
    tokens, size = rows[:, :-1], config.model.dspark_block_size
    target = lax.stop_gradient(run_sequences(frozen, tokens, config=config, strength=full))
    blocks = run_blocks(params, target.main_hidden, tokens, anchors, config=config, strength=full)
    sequence = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None, None]
    places = anchors[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    by_block = lambda x: x.reshape(-1, size, *x.shape[3:])  # noqa: E731
    logits, confidence = markov_logits(params, blocks.base, blocks.hidden, by_block(rows[sequence, places]))
    value, parts = draft_losses(
        logits, confidence, by_block(target.logits[sequence, places]), by_block(rows[sequence, places + 1])
    )
    return value, Measured(loads={f"{DRAFT_PREFIX}moe.bias": blocks.loads}, values=parts)


def run_blocks(
    params: Params,
    main_hidden: Float[Array, "B R F"],
    tokens: Int[Array, "B R"],
    anchors: Int[Array, "B A"],
    *,
    config: TrainingConfig,
    strength: Float32[Array, ""],
) -> Blocks:
    """The draft stages on a block behind each anchor, M = B A, anchors of one sequence together.

    strength: how far context and block rows are quantised (see `straight_through`).
    """
    draft = _draft_of(params)
    config = dataclasses.replace(config, model=_with_draft_experts(config.model))
    model, batch = config.model, tokens.shape[0]
    size = model.dspark_block_size
    places = _places(anchors, size=size, window_size=model.sliding_window)
    contexts = _context_latents(draft, main_hidden, config=config, strength=strength)
    first = tokens[jnp.arange(batch)[:, None], anchors].reshape(-1, 1)
    ids = jnp.concatenate([first, jnp.full((first.shape[0], size - 1), model.dspark_noise_token_id)], axis=1)
    streams, pre = embed_tokens(params, ids.reshape(-1), config=config, stages=Stages((), {}))
    loads = []
    for stage, latents in enumerate(contexts):
        streams, pre, chosen = _run_stage(draft, latents, streams, pre, places, stage, config=config, strength=strength)
        loads.append(expert_loads(chosen, model.n_routed_experts))
    hidden = hyper.collapse(streams, pre)
    normed = rms_norm(hidden, draft.norm, eps=model.rms_norm_eps)
    base = row_product(normed, params.head.astype(normed.dtype))
    by_block = lambda x: x.reshape(-1, size, x.shape[-1])  # noqa: E731
    return Blocks(base=by_block(base), hidden=by_block(hidden), loads=jnp.stack(loads))


def markov_logits(
    params: Params, base: Float32[Array, "M G V"], hidden: Float[Array, "M G D"], before: Int[Array, "M G"]
) -> tuple[Float32[Array, "M G V"], Float32[Array, "M G"]]:
    """Logits and raw confidences of drafts, given the token before each of them."""
    draft = _draft_of(params)
    embedding = draft.markov.embed[before.reshape(-1)].astype(jnp.float32)
    features = jnp.concatenate([hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32), embedding], axis=1)
    logits = base + linear_f32(embedding, draft.markov.head).reshape(base.shape)
    return logits, linear_f32(features, draft.confidence).reshape(before.shape)


def _draft_of(params: Params) -> DraftParams:
    assert params.draft is not None
    return params.draft


def _with_draft_experts(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        model, n_routed_experts=model.dspark_n_routed_experts, num_experts_per_tok=model.dspark_num_experts_per_tok
    )


def _places(anchors: Int[Array, "B A"], *, size: int, window_size: int) -> _Places:
    batch, count = anchors.shape
    flat = anchors.reshape(-1)
    positions = (flat[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)
    nothing = jnp.zeros_like(positions)
    block = jnp.repeat(jnp.arange(batch * count, dtype=jnp.int32), size)
    return _Places(
        rows=rows_at(positions, block, nothing, nothing, jnp.zeros((1, 1), jnp.int32)),
        sequence=jnp.repeat(jnp.arange(batch, dtype=jnp.int32), count),
        context=flat[:, None] + jnp.arange(-window_size, 0, dtype=jnp.int32)[None],
    )


def _layer(stage: int) -> Layer:
    """A draft stage as a layer: window only, plain rotation."""
    none = {field.name: 0 for field in dataclasses.fields(Layer)}
    return Layer(**{**none, "layer": stage})


def _context_latents(
    draft: DraftParams, main_hidden: Float[Array, "B R F"], *, config: TrainingConfig, strength: Float32[Array, ""]
) -> list[Float[Array, "B R K"]]:
    """The context rows of every position, one array for each stage."""
    batch, length, _ = main_hidden.shape
    x = linear(main_hidden.reshape(batch * length, -1), draft.main_proj)
    x = rms_norm(x, draft.main_norm, eps=config.model.rms_norm_eps)
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    tables = rope_tables(positions, _layer(0), config=config.model)
    wkv = dequantize(draft.attention.wkv, x.dtype)
    made = [
        window_latents(x, wkv[stage], draft.attention.kv_norm[stage], tables, config=config).payload
        for stage in range(config.model.num_nextn_predict_layers)
    ]
    return [
        straight_through(latents, quantize_fp8, strength).astype(x.dtype).reshape(batch, length, -1) for latents in made
    ]


def _run_stage(
    draft: DraftParams,
    latents: Float[Array, "B R K"],
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    places: _Places,
    stage: int,
    *,
    config: TrainingConfig,
    strength: Float32[Array, ""],
) -> tuple[Array, Array, Int[Array, "T A"]]:
    """One stage on all blocks: streams, pre-mix and expert choices."""
    layer, prefix, name = _layer(stage), f"mtp.{stage}", f"mtp.{stage}.router_ids"
    stages, rows = Stages((name,), {}), places.rows
    own = layer_weights(draft.attention, stage, dtype=streams.dtype)
    entered = enter(draft, own, streams, pre, rows, layer, prefix=prefix, config=config, stages=stages)
    size = config.model.dspark_block_size
    q = entered.projected.q
    new = straight_through(entered.projected.new_kv.payload, quantize_fp8, strength).astype(q.dtype)
    window = latents[places.sequence[:, None], jnp.maximum(places.context, 0)]
    exists: Bool[Array, "M N"] = jnp.pad(places.context >= 0, ((0, 0), (0, size)), constant_values=True)
    out = attend_blocks_of_rows(
        q.reshape(-1, size, *q.shape[1:]),
        jnp.concatenate([window, new.reshape(-1, size, q.shape[-1])], axis=1),
        exists,
        own.attn_sink,
    )
    streams, pre, _ = finish(
        draft, own, out.reshape(q.shape), entered, rows, layer, prefix=prefix, config=config, stages=stages
    )
    return streams, pre, stages.captured[name]
