"""Products of rows with plain or packed weights, by whatever the backend has for them."""

from jaxtyping import Array, Float

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.ascend import DeviceArray
from deepinfer_jax.kernels.linear import cann
from deepinfer_jax.kernels.linear.cann import MxWeight
from deepinfer_jax.kernels.registry import ASCEND, REFERENCE, Impl, select
from deepinfer_jax.ops import linear as ops
from deepinfer_jax.ops.quant import ScaledArray

OP, GROUPED_OP = "linear", "grouped_linear"
IMPLS = (
    Impl(name="cann", fn=cann.linear, targets=(ASCEND,), refuses=cann.refuses),
    Impl(name=REFERENCE, fn=ops.linear),
)
GROUPED_IMPLS = (
    Impl(name="cann", fn=cann.grouped_linear, targets=(ASCEND,), refuses=cann.refuses_groups),
    Impl(name=REFERENCE, fn=ops.grouped_linear),
)
# MxWeight and DeviceArray: as `engine/ascend.py` packs weights for CANN's operators.
Weight = ScaledArray | Array | MxWeight | DeviceArray


def linear(x: Float[Array, "T K"], w: Weight, *, backend: Backend) -> Float[Array, "T N"]:
    """See `ops.linear.linear`; x has been through `fp8_roundtrip` where the numerics quantise activations."""
    return select(OP, IMPLS, backend, x, w).fn(x, w)


def grouped_linear(x: Float[Array, "T O M"], w: Weight, *, backend: Backend) -> Float[Array, "T O R"]:
    """See `ops.linear.grouped_linear`; for CANN w is plain values in groups, [O, R, M]."""
    return select(GROUPED_OP, GROUPED_IMPLS, backend, x, w).fn(x, w)
