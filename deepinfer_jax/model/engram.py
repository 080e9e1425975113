"""Engram at the entry of a layer: hash, look-up, projection, gate (spec: engram)."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.linear.api import PackedLinear
from deepinfer_jax.kernels.linear.api import linear as packed_linear
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import EngramParams
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import State
from deepinfer_jax.model.variants import Layer, layer_weights, pick, rows_for
from deepinfer_jax.ops import engram as engram_math
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.ops.scatter import put_where
from deepinfer_jax.parallel import engram_rows
from deepinfer_jax.text.engram_vocab import EngramConstants, engram_constants


@functools.cache
def constants_of(config: ModelConfig) -> EngramConstants:
    """Primes, offsets and multipliers of a model's Engram layers. Raises ValueError for a table that is too short."""
    constants = engram_constants(
        layer_ids=config.engram_layer_ids,
        max_ngram=config.engram_max_ngram_size,
        num_heads=config.engram_n_heads,
        vocab_base=config.engram_vocab_size,
        compressed_vocab_size=config.engram_compressed_vocab_size,
    )
    for layer, rows, needed in zip(
        config.engram_layer_ids, config.engram_num_embeddings, constants.num_rows, strict=True
    ):
        if rows < needed:
            raise ValueError(
                f"engram_num_embeddings={rows} of layer {layer} is below {needed}, the sum of its bucket primes; "
                "correct engram_num_embeddings or engram_vocab_size"
            )
    return constants


def token_context(
    token_map: Int[Array, " V"],
    state: State,
    tokens: Int[Array, " T"],
    rows: Rows,
    is_image: Bool[Array, " T"] | None = None,
    *,
    config: RuntimeConfig,
) -> tuple[Int[Array, "T M"], Bool[Array, "T M"], State]:
    """Compressed ids of each row and of the tokens before it, which of them exist, and the state with this step's ids.

    Older tokens come from this step's rows where they are here, else from the request's history ring. Image rows have
    the compressed id DEAD (spec: engram 2.3); is_image None: every row is text.
    """
    compressed = token_map[tokens]
    if is_image is not None:
        compressed = jnp.where(is_image, engram_math.DEAD, compressed)
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    slots = jnp.maximum(rows.slots, 0)
    columns, exists = [], []
    for back in range(config.model.engram_max_ngram_size):
        position = rows.positions - back
        kept = state.history[slots, jnp.maximum(position, 0) % config.history_len]
        is_here = index - back >= rows.first_row
        columns.append(jnp.where(is_here, compressed[jnp.maximum(index - back, 0)], kept))
        exists.append(position >= rows.window_start)
    is_kept = rows.is_live & (rows.num_after < config.history_len)
    # Written once read, as the window ring is: else a compiler keeps a copy for the reads.
    columns, history = lax.optimization_barrier((columns, state.history))
    history = put_where(history, (rows.slots, rows.positions % config.history_len), compressed, is_kept)
    return jnp.stack(columns, axis=1), jnp.stack(exists, axis=1), dataclasses.replace(state, history=history)


def look_up(
    params: EngramParams,
    context: Int[Array, "T M"],
    exists: Bool[Array, "T M"],
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[ScaledArray, ...]:
    """The packed rows [T, N, W] of each table that these rows of the step hash to: known before the first layer."""
    found = []
    for ordinal, table in enumerate(params.embed):
        hashed = table_rows(params.token_map, context, exists, ordinal=ordinal, config=config.model)
        hashed = stages.note(f"layers.{config.model.engram_layer_ids[ordinal]}.engram_rows", hashed)
        found.append(engram_rows.look_up(table, hashed, config=config))
    return tuple(found)


def engram(
    params: EngramParams,
    streams: Float[Array, "T C D"],
    memories: tuple[ScaledArray, ...],
    is_text: Bool[Array, " T"],
    rows: Rows,
    layer: Layer,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> Float[Array, "T C D"]:
    """The streams with the looked-up memory mixed in, at layers that have a table; those of image rows unchanged."""

    def with_table(ordinal: int) -> Float[Array, "T C D"]:
        wkv = layer_weights(params.wkv, ordinal, dtype=streams.dtype, config=config)

        def on_tile(stages: Stages, streams: Array, memory: ScaledArray, is_text: Array) -> Array:
            prefix = f"layers.{layer.layer}"
            entering = stages.note(f"{prefix}.engram_in", streams)
            mixed = _mix_in(params, wkv, entering, memory, is_text, ordinal=ordinal, config=config)
            return stages.note(f"{prefix}.engram_out", mixed)

        return stages.map_rows(on_tile, streams, memories[ordinal], is_text, num_live=rows.num_live, config=config)

    tables = [lambda ordinal=ordinal: with_table(ordinal) for ordinal in range(len(params.embed))]
    return pick(layer.engram_kind, [lambda: streams, *tables])


def table_rows(
    token_map: Int[Array, " V"],
    context: Int[Array, "T M"],
    exists: Bool[Array, "T M"],
    *,
    ordinal: int,
    config: ModelConfig,
) -> Int[Array, "T N"]:
    """Rows of one Engram layer's table for each row of the step."""
    constants = constants_of(config)
    return engram_math.hash_rows(
        context,
        exists,
        multipliers=constants.multipliers[ordinal],
        primes=constants.primes[ordinal],
        pad=token_map[config.engram_pad_token_id],
    )


def _mix_in(
    params: EngramParams,
    wkv: ScaledArray | PackedLinear | Array,
    streams: Float[Array, "T C D"],
    found: ScaledArray,
    is_text: Bool[Array, " T"],
    *,
    ordinal: int,
    config: RuntimeConfig,
) -> Float[Array, "T C D"]:
    """Projection and gate (spec: engram 4)."""
    model = config.model
    memory = dequantize(found, streams.dtype).reshape(streams.shape[0], -1)
    memory = rows_for(memory, wkv, config=config)
    # Plain weights are multiplied here on every backend: the host computes all of this for an Ascend device.
    is_packed = isinstance(wkv, ScaledArray | PackedLinear)
    projected = packed_linear(memory, wkv, backend=config.backend) if is_packed else linear(memory, wkv)
    keys = projected[:, : model.hc_mult * model.hidden_size].reshape(streams.shape)
    value = projected[:, model.hc_mult * model.hidden_size :]
    return engram_math.gate(streams, keys, value, params.q_weight[ordinal], params.k_weight[ordinal], is_text)
