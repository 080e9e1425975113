"""Index arithmetic of an image: patches, the squares of patches that become tokens, and the span (spec: vision 4, 6).

A grid is (patch rows, patch columns); both are data, so that images of all shapes share one program.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

# Roles of the rows of a span; OUTSIDE: behind its end.
OUTSIDE, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3


def patch_places(grid: Int[Array, " two"], *, num_patches: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Row and column of each patch in reading order."""
    index = jnp.arange(num_patches, dtype=jnp.int32)
    return index // grid[1], index % grid[1]


def token_grid(grid: Int[Array, " two"], *, factor: int) -> Int[Array, " two"]:
    """Token rows and columns of a grid of patches, of which factor x factor make a token."""
    return -(-grid // factor)


def merged_patches(grid: Int[Array, " two"], *, num_tokens: int, factor: int) -> Int[Array, "tokens square"]:
    """The factor * factor patches of each token, row by row; -1 where a square reaches over the image's edge.

    Tokens are in reading order; those behind the last one have meaningless patches.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    columns = token_grid(grid, factor=factor)[1]
    steps = jnp.arange(factor, dtype=jnp.int32)
    row = (token // columns * factor)[:, None, None] + steps[None, :, None]
    column = (token % columns * factor)[:, None, None] + steps[None, None, :]
    is_inside = (row < grid[0]) & (column < grid[1])
    return jnp.where(is_inside, row * grid[1] + column, -1).reshape(num_tokens, factor * factor)


def span_roles(
    grid: Int[Array, " two"], *, num_rows: int, factor: int
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Role of each row of an image's span, and the token that an IMAGE row holds (0 in other rows).

    START, then for each token row its tokens and NEWLINE, then END; rows behind it are OUTSIDE.
    """
    tokens = token_grid(grid, factor=factor)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    line, place = (row - 1) // (tokens[1] + 1), (row - 1) % (tokens[1] + 1)
    last = tokens[0] * (tokens[1] + 1) + 1
    role = jnp.where(place == tokens[1], NEWLINE, IMAGE)
    role = jnp.where(row == 0, START, jnp.where(row == last, END, jnp.where(row > last, OUTSIDE, role)))
    return role, jnp.where(role == IMAGE, line * tokens[1] + place, 0)
