"""Products with plain and with block-scaled FP8 weights by aclnnMatmul, aclnnDynamicMxQuant and aclnnQuantMatmulV5.

`ops.linear` and `ops.quant` are the references. CANN takes one E8M0 scale for each row of a weight and 32 channels, in
pairs; the checkpoint's scale covers 32 rows as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, on_host, result
from deepinfer_jax.ops.quant import FP8_GROUP, ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

LINEAR = "deepinfer.cann.linear.v2"
LINEAR_MXFP8 = "deepinfer.cann.linear_mxfp8.v2"
QUANTIZE_MXFP8 = "deepinfer.cann.quantize_mxfp8.v2"
# CANN's scaleAlg that we take for the model's rule, the power of two at or above amax / 448. Not confirmed on hardware.
CEILING_SCALES = np.int64(1)
COLUMNS = 2 * FP8_GROUP  # what the columns of a packed weight are a multiple of: scales lie in pairs


@pytree_dataclass
class MxWeight:
    """A weight [N, K] as CANN takes it: codes uint8 [N, K] (E4M3), scale uint8 [N, K / 64, 2] (E8M0).

    Weights of several layers have a leading axis, which a device array has in its words only.
    """

    codes: Operand
    scale: Operand


def pack_weight(w: ScaledArray) -> MxWeight:
    """The checkpoint's FP8 weight [N, K] with one scale for each row; ValueError for another form or K."""
    if w.form != "fp8" or w.scale is None or w.block[1] != FP8_GROUP:
        raise ValueError(
            f"the weight has form {w.form} in blocks of {w.block}; CANN takes fp8 in blocks of 32 channels"
        )
    rows, cols = w.payload.shape
    if cols % COLUMNS:
        raise ValueError(f"K={cols} is not a multiple of {COLUMNS}; CANN's scales lie in pairs")
    scale = jnp.repeat(w.scale, w.block[0], axis=0)[:rows]
    return MxWeight(codes=w.payload, scale=scale.reshape(rows, cols // COLUMNS, 2))


def linear(x: Operand, w: Operand | MxWeight) -> Operand:
    """x [T, K] @ w.T in x.dtype. With a packed weight x is bfloat16 and is quantised on the device first."""
    if isinstance(w, MxWeight):
        shape = result((x.shape[0], w.codes.shape[0]), jnp.bfloat16)
        return ascend_call(LINEAR_MXFP8, (x, w.codes, w.scale), [shape], scale_rule=CEILING_SCALES)[0]
    return ascend_call(LINEAR, (x, w), [result((x.shape[0], w.shape[0]), x.dtype)])[0]


def refuses(x: Operand, w: Operand | MxWeight | ScaledArray) -> str | None:
    """Why the operators cannot take these arguments, None if they can."""
    if isinstance(w, ScaledArray):
        return "the weight is in the checkpoint's form; `pack_weight` makes CANN's"
    if isinstance(w, MxWeight):
        return None if x.dtype == jnp.bfloat16 else f"x is {x.dtype}; rows for packed weights are bfloat16 (numerics q)"
    return None if x.dtype == w.dtype else f"x is {x.dtype} and w is {w.dtype}; both must be the same"


def grouped_linear(x: Float[Array, "T O M"], w: Operand) -> Float[Array, "T O R"]:
    """One product for each of the O output groups of w [O, R, M], plain and in x.dtype."""
    groups = [jax.tree.map(lambda a, g=g: a[g], w) for g in range(x.shape[1])]
    return jnp.stack([on_host(linear(x[:, g], own)) for g, own in enumerate(groups)], axis=1)


def refuses_groups(x: Array, w: Operand | ScaledArray) -> str | None:
    """Why the operator cannot take these arguments, None if it can."""
    if isinstance(w, ScaledArray):
        return "the weight is packed; it is taken as plain values in groups"
    return None if x.dtype == w.dtype else f"x is {x.dtype} and w is {w.dtype}; both must be the same"


def quantize_fp8(x: Operand) -> tuple[Operand, Operand]:
    """bfloat16 x [T, K] as E4M3 bytes [T, K] and E8M0 bytes [T, K / 64, 2]."""
    rows, cols = x.shape
    shapes = [result((rows, cols), jnp.uint8), result((rows, cols // COLUMNS, 2), jnp.uint8)]
    codes, scale = ascend_call(QUANTIZE_MXFP8, (x,), shapes, scale_rule=CEILING_SCALES)
    return codes, scale


def unpack_rows(codes: Array, scale: Array) -> ScaledArray:
    """Host arrays of `quantize_fp8` in the project's packed form."""
    return ScaledArray(payload=codes, scale=scale.reshape(scale.shape[0], -1), form="fp8", block=(1, FP8_GROUP))
