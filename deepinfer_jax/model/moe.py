"""The expert sublayer of one layer (spec: backbone 6)."""

import jax
from jaxtyping import Array, Float, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import Rows
from deepinfer_jax.model.layer import Index
from deepinfer_jax.model.params import ExpertParams, MoeParams, layer_slice
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.ops import moe as experts_math
from deepinfer_jax.ops.quant import fp8_roundtrip


def moe(
    params: MoeParams,
    u: Float[Array, "T D"],
    rows: Rows,
    *,
    layer: Index,
    config: RuntimeConfig,
    stages: Stages,
) -> Float[Array, "T D"]:
    """Routed and shared experts on normed inputs u; padding rows cost no expert work."""
    model, prefix, quantizes = config.model, f"layers.{layer}", config.policy.quantizes_activations
    scores = experts_math.router_scores(u, params.gate[layer], tile=config.product_tile)
    ids = experts_math.choose_experts(scores, params.bias[layer], count=model.num_experts_per_tok)
    stages.note(f"{prefix}.router_scores", scores)
    ids = stages.note(f"{prefix}.router_ids", ids)
    weights = experts_math.expert_weights(scores, ids, scaling=model.routed_scaling_factor)
    weights = stages.note(f"{prefix}.router_weights", weights)

    u_in = fp8_roundtrip(u) if quantizes else u
    shared = layer_slice(params.shared, layer)
    shared_out = experts_math.expert(
        u_in,
        shared.w1,
        shared.w2,
        shared.w3,
        None,
        limit=model.swiglu_limit,
        quantizes=quantizes,
        tile=config.product_tile,
    )
    stages.note(f"{prefix}.shared_expert_out", shared_out)

    def apply(expert: Int[Array, ""], x: Float[Array, "B D"], weight: Float[Array, " B"]) -> Float[Array, "B D"]:
        own: ExpertParams = jax.tree.map(lambda a: a[layer, expert], params.experts)
        return experts_math.expert(
            x, own.w1, own.w2, own.w3, weight, limit=model.swiglu_limit, quantizes=quantizes, tile=None
        )

    routed = experts_math.routed_experts(
        u_in, ids, weights, rows.is_live, apply, num_experts=model.n_routed_experts, tile=config.row_tile
    )
    return experts_math.combine(routed, shared_out)
