"""Rows of arrays that lie in the memory of the host."""

import jax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Int


def take_on_host(array: Array, *index: Int[Array, "..."]) -> Array:
    """`array[index]` of an array in host memory, gathered by the host and brought to the device; inside `jax.jit` only.

    The device does not read the array: only what was asked for moves.
    """

    def take(array: Array, *index: Array) -> Array:
        return array[index]

    gather = compute_on(take, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return jax.device_put(gather(array, *jax.device_put(index, jax.memory.Space.Host)), jax.memory.Space.Device)
