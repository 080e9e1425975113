"""The text network: one forward for prefill chunks, decode rows and verify rows (spec: backbone 2, 3.3, 8)."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from deepinfer_jax.config.roles import replay_boundary
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.rms_norm.api import rms_norm
from deepinfer_jax.model import engram as memory
from deepinfer_jax.model import replay
from deepinfer_jax.model.batch import ImageRows, Rows, StepBatch, derive_rows, own_part, pad_rows
from deepinfer_jax.model.layer import Carry, Step, apply_layer
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.selection import empty_selection
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import State
from deepinfer_jax.model.variants import Layer, all_layers, stacked_layers
from deepinfer_jax.model.vision import place_spans
from deepinfer_jax.ops import hyper, paged
from deepinfer_jax.ops.invariant import map_rows, row_product
from deepinfer_jax.parallel import context
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class Features:
    """What the drafter reads of the rows that ran the last layers; padding rows have slot -1."""

    main_hidden: Float[Array, "T F"]  # the target layers' stream means side by side (spec: dspark 3)
    positions: Int[Array, " T"]
    slots: Int[Array, " T"]


@pytree_dataclass
class StepOutput:
    """What a forward returns beside the state."""

    logits: Float32[Array, "N V"]  # for the batch's logit rows
    stages: dict[str, Array]  # the stages that `capture` asked for; rows of the step lead, padding rows cut
    computed_rows: Int32[Array, " two"]  # rows that the encoder and the decoder layers computed, padding included
    features: Features | None = None  # for the drafter, where wanted
    loads: Int[Array, "layers E"] | None = (
        None  # of each layer, this device's rows that chose each expert, where counted
    )


def forward(
    params: Params,
    state: State,
    batch: StepBatch,
    *,
    config: RuntimeConfig,
    capture: tuple[str, ...] = (),
    forced_selection: Mapping[str, Array] | None = None,
    wants_features: bool = False,
) -> tuple[StepOutput, State]:
    """Logits of the wanted rows, and the state with every row of the batch written.

    A pure function for any jit. capture: patterns of stage names to return (see `Stages`; `capture=("*",)` returns
    all). forced_selection: stage name -> value used instead of the computed one, for ids ("layers.4.topk_idxs",
    "layers.4.candidate_mask", "layers.4.router_ids") and for any other stage that later ones read. wants_features: also
    return what `model/draft.py` reads. A donated state must not be used again.
    Raises ValueError for names that match no stage, and for a forced one that nothing is computed from.
    """
    num_rows = batch.tokens.shape[0]
    pad = -num_rows % config.row_multiple
    forced = {k: jnp.pad(v, [(0, pad)] + [(0, 0)] * (v.ndim - 1)) for k, v in (forced_selection or {}).items()}
    stages = Stages(capture, context.own_rows(forced, config=config))
    padded = pad_rows(batch, multiple=config.row_multiple)
    every_row = derive_rows(padded)
    rows = own_part(every_row, config=config)
    encoder_rows = decoder_rows = _num_computed(every_row, config=config)
    images = padded.images
    is_image = None if images is None else images.index >= 0
    ngrams, exists, state = memory.token_context(
        params.engram.token_map, state, padded.tokens, every_row, is_image, config=config
    )
    is_text = every_row.is_live if is_image is None else every_row.is_live & ~is_image
    own = (padded.tokens, is_text, ngrams, exists, None if images is None else images.index)
    tokens, is_text, ngrams, exists, image_index = context.own_rows(own, config=config)
    images = None if images is None else dataclasses.replace(images, index=image_index)
    streams, pre = embed_tokens(params, tokens, images, config=config, stages=stages)
    memories = memory.look_up(params.engram, ngrams, exists, config=config, stages=stages)
    step = Step(rows=rows, every_row=every_row, is_text=is_text, memories=memories, has_images=images is not None)
    carry = Carry(streams=streams, pre=pre, selection=empty_selection(rows, config=config), state=state)
    if wants_features or stages.wants("main_hidden"):
        blank = jnp.zeros(
            (streams.shape[0], len(config.model.dspark_target_layer_ids), streams.shape[2]), streams.dtype
        )
        carry = dataclasses.replace(carry, features=blank)
    if config.counts_experts:
        blank = jnp.zeros((config.model.num_hidden_layers, config.model.n_routed_experts), jnp.int32)
        carry = dataclasses.replace(carry, loads=blank)
    layers, logit_rows = all_layers(config.model), batch.logit_rows
    if padded.tail_rows is not None:
        if forced:
            raise ValueError("forced_selection needs every row in every layer; leave tail_rows out of the batch")
        boundary = replay_boundary(config.model)
        carry = _run_layers(params, step, carry, layers[:boundary], config=config, stages=stages)
        step, carry, logit_rows = replay.cut_to_tail(
            params, step, carry, padded.tail_rows, logit_rows, layers[boundary], config=config, stages=stages
        )
        decoder_rows = _num_computed(step.every_row, config=config)
        layers = (replay.without_source(layers[boundary]), *layers[boundary + 1 :])
        if padded.tail_rows.shape[0] == 0:
            blank = jnp.zeros((batch.logit_rows.shape[0], config.model.vocab_size), jnp.float32)
            output = StepOutput(
                logits=blank,
                stages=_captured(stages, num_rows, config=config),
                computed_rows=jnp.stack([encoder_rows, jnp.int32(0)]),
                features=_features(carry, step.rows) if wants_features else None,
                loads=carry.loads,
            )
            return output, carry.state
    carry = _run_layers(params, step, carry, layers, config=config, stages=stages)
    features = None if carry.features is None else _features(carry, step.rows)
    if features is not None:
        stages.show("main_hidden", features.main_hidden)
    logits = _head(params, carry, logit_rows, step.rows.num_live, config=config, stages=stages)
    output = StepOutput(
        logits=logits,
        stages=_captured(stages, num_rows, config=config),
        computed_rows=jnp.stack([encoder_rows, decoder_rows]),
        features=features if wants_features else None,
        loads=carry.loads,
    )
    return output, carry.state


def _features(carry: Carry, rows: Rows) -> Features:
    features = carry.features
    assert features is not None
    num_rows, num_layers, width = features.shape
    main_hidden = features.reshape(num_rows, num_layers * width)  # there may be no rows
    return Features(main_hidden=main_hidden, positions=rows.positions, slots=rows.slots)


def _num_computed(rows: Rows, *, config: RuntimeConfig) -> Int[Array, ""]:
    """Rows of the tiles that hold live rows; all rows where a product sees them at once."""
    if config.product_tile is None:
        return jnp.int32(rows.positions.shape[0])
    return -(-rows.num_live // config.row_tile) * config.row_tile


def _captured(stages: Stages, num_rows: int, *, config: RuntimeConfig) -> dict[str, Array]:
    captured = context.all_rows(stages.finish(), config=config)
    return {name: value[:num_rows] for name, value in captured.items()}


def _run_layers(
    params: Params, step: Step, carry: Carry, layers: Sequence[Layer], *, config: RuntimeConfig, stages: Stages
) -> Carry:
    """Layers one after the other.

    Where nothing is captured or forced they may share one compiled body, in which a layer's variants are chosen on
    the device; unrolled, every stage has a name. Both give the same bits.
    """
    if config.loops_layers and not stages.is_active:

        def body(carry: Carry, layer: Layer) -> tuple[Carry, None]:
            return apply_layer(params, step, carry, layer, config=config, stages=stages), None

        return lax.scan(body, carry, stacked_layers(layers))[0]
    for layer in layers:
        carry = apply_layer(params, step, carry, layer, config=config, stages=stages)
    return carry


def embed_tokens(
    params: Params, tokens: Int[Array, " T"], images: ImageRows | None = None, *, config: RuntimeConfig, stages: Stages
) -> tuple[Float[Array, "T C D"], Float32[Array, "T C"]]:
    """Equal streams holding the embedding, and the one-hot pre-mix that hands stream 0 to the first sublayer."""
    model = config.model
    hidden = params.embed[tokens].astype(config.activation_dtype)
    hidden = hidden if images is None else place_spans(hidden, images)
    hidden = stages.note("embed", hidden)
    streams = jnp.repeat(hidden[:, None, :], model.hc_mult, axis=1)
    pre = jnp.zeros((hidden.shape[0], model.hc_mult), jnp.float32).at[:, 0].set(1.0)
    return streams, pre


def _head(
    params: Params,
    carry: Carry,
    logit_rows: Int[Array, " N"],
    num_live: Int[Array, ""],
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> Float32[Array, "N V"]:
    """Float32 logits of the wanted rows, from the last sublayer's pre-mix (spec: backbone 8)."""

    def norm(stages: Stages, streams: Array, pre: Array) -> Float[Array, "B D"]:
        hidden = rms_norm(
            hyper.collapse(streams, pre), params.norm, eps=config.model.rms_norm_eps, backend=config.backend
        )
        return stages.note("final_hidden", hidden)

    hidden = stages.map_rows(norm, carry.streams, carry.pre, num_live=num_live, config=config)
    wanted = context.take_rows(hidden, logit_rows, config=config)
    head = params.head.astype(wanted.dtype)
    return map_rows(
        lambda rows: row_product(rows, head),
        wanted,
        num_live=paged.num_leading(logit_rows >= 0),
        **config.tiles,
    )


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
