"""Bounded replay: prefill rows in front of the tail skip the decoder layers (spec: backbone 2.2).

Off: no tail. Mask: every row runs, the decoder's windows are cut at the tail's start (`StepBatch.tail_starts`).
Compact: only the tail rows run the decoder layers (`StepBatch.tail_rows`); the last KV source still sees every row.
Mask and compact give the same bits on tail rows.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.rms_norm.api import rms_norm
from deepinfer_jax.model.batch import Rows, own_part, rows_at
from deepinfer_jax.model.layer import Carry, Step
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.selection import empty_selection
from deepinfer_jax.model.sources import write_sources
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.variants import Layer
from deepinfer_jax.ops import hyper
from deepinfer_jax.ops.scatter import put_where
from deepinfer_jax.parallel import context


def cut_to_tail(
    params: Params,
    step: Step,
    carry: Carry,
    tail_rows: Int[Array, " U"],
    logit_rows: Int[Array, " N"],
    boundary: Layer,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> tuple[Step, Carry, Int[Array, " N"]]:
    """The step, carry and logit rows of the tail alone, with main KV and index K of every row written.

    tail_rows may be padded with -1 to any length; logit rows outside the tail become -1 (zero logits).
    """
    state = write_sources(
        params,
        carry.state,
        _source_input(params, carry, step.rows, boundary, config, stages),
        step.rows,
        step.every_row,
        boundary,
        config=config,
        stages=Stages((), {}),
    )
    whole = step.every_row
    missing = -tail_rows.shape[0] % config.row_multiple
    tail_rows = jnp.pad(tail_rows, (0, missing), constant_values=-1)
    is_row = tail_rows >= 0
    at = jnp.maximum(tail_rows, 0)
    every_row = rows_at(
        jnp.where(is_row, whole.positions[at], 0),
        jnp.where(is_row, whole.slots[at], -1),
        whole.tail_start[at],
        whole.window_start[at],
        whole.page_table,
    )
    moved = (carry.streams, carry.pre, carry.features, step.is_text, step.memories)
    moved = context.own_rows(context.take_rows(moved, tail_rows, config=config), config=config)
    streams, pre, features, is_text, memories = moved
    rows = own_part(every_row, config=config)
    cut = Carry(
        streams=streams,
        pre=pre,
        selection=empty_selection(rows, config=config),
        state=state,
        features=features,
        loads=carry.loads,
    )
    short = Step(rows=rows, every_row=every_row, is_text=is_text, memories=memories, has_images=step.has_images)
    return short, cut, _place_in(tail_rows, is_row, logit_rows, whole.positions.shape[0])


def without_source(layer: Layer) -> Layer:
    """The boundary layer once its KV has been written."""
    return dataclasses.replace(layer, source_kind=0)


def _source_input(
    params: Params, carry: Carry, rows: Rows, layer: Layer, config: RuntimeConfig, stages: Stages
) -> Float[Array, "T D"]:
    """The boundary layer's normed attention input, for every row."""
    norm = params.attn_norm[layer.layer]

    def on_tile(_: Stages, streams: Array, pre: Array) -> Float[Array, "B D"]:
        return rms_norm(hyper.collapse(streams, pre), norm, eps=config.model.rms_norm_eps, backend=config.backend)

    return stages.map_rows(on_tile, carry.streams, carry.pre, num_live=rows.num_live, config=config)


def _place_in(
    tail_rows: Int[Array, " U"], is_row: Bool[Array, " U"], wanted: Int[Array, " N"], num_rows: int
) -> Int[Array, " N"]:
    """Where each wanted row of the step stands in the tail; -1 for rows outside it."""
    places = jnp.full((num_rows,), -1, jnp.int32)
    places = put_where(places, (tail_rows,), jnp.arange(tail_rows.shape[0], dtype=jnp.int32), is_row)
    return places.at[wanted].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
