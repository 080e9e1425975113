"""Arrays with the same leading rows as one array of 32-bit words, so that they travel in one collective."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

_WORD = 4  # bytes


def to_words(tree: Any) -> UInt32[Array, "T W"]:
    """The rows of all arrays, side by side; each array begins with a word of its own."""
    return jnp.concatenate([_words_of(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def from_words(rows: UInt32[Array, "R W"], like: Any) -> Any:
    """The arrays again, with R rows. like: a tree of the arrays that were packed, or of their shapes and dtypes."""
    leaves, tree = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        width = -(-math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // _WORD)
        found.append(_values_of(rows[:, start : start + width], leaf.shape[1:], leaf.dtype))
        start += width
    return jax.tree.unflatten(tree, found)


def _words_of(array: Array) -> UInt32[Array, "T W"]:
    values = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    values = values.reshape(array.shape[0], math.prod(array.shape[1:]))
    each = _WORD // values.dtype.itemsize
    if each == 1:
        return lax.bitcast_convert_type(values, jnp.uint32)
    values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % each)))
    return lax.bitcast_convert_type(values.reshape(values.shape[0], values.shape[1] // each, each), jnp.uint32)


def _values_of(rows: UInt32[Array, "R W"], shape: tuple[int, ...], dtype: Any) -> Array:
    is_bool = dtype == jnp.bool_
    values = lax.bitcast_convert_type(rows, jnp.uint8 if is_bool else dtype)
    values = values.reshape(rows.shape[0], math.prod(values.shape[1:]))[:, : math.prod(shape)]
    values = values.reshape(rows.shape[0], *shape)
    return values != 0 if is_bool else values
