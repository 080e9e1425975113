"""Sums and gathers between devices by HCCL, for use inside `shard_map` with one JAX CPU device for each NPU.

All devices of a group must reach its collectives in the same order. XLA keeps an order only where data flows, so each
call after the first names the result of the one before in `after`. HCCL chooses the order in which a sum is taken.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax.kernels.ascend import DeviceGroups
from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, like, result

PSUM = "deepinfer.cann.psum.v2"
ALL_GATHER = "deepinfer.cann.all_gather.v2"
REDUCE_SCATTER = "deepinfer.cann.reduce_scatter.v2"


def psum(x: Operand, groups: DeviceGroups, *, after: Sequence[Operand] = ()) -> Operand:
    """The sum of x over the devices of this device's group. Wire: up to 2 * bytes(x) out of each device."""
    return _collective(PSUM, x, like(x), groups, after)


def all_gather(x: Operand, groups: DeviceGroups, *, after: Sequence[Operand] = ()) -> Operand:
    """x [N, ...] of all devices of the group, [size * N, ...] by rank. Wire: (size - 1) * bytes(x) a device."""
    shape = (x.shape[0] * groups.size, *x.shape[1:])
    return _collective(ALL_GATHER, x, result(shape, x.dtype), groups, after)


def reduce_scatter(x: Operand, groups: DeviceGroups, *, after: Sequence[Operand] = ()) -> Operand:
    """Part `rank` of the sum of x [N, ...], [N / size, ...]. Wire: up to bytes(x) out of each device."""
    shape = (x.shape[0] // groups.size, *x.shape[1:])
    return _collective(REDUCE_SCATTER, x, result(shape, x.dtype), groups, after)


def _collective(target: str, x: Operand, made: Any, groups: DeviceGroups, after: Sequence[Operand]) -> Operand:
    attributes = {"family": np.int64(groups.family), "size": np.int64(groups.size)}
    return ascend_call(target, (x,), [made], after=after, **attributes)[0]
