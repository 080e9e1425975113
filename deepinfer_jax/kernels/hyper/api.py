"""Doubly stochastic mixes of the residual streams, by whatever the backend has for them."""

from jaxtyping import Array, Float32

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.hyper import mosaic_sm90
from deepinfer_jax.kernels.registry import ASCEND, NVIDIA, REFERENCE, TRAINING, Impl, select
from deepinfer_jax.ops import hyper

OP = "hyper"


def _sm90(logits: Float32[Array, "T C C"], *, iterations: int, eps: float) -> Float32[Array, "T C C"]:
    return shared_call(mosaic_sm90.sinkhorn, iterations=iterations, eps=eps)(logits)


IMPLS = (
    registry.mosaic_sm90(_sm90, mosaic_sm90.refuses),
    # The host computes this part of a step for an Ascend device, which its caller has agreed to (`ascend_coverage`).
    Impl(name=REFERENCE, fn=hyper.sinkhorn, targets=("cpu", NVIDIA, ASCEND, TRAINING)),
)


def sinkhorn(
    logits: Float32[Array, "T C C"], *, iterations: int, eps: float, backend: Backend
) -> Float32[Array, "T C C"]:
    """See `ops.hyper.sinkhorn`."""
    given = {"iterations": iterations, "eps": eps}
    return select(OP, IMPLS, backend, logits, **given).fn(logits, **given)
