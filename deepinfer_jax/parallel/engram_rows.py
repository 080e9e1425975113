"""Look-ups in an Engram table whose rows lie on all devices of the mesh, or in their hosts' memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.host_rows import api as host_rows
from deepinfer_jax.ops import paged
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.parallel.exchange import ask, peers_along


def look_up(table: ScaledArray, wanted: Int[Array, "T N"], *, config: RuntimeConfig) -> ScaledArray:
    """The packed rows [T, N, W] of a table; a negative row number gives zeros.

    table: this device's rows of the whole table, the first of which has the number of its device times their count.
    Bytes on the wire for each wanted row: its number (4 bytes) there, its packed bytes back (`exchange`). A table in
    host memory sends the same bytes over the bus as well, for the rows that this device was asked for.
    """
    peers = peers_along(config.engram_axes, config)
    if peers.count == 1:
        return _take_rows(table, wanted, config=config)
    num_local, flat = table.payload.shape[0], wanted.reshape(-1)

    def rows_of(numbers: Int[Array, " R"], is_item: Bool[Array, " R"]) -> ScaledArray:
        first = lax.axis_index(peers.axes).astype(jnp.int32) * num_local
        return _take_rows(table, jnp.where(is_item, numbers - first, -1), config=config)

    found = ask(flat, jnp.where(flat >= 0, flat // num_local, -1), rows_of, peers)
    return jax.tree.map(lambda a: a.reshape(*wanted.shape, *a.shape[1:]), found)


def _take_rows(table: ScaledArray, numbers: Int[Array, "*N"], *, config: RuntimeConfig) -> ScaledArray:
    """Rows of this device's part of the table; a negative number gives zeros."""
    if not config.engram_on_host:
        return paged.take_rows(table, numbers)

    return jax.tree.map(lambda array: host_rows.take_rows(array, numbers, backend=config.backend), table)
