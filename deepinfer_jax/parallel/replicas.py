"""Expert weights moved between devices while an engine runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.parallel.exchange import peers_along, send, send_back


def move_layer(experts: Any, layer: Int[Array, ""], sources: Int[Array, " P"], *, config: RuntimeConfig) -> Any:
    """This device's experts with new ones in some places of one layer.

    experts: arrays [layers, places of this device, ...]. sources: for each place of all devices the place that its new
    expert is in now, -1 where it stays; all are read before any is written. Bytes on the wire: those of the experts
    that come from another device (`exchange`), one array at a time.
    """
    peers = peers_along(config.expert_axes, config)
    num_local = jax.tree.leaves(experts)[0].shape[1]
    first = lax.axis_index(peers.axes).astype(jnp.int32) * num_local
    own = lax.dynamic_slice_in_dim(sources, first, num_local)
    wanted, _, way = send(own % num_local, jnp.where(own >= 0, own // num_local, -1), peers)

    def move(array: Array) -> Array:
        old = array[layer]
        found = send_back(old[wanted], way)
        moves = (own >= 0).reshape(-1, *[1] * (old.ndim - 1))
        return array.at[layer].set(jnp.where(moves, found, old))

    return jax.tree.map(move, experts)
