"""Experts spread over Ascend devices: each computes its own for the rows of all, HCCL carries rows and outputs.

Not dispatch and combine (aclnnMoeDistributeDispatch), which not every chip has: rows are gathered whole.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.kernels.ascend import DeviceGroups
from deepinfer_jax.kernels.ascend_call import on_host
from deepinfer_jax.kernels.collectives import cann as collectives
from deepinfer_jax.kernels.experts.cann import PackedExperts, routed_experts


def experts_of_all(
    u: Float[Array, "T D"],
    expert_ids: Int[Array, "T A"],
    shares: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    experts: PackedExperts,
    layer: int | Int[Array, ""],
    *,
    groups: DeviceGroups,
    rank: Int[Array, ""],
    num_local: int,
    limit: float,
) -> Float[Array, "T A D"]:
    """Output of every chosen expert for this device's rows, with the bits of one device that has all experts.

    Inside `shard_map`, equally many rows on each device. experts: the num_local of this device, those of rank r being
    r * num_local and on. Wire, out of each device: (size - 1) * (2 D + 8 A + 4) bytes a row there, and up to 2 A D
    bytes a row of all devices back. An output is added to zeros only, which rounds nothing.
    """
    gathered = []
    for part in (u, expert_ids, shares, is_live.astype(jnp.int32)):
        last = tuple(gathered[-1:])
        gathered.append(on_host(collectives.all_gather(part, groups, after=last)))
    rows, ids, all_shares, all_live = gathered
    local = ids - rank * num_local
    is_here = (local >= 0) & (local < num_local)
    outputs = routed_experts(
        rows,
        jnp.where(is_here, local, num_local),  # an id behind the last group: zeros
        all_shares,
        all_live > 0,
        experts,
        layer,
        num_experts=num_local,
        limit=limit,
    )
    return on_host(collectives.reduce_scatter(outputs, groups, after=(all_live,)))
