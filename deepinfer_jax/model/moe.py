"""The expert sublayer of one layer (spec: backbone 6)."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import ExpertParams, MoeParams, layer_slice
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.variants import Index
from deepinfer_jax.ops import moe as experts_math
from deepinfer_jax.ops.quant import dequantize, fp8_roundtrip, quantize_fp8
from deepinfer_jax.parallel.experts import on_owners
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class Routed:
    """What the router makes of normed inputs u."""

    u: Float[Array, "T D"]  # in the form that the experts read
    expert_ids: Int[Array, "T A"]
    weights: Float32[Array, "T A"]


@pytree_dataclass
class EveryExpert(ExpertParams):
    """Routed experts that all compute all rows: what training puts in the place of the others in `MoeParams`."""


def route(
    gate: Float[Array, "E D"],
    bias: Float32[Array, "*T E"],
    u: Float[Array, "T D"],
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
) -> Routed:
    """Expert choice."""
    model, quantizes = config.model, config.policy.quantizes_activations
    scores = stages.note(f"{prefix}.router_scores", experts_math.router_scores(u, gate))
    ids = experts_math.choose_experts(scores, bias, count=model.num_experts_per_tok)
    ids = stages.note(f"{prefix}.router_ids", ids)
    weights = experts_math.expert_weights(scores, ids, scaling=model.routed_scaling_factor)
    weights = stages.note(f"{prefix}.router_weights", weights)
    return Routed(u=fp8_roundtrip(u) if quantizes else u, expert_ids=ids, weights=weights)


def force_experts(routed: Routed, *, config: RuntimeConfig) -> Routed:
    """`routed` with experts that take turns in place of those that were chosen, where the config forces them."""
    if not config.forced_imbalance:
        return routed
    count, model = routed.expert_ids.shape[0], config.model
    ids = experts_math.forced_experts(
        count,
        num_experts=model.n_routed_experts,
        count=model.num_experts_per_tok,
        num_shards=config.num_pieces(config.expert_axes),
        imbalance=config.forced_imbalance,
    )
    return dataclasses.replace(routed, expert_ids=ids)


def run_shared(
    shared: ExpertParams, u: Float[Array, "T D"], *, prefix: str, config: RuntimeConfig, stages: Stages
) -> Float[Array, "T D"]:
    """Output of the shared expert, for inputs in the form that experts read.

    Not part of `route`, so that it can run while rows travel to their experts.
    """
    limit, quantizes = config.model.swiglu_limit, config.policy.quantizes_activations
    out = experts_math.expert(u, shared.w1, shared.w2, shared.w3, None, limit=limit, quantizes=quantizes)
    return stages.note(f"{prefix}.shared_expert_out", out)


def run_experts(
    moe: MoeParams, routed: Routed, is_live: Bool[Array, " T"], *, layer: Index, config: RuntimeConfig
) -> Float[Array, "T A D"]:
    """Output of every chosen expert; padding rows cost no expert work. Weights are unpacked one expert at a time.

    On a mesh each expert's rows are computed where it is (`parallel/experts.py`). `EveryExpert` gives the sum of the
    outputs in place of A outputs, for padding rows too.
    """
    experts = moe.experts
    if isinstance(experts, EveryExpert):
        return _run_every_expert(experts, routed, layer=layer, config=config)[:, None]
    if config.num_pieces(config.expert_axes) == 1:
        return _run_local(
            experts, routed, is_live, num_experts=config.model.n_routed_experts, layer=layer, config=config
        )
    dtype, num_local = routed.u.dtype, experts.w1.payload.shape[1]
    travels_packed = config.policy.quantizes_activations

    def compute(rows: Any, ids: Array, weights: Array, is_item: Array) -> Float[Array, "R D"]:
        u = dequantize(rows, dtype) if travels_packed else rows
        arrived = Routed(u=u, expert_ids=ids[:, None], weights=weights[:, None])
        return _run_local(experts, arrived, is_item, num_experts=num_local, layer=layer, config=config)[:, 0]

    return on_owners(
        quantize_fp8(routed.u) if travels_packed else routed.u,  # exact: u is what FP8 has made of it
        routed.expert_ids,
        routed.weights,
        is_live,
        compute,
        num_local=num_local,
        replicas=None if moe.replicas is None else moe.replicas[layer],
        config=config,
    )


def _run_local(
    experts: ExpertParams,
    routed: Routed,
    is_live: Bool[Array, " T"],
    *,
    num_experts: int,
    layer: Index,
    config: RuntimeConfig,
) -> Float[Array, "T A D"]:
    """The chosen among experts that are all here."""
    model = config.model

    def apply(expert: Int[Array, ""], x: Float[Array, "B D"], weight: Float32[Array, " B"]) -> Float[Array, "B D"]:
        own: ExpertParams = jax.tree.map(lambda a: a[layer, expert], experts)
        return experts_math.expert(
            x,
            own.w1,
            own.w2,
            own.w3,
            weight,
            limit=model.swiglu_limit,
            quantizes=config.policy.quantizes_activations,
        )

    return experts_math.routed_experts(
        routed.u,
        routed.expert_ids,
        routed.weights,
        is_live,
        apply,
        num_experts=num_experts,
        tile=config.row_tile,
        has_fixed_trips=config.has_fixed_trips,
    )


def _run_every_expert(
    experts: EveryExpert, routed: Routed, *, layer: Index, config: RuntimeConfig
) -> Float[Array, "T D"]:
    own, dtype = layer_slice(experts, layer), routed.u.dtype
    return experts_math.every_expert(
        routed.u,
        routed.expert_ids,
        routed.weights,
        dequantize(own.w1, dtype),
        dequantize(own.w2, dtype),
        dequantize(own.w3, dtype),
        limit=config.model.swiglu_limit,
        quantizes=config.policy.quantizes_activations,
    )
