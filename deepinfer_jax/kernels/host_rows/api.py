"""Rows of tables in the memory of the host, by whatever the backend has for them."""

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.host_rows import mosaic
from deepinfer_jax.kernels.registry import ASCEND, NVIDIA, REFERENCE, TRAINING, Impl, select
from deepinfer_jax.ops.host import take_on_host

OP = "host_rows"


def _by_kernel(table: UInt8[Array, "R W"], numbers: Int[Array, "*N"]) -> UInt8[Array, "*N W"]:
    return shared_call(mosaic.take_rows)(table, numbers.reshape(-1)).reshape(*numbers.shape, table.shape[1])


def _reference(table: UInt8[Array, "R W"], numbers: Int[Array, "*N"]) -> UInt8[Array, "*N W"]:
    rows = take_on_host(table, jnp.maximum(numbers, 0))
    return jnp.where((numbers >= 0)[..., None], rows, jnp.zeros((), rows.dtype))


IMPLS = (
    *registry.mosaic(_by_kernel, mosaic.refuses),
    # The tables are the host's, so that it reads them for an Ascend device too.
    Impl(name=REFERENCE, fn=_reference, targets=("cpu", NVIDIA, ASCEND, TRAINING)),
)


def take_rows(table: UInt8[Array, "R W"], numbers: Int[Array, "*N"], *, backend: Backend) -> UInt8[Array, "*N W"]:
    """Rows of a table in the memory of the host, zeros for a negative number; inside `jax.jit` only."""
    return select(OP, IMPLS, backend, table, numbers).fn(table, numbers)
