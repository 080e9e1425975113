"""The choice of keys by index score with aclnnQuantLightningIndexerV2; `ops.indexer` has the references.

CANN scores all keys that it is given: candidate blocks are gathered first, and places are among the gathered keys. Its
intermediate rounding is not documented, so scores near a border may be chosen otherwise than by the reference.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, result
from deepinfer_jax.ops.quant import INDEX_GROUP, ScaledArray

TARGET = "deepinfer.cann.index_top_k.v1"


def pack_rows(rows: ScaledArray) -> tuple[Array, Array]:
    """Rows [B, N, 128] of `quantize_index` as the operator takes them: codes [B, N, 64] and scales [B, N, 2, 2]."""
    if rows.form != "fp4" or rows.scale is None or rows.block != (1, INDEX_GROUP):
        raise ValueError(
            f"the rows have form {rows.form} in blocks of {rows.block}; CANN takes fp4 in blocks of (1, 32)"
        )
    return rows.payload, rows.scale.reshape(*rows.scale.shape[:-1], -1, 2)


def best_keys(
    queries: tuple[Operand, Operand],
    weights: Operand,
    keys: tuple[Operand, Operand],
    key_len: Operand,
    *,
    count: int,
) -> tuple[Operand, Operand]:
    """Places [B, count] (int32, -1 where there are no more keys) and scores [B, count] (bfloat16, -inf there).

    queries of I heads and keys come from `pack_rows`, weights [B, I] are float32, key_len [B] (int32) says how many
    leading keys count. The order of the places is CANN's own.
    """
    shape = (weights.shape[0], count)
    results = [result(shape, jnp.int32), result(shape, jnp.bfloat16)]
    places, scores = ascend_call(TARGET, (*queries, weights, *keys, key_len), results, k=np.int64(count))
    return places, scores
