"""The network on whole sequences, with gradients: the layers of `model/`, with dense masks in the place of gathers."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.config.roles import LayerRole, layer_roles
from deepinfer_jax.model import engram as memory
from deepinfer_jax.model.backbone import embed_tokens
from deepinfer_jax.model.batch import Rows, StepBatch, derive_rows
from deepinfer_jax.model.layer import Entered, enter, finish
from deepinfer_jax.model.params import Params, layer_slice
from deepinfer_jax.model.selection import index_queries
from deepinfer_jax.model.sources import write_sources
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State, init_state
from deepinfer_jax.model.variants import Layer, all_layers, layer_weights
from deepinfer_jax.ops import hyper
from deepinfer_jax.ops.invariant import row_product
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.quant import dequantize, quantize_fp8, quantize_index, quantize_main_kv
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.training.attention import attend_sequences, entry_shares
from deepinfer_jax.training.numerics import TrainingConfig, straight_through
from deepinfer_jax.training.selection import Chosen, choose, index_distance, index_scores, visible_entries


@pytree_dataclass
class SequenceOutput:
    """What training reads of B sequences of R tokens."""

    logits: Float32[Array, "B R V"]
    main_hidden: Float[Array, "B R F"]  # the drafter's features, target layers side by side (spec: dspark 3)
    loads: Int[Array, "N E"]  # rows that each expert of each layer was chosen for
    index_loss: Float32[Array, ""]  # mean over index sources; its gradient reaches indexers only


@pytree_dataclass
class _Sequences:
    """What the layers of one step share."""

    rows: Rows
    strength: Float32[Array, ""]


@pytree_dataclass
class _Flow:
    """What one layer hands to the next."""

    streams: Float[Array, "T C D"]
    pre: Float32[Array, "T C"]
    entries: Float[Array, "B N K"]  # main KV of the last source
    keys: Float[Array, "B N I"]  # its index keys, which gradients leave towards the indexer only
    chosen: Chosen


def run_sequences(
    params: Params, tokens: Int[Array, "B R"], *, config: TrainingConfig, strength: Float32[Array, ""]
) -> SequenceOutput:
    """Logits of every position of sequences that start at position 0; R is the config's `page_tokens`.

    params: as `training_params` makes them. strength: how far caches are quantised (see `straight_through`).
    """
    batch, length = tokens.shape
    if length != config.page_tokens:
        raise ValueError(f"sequences of {length} tokens do not fit the config, which was made for {config.page_tokens}")
    rows = derive_rows(_whole_sequences(tokens))
    state = init_state(config, num_slots=batch, num_pages=batch)
    flat = tokens.reshape(-1)
    streams, pre = embed_tokens(params, flat, config=config, stages=Stages((), {}))
    context, exists, state = memory.token_context(params.engram.token_map, state, flat, rows, config=config)
    memories = memory.look_up(params.engram, context, exists, config=config, stages=Stages((), {}))
    step = _Sequences(rows=rows, strength=strength)
    flow = _no_source(streams, pre, batch)
    loads, features, distances = [], [], []
    for layer, role in zip(all_layers(config.model), layer_roles(config.model), strict=True):
        entering = memory.engram(
            params.engram, flow.streams, memories, rows.is_live, rows, layer, config=config, stages=Stages((), {})
        )
        if layer.layer in config.model.dspark_target_layer_ids:
            features.append(jnp.mean(entering.astype(jnp.float32), axis=1).astype(entering.dtype))
        flow = dataclasses.replace(flow, streams=entering)
        flow, ids, distance = _run_layer(params, state, step, flow, layer, role, config=config)
        loads.append(expert_loads(ids, config.model.n_routed_experts))
        if distance is not None:
            distances.append(distance)
    hidden = rms_norm(hyper.collapse(flow.streams, flow.pre), params.norm, eps=config.model.rms_norm_eps)
    logits = row_product(hidden, params.head.astype(hidden.dtype))
    return SequenceOutput(
        logits=logits.reshape(batch, length, -1),
        main_hidden=jnp.concatenate(features, axis=1).reshape(batch, length, -1),
        loads=jnp.stack(loads),
        index_loss=jnp.mean(jnp.stack(distances)),
    )


def expert_loads(ids: Int[Array, "T A"], num_experts: int) -> Int[Array, " E"]:
    """How many rows chose each expert."""
    return jnp.zeros(num_experts, jnp.int32).at[ids.reshape(-1)].add(1)


def _whole_sequences(tokens: Int[Array, "B R"]) -> StepBatch:
    """One chunk for each sequence, in a slot and on a page of its own."""
    batch, length = tokens.shape
    slots = jnp.arange(batch, dtype=jnp.int32)
    return StepBatch(
        tokens=tokens.reshape(-1),
        positions=jnp.tile(jnp.arange(length, dtype=jnp.int32), batch),
        slots=jnp.repeat(slots, length),
        page_table=slots[:, None],
        logit_rows=jnp.arange(batch * length, dtype=jnp.int32),
    )


def _no_source(streams: Array, pre: Array, batch: int) -> _Flow:
    """In front of the first source there are no entries."""
    length = streams.shape[0] // batch
    nothing = jnp.zeros((batch, 0, 1), streams.dtype)
    unseen = jnp.zeros((batch, length, 0), bool)
    return _Flow(
        streams=streams, pre=pre, entries=nothing, keys=nothing, chosen=Chosen(entries=unseen, candidates=unseen)
    )


def _run_layer(
    params: Params,
    state: State,
    step: _Sequences,
    flow: _Flow,
    layer: Layer,
    role: LayerRole,
    *,
    config: TrainingConfig,
) -> tuple[_Flow, Int[Array, "T A"], Float32[Array, ""] | None]:
    """One layer; also its expert choices and, at an index source, the distance of its indexer from attention."""
    stages = Stages((f"layers.{layer.layer}.router_ids",), {})
    prefix = f"layers.{layer.layer}"
    own = layer_weights(params.attention, layer.layer, dtype=flow.streams.dtype)
    entered = enter(params, own, flow.streams, flow.pre, step.rows, layer, prefix=prefix, config=config, stages=stages)
    if role.owns_kv:
        flow = _with_source(params, state, entered, step, flow, layer, role, config=config)
    batch = flow.entries.shape[0]
    by_sequence = lambda x: x.reshape(batch, -1, *x.shape[1:])  # noqa: E731
    q, latents = by_sequence(entered.projected.q), by_sequence(entered.projected.new_kv.payload)
    distance = None
    if role.index_ordinal >= 0:
        flow, distance = _with_selection(params, entered, q, step, flow, layer, role, config=config)
    has_entries = role.ratio > 0
    attended = attend_sequences(
        q,
        straight_through(latents, quantize_fp8, step.strength).astype(q.dtype),
        flow.entries if has_entries else jnp.zeros((batch, 0, q.shape[-1]), q.dtype),
        flow.chosen.entries if has_entries else jnp.zeros((*q.shape[:2], 0), bool),
        own.attn_sink,
        window_size=config.model.sliding_window,
    )
    streams, pre, _ = finish(
        params,
        own,
        attended.reshape(-1, *attended.shape[2:]),
        entered,
        step.rows,
        layer,
        prefix=prefix,
        config=config,
        stages=stages,
    )
    return dataclasses.replace(flow, streams=streams, pre=pre), stages.captured[f"{prefix}.router_ids"], distance


def _with_source(
    params: Params,
    state: State,
    entered: Entered,
    step: _Sequences,
    flow: _Flow,
    layer: Layer,
    role: LayerRole,
    *,
    config: TrainingConfig,
) -> _Flow:
    """The entries and index keys of a source layer, through the caches of an empty state.

    They are made twice: an index key must not carry the gradient of the selection into the network.
    """
    which, ordinal = RATIOS.index(role.ratio), role.cache_ordinal

    def write(params: Params, x: Array) -> State:
        return write_sources(params, state, x, step.rows, step.rows, layer, config=config, stages=Stages((), {}))

    entries = write(params, entered.x).main_kv[which].payload[ordinal]
    apart = dataclasses.replace(params, compressor=lax.stop_gradient(params.compressor))
    keys = write(apart, lax.stop_gradient(entered.x)).index_k[which].payload[ordinal]
    dtype = entered.x.dtype
    none_yet = jnp.zeros((entries.shape[0], config.page_tokens, entries.shape[1]), bool)
    return dataclasses.replace(
        flow,
        entries=straight_through(entries, quantize_main_kv, step.strength).astype(dtype),
        keys=straight_through(keys, quantize_index, step.strength).astype(dtype),
        chosen=Chosen(entries=none_yet, candidates=none_yet),
    )


def _with_selection(
    params: Params,
    entered: Entered,
    q: Float[Array, "B R H K"],
    step: _Sequences,
    flow: _Flow,
    layer: Layer,
    role: LayerRole,
    *,
    config: TrainingConfig,
) -> tuple[_Flow, Float32[Array, ""]]:
    """The selection of an index source, and its distance from the attention over all that it chose from."""
    batch, length = q.shape[:2]
    wq_b = dequantize(layer_slice(params.indexer.wq_b, layer.index_ordinal), entered.x.dtype)
    queries, weights = index_queries(
        wq_b,
        params.indexer.weights_proj[layer.index_ordinal],
        lax.stop_gradient(entered.x),
        lax.stop_gradient(entered.projected.q_latent),
        entered.tables,
        config=config,
    )
    queries = straight_through(queries, quantize_index, step.strength)
    by_sequence = lambda x: x.reshape(batch, length, *x.shape[1:])  # noqa: E731
    scores = index_scores(by_sequence(queries), by_sequence(weights), flow.keys)
    visible = visible_entries(batch, length, ratio=role.ratio)
    chosen, pool = choose(scores, visible, flow.chosen, role, config=config.model)
    shares = entry_shares(lax.stop_gradient(q), lax.stop_gradient(flow.entries), visible)
    return dataclasses.replace(flow, chosen=chosen), index_distance(scores, shares, pool)
