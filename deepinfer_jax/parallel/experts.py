"""Expert parallelism: every device owns some experts of each layer and computes the rows that chose them.

A (row, choice) pair travels to the owner of its expert and its output back; the row's device adds the outputs in the
order of the choices. Nothing is summed on the way, so the bits do not depend on the number of devices, nor on which
replica of an expert computed a pair.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.parallel.context import is_split
from deepinfer_jax.parallel.exchange import ask, peers_along
from deepinfer_jax.parallel.mesh import CP

# From rows in the form that travels, the local expert of each, its weight, and which rows are some, to their outputs.
Compute = Callable[
    [Any, Int[Array, " R"], Float32[Array, " R"], Bool[Array, " R"]],
    Float[Array, "R D"],
]


def on_owners(
    rows: Any,
    expert_ids: Int[Array, "T A"],
    weights: Float32[Array, "T A"],
    is_live: Bool[Array, " T"],
    compute: Compute,
    *,
    num_local: int,
    replicas: Int[Array, "E K"] | None,
    config: RuntimeConfig,
) -> Float[Array, "T A D"]:
    """The outputs of the chosen experts, each computed by `compute` on a device that has it.

    rows: arrays with T leading rows, in the form that is to travel. num_local: experts of each device. replicas: the
    places of each expert among all devices' experts, a list of K filled up by repetition; None: expert e has place e
    alone. Rows that are not live go nowhere and give zeros. Rows that all devices of a dp rank have are asked for
    once: each device takes a part of them, and the outputs are gathered over cp. Bytes on the wire for each row: its
    own to each device that has one of its experts; for each pair 12 bytes there and D activations back; and as much
    again for the room of a round (`exchange`).
    """
    asked = (rows, expert_ids, weights, is_live)
    is_shared = config.cp > 1 and CP in config.expert_axes and not is_split(config)
    if is_shared:
        asked = _part_of(asked, config.cp)
    rows, part_ids, part_weights, part_live = asked
    count, per_row = part_ids.shape
    pair = jnp.arange(count * per_row, dtype=jnp.int32)
    place = _places(part_ids.reshape(-1), pair, replicas, config.expert_axes)
    destinations = jnp.where(part_live[pair // per_row], place // num_local, -1)
    sent = (place % num_local, part_weights.reshape(-1))

    def computed(arrived: Any, is_item: Bool[Array, " R"]) -> Float[Array, "R D"]:
        (local, own_weights), own = arrived
        return compute(own, local, own_weights, is_item)

    outputs = ask(sent, destinations, computed, peers_along(config.expert_axes, config), rows=rows)
    outputs = outputs.reshape(count, per_row, outputs.shape[-1])
    if is_shared:
        outputs = lax.all_gather(outputs, CP, tiled=True)[: expert_ids.shape[0]]
    return outputs


def _places(
    expert_ids: Int[Array, " P"], pair: Int[Array, " P"], replicas: Int[Array, "E K"] | None, axes: tuple[str, ...]
) -> Int[Array, " P"]:
    """Which replica computes each pair: they take turns, each device beginning with another one."""
    if replicas is None:
        return expert_ids
    turn = (pair + lax.axis_index(axes).astype(jnp.int32)) % replicas.shape[1]
    return replicas[expert_ids, turn]


def _part_of(tree: Any, cp: int) -> Any:
    """This device's part of rows that all devices of its dp rank have, padded with rows of zeros (not live)."""

    def own(array: Array) -> Array:
        part = -(-array.shape[0] // cp)
        padded = jnp.pad(array, [(0, part * cp - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(CP) * part, part)

    return jax.tree.map(own, tree)
