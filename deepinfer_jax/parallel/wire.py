"""Arrays with the same leading rows as one array of bytes, so that they travel in one collective."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8


def to_bytes(tree: Any) -> UInt8[Array, "T B"]:
    """The rows of all arrays, side by side."""
    return jnp.concatenate([_bytes_of(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def from_bytes(rows: UInt8[Array, "R B"], like: Any) -> Any:
    """The arrays again, with R rows. like: a tree of the arrays that were packed, or of their shapes and dtypes."""
    leaves, tree = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        width = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        found.append(_values_of(rows[:, start : start + width], leaf.shape[1:], leaf.dtype))
        start += width
    return jax.tree.unflatten(tree, found)


def _bytes_of(array: Array) -> UInt8[Array, "T B"]:
    values = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else lax.bitcast_convert_type(array, jnp.uint8)
    return values.reshape(array.shape[0], math.prod(values.shape[1:]))


def _values_of(rows: UInt8[Array, "R B"], shape: tuple[int, ...], dtype: Any) -> Array:
    if dtype == jnp.bool_:
        return rows.reshape(rows.shape[0], *shape) != 0
    per_value = () if dtype.itemsize == 1 else (dtype.itemsize,)
    return lax.bitcast_convert_type(rows.reshape(rows.shape[0], *shape, *per_value), dtype)
