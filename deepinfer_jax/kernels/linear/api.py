"""Products of rows with plain or packed weights, by whatever the backend has for them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.ascend import DeviceArray
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.linear import cann, mosaic_sm90, mosaic_sm100, packed_sm90, packed_sm100
from deepinfer_jax.kernels.linear.cann import MxWeight
from deepinfer_jax.kernels.registry import ASCEND, NVIDIA, REFERENCE, TRAINING, Impl, select
from deepinfer_jax.ops import linear as ops
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip

OP, GROUPED_OP = "linear", "grouped_linear"
# From so many rows on XLA's bfloat16 product takes less time than a kernel that writes the sums of several runs of
# columns (docs/kernels.md). In batch-invariant mode no call has so many: they see one tile at a time.
MANY_ROWS = 1024
PackedLinear = packed_sm90.PackedLinear | packed_sm100.PackedLinear  # as `packed` leaves weights for a kernel


def linear_sm90(x: Float[Array, "T K"], w: ScaledArray | packed_sm90.PackedLinear) -> Float[Array, "T N"]:
    """`mosaic_sm90.linear`, lowered once for all layers; for many rows XLA's product of the same numbers."""
    if x.shape[0] < MANY_ROWS or not mosaic_sm90.is_split(w):
        return shared_call(mosaic_sm90.linear)(x, w)
    values = packed_sm90.unpack(w, x.dtype) if isinstance(w, packed_sm90.PackedLinear) else dequantize(w, x.dtype)
    return lax.dot_general(fp8_roundtrip(x), values, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def linear_sm100(x: Float[Array, "T K"], w: ScaledArray | packed_sm100.PackedLinear) -> Float[Array, "T N"]:
    """`mosaic_sm100.linear`, lowered once for all layers."""
    return shared_call(mosaic_sm100.linear)(x, w)


def _grouped(module: Any) -> tuple[Callable[..., Array], Callable[..., str | None]]:
    """Its `grouped_linear`, and why it refuses, for weights that may be packed.

    These become bfloat16 first: the kernels multiply exactly, and rows are not quantised here.
    """

    def multiply(x: Float[Array, "T O M"], w: ScaledArray | Array) -> Float[Array, "T O R"]:
        return shared_call(module.grouped_linear)(x, dequantize(w, x.dtype))

    def refuses(x: Array, w: ScaledArray | Array) -> str | None:
        return module.refuses_grouped(x, dequantize(w, x.dtype))  # of values that nobody reads

    return multiply, refuses


def _f32(module: Any) -> tuple[Callable[..., Array], Callable[..., str | None]]:
    """Its `linear_bf16` for each of several weights, so that these are not copied, and why it refuses."""

    def multiply(x: Float[Array, "T K"], weights: Sequence[Array]) -> Float32[Array, "T N"]:
        return jnp.concatenate([shared_call(module.linear_bf16)(x, w) for w in weights], axis=1)

    def refuses(x: Array, weights: Sequence[Array]) -> str | None:
        return next(filter(None, (module.refuses_grouped(x, w) for w in weights)), None)

    return multiply, refuses


def _linear_f32(x: Float[Array, "T K"], weights: Sequence[Array]) -> Float32[Array, "T N"]:
    return ops.linear_f32(x, jnp.concatenate(weights, axis=0))


IMPLS = (
    Impl(name="cann", fn=cann.linear, targets=(ASCEND,), refuses=cann.refuses),
    registry.mosaic_sm90(linear_sm90, mosaic_sm90.refuses),
    registry.mosaic_sm100(linear_sm100, mosaic_sm100.refuses),
    Impl(name=REFERENCE, fn=ops.linear),
)
GROUPED_IMPLS = (
    Impl(name="cann", fn=cann.grouped_linear, targets=(ASCEND,), refuses=cann.refuses_groups),
    registry.mosaic_sm90(*_grouped(mosaic_sm90)),
    registry.mosaic_sm100(*_grouped(mosaic_sm100)),
    Impl(name=REFERENCE, fn=ops.grouped_linear),
)
_F32_IMPLS = (
    registry.mosaic_sm90(*_f32(mosaic_sm90)),
    registry.mosaic_sm100(*_f32(mosaic_sm100)),
    # For an Ascend device the host computes it, as part of the compressor.
    Impl(name=REFERENCE, fn=_linear_f32, targets=("cpu", NVIDIA, ASCEND, TRAINING)),
)
# MxWeight and DeviceArray: as `engine/ascend.py` packs weights for CANN's operators. PackedLinear: as
# `model/kernel_weights.py` packs them for the kernels for NVIDIA GPUs.
Weight = ScaledArray | Array | MxWeight | DeviceArray | PackedLinear


def linear(x: Float[Array, "T K"], w: Weight, *, backend: Backend) -> Float[Array, "T N"]:
    """See `ops.linear.linear`; x has been through `fp8_roundtrip` where the numerics quantise activations.

    A kernel that multiplies packed weights quantises x itself; where the numerics do not quantise activations, w must
    be plain (`multiplies_packed`).
    """
    return select(OP, IMPLS, backend, x, w).fn(x, w)


def grouped_linear(x: Float[Array, "T O M"], w: Weight, *, backend: Backend) -> Float[Array, "T O R"]:
    """See `ops.linear.grouped_linear`; for CANN w is plain values in groups, [O, R, M]."""
    return select(GROUPED_OP, GROUPED_IMPLS, backend, x, w).fn(x, w)


def linear_f32(
    x: Float[Array, "T K"], weights: Sequence[Float[Array, "M K"]], *, backend: Backend
) -> Float32[Array, "T N"]:
    """See `ops.linear.linear_f32`; weights: plain ones, whose outputs lie side by side."""
    return select(OP, _F32_IMPLS, backend, x, weights).fn(x, weights)


def multiplies_packed(w: ScaledArray, *, dtype: Any, backend: Backend) -> bool:
    """Whether `linear` takes this weight as it is stored, for rows in `dtype` that it may quantise.

    Else it is to be unpacked once, in front of any loop over tiles of rows.
    """
    rows = jnp.zeros((1, w.payload.shape[-1]), dtype)
    found = (impl for impl in registry.asked(IMPLS, OP, backend) if impl.refuses(rows, w) is None)
    return next((impl.name for impl in found), REFERENCE) != REFERENCE


def packed(w: ScaledArray, *, dtype: Any, backend: Backend) -> ScaledArray | PackedLinear:
    """A weight, or a stack of one for each layer, in the form that no call of `linear` has to change, if there is one.

    See `multiplies_packed`; the payload stays where it is.
    """
    one = jax.tree.map(lambda a: a[0], w) if w.payload.ndim == 3 else w
    if not multiplies_packed(one, dtype=dtype, backend=backend):
        return w
    return packed_sm100.pack(w) if backend.kernels == registry.MOSAIC_SM100 else packed_sm90.pack(w)


def keeps_plain(groups: int, outputs: int, width: int, *, dtype: Any, backend: Backend) -> bool:
    """Whether a kernel multiplies weights [outputs, width] of so many groups that are plain values in `dtype`.

    Else `grouped_linear` unpacks them itself, if they are packed.
    """
    if backend.kernels not in registry.COMPUTE_CAPABILITIES:
        return False
    rows = jnp.zeros((1, groups, width), dtype)
    return select(GROUPED_OP, GROUPED_IMPLS, backend, rows, jnp.zeros((outputs, width), dtype)).name != REFERENCE
