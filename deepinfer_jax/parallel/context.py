"""Context parallelism: the rows of a step spread over the devices of one dp rank (spec: interface 9).

Rows go to devices in blocks of one row tile, in mirror order: 0, 1, .., cp - 1, cp - 1, .., 1, 0 and so on. A row's
attention costs in proportion to its position, so each round trip of 2 cp blocks gives every device the same work, for
every request and whatever the step holds. All caches are replicated over cp: the new rows of a layer are gathered,
nothing older moves. A device's rows stay in order, so those that are padding stay behind.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.parallel.mesh import CP
from deepinfer_jax.parallel.wire import from_words, to_words


def is_split(config: RuntimeConfig) -> bool:
    """Whether a device has only a part of its rank's rows."""
    return config.cp > 1 and config.splits_rows


def own_rows(tree: Any, *, config: RuntimeConfig) -> Any:
    """This device's rows of arrays that hold all rows of the step. No bytes on the wire."""
    if not is_split(config):
        return tree
    rank = lax.axis_index(CP)

    def take(array: Array) -> Array:
        blocks = array.reshape(-1, config.cp, config.row_tile, *array.shape[1:])
        there = lax.dynamic_index_in_dim(blocks, rank, axis=1, keepdims=False)
        back = lax.dynamic_index_in_dim(blocks, config.cp - 1 - rank, axis=1, keepdims=False)
        return jnp.where(_is_back(there), back, there).reshape(-1, *array.shape[1:])

    return jax.tree.map(take, tree)


def all_rows(tree: Any, *, config: RuntimeConfig) -> Any:
    """All rows of the step, in their order, from each device's own.

    Bytes on the wire: a device receives (cp - 1) / cp of the arrays' bytes, in one all-gather.
    """
    if not is_split(config) or not jax.tree.leaves(tree):
        return tree
    return from_words(_gather(to_words(tree), config.row_tile), tree)


def rows_before(array: Array, index: Int[Array, " T"], *, config: RuntimeConfig) -> Array:
    """For each of this device's rows the row in front of it in the step; what stands before the first is any row.

    index: of this device's rows in the step. Bytes on the wire: those of one row in `config.row_tile`.
    """
    if not is_split(config):
        return jnp.concatenate([array[:1], array[:-1]])
    tile = config.row_tile
    blocks = array.reshape(-1, tile, *array.shape[1:])
    ends = _gather(blocks[:, -1], 1)
    before = ends[jnp.maximum(index[::tile] // tile - 1, 0)]
    return jnp.concatenate([before[:, None], blocks[:, :-1]], axis=1).reshape(array.shape)


def take_rows(tree: Any, index: Int[Array, " N"], *, config: RuntimeConfig) -> Any:
    """Rows of the step by their number, on every device of the rank; rows of -1 are zeros.

    Bytes on the wire: cp - 1 times those of N rows, in one all-gather.
    """

    def local(array: Array, at: Array) -> Array:
        return array.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    if not is_split(config):
        return jax.tree.map(lambda array: local(array, index), tree)
    owner, place = place_of_rows(index, cp=config.cp, tile=config.row_tile)
    found = lax.all_gather(to_words(jax.tree.map(lambda array: local(array, place), tree)), CP)
    return from_words(jnp.take_along_axis(found, owner[None, :, None], axis=0)[0], tree)


def place_of_rows(index: Any, *, cp: int, tile: int) -> tuple[Any, Any]:
    """The cp rank that has each row of the step, and its place among that device's rows; place -1 for rows of -1.

    index: an integer array of NumPy or JAX.
    """
    block, offset = index // tile, index % tile
    turn, step = block // cp, block % cp
    is_back = turn % 2
    owner = is_back * (cp - 1 - step) + (1 - is_back) * step
    is_row = (index >= 0).astype(index.dtype)
    return owner * is_row, (turn * tile + offset + 1) * is_row - 1


def _gather(array: Array, tile: int) -> Array:
    """The blocks of `tile` rows of all devices, in the order of the step."""
    own = array.reshape(-1, tile, *array.shape[1:])
    blocks = jnp.swapaxes(lax.all_gather(own, CP), 0, 1)  # [turns, cp, tile, ...]
    blocks = jnp.where(_is_back(blocks), jnp.flip(blocks, axis=1), blocks)
    return blocks.reshape(-1, *array.shape[1:])


def _is_back(blocks: Array) -> Bool[Array, "..."]:
    """Of each turn: whether its blocks go to the devices from the last to the first."""
    turns = jnp.arange(blocks.shape[0], dtype=jnp.int32) % 2 == 1
    return turns.reshape(-1, *[1] * (blocks.ndim - 1))
