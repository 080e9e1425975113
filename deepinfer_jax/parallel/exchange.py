"""Items sent to the devices that own what they ask for, and the answers sent back to where they came from.

Two forms with the same results. Padded: room for every item on every device, one `all_to_all` each way; runs
everywhere. Ragged: only what is there travels (`ragged_all_to_all`), which XLA has for GPUs. No item is ever dropped:
both forms have room for the worst case, all items on one device.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.pytree import pytree_dataclass, static_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The devices that a device exchanges items with, itself among them: those along some axes of the mesh."""

    axes: tuple[str, ...]
    count: int
    is_ragged: bool  # the form


def peers_along(axes: tuple[str, ...], config: RuntimeConfig) -> Peers:
    """The peers along these axes, in the form that the target has."""
    return Peers(axes=axes, count=config.num_pieces(axes), is_ragged=config.target != "cpu")


@pytree_dataclass
class Way:
    """Where the M items of this device went, for the way back."""

    destinations: Int[Array, " M"]  # -1: nowhere
    ragged: "_Ragged | None"
    peers: "Peers" = static_field()


@pytree_dataclass
class _Ragged:
    """Sizes and offsets by peer, and the items' order on the wire."""

    order: Int[Array, " M"]
    send_offsets: Int[Array, " n"]
    send_sizes: Int[Array, " n"]
    receive_offsets: Int[Array, " n"]
    receive_sizes: Int[Array, " n"]
    remote_receive_offsets: Int[Array, " n"]  # where each peer puts this device's items
    remote_send_offsets: Int[Array, " n"]  # where each peer has the items that it sent here


def send(tree: Any, destinations: Int[Array, " M"], peers: Peers) -> tuple[Any, Bool[Array, " R"], Way]:
    """The items that arrive here, R = peers.count * M places of them, which places hold one, and the way back.

    destinations: -1 for an item that goes nowhere. Bytes on the wire for each item: its own where ragged; padded,
    peers.count - 1 times its own, sent or not.
    """
    if peers.is_ragged:
        return _send_ragged(tree, destinations, peers)
    is_here = jnp.arange(peers.count, dtype=jnp.int32)[:, None] == destinations[None, :]

    def bring(x: Array) -> Array:
        wide = is_here.reshape(*is_here.shape, *[1] * (x.ndim - 1))
        return _flat(_exchange(jnp.where(wide, x[None], jnp.zeros((), x.dtype)), peers))

    is_item = bring(jnp.ones(destinations.shape, jnp.uint8)) != 0
    return jax.tree.map(bring, tree), is_item, Way(destinations=destinations, ragged=None, peers=peers)


def send_back(tree: Any, way: Way) -> Any:
    """For each of this device's items the answer made where it arrived; zeros for those that went nowhere.

    tree: answers in the places of the items that `send` gave. Bytes on the wire: as for `send`.
    """
    if way.ragged is not None:
        return _send_back_ragged(tree, way, way.ragged)
    at = jnp.maximum(way.destinations, 0)
    index = jnp.arange(at.shape[0], dtype=jnp.int32)

    def bring(answers: Array) -> Array:
        by_peer = _exchange(answers.reshape(way.peers.count, -1, *answers.shape[1:]), way.peers)
        went = (way.destinations >= 0).reshape(-1, *[1] * (answers.ndim - 1))
        return jnp.where(went, by_peer[at, index], jnp.zeros((), answers.dtype))

    return jax.tree.map(bring, tree)


def _exchange(by_peer: Array, peers: Peers) -> Array:
    return lax.all_to_all(by_peer, peers.axes, split_axis=0, concat_axis=0, tiled=True)


def _send_ragged(tree: Any, destinations: Int[Array, " M"], peers: Peers) -> tuple[Any, Bool[Array, " R"], Way]:
    keys = jnp.where(destinations >= 0, destinations, peers.count)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    numbers = jnp.arange(peers.count, dtype=jnp.int32)
    sizes = jnp.sum(keys[None, :] == numbers[:, None], axis=1, dtype=jnp.int32)
    receive_sizes = _exchange(sizes, peers)
    offsets, receive_offsets = _starts(sizes), _starts(receive_sizes)
    ragged = _Ragged(
        order=order,
        send_offsets=offsets,
        send_sizes=sizes,
        receive_offsets=receive_offsets,
        receive_sizes=receive_sizes,
        remote_receive_offsets=_exchange(receive_offsets, peers),
        remote_send_offsets=_exchange(offsets, peers),
    )
    room = peers.count * destinations.shape[0]

    def bring(x: Array) -> Array:
        return lax.ragged_all_to_all(
            x[order],
            jnp.zeros((room, *x.shape[1:]), x.dtype),
            ragged.send_offsets,
            ragged.send_sizes,
            ragged.remote_receive_offsets,
            ragged.receive_sizes,
            axis_name=peers.axes,
        )

    is_item = jnp.arange(room, dtype=jnp.int32) < jnp.sum(receive_sizes)
    way = Way(destinations=destinations, ragged=ragged, peers=peers)
    return jax.tree.map(bring, tree), is_item, way


def _send_back_ragged(tree: Any, way: Way, ragged: _Ragged) -> Any:
    count = way.destinations.shape[0]

    def bring(answers: Array) -> Array:
        found = lax.ragged_all_to_all(
            answers,
            jnp.zeros((count, *answers.shape[1:]), answers.dtype),
            ragged.receive_offsets,
            ragged.receive_sizes,
            ragged.remote_send_offsets,
            ragged.send_sizes,
            axis_name=way.peers.axes,
        )
        return jnp.zeros_like(found).at[ragged.order].set(found, unique_indices=True)

    return jax.tree.map(bring, tree)


def _starts(sizes: Int[Array, " n"]) -> Int[Array, " n"]:
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes


def _flat(by_peer: Array) -> Array:
    return by_peer.reshape(-1, *by_peer.shape[2:])
