"""Rows spread over cp: every row is on one device, work is balanced, and what is gathered is in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.parallel import context
from tests.parallel.conftest import config_of

TILE = 8


def test_one_device_has_all_rows():
    config, rows = config_of(2, 1), jnp.arange(16)
    assert not context.is_split(config)
    np.testing.assert_array_equal(context.own_rows(rows, config=config), rows)
    np.testing.assert_array_equal(context.all_rows(rows, config=config), rows)
    np.testing.assert_array_equal(context.take_rows(rows, jnp.asarray([3, -1]), config=config), [3, 0])


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("num_turns", [1, 2, 5])
def test_rows_come_back_in_order(on_devices, cp, num_turns):
    count, config = cp * TILE * num_turns, config_of(1, cp)
    rows = np.arange(count, dtype=np.int32)
    values = np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)
    wanted = np.asarray([0, count - 1, -1, 5, count // 2], np.int32)

    def body(rows, values):
        own = context.own_rows((rows, values, rows % 3 == 0), config=config)
        before = context.rows_before(own[1], own[0], config=config)
        taken = context.take_rows(own, jnp.asarray(wanted), config=config)
        return own, context.all_rows(own, config=config), before, taken

    everywhere = jax.tree.map(lambda a: np.stack([a] * cp), (rows, values))
    own, gathered, before, taken = on_devices(body, 1, cp, *everywhere)
    own_rows = np.asarray(own[0])
    assert sorted(own_rows.reshape(-1)) == list(range(count))
    for device in range(cp):
        assert (np.diff(own_rows[device]) > 0).all()  # so padding stays behind
        owner, place = context.place_of_rows(own_rows[device], cp=cp, tile=TILE)
        assert (owner == device).all() and (place == np.arange(count // cp)).all()
        np.testing.assert_array_equal(gathered[0][device], rows)
        np.testing.assert_array_equal(gathered[1][device], values)
        np.testing.assert_array_equal(gathered[2][device], rows % 3 == 0)
        has_before = own_rows[device] > 0
        np.testing.assert_array_equal(before[device][has_before], values[own_rows[device][has_before] - 1])
        np.testing.assert_array_equal(taken[1][device], np.where(wanted[:, None] >= 0, values[wanted], 0))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_work_is_balanced(cp):
    """The positions of each device's rows sum to the same, but for the last turn, for any chunk of any request."""
    for start, count in ((0, 64 * cp), (1000, 40 * cp), (7, 24 * cp)):
        owner, _ = context.place_of_rows(np.arange(count), cp=cp, tile=TILE)
        work = np.bincount(owner, weights=start + np.arange(count) + 1, minlength=cp)
        slack = cp * TILE * TILE  # of one turn that has no way back
        if count % (2 * cp * TILE) == 0:
            assert np.ptp(work) == 0
        else:
            assert np.ptp(work) <= slack


def test_no_row_has_no_place():
    owner, place = context.place_of_rows(np.asarray([-1, 0]), cp=4, tile=TILE)
    assert owner.tolist() == [0, 0] and place.tolist() == [-1, 0]
