"""The choice of experts by aclnnMoeGatingTopKV2; `ops.moe` has the references."""

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, result
from deepinfer_jax.ops.moe import ROUTER_EPS

TARGET = "deepinfer.cann.router.v1"


def choose_experts(logits: Operand, bias: Operand, *, count: int, scaling: float) -> tuple[Operand, Operand]:
    """Weights [T, A] (float32, summing to `scaling`) and ids [T, A] (int32, best first) of `count` experts a row.

    logits [T, E] and bias [E] are float32. CANN does not document which of two equal scores comes first.
    """
    shape = (logits.shape[0], count)
    results = [result(shape, jnp.float32), result(shape, jnp.int32)]
    weights, ids = ascend_call(
        TARGET,
        (logits, bias),
        results,
        k=np.int64(count),
        scaling=np.float64(scaling),
        eps=np.float64(ROUTER_EPS),
    )
    return weights, ids
