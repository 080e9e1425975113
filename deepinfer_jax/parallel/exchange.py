"""Items answered by the devices that own what they ask for.

Items travel in rounds of one `all_to_all` there and one back, each with the same room for every peer: what a step of
ordinary routing needs is one round, and a device that everyone asks gets more of them. Nothing is ever dropped, and
no buffer has room for all items on one device. `ragged_all_to_all`, which XLA has for GPUs, sends no padding, but
waits for the host: 2,302 us there and back between two H200s where this form takes 204.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.ops.scatter import put_where
from deepinfer_jax.parallel.wire import from_words, to_words

HEADROOM = 2  # times a peer's share of the items if all peers were asked alike: the room of one round
LEAST_ROOM = 64  # items, if they are rows: fewer rounds count more than a small buffer

# From arrays of R items that arrived, and which of these rows are items, to arrays of R answers, each row by itself.
Answer = Callable[[Any, Bool[Array, " R"]], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The devices that a device exchanges items with, itself among them: those along some axes of the mesh."""

    axes: tuple[str, ...]
    count: int


def peers_along(axes: tuple[str, ...], config: RuntimeConfig) -> Peers:
    """The peers along these axes."""
    return Peers(axes=axes, count=config.num_pieces(axes))


def room_for_each(num_items: int, peers: Peers, least: int = LEAST_ROOM) -> int:
    """Of `num_items` of a device, how many go to one peer in a round; all of them where two peers exchange."""
    share = -(-num_items // peers.count)
    return min(num_items, max(least, HEADROOM * share))


def ask(
    items: Any,
    destinations: Int[Array, " M"],
    answer: Answer,
    peers: Peers,
    *,
    rows: Any = (),
    room: int | None = None,
) -> Any:
    """The answers to M items from the peers they are sent to; zeros for an item that goes nowhere.

    items: arrays with M leading rows. destinations: numbers of peers, -1 for an item that goes nowhere. rows: arrays
    with T leading rows, each of which is part of M / T items that follow each other and travels once to each peer that
    one of them is sent to; `answer` gets a pair of items and their rows where there are some. room: items for each
    peer in a round, at least 1; None: `room_for_each`. Bytes on the wire for each round and peer: so many items and
    answers, and as many rows but T at most, in words of 4 bytes and with one word more for each item. Rounds are as
    many as the fullest way from one peer to another needs, which one collective of 4 bytes finds out where one round
    may not do.
    """
    num_items = destinations.shape[0]
    room = room_for_each(num_items, peers) if room is None else min(room, num_items)
    own, shared = to_words(items), to_words(rows) if jax.tree.leaves(rows) else None
    nth, most = _nth_of_their_peer(destinations, peers.count)

    def ask_from(first: Int[Array, ""] | int) -> tuple[Any, Bool[Array, " M"]]:
        """The answers to the items first to first + room of each peer, and which items these are."""
        is_asked = (destinations >= 0) & (nth >= first) & (nth < first + room)
        place = jnp.maximum(destinations, 0) * room + jnp.clip(nth - first, 0, room - 1)
        row_at, parts = jnp.zeros(num_items, jnp.int32), []
        if shared is not None:
            its_rows, row_at = _rows_of_peers(shared, destinations, is_asked, peers.count, room=room)
            parts.append(its_rows)
        # The first word of a place is 0 where it holds no item, else one more than the place of the item's row.
        words = jnp.concatenate([lax.bitcast_convert_type(row_at + 1, jnp.uint32)[:, None], own], axis=1)
        blank = jnp.zeros((peers.count * room, words.shape[1]), jnp.uint32)
        parts.append(put_where(blank, (place,), words, is_asked).reshape(peers.count, room, -1))
        *its_rows, arrived = _exchange_together(parts, peers)
        marks = lax.bitcast_convert_type(arrived[..., 0], jnp.int32)
        found = from_words(arrived[..., 1:].reshape(peers.count * room, -1), items)
        if shared is not None:
            of_items = jnp.take_along_axis(its_rows[0], jnp.maximum(marks - 1, 0)[..., None], axis=1)
            found = found, from_words(of_items.reshape(peers.count * room, -1), rows)
        answers = answer(found, (marks > 0).reshape(-1))
        leaves, tree = jax.tree.flatten(answers)
        found = _exchange(leaves[0] if len(leaves) == 1 else to_words(answers), peers)[place]  # one travels as it is
        found = jnp.where(_like(is_asked, found), found, jnp.zeros((), found.dtype))
        return (tree.unflatten([found]) if len(leaves) == 1 else from_words(found, answers)), is_asked

    if room == num_items:
        return ask_from(0)[0]

    def ask_more(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        first, found = carry
        answers, is_asked = ask_from(first)
        return first + room, jax.tree.map(lambda old, new: jnp.where(_like(is_asked, new), new, old), found, answers)

    end = lax.pmax(most, peers.axes)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: ask_from(0)[0]))
    return lax.while_loop(lambda carry: carry[0] < end, ask_more, (jnp.int32(0), nothing))[1]


def _exchange(by_peer: Array, peers: Peers) -> Array:
    return lax.all_to_all(by_peer, peers.axes, split_axis=0, concat_axis=0, tiled=True)


def _exchange_together(parts: list[Array], peers: Peers) -> list[Array]:
    """What the peers have for this device, of several arrays [n, .., ..] in one collective."""
    arrived = _exchange(jnp.concatenate([part.reshape(peers.count, -1) for part in parts], axis=1), peers)
    ends = np.cumsum([part[0].size for part in parts])[:-1]
    return [got.reshape(part.shape) for got, part in zip(jnp.split(arrived, ends, axis=1), parts, strict=True)]


def _rows_of_peers(
    rows: UInt32[Array, "T W"], destinations: Int[Array, " M"], is_asked: Bool[Array, " M"], count: int, *, room: int
) -> tuple[UInt32[Array, "n R W"], Int[Array, " M"]]:
    """The rows of the items that are asked, once for each peer, and where the row of each item is among its peer's."""
    num_rows = rows.shape[0]
    peer = jnp.arange(count, dtype=jnp.int32)[:, None]
    by_row = lambda a: a.reshape(1, num_rows, -1)  # noqa: E731
    is_wanted = jnp.any((by_row(destinations) == peer[..., None]) & by_row(is_asked), axis=2)  # [n, T]
    at = jnp.cumsum(is_wanted, axis=1, dtype=jnp.int32) - 1
    most = min(num_rows, room)
    row = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32), at.shape)
    wanted = put_where(jnp.zeros((count, most), jnp.int32), (peer, jnp.maximum(at, 0)), row, is_wanted)
    of_item = jnp.arange(destinations.shape[0], dtype=jnp.int32) // (destinations.shape[0] // num_rows)
    return rows[wanted], jnp.maximum(at[jnp.maximum(destinations, 0), of_item], 0)


def _like(is_row: Bool[Array, " M"], array: Array) -> Bool[Array, "M ..."]:
    """With as many axes as an array of M leading rows."""
    return is_row.reshape(-1, *[1] * (array.ndim - 1))


def _nth_of_their_peer(destinations: Int[Array, " M"], count: int) -> tuple[Int[Array, " M"], Int[Array, ""]]:
    """How many items before each go to the same peer, and the most that go to any."""
    is_there = destinations[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :]
    so_far = jnp.cumsum(is_there, axis=0, dtype=jnp.int32)
    nth = jnp.sum(jnp.where(is_there, so_far, 0), axis=1, dtype=jnp.int32) - 1
    return nth, jnp.max(so_far[-1], initial=0)
