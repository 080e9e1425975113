"""Index arithmetic of images against plain loops, for grids whose edges cut squares in every way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import image_grid as grids
from deepinfer_jax.testing import compare

GRIDS = {"one": (1, 1), "square": (3, 3), "cut_below": (4, 6), "cut_right": (6, 5), "row": (1, 20), "column": (20, 2)}
NUM_TOKENS = 30


@pytest.mark.parametrize("name", GRIDS)
def test_squares_of_patches(name: str):
    rows, columns = GRIDS[name]
    want = [
        [
            row * columns + column if row < rows and column < columns else -1
            for row in range(top, top + 3)
            for column in range(left, left + 3)
        ]
        for top in range(0, rows, 3)
        for left in range(0, columns, 3)
    ]
    merged = jax.jit(functools.partial(grids.merged_patches, num_tokens=NUM_TOKENS, factor=3))
    got = np.asarray(merged(jnp.asarray([rows, columns], jnp.int32)))
    np.testing.assert_array_equal(got[: len(want)], want)
    assert sorted(got[: len(want)][got[: len(want)] >= 0]) == list(range(rows * columns))


@pytest.mark.parametrize("name", GRIDS)
def test_roles_of_a_span(name: str):
    grid = jnp.asarray(GRIDS[name], jnp.int32)
    token_rows, token_columns = -(-GRIDS[name][0] // 3), -(-GRIDS[name][1] // 3)
    line = [grids.IMAGE] * token_columns + [grids.NEWLINE]
    want = [grids.START, *(line * token_rows), grids.END]
    role, token = jax.jit(functools.partial(grids.span_roles, num_rows=NUM_TOKENS, factor=3))(grid)
    want += [grids.OUTSIDE] * (NUM_TOKENS - len(want))
    compare.assert_bitwise(role, np.asarray(want, np.int32))
    np.testing.assert_array_equal(np.asarray(token)[np.asarray(role) == grids.IMAGE], range(token_rows * token_columns))
    assert not np.asarray(token)[np.asarray(role) != grids.IMAGE].any()


def test_patches_stand_in_reading_order():
    rows, columns = grids.patch_places(jnp.asarray([4, 6], jnp.int32), num_patches=24)
    np.testing.assert_array_equal(
        np.asarray(rows) * 100 + np.asarray(columns), (np.indices((4, 6)).T @ [100, 1]).T.flat
    )
