"""The expert sublayer of one layer (spec: backbone 6)."""

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.experts import api as experts_api
from deepinfer_jax.kernels.experts.api import PackedExperts, PackedShared
from deepinfer_jax.kernels.router import api as router
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
    gate: router.Gate,
    bias: Float32[Array, "*T E"],
    u: Float[Array, "T D"],
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
    quantizes: bool | None = None,
) -> Routed:
    """Expert choice. quantizes: u goes through FP8 for the experts; None: as the numerics say."""
    model = config.model
    quantizes = config.policy.quantizes_activations if quantizes is None else quantizes
    names = [f"{prefix}.router_{what}" for what in ("scores", "ids", "weights")]
    ids, weights = router.route(
        u,
        gate,
        bias,
        count=model.num_experts_per_tok,
        scaling=model.routed_scaling_factor,
        note=lambda name, value: stages.note(f"{prefix}.{name}", value),
        needs_scores=stages.wants(names[0]) or any(stages.is_forced(name) for name in names),
        backend=config.backend,
    )
    return Routed(u=fp8_roundtrip(u) if quantizes else u, expert_ids=ids, weights=weights)


def needs_quantized_rows(
    moe: MoeParams, shared: ExpertParams | PackedShared, u: Float[Array, "T D"], *, config: RuntimeConfig
) -> bool:
    """Whether u goes through FP8 in front of the experts: not where kernels for all of them do that.

    u: all rows of the step on this device; values do not count.
    """
    if not config.policy.quantizes_activations or isinstance(moe.experts, EveryExpert):
        return config.policy.quantizes_activations
    if config.num_pieces(config.expert_axes) > 1:
        return True
    return not experts_api.quantize_rows(
        u,
        moe.experts,
        shared,
        num_chosen=config.model.num_experts_per_tok,
        num_experts=config.model.n_routed_experts,
        limit=config.model.swiglu_limit,
        tile=config.row_tile,
        has_fixed_trips=config.has_fixed_trips,
        backend=config.backend,
    )


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
    shared: ExpertParams | PackedShared, u: Float[Array, "T D"], *, prefix: str, config: RuntimeConfig, stages: Stages
) -> Float[Array, "T D"]:
    """Output of the shared expert, for inputs in the form that experts read.

    Not part of `route`, so that it can run while rows travel to their experts.
    """
    limit, quantizes = config.model.swiglu_limit, config.policy.quantizes_activations
    out = experts_api.shared_expert(u, shared, limit=limit, quantizes=quantizes, backend=config.backend)
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
    experts: ExpertParams | PackedExperts,
    routed: Routed,
    is_live: Bool[Array, " T"],
    *,
    num_experts: int,
    layer: Index,
    config: RuntimeConfig,
) -> Float[Array, "T A D"]:
    """The chosen among experts that are all here."""
    return experts_api.routed_experts(
        routed.u,
        routed.expert_ids,
        routed.weights,
        is_live,
        experts,
        layer,
        num_experts=num_experts,
        limit=config.model.swiglu_limit,
        quantizes=config.policy.quantizes_activations,
        tile=config.row_tile,
        has_fixed_trips=config.has_fixed_trips,
        backend=config.backend,
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
