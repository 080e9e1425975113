"""The expert sublayer of one layer (spec: backbone 6)."""

import jax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.params import ExpertParams, layer_slice
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.variants import Index
from deepinfer_jax.ops import moe as experts_math
from deepinfer_jax.ops.quant import dequantize, fp8_roundtrip
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class Routed:
    """What the router and the shared expert make of normed inputs u."""

    u: Float[Array, "T D"]  # in the form that the experts read
    expert_ids: Int[Array, "T A"]
    weights: Float32[Array, "T A"]
    shared_out: Float[Array, "T D"]


@pytree_dataclass
class EveryExpert(ExpertParams):
    """Routed experts that all compute all rows: what training puts in the place of the others in `MoeParams`."""


def route(
    gate: Float[Array, "E D"],
    bias: Float32[Array, "*T E"],
    shared: ExpertParams,
    u: Float[Array, "T D"],
    *,
    prefix: str,
    config: RuntimeConfig,
    stages: Stages,
) -> Routed:
    """Expert choice and shared expert."""
    model, quantizes = config.model, config.policy.quantizes_activations
    scores = stages.note(f"{prefix}.router_scores", experts_math.router_scores(u, gate))
    ids = experts_math.choose_experts(scores, bias, count=model.num_experts_per_tok)
    ids = stages.note(f"{prefix}.router_ids", ids)
    weights = experts_math.expert_weights(scores, ids, scaling=model.routed_scaling_factor)
    weights = stages.note(f"{prefix}.router_weights", weights)
    u_in = fp8_roundtrip(u) if quantizes else u
    shared_out = experts_math.expert(
        u_in, shared.w1, shared.w2, shared.w3, None, limit=model.swiglu_limit, quantizes=quantizes
    )
    shared_out = stages.note(f"{prefix}.shared_expert_out", shared_out)
    return Routed(u=u_in, expert_ids=ids, weights=weights, shared_out=shared_out)


def run_experts(
    experts: ExpertParams, routed: Routed, is_live: Bool[Array, " T"], *, layer: Index, config: RuntimeConfig
) -> Float[Array, "T A D"]:
    """Output of every chosen expert; padding rows cost no expert work. Weights are unpacked one expert at a time.

    `EveryExpert` gives the sum of the outputs in place of A outputs, for padding rows too.
    """
    model = config.model
    if isinstance(experts, EveryExpert):
        return _run_every_expert(experts, routed, layer=layer, config=config)[:, None]

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
        num_experts=model.n_routed_experts,
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
