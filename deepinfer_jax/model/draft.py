"""The drafter: a few layers that propose a block of tokens behind the newest one (spec: dspark 1 to 4).

Context comes from the backbone's target layers (stage "main_hidden" of `forward`) and is kept in rings of its own; a
block attends to it and to itself. Its layers are the backbone's, with another key set. How a token is drawn from its
logits is an argument.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.attention.api import key_segments
from deepinfer_jax.kernels.linear.api import linear
from deepinfer_jax.kernels.rms_norm.api import rms_norm
from deepinfer_jax.model import attention as attending
from deepinfer_jax.model.backbone import embed_tokens
from deepinfer_jax.model.batch import Rows, rows_at
from deepinfer_jax.model.layer import enter, finish
from deepinfer_jax.model.params import DraftParams, Params
from deepinfer_jax.model.sources import ring_places
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import DraftState
from deepinfer_jax.model.variants import Index, Layer, layer_weights, rope_tables
from deepinfer_jax.ops import hyper, paged
from deepinfer_jax.ops.attention import attend_blocks
from deepinfer_jax.ops.invariant import map_rows, row_product
from deepinfer_jax.ops.linear import linear_f32
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip
from deepinfer_jax.parallel import context
from deepinfer_jax.pytree import pytree_dataclass

# From the index of a draft in its block and its logits [R, V] to one token id for each request, and whatever else of
# the draw is wanted: arrays with R rows.
Draw = Callable[[Index, Float32[Array, "R V"]], tuple[Int[Array, " R"], Any]]


@pytree_dataclass
class DraftOutput:
    """Drafts of R requests; draft i of a request is its token at the position i + 1 behind the anchor's."""

    ids: Int[Array, "R G"]
    logits: Float32[Array, "R G V"]  # each draft was drawn from its own; the Markov bias is included
    confidence: Float32[Array, "R G"]  # logit of the chance that a draft is accepted if those before it are
    extras: Any  # what else `draw` returned, stacked: [R, G, ...]
    stages: dict[str, Array]  # the stages that `capture` asked for; R * G rows lead


@pytree_dataclass
class Block:
    """Facts about the R * G rows of a step of drafts: G rows for each request, at consecutive positions."""

    first_row: Int[Array, " T"]  # index of the first row of the same block
    last_context: Int[Array, " T"]  # position of the newest context row that the block may see
    context_start: Int[Array, " T"]  # and of the oldest one that was ever written


