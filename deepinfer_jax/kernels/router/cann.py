"""The choice of experts by aclnnMoeGatingTopKV2; `ops.moe` has the references."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, on_host, result
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.ops.moe import ROUTER_EPS

TARGET = "deepinfer.cann.router.v2"
MAX_EXPERTS = 2048


def choose_experts(logits: Operand, bias: Operand, *, count: int, scaling: float) -> tuple[Operand, Operand]:
    """Weights [T, A] (float32, summing to `scaling`) and ids [T, A] (int32, best first) of `count` experts a row.

    logits [T, E] and bias [E] are float32. CANN does not document which of two equal scores comes first.
    """
    shape = (logits.shape[0], count)
    results = [result(shape, jnp.float32), result(shape, jnp.int32)]
    weights, ids = ascend_call(
        TARGET,
        (logits, bias),
        results,
        k=np.int64(count),
        scaling=np.float64(scaling),
        eps=np.float64(ROUTER_EPS),
    )
    return weights, ids


def route(
    u: Float[Array, "T D"],
    gate: Operand,
    bias: Float32[Array, "one E"],
    *,
    count: int,
    scaling: float,
    note: Callable[[str, Array], Array],
    needs_scores: bool,
) -> tuple[Int[Array, "T A"], Float32[Array, "T A"]]:
    """Ids and weights of the experts of rows u; gate [E, D] is float32, or a plain array that is made so."""
    if isinstance(gate, Array):
        gate = gate.astype(jnp.float32)
    logits = linear.linear(u.astype(jnp.float32), gate)
    weights, ids = choose_experts(logits, bias[0], count=count, scaling=scaling)
    return note("router_ids", on_host(ids)), note("router_weights", on_host(weights))


def refuses(u: Array, gate: Operand, bias: Array, *, needs_scores: bool, **_: object) -> str | None:
    """Why the operator cannot take these arguments, None if it can."""
    if needs_scores:
        return "the operator gives no scores of all experts, and takes no ids; capture and force nothing of the router"
    if bias.shape[0] != 1:
        return f"there is a bias for each of {bias.shape[0]} rows (images); the operator takes one for all"
    return None
