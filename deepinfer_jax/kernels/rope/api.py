"""Rotary positions, by whatever the backend has for them."""

import functools

from jaxtyping import Array, Float, Float32

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.kernels.rope import cann
from deepinfer_jax.ops import rope

OP = "rope"
IMPLS = (
    Impl(name="cann", fn=cann.rotate_rows, targets=(ASCEND,), refuses=cann.refuses),
    # XLA's own kernel, one where the reference's barrier makes three.
    *registry.mosaic(functools.partial(rope.rotate, may_contract=True), registry.accepts),
    Impl(name=REFERENCE, fn=rope.rotate),
)


def rotate(
    x: Float[Array, "T *H N"],
    cos: Float32[Array, "T F"],
    sin: Float32[Array, "T F"],
    *,
    inverse: bool = False,
    backend: Backend,
) -> Float[Array, "T *H N"]:
    """See `ops.rope.rotate`."""
    return select(OP, IMPLS, backend, x, cos, sin, inverse=inverse).fn(x, cos, sin, inverse=inverse)