def greedy(_: Index, logits: Float32[Array, "R V"]) -> tuple[Int[Array, " R"], tuple[()]]:
    """The id with the largest logit, the lowest one among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), ()


def write_context(
    params: Params,
    state: DraftState,
    main_hidden: Float[Array, "T F"],
    positions: Int[Array, " T"],
    slots: Int[Array, " T"],
    *,
    config: RuntimeConfig,
) -> DraftState:
    """The state with the context rows of committed positions (spec: dspark 3).

    main_hidden: the target layers' features of each row, side by side. Rows of one request are adjacent and at
    consecutive positions; rows of slot -1 write nothing: padding, and rows that were not accepted.
    """
    draft, model = _draft_of(params), config.model
    rows = _rows_at(positions, slots)
    num_stages, dtype = model.num_nextn_predict_layers, config.activation_dtype
    main_proj = dequantize(draft.main_proj, dtype)
    wkv = dequantize(draft.attention.wkv, dtype)
    quantizes = config.policy.quantizes_activations

    def on_tile(_: Stages, hidden: Array, positions: Array) -> list[ScaledArray]:
        x = linear(fp8_roundtrip(hidden) if quantizes else hidden, main_proj, backend=config.backend)
        x = rms_norm(x, draft.main_norm, eps=model.rms_norm_eps, backend=config.backend)
        x = fp8_roundtrip(x) if quantizes else x
        tables = rope_tables(positions, _layer(0), config=model)
        own = [(wkv[k], draft.attention.kv_norm[k]) for k in range(num_stages)]
        return [attending.window_latents(x, w, norm, tables, config=config) for w, norm in own]

    hidden = main_hidden.astype(dtype)
    made = Stages((), {}).map_rows(on_tile, hidden, rows.positions, num_live=rows.num_live, config=config)
    made, positions, slots = context.all_rows((made, positions, slots), config=config)
    slots, places = ring_places(_rows_at(positions, slots), config.ring_len)
    window = state.window
    for k, latents in enumerate(made):
        window = paged.put_rows(window, latents, k, slots, places)
    return dataclasses.replace(state, window=window)


def draft_block(
    params: Params,
    state: DraftState,
    anchors: Int[Array, " R"],
    positions: Int[Array, " R"],
    slots: Int[Array, " R"],
    *,
    config: RuntimeConfig,
    draw: Draw = greedy,
    context_starts: Int[Array, " R"] | None = None,
    capture: tuple[str, ...] = (),
) -> DraftOutput:
    """G drafts for each request, behind its newest token (spec: dspark 4).

    anchors: the newest tokens, at `positions`; the context of the positions before must be in the rings already. Slot
    -1 is padding, whose drafts mean nothing. `draw` is traced once, for every place of the block in order; it should
    treat each request on its own. context_starts: first position with a context row, 0 unless a prefix was taken over
    without its rings. capture: patterns of stage names ("mtp.1.attn_out", "mtp.*.router_ids"; see `Stages`).
    """
    draft, model, stages = _draft_of(params), config.model, Stages(capture, {})
    size, num_requests = model.dspark_block_size, anchors.shape[0]
    place = jnp.tile(jnp.arange(size, dtype=jnp.int32), num_requests)
    rows = _rows_at(jnp.repeat(positions, size) + place, jnp.repeat(slots, size))
    starts = jnp.zeros_like(positions) if context_starts is None else context_starts
    block = Block(
        first_row=jnp.arange(num_requests * size, dtype=jnp.int32) - place,
        last_context=jnp.repeat(positions - 1, size),
        context_start=jnp.repeat(starts, size),
    )
    tokens = jnp.where(place == 0, jnp.repeat(anchors, size), model.dspark_noise_token_id)
    streams, pre = embed_tokens(params, tokens, config=config, stages=stages)
    streams, pre = _run_stages(draft, state, streams, pre, rows, block, config=config, stages=stages)

    def collapse(stages: Stages, streams: Array, pre: Array) -> tuple[Array, Array]:
        hidden = stages.note("mtp.head_in", hyper.collapse(streams, pre))
        return hidden, stages.note(
            "mtp.final_hidden", rms_norm(hidden, draft.norm, eps=model.rms_norm_eps, backend=config.backend)
        )

    hidden, normed = stages.map_rows(collapse, streams, pre, num_live=rows.num_live, config=config)
    head = params.head.astype(normed.dtype)
    base = map_rows(
        lambda x: row_product(x, head),
        normed,
        num_live=rows.num_live,
        **config.tiles,
    )
    by_request = lambda x: x.reshape(num_requests, size, x.shape[-1])  # noqa: E731
    drawn = _draw_in_order(draft, by_request(base), by_request(hidden), anchors, slots, draw, config=config)
    ids, logits, confidence, extras = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), drawn)
    return DraftOutput(ids=ids, logits=logits, confidence=confidence, extras=extras, stages=stages.finish())


def _draft_of(params: Params) -> DraftParams:
    if params.draft is None:
        raise ValueError("these parameters have no draft stages; load them with with_draft=True")
    return params.draft


def _rows_at(positions: Int[Array, " T"], slots: Int[Array, " T"]) -> Rows:
    """Row facts where nothing is paged."""
    zeros = jnp.zeros_like(positions)
    return rows_at(positions, slots, zeros, zeros, jnp.zeros((1, 1), jnp.int32))


def _layer(stage: Index) -> Layer:
    """A draft stage as a layer: window only, plain rotation."""
    none = {field.name: 0 for field in dataclasses.fields(Layer)}
    return Layer(**{**none, "layer": stage})


@functools.cache
def _with_draft_experts(config: RuntimeConfig) -> RuntimeConfig:
    """The config that the shared layer code reads: the draft's experts, and no split of its rows, which are few."""
    model: ModelConfig = dataclasses.replace(
        config.model,
        n_routed_experts=config.model.dspark_n_routed_experts,
        num_experts_per_tok=config.model.dspark_num_experts_per_tok,
    )
    return dataclasses.replace(config, model=model, splits_rows=False)


