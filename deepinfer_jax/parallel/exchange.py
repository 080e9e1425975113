"""Items sent to the devices that own what they ask for, and the answers sent back to where they came from.

Two forms with the same results. Padded: room for every item on every device, one `all_to_all` each way; runs
everywhere. Ragged: only what is there travels (`ragged_all_to_all`), which XLA has for GPUs. No item is ever dropped:
both forms have room for the worst case, all items on one device.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt8

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.parallel.wire import from_bytes, to_bytes
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

    destinations: -1 for an item that goes nowhere. One collective (ragged: four small ones before it). Bytes on the
    wire for each item: its own and one; padded, peers.count - 1 times that, sent or not.
    """
    marked = (tree, jnp.ones(destinations.shape, jnp.uint8))
    items = to_bytes(marked)
    if peers.is_ragged:
        ragged = _agree(destinations, peers)
        arrived = _ragged(items[ragged.order], peers.count * items.shape[0], ragged, peers, is_back=False)
    else:
        ragged = None
        is_here = jnp.arange(peers.count, dtype=jnp.int32)[:, None] == destinations[None, :]
        by_peer = jnp.where(is_here[:, :, None], items[None], jnp.zeros((), jnp.uint8))
        arrived = _exchange(by_peer, peers).reshape(-1, items.shape[1])
    tree, marks = from_bytes(arrived, marked)
    return tree, marks != 0, Way(destinations=destinations, ragged=ragged, peers=peers)


def send_back(tree: Any, way: Way) -> Any:
    """For each of this device's items the answer made where it arrived; zeros for those that went nowhere.

    tree: answers in the places of the items that `send` gave. One collective; bytes on the wire as for `send`.
    """
    answers, count = to_bytes(tree), way.destinations.shape[0]
    if way.ragged is not None:
        found = _ragged(answers, count, way.ragged, way.peers, is_back=True)
        found = jnp.zeros_like(found).at[way.ragged.order].set(found, unique_indices=True)
    else:
        by_peer = _exchange(answers.reshape(way.peers.count, count, -1), way.peers)
        found = by_peer[jnp.maximum(way.destinations, 0), jnp.arange(count, dtype=jnp.int32)]
    went = (way.destinations >= 0)[:, None]
    return from_bytes(jnp.where(went, found, jnp.zeros((), jnp.uint8)), tree)


def _exchange(by_peer: Array, peers: Peers) -> Array:
    return lax.all_to_all(by_peer, peers.axes, split_axis=0, concat_axis=0, tiled=True)


def _agree(destinations: Int[Array, " M"], peers: Peers) -> _Ragged:
    """Who sends how much to whom, and where it lies."""
    keys = jnp.where(destinations >= 0, destinations, peers.count)
    numbers = jnp.arange(peers.count, dtype=jnp.int32)
    sizes = jnp.sum(keys[None, :] == numbers[:, None], axis=1, dtype=jnp.int32)
    receive_sizes = _exchange(sizes, peers)
    offsets, receive_offsets = _starts(sizes), _starts(receive_sizes)
    return _Ragged(
        order=jnp.argsort(keys, stable=True).astype(jnp.int32),
        send_offsets=offsets,
        send_sizes=sizes,
        receive_offsets=receive_offsets,
        receive_sizes=receive_sizes,
        remote_receive_offsets=_exchange(receive_offsets, peers),
        remote_send_offsets=_exchange(offsets, peers),
    )


def _ragged(
    rows: UInt8[Array, "M B"], room: int, ragged: _Ragged, peers: Peers, *, is_back: bool
) -> UInt8[Array, "room B"]:
    """The rows for this device, behind each other in the order of the peers; zeros behind them."""
    blank = jnp.zeros((room, rows.shape[1]), rows.dtype)
    there = (ragged.send_offsets, ragged.send_sizes, ragged.remote_receive_offsets, ragged.receive_sizes)
    back = (ragged.receive_offsets, ragged.receive_sizes, ragged.remote_send_offsets, ragged.send_sizes)
    return lax.ragged_all_to_all(rows, blank, *(back if is_back else there), axis_name=peers.axes)


def _starts(sizes: Int[Array, " n"]) -> Int[Array, " n"]:
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes
