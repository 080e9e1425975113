"""The experts of a layer, routed and shared, by whatever the backend has for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.experts import cann, mosaic_sm90, mosaic_sm100, packed
from deepinfer_jax.kernels.linear import api as linear_api
from deepinfer_jax.kernels.linear import mosaic_sm90 as linear_sm90
from deepinfer_jax.kernels.linear import mosaic_sm100 as linear_sm100
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.ops import moe

OP, SHARED_OP = "experts", "shared_expert"
Index = int | Int[Array, ""]


# CANN's forms of weights, as `engine/ascend.py` makes them.
PackedExperts = cann.PackedExperts
PackedShared = cann.PackedShared
# One of their matrices as the kernels for Hopper and for Blackwell read it, as `model/kernel_weights.py` makes it.
PackedMatrix = packed.PackedExperts
pack_matrix = packed.pack_experts
# CANN's form, or a node with the matrices w1 (gate), w2 (down) and w3 (up): plain, packed, or as these kernels read
# them.
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
        w1, w2, w3 = (packed.unpacked(w) if isinstance(w, PackedMatrix) else w for w in (own.w1, own.w2, own.w3))
        return moe.expert(x, w1, w2, w3, weight, limit=limit, quantizes=quantizes)

    return moe.routed_experts(
        u, expert_ids, shares, is_live, apply, num_experts=num_experts, tile=tile, has_fixed_trips=has_fixed_trips
    )


def _shared(u: Float[Array, "T D"], expert: Experts, *, limit: float, quantizes: bool) -> Float[Array, "T D"]:
    return moe.expert(u, expert.w1, expert.w2, expert.w3, None, limit=limit, quantizes=quantizes)


def _routed_kernel(module: Any) -> tuple[Callable[..., Array], Callable[..., str | None]]:
    """Its `routed_experts`, and why it refuses."""

    def run(
        u: Float[Array, "T D"],
        expert_ids: Int[Array, "T A"],
        shares: Float32[Array, "T A"],
        is_live: Bool[Array, " T"],
        experts: Experts,
        layer: Index,
        *,
        limit: float,
        **_: Any,
    ) -> Float[Array, "T A D"]:
        """The whole stack of layers is an operand, read where it is."""
        call = shared_call(module.routed_experts, limit=limit)
        layer = jnp.asarray(layer, jnp.int32)
        return call(u, expert_ids, shares, is_live, experts.w1, experts.w2, experts.w3, layer=layer)

    def refuses(
        u: Array, expert_ids: Array, _: Array, __: Array, experts: Experts, *___: Any, quantizes: bool, **____: Any
    ) -> str | None:
        if not quantizes:
            return "activations between the products are not FP8 in this numerics policy"
        return module.refuses(u, expert_ids, experts.w1, experts.w2)

    return run, refuses


def _shared_kernel(
    linear: Callable[..., Array], refuses_linear: Callable[..., str | None]
) -> tuple[Callable[..., Array], Callable[..., str | None]]:
    """The shared expert by a kernel for linear layers that quantises rows, and why it refuses."""

    def run(u: Float[Array, "T D"], expert: Experts, *, limit: float, quantizes: bool) -> Float[Array, "T D"]:
        del quantizes
        inner = moe.swiglu(linear(u, expert.w1), linear(u, expert.w3), None, limit=limit)
        return linear(inner, expert.w2)

    def refuses(u: Array, expert: Experts, *, quantizes: bool, **_: Any) -> str | None:
        if not quantizes:
            return "activations between the products are not FP8 in this numerics policy"
        reasons = (refuses_linear(u, w) for w in (expert.w1, expert.w2, expert.w3))
        return next((reason for reason in reasons if reason is not None), None)

    return run, refuses


IMPLS = (
    Impl(name="cann", fn=cann.routed_experts, targets=(ASCEND,), refuses=cann.refuses_routed),
    registry.mosaic_sm90(*_routed_kernel(mosaic_sm90)),
    registry.mosaic_sm100(*_routed_kernel(mosaic_sm100)),
    Impl(name=REFERENCE, fn=_routed),
)
SHARED_IMPLS = (
    Impl(name="cann", fn=cann.shared_expert, targets=(ASCEND,), refuses=cann.refuses_shared),
    registry.mosaic_sm90(*_shared_kernel(linear_api.linear_sm90, linear_sm90.refuses)),
    registry.mosaic_sm100(*_shared_kernel(linear_api.linear_sm100, linear_sm100.refuses)),
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


def quantize_rows(
    u: Float[Array, "T D"],
    experts: Experts,
    shared: Experts,
    *,
    num_chosen: int,
    num_experts: int,
    limit: float,
    tile: int,
    has_fixed_trips: bool,
    backend: Backend,
) -> bool:
    """Whether routed experts and the shared one quantise such rows themselves, `num_chosen` experts for each row.

    Else they are given rows that have been through `fp8_roundtrip`, where the numerics quantise activations.
    """
    if backend.kernels not in registry.COMPUTE_CAPABILITIES:
        return False
    ids = jnp.zeros((u.shape[0], num_chosen), jnp.int32)
    arrays = (u, ids, ids.astype(jnp.float32), jnp.ones(u.shape[0], jnp.bool_), experts, 0)
    given = {"limit": limit, "quantizes": True}
    sizes = {"num_experts": num_experts, "tile": tile, "has_fixed_trips": has_fixed_trips}
    found = (
        select(OP, IMPLS, backend, *arrays, **given, **sizes),
        select(SHARED_OP, SHARED_IMPLS, backend, u, shared, **given),
    )
    return all(impl.name == backend.kernels for impl in found)


def wants_packed(experts: Experts, *, dtype: Any, backend: Backend) -> bool:
    """Whether the kernel that was asked for takes these experts for few rows in `dtype` that it may quantise.

    It then multiplies what `pack_matrix` makes of each of their matrices.
    """
    if backend.kernels not in registry.COMPUTE_CAPABILITIES:
        return False
    ids = jnp.zeros((1, 1), jnp.int32)
    u = jnp.zeros((1, experts.w2.payload.shape[-2]), dtype)
    arrays = (u, ids, ids.astype(jnp.float32), jnp.ones(1, jnp.bool_), experts, 0)
    return select(OP, IMPLS, backend, *arrays, limit=0.0, quantizes=True).name == backend.kernels


def shared_expert(
    u: Float[Array, "T D"], expert: Experts, *, limit: float, quantizes: bool, backend: Backend
) -> Float[Array, "T D"]:
    """Output of one expert on all rows, for inputs in the form that experts read."""
    given = {"limit": limit, "quantizes": quantizes}
    return select(SHARED_OP, SHARED_IMPLS, backend, u, expert, **given).fn(u, expert, **given)
