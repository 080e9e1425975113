"""Attention of one layer: projections, one softmax over window and selected keys, output (spec: backbone 4)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.attention import api as attention
from deepinfer_jax.kernels.attention.keys import KeySources, RowPlaces
from deepinfer_jax.kernels.linear.api import Weight, grouped_linear, linear
from deepinfer_jax.kernels.rms_norm.api import rms_norm
from deepinfer_jax.kernels.rope.api import rotate
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.params import AttentionParams
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import RATIOS, State
from deepinfer_jax.model.variants import RATIO_OF_KIND, Layer, RopeTables, pick, rows_for
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_fp8
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class Projected:
    """What the projections of one layer make of its inputs."""

    q_latent: Float[Array, "T Q"]  # normed; also the indexer's input
    q: Float[Array, "T H K"]  # rotated
    new_kv: ScaledArray  # rotated window latents in the form of the ring


def project(
    own: AttentionParams,
    x: Float[Array, "T D"],
    tables: RopeTables,
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
) -> Projected:
    """Queries and window KV of normed inputs x (spec: backbone 4.2)."""
    model, backend = config.model, config.backend
    x_in = rows_for(x, own.wq_a, own.wkv, config=config)
    q_latent = rms_norm(linear(x_in, own.wq_a, backend=backend), own.q_norm, eps=model.rms_norm_eps, backend=backend)
    q_latent = stages.note(f"{prefix}.q_latent", q_latent)
    q_in = rows_for(q_latent, own.wq_b, config=config)
    q = linear(q_in, own.wq_b, backend=backend).reshape(-1, model.num_attention_heads, model.head_dim)
    new_kv = window_latents(x_in, own.wkv, own.kv_norm, tables, config=config)
    stages.show(f"{prefix}.window_kv", dequantize(new_kv, x.dtype))
    return Projected(q_latent=q_latent, q=rotate(q, tables.cos, tables.sin, backend=backend), new_kv=new_kv)


def window_latents(
    x_in: Float[Array, "T D"],
    wkv: Weight,
    kv_norm: Float[Array, " L"],
    tables: RopeTables,
    *,
    config: RuntimeConfig,
) -> ScaledArray:
    """Rotated window latents of inputs in the form that products read, in the form of the ring."""
    backend = config.backend
    kv = rms_norm(linear(x_in, wkv, backend=backend), kv_norm, eps=config.model.rms_norm_eps, backend=backend)
    return window_rows(rotate(kv, tables.cos, tables.sin, backend=backend), config=config)


def window_rows(kv: Float[Array, "T L"], *, config: RuntimeConfig) -> ScaledArray:
    """Rotated window latents in the form of the ring."""
    if config.policy.quantizes_caches:
        return quantize_fp8(kv)
    return ScaledArray(payload=kv.astype(jnp.float32), scale=None)


def attend(
    q: Float[Array, "T H K"],
    new_kv: ScaledArray,
    state: State,
    entries: Int[Array, "T N"],
    sink: Float[Array, " H"],
    rows: Rows,
    layer: Layer,
    *,
    config: RuntimeConfig,
) -> Float[Array, "T H K"]:
    """Attention over the key list of each row: W window places in position order, then the selected entries.

    Window keys at positions of this step come from `new_kv`, older ones from the ring, which must not hold this step's
    rows yet: a chunk may overwrite ring rows that its own first queries need.
    """
    # Rows in front of the tail see their own window, whatever it is: nobody reads what they make of it.
    floor = jnp.where(rows.positions >= rows.tail_start, rows.tail_start, 0) * layer.decoder_kind
    places = RowPlaces(
        slots=rows.slots,
        positions=rows.positions,
        first_row=rows.first_row,
        first_position=rows.first_position,
        floor=jnp.maximum(floor, rows.window_start),
    )

    def variant(ratio: int) -> Float[Array, "T H K"]:
        sources = KeySources(
            new=new_kv,
            ring=state.window,
            layer=layer.layer,
            cache=state.main_kv[RATIOS.index(ratio)] if ratio else None,
            source=layer.cache_ordinal,
            page_table=rows.page_table,
            window=config.model.sliding_window,
            ring_len=config.ring_len,
            page_entries=config.page_tokens // max(ratio, 1),
        )
        return attention.attend(
            q,
            sources,
            places,
            entries,
            sink,
            rows.num_live,
            tile=config.row_tile,
            has_fixed_trips=config.has_fixed_trips,
            backend=config.backend,
        )

    return pick(layer.ratio_kind, [lambda ratio=ratio: variant(ratio) for ratio in RATIO_OF_KIND])


def project_out(
    own: AttentionParams, out: Float[Array, "T H K"], tables: RopeTables, *, config: RuntimeConfig
) -> Float[Array, "T D"]:
    """Inverse rotation and grouped low-rank output projection, whose first factor is never quantised (backbone 4.7)."""
    out = rotate(out, tables.cos, tables.sin, inverse=True, backend=config.backend)
    groups = out.reshape(out.shape[0], config.model.o_groups, -1)
    low = grouped_linear(groups, own.wo_a, backend=config.backend)
    low = low.reshape(out.shape[0], -1)
    return linear(rows_for(low, own.wo_b, config=config), own.wo_b, backend=config.backend)
