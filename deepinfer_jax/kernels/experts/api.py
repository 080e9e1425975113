"""The experts of a layer, routed and shared, by whatever the backend has for them."""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.experts import cann
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.ops import moe

OP, SHARED_OP = "experts", "shared_expert"
Index = int | Int[Array, ""]


# CANN's forms of weights, as `engine/ascend.py` makes them.
PackedExperts = cann.PackedExperts
PackedShared = cann.PackedShared
# One of them, or a node with the matrices w1 (gate), w2 (down) and w3 (up), plain or packed.
Experts = Any


def _routed(
    u: Float[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    shares: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    experts: Experts,
    layer: Index,
    *,
    num_experts: int,
    limit: float,
    quantizes: bool,
    tile: int,
    has_fixed_trips: bool,
) -> Float[Array, "T A D"]:
    """Weights are unpacked one expert at a time."""

    def apply(expert: Int[Array, ""], x: Float[Array, "B D"], weight: Float32[Array, " B"]) -> Float[Array, "B D"]:
        own = jax.tree.map(lambda a: a[layer, expert], experts)
        return moe.expert(x, own.w1, own.w2, own.w3, weight, limit=limit, quantizes=quantizes)

    return moe.routed_experts(
        u, expert_ids, shares, is_live, apply, num_experts=num_experts, tile=tile, has_fixed_trips=has_fixed_trips
    )


def _shared(u: Float[Array, "T D"], expert: Experts, *, limit: float, quantizes: bool) -> Float[Array, "T D"]:
    return moe.expert(u, expert.w1, expert.w2, expert.w3, None, limit=limit, quantizes=quantizes)


IMPLS = (
    Impl(name="cann", fn=cann.routed_experts, targets=(ASCEND,), refuses=cann.refuses_routed),
    Impl(name=REFERENCE, fn=_routed),
)
SHARED_IMPLS = (
    Impl(name="cann", fn=cann.shared_expert, targets=(ASCEND,), refuses=cann.refuses_shared),
    Impl(name=REFERENCE, fn=_shared),
)


def routed_experts(
    u: Float[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    shares: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    experts: Experts,
    layer: Index,
    *,
    num_experts: int,
    limit: float,
    quantizes: bool,
    tile: int,
    has_fixed_trips: bool,
    backend: Backend,
) -> Float[Array, "T A D"]:
    """Output of every chosen expert, weighted by its share; rows that are not live give zeros.

    u: in the form that experts read. experts: stacked, leading axes layers and experts. num_experts: how many of them
    are here. quantizes: the activation between the products is FP8. tile, has_fixed_trips: see
    `ops.moe.routed_experts`.
    """
    arrays = (u, expert_ids, shares, is_live, experts, layer)
    given = {
        "num_experts": num_experts,
        "limit": limit,
        "quantizes": quantizes,
        "tile": tile,
        "has_fixed_trips": has_fixed_trips,
    }
    return select(OP, IMPLS, backend, *arrays, **given).fn(*arrays, **given)


def shared_expert(
    u: Float[Array, "T D"], expert: Experts, *, limit: float, quantizes: bool, backend: Backend
) -> Float[Array, "T D"]:
    """Output of one expert on all rows, for inputs in the form that experts read."""
    given = {"limit": limit, "quantizes": quantizes}
    return select(SHARED_OP, SHARED_IMPLS, backend, u, expert, **given).fn(u, expert, **given)
