"""The root-mean-square norm by aclnnRmsNorm; `ops.norm` is its reference."""

import numpy as np

from deepinfer_jax.kernels.ascend_call import FLOATS, Operand, ascend_call, like

TARGET = "deepinfer.cann.rms_norm.v2"


def rms_norm(x: Operand, weight: Operand, *, eps: float) -> Operand:
    """The norm of x [..., D] over D with weight [D], in x.dtype; weight may be float32 beside a bfloat16 x."""
    return ascend_call(TARGET, (x, weight), [like(x)], eps=np.float64(eps))[0]


def refuses(x: Operand, weight: Operand, *, eps: float) -> str | None:
    """Why the operator cannot take these arguments, None if it can."""
    return None if x.dtype in FLOATS else f"x is {x.dtype}; the operator takes {' or '.join(map(str, FLOATS))}"
