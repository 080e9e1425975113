"""The experts' activation with quantisation by aclnnSwigluGroupQuant; `ops.moe.swiglu` is the reference."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, result
from deepinfer_jax.ops.quant import FP8_GROUP

TARGET = "deepinfer.cann.swiglu_mxfp8.v2"
WIDTHS = 256  # what the width behind the activation is a multiple of


def swiglu(gate_up: Operand, weight: Operand, *, limit: float) -> tuple[Operand, Operand, Operand]:
    """silu(min(gate, limit)) * clip(up, +-limit) * weight of gate_up [T, 2 D] (bfloat16) and weight [T] (float32).

    Returns E4M3 bytes [T, D], E8M0 bytes [T, D / 64, 2], and the value before quantisation [T, D].
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    shapes = [
        result((rows, width), jnp.uint8),
        result((rows, width // (2 * FP8_GROUP), 2), jnp.uint8),
        result((rows, width), gate_up.dtype),
    ]
    codes, scale, value = ascend_call(TARGET, (gate_up, weight), shapes, limit=np.float64(limit))
    return codes, scale, value