def _run_stages(
    draft: DraftParams,
    state: DraftState,
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    rows: Rows,
    block: Block,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"]]:
    """The stages one after the other; as in the backbone, they share one compiled body where nothing is captured."""
    config = _with_draft_experts(config)

    def run(carry: tuple[Array, Array], stage: Index) -> tuple[Array, Array]:
        return _run_stage(draft, state, *carry, rows, block, stage, config=config, stages=stages)

    if config.loops_layers and not stages.is_active:
        numbers = jnp.arange(config.model.num_nextn_predict_layers, dtype=jnp.int32)
        return lax.scan(lambda carry, stage: (run(carry, stage), None), (streams, pre), numbers)[0]
    carry = streams, pre
    for stage in range(config.model.num_nextn_predict_layers):
        carry = run(carry, stage)
    return carry


def _run_stage(
    draft: DraftParams,
    state: DraftState,
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    rows: Rows,
    block: Block,
    stage: Index,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"]]:
    """One stage on the rows of all blocks: streams and pre-mix for the next one."""
    layer, prefix = _layer(stage), f"mtp.{stage}"
    own = layer_weights(draft.attention, stage, dtype=streams.dtype, config=config)
    entered = enter(draft, own, streams, pre, rows, layer, prefix=prefix, config=config, stages=stages)
    new = entered.projected
    out = attend_to_block(new.q, new.new_kv, state, own.attn_sink, rows, block, stage, config=config)
    return finish(draft, own, out, entered, rows, layer, prefix=prefix, config=config, stages=stages)[:2]


def attend_to_block(
    q: Float[Array, "T H K"],
    new_kv: ScaledArray,
    state: DraftState,
    sink: Float[Array, " H"],
    rows: Rows,
    block: Block,
    stage: Index,
    *,
    config: RuntimeConfig,
) -> Float[Array, "T H K"]:
    """Attention whose keys are the same for all rows of a block: the W positions before it, then all of its own rows.

    Key list: W places of the ring in position order, then the G rows of the block (spec: dspark 4).
    """
    window_size, size, ring_len = config.model.sliding_window, config.model.dspark_block_size, config.ring_len

    def tile_of_rows(q: Array, slots: Array, block: Block) -> Float[Array, "B H K"]:
        oldest = jnp.maximum(block.last_context - (window_size - 1), 0)
        is_live = (slots >= 0)[:, None]

        def context_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            position = oldest[:, None] + places
            exists = is_live & (places < window_size) & (position <= block.last_context[:, None])
            exists = exists & (position >= block.context_start[:, None])
            slot = jnp.where(exists, slots[:, None], -1)
            return dequantize(paged.take_rows(state.window, stage, slot, position % ring_len), q.dtype), exists

        def own_block(places: Int[Array, "B M"]) -> tuple[Array, Bool[Array, "B M"]]:
            exists = is_live & (places >= 0) & (places < size)
            row = jnp.where(exists, block.first_row[:, None] + places, -1)
            return dequantize(paged.take_rows(new_kv, row), q.dtype), exists

        segments = key_segments(
            context_block, own_block, num_rows=slots.shape[0], num_window=window_size, num_others=size
        )
        return attend_blocks(q, segments, sink, has_fixed_trips=config.has_fixed_trips)

    return map_rows(
        tile_of_rows,
        q,
        rows.slots,
        block,
        tile=config.row_tile,
        num_live=rows.num_live,
        has_fixed_trips=config.has_fixed_trips,
    )


def _draw_in_order(
    draft: DraftParams,
    base: Float32[Array, "R G V"],
    hidden: Float[Array, "R G D"],
    anchors: Int[Array, " R"],
    slots: Int[Array, " R"],
    draw: Draw,
    *,
    config: RuntimeConfig,
) -> tuple[Int[Array, "G R"], Float32[Array, "G R V"], Float32[Array, "G R"], Any]:
    """Ids, logits, confidences and what else was drawn: the token before each draft adds a bias to its logits."""
    num_live = paged.num_leading(slots >= 0)

    def on_tile(token: Array, base: Array, hidden: Array) -> tuple[Array, Array]:
        embedding = draft.markov.embed[token].astype(jnp.float32)
        features = jnp.concatenate([hidden.astype(jnp.float32), embedding], axis=1)
        return base + linear_f32(embedding, draft.markov.head), linear_f32(features, draft.confidence)[:, 0]

    def one_place(token: Array, place: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array, Any]]:
        index, base, hidden = place
        logits, confidence = map_rows(
            on_tile,
            token,
            base,
            hidden,
            num_live=num_live,
            **config.tiles,
        )
        token, extras = draw(index, logits)
        return token, (token, logits, confidence, extras)

    index = jnp.arange(base.shape[1], dtype=jnp.int32)
    places = (index, jnp.swapaxes(base, 0, 1), jnp.swapaxes(hidden, 0, 1))
    return lax.scan(one_place, anchors.astype(jnp.int32), places)[1]
