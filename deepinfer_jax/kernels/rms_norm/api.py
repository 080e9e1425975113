"""The root-mean-square norm, by whatever the backend has for it."""

from jaxtyping import Array, Float

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.kernels.rms_norm import cann
from deepinfer_jax.ops import norm

OP = "rms_norm"
IMPLS = (
    Impl(name="cann", fn=cann.rms_norm, targets=(ASCEND,), refuses=cann.refuses),
    Impl(name=REFERENCE, fn=norm.rms_norm),
)


def rms_norm(
    x: Float[Array, "*T D"], weight: Float[Array, " D"], *, eps: float, backend: Backend
) -> Float[Array, "*T D"]:
    """See `ops.norm.rms_norm`."""
    return select(OP, IMPLS, backend, x, weight, eps=eps).fn(x, weight, eps=eps)
