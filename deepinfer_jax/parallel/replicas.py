"""Expert weights moved between devices while an engine runs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.parallel.exchange import ask, peers_along, room_for_each


def move_layer(experts: Any, layer: Int[Array, ""], sources: Int[Array, " P"], *, config: RuntimeConfig) -> Any:
    """This device's experts with new ones in some places of one layer.

    experts: arrays [layers, places of this device, ...]. sources: for each place of all devices the place that its new
    expert is in now, -1 where it stays; all are read before any is written. Bytes on the wire: those of twice as many
    experts as a device has, or more where many of them come from one other (`exchange`), one array at a time.
    """
    peers = peers_along(config.expert_axes, config)
    num_local = jax.tree.leaves(experts)[0].shape[1]
    first = lax.axis_index(peers.axes).astype(jnp.int32) * num_local
    own = lax.dynamic_slice_in_dim(sources, first, num_local)
    owners, room = jnp.where(own >= 0, own // num_local, -1), room_for_each(num_local, peers, least=1)

    def move(array: Array) -> Array:
        old = array[layer]

        def experts_of(numbers: Int[Array, " R"], is_item: Bool[Array, " R"]) -> Array:
            return old[jnp.where(is_item, numbers, 0)]

        found = ask(own % num_local, owners, experts_of, peers, room=room)
        moves = (own >= 0).reshape(-1, *[1] * (old.ndim - 1))
        return array.at[layer].set(jnp.where(moves, found, old))

    return jax.tree.map(move, experts)
