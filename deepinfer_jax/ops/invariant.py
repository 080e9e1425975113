"""Row tiles and ordered sums: what makes a row's bits independent of the rows beside it.

XLA chooses the reduction order of a product or a row sum by the number of rows, and fuses a loop of one trip into its
surroundings. So everything that rounds runs on tiles of a fixed number of rows, inside loops whose trip count the
compiler does not know: the same machine code computes a row, whatever else the step holds.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def repeat[C](
    count: int | Int[Array, ""], step: Callable[[Array, C], C], carry: C, *, has_fixed_trips: bool = False
) -> C:
    """`step(i, carry)` for i in 0..count-1, compiled to the same loop body for every count.

    `has_fixed_trips` tells the compiler the count, which makes the loop differentiable and its bits depend on it.
    """
    stop = count if has_fixed_trips else lax.optimization_barrier(jnp.asarray(count, jnp.int32))
    return lax.fori_loop(0, stop, step, carry)


def map_rows(
    fn: Callable[..., Any],
    *trees: Any,
    tile: int | None,
    num_live: Int[Array, ""] | None = None,
    has_fixed_trips: bool = False,
    loops_one: bool = True,
) -> Any:
    """`fn` over consecutive tiles of `tile` leading rows of every array; None means one call with all rows.

    The last tile is filled up with zeros (False, 0); its extra rows are cut from the results. Every result of `fn`
    must have `tile` leading rows. num_live: only tiles with one of the first so many rows are computed, the results
    of the others are zeros; so padding costs nothing. None, a fixed trip count, or no tile computes all. loops_one:
    False computes a single tile without a loop, for compilers that leave the section between two barriers to itself;
    the body of a loop over more tiles is the same section.
    """
    if tile is None:
        return fn(*trees)
    rows = jax.tree.leaves(trees)[0].shape[0]
    section = fn if loops_one else _between_barriers(fn)
    if rows <= tile and not loops_one:
        padded = jax.tree.map(lambda a: jnp.pad(a, [(0, tile - rows)] + [(0, 0)] * (a.ndim - 1)), trees)
        return jax.tree.map(lambda a: a[:rows], section(*padded))
    num_tiles = -(-rows // tile)
    count = num_tiles if num_live is None or has_fixed_trips else -(-num_live // tile)
    # Room for two tiles at least: a slice of all there is would not depend on the index, and be moved out of the loop.
    room = max(num_tiles, 2)
    tiled = jax.tree.map(lambda a: _split(a, room, tile), trees)
    # Traced once, for the shapes of its results, and written out in the loop; not a step: part of one.
    traced = jax.jit(lambda *parts: section(*parts), inline=True)
    shapes = jax.eval_shape(traced, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), tiled))
    blank = jax.tree.map(lambda s: jnp.zeros((room, *s.shape), s.dtype), shapes)

    def step(index: Array, results: Any) -> Any:
        made = traced(*jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), tiled))
        return jax.tree.map(lambda whole, one: lax.dynamic_update_index_in_dim(whole, one, index, 0), results, made)

    result = repeat(count, step, blank, has_fixed_trips=has_fixed_trips)
    return jax.tree.map(lambda r: r.reshape(room * tile, *r.shape[2:])[:rows], result)


def _between_barriers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a section of its own: nothing of it is fused with what makes its arguments or reads its results."""

    def section(*parts: Any) -> Any:
        return lax.optimization_barrier(fn(*lax.optimization_barrier(parts)))

    return section


def _split(array: Array, num_tiles: int, tile: int) -> Array:
    missing = num_tiles * tile - array.shape[0]
    if missing:
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return array.reshape(num_tiles, tile, *array.shape[1:])


def row_product(x: Float[Array, "T K"], w: Float[Array, "N K"]) -> Float[Array, "T N"]:
    """x @ w.T accumulated and returned in float32; the only dense product of the model.

    Operands keep their dtype (both bfloat16 or both float32); float32 products run at the highest precision.
    """
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def ordered_sum(terms: list[Array]) -> Array:
    """The sum of equally shaped arrays, added left to right."""
    return reduce(jnp.add, terms)


def round_to(x: Float[Array, "*N"], dtype: Any) -> Float[Array, "*N"]:
    """x rounded to `dtype` (float32 or bfloat16), also where a compiler may keep excess precision."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
    return x.astype(dtype)
