"""Attention over a window and selected keys by aclnnSparseFlashMla; `ops.attention.attend_blocks` is the reference.

CANN has no operator on this model's packed main KV rows: the keys come here gathered and in bfloat16.
"""

import numpy as np

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, like

TARGET = "deepinfer.cann.attention.v1"
HEAD_DIM = 512  # the only head width of the operator


def attend(
    q: Operand,
    window: Operand,
    window_len: Operand,
    sink: Operand,
    selected: tuple[Operand, Operand] | None = None,
) -> Operand:
    """One softmax of q [B, H, 512] over the leading window_len [B] rows of window [B, W, 512] and selected rows.

    selected is ([B, N, 512], lengths [B]). A key is also its value; sink [H] (float32) counts in the denominator only.
    q and keys are bfloat16, lengths int32; the score scale is 512 ** -0.5.
    """
    operands = (q, window, window_len, sink, *(selected or ()))
    return ascend_call(TARGET, operands, [like(q)], scale=np.float64(HEAD_DIM**-0.5))[0]
