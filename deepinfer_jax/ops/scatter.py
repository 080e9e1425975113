"""Writes to places that are all different: `array.at[place].set(values)` with a promise that compilers may rely on.

Without the promise XLA sorts the places where a GPU's program is to be repeatable, by their number in the flattened
array: a place beyond the end of a row is then taken for the start of the next one. With it nothing is sorted.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

type Place = tuple[Any, ...]  # of slices, ints and arrays of indices


def put_where(array: Array, place: Place, values: Array, is_kept: Bool[Array, "..."] | None = None) -> Array:
    """`array.at[place].set(values)` for the elements of `place` that are kept; None keeps all.

    No two kept elements may name the same place. The others are sent to places of their own beyond the end of the
    first axis that an array indexes, where they are dropped. `is_kept` has as many elements as the index arrays
    together.
    """
    if is_kept is not None:
        axis = next(i for i, part in enumerate(place) if not isinstance(part, slice) and jnp.ndim(part))
        outside = array.shape[axis] + jnp.arange(is_kept.size, dtype=jnp.int32).reshape(is_kept.shape)
        place = (*place[:axis], jnp.where(is_kept, place[axis], outside), *place[axis + 1 :])
    return array.at[place].set(values, mode="drop", unique_indices=True)
