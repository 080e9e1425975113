"""The choice of experts for each row, by whatever the backend has for it."""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.ascend import DeviceArray
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.linear import mosaic_sm90, mosaic_sm100
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.kernels.router import cann
from deepinfer_jax.ops import moe

OP = "router"
# Shows a value under a name, and gives what is to be used in its place.
Note = Callable[[str, Array], Array]
Gate = Float[Array, "E D"] | DeviceArray  # float32 on a device, as `engine/ascend.py` puts it there


def _reference(
    u: Float[Array, "T D"],
    gate: Float[Array, "E D"],
    bias: Float32[Array, "*T E"],
    *,
    count: int,
    scaling: float,
    note: Note,
    needs_scores: bool,
) -> tuple[Int[Array, "T A"], Float32[Array, "T A"]]:
    del needs_scores
    return _choose(moe.router_scores(u, gate), bias, count=count, scaling=scaling, note=note)


def _by_kernel(
    module: Any,
    u: Float[Array, "T D"],
    gate: Float[Array, "E D"],
    bias: Float32[Array, "*T E"],
    *,
    count: int,
    scaling: float,
    note: Note,
    needs_scores: bool,
) -> tuple[Int[Array, "T A"], Float32[Array, "T A"]]:
    """The reference with a product of its own: of bfloat16 operands, which are exact, and float32 sums."""
    del needs_scores
    logits = shared_call(module.linear_bf16)(u, gate)
    return _choose(moe.scores_of(logits), bias, count=count, scaling=scaling, note=note)


def _refuses_sm90(u: Array, gate: Array, *_: Any, **__: Any) -> str | None:
    return mosaic_sm90.refuses_grouped(u, gate)


def _refuses_sm100(u: Array, gate: Array, *_: Any, **__: Any) -> str | None:
    return mosaic_sm100.refuses_grouped(u, gate)


def _choose(
    scores: Float32[Array, "T E"], bias: Float32[Array, "*T E"], *, count: int, scaling: float, note: Note
) -> tuple[Int[Array, "T A"], Float32[Array, "T A"]]:
    scores = note("router_scores", scores)
    ids = note("router_ids", moe.choose_experts(scores, bias, count=count))
    return ids, note("router_weights", moe.expert_weights(scores, ids, scaling=scaling))


IMPLS = (
    Impl(name="cann", fn=cann.route, targets=(ASCEND,), refuses=cann.refuses),
    registry.mosaic_sm90(functools.partial(_by_kernel, mosaic_sm90), _refuses_sm90),
    registry.mosaic_sm100(functools.partial(_by_kernel, mosaic_sm100), _refuses_sm100),
    Impl(name=REFERENCE, fn=_reference),
)


def route(
    u: Float[Array, "T D"],
    gate: Gate,
    bias: Float32[Array, "*T E"],
    *,
    count: int,
    scaling: float,
    note: Note,
    needs_scores: bool,
    backend: Backend,
) -> tuple[Int[Array, "T A"], Float32[Array, "T A"]]:
    """Ids of the `count` experts of each row, best first, and their weights, which sum to `scaling`.

    note: is shown "router_ids", "router_weights" and, where the implementation has them, "router_scores" of all
    experts. needs_scores: somebody looks at the scores, or puts other ids or scores in the place of the computed ones.
    """
    given = {"count": count, "scaling": scaling, "note": note, "needs_scores": needs_scores}
    return select(OP, IMPLS, backend, u, gate, bias, **given).fn(u, gate, bias, **given)
