"""Products and row maps whose bits do not depend on how many rows a step holds.

XLA chooses the reduction order of a product by its number of rows, so padding a batch is not enough. Here every
product sees the same fixed tile of rows, whatever the step holds.
"""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def repeat[C](count: int, step: Callable[[Array, C], C], carry: C, *, has_fixed_trips: bool = False) -> C:
    """`step(i, carry)` for i in 0..count-1, compiled to the same loop body for every count.

    The compiler does not learn the count: it would inline a loop of one trip into its surroundings and fuse it
    differently, which changes bits. `has_fixed_trips` gives that up for a loop that can be differentiated.
    """
    stop = count if has_fixed_trips else lax.optimization_barrier(jnp.int32(count))
    return lax.fori_loop(0, stop, step, carry)


def map_rows[R](fn: Callable[..., R], *arrays: Array, tile: int | None, has_fixed_trips: bool = False) -> R:
    """`fn` over consecutive tiles of `tile` leading rows; None means one call with all rows.

    The last tile is filled up with zeros (False, 0); its extra rows are cut from the results. Every result of `fn`
    must have `tile` leading rows.
    """
    if tile is None:
        return fn(*arrays)
    rows = arrays[0].shape[0]
    num_tiles = -(-rows // tile)
    tiled = [_split(a, num_tiles, tile) for a in arrays]
    shapes = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in tiled))
    blank = jax.tree.map(lambda s: jnp.zeros((num_tiles, *s.shape), s.dtype), shapes)

    def step(index: Array, results: R) -> R:
        made = fn(*(lax.dynamic_index_in_dim(a, index, keepdims=False) for a in tiled))
        return jax.tree.map(
            lambda all_tiles, one: lax.dynamic_update_index_in_dim(all_tiles, one, index, 0), results, made
        )

    result = repeat(num_tiles, step, blank, has_fixed_trips=has_fixed_trips)
    return jax.tree.map(lambda r: r.reshape(num_tiles * tile, *r.shape[2:])[:rows], result)


def _split(array: Array, num_tiles: int, tile: int) -> Array:
    missing = num_tiles * tile - array.shape[0]
    if missing:
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return array.reshape(num_tiles, tile, *array.shape[1:])


def row_product(x: Float[Array, "T K"], w: Float[Array, "N K"], *, tile: int | None) -> Float[Array, "T N"]:
    """x @ w.T in float32, accumulated in float32; a row's bits depend on that row and on w only.

    Operands keep their dtype (both bfloat16 or both float32); float32 products run at the highest precision.
    """

    def product(rows: Float[Array, "R K"]) -> Float[Array, "R N"]:
        return lax.dot_general(
            rows,
            w,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    return map_rows(product, x, tile=tile)


def ordered_sum(terms: list[Array]) -> Array:
    """The sum of equally shaped arrays, added left to right."""
    return reduce(jnp.add, terms)


def round_to(x: Float[Array, "*N"], dtype: jnp.dtype) -> Float[Array, "*N"]:
    """x rounded to `dtype` (float32 or bfloat16), also where a compiler may keep excess precision."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
    return x.astype(dtype)
