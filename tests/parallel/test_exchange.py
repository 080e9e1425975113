"""Items reach the device they are sent to, and their answers come back to where they came from."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from deepinfer_jax.parallel.exchange import Peers, ask, room_for_each
from deepinfer_jax.parallel.mesh import CP, DP
from tests.parallel.conftest import config_of

COUNT = 13  # items of each device


@pytest.mark.parametrize("room", [COUNT, 3, 1], ids=["one round", "rooms of 3", "rooms of 1"])
@pytest.mark.parametrize("dp, cp, axes", [(2, 1, (DP, CP)), (2, 4, (DP, CP)), (4, 2, (DP,)), (2, 4, (CP,))])
@pytest.mark.parametrize("kind", ["random", "all to one", "none"])
def test_answers_come_back(on_devices, room, dp, cp, axes, kind):
    rng = np.random.default_rng(1)
    peers = Peers(axes=axes, count=config_of(dp, cp).num_pieces(axes))
    devices = dp * cp
    low, high = {"random": (-1, peers.count), "all to one": (peers.count - 1, peers.count), "none": (-1, 0)}[kind]
    destinations = rng.integers(low, high, (devices, COUNT)).astype(np.int32)
    values = rng.standard_normal((devices, COUNT, 3)).astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 256, (devices, COUNT), dtype=np.uint8)
    arrived = []

    def body(values, codes, destinations):
        me = lax.axis_index(axes).astype(jnp.float32)

        def answer(items, is_item):
            assert is_item.shape == (peers.count * room,)
            jax.debug.callback(lambda n: arrived.append(int(n)), jnp.sum(is_item, dtype=jnp.int32))
            numbers, marks = items
            answers = numbers.astype(jnp.float32) * 2.0 + me
            return jnp.where(is_item[:, None], answers, jnp.nan), marks  # what nobody asked for goes nowhere

        return ask((values, codes), destinations, answer, peers, room=room)

    found, marks = jax.block_until_ready(on_devices(body, dp, cp, values, codes, destinations))
    jax.effects_barrier()
    went = destinations >= 0
    want = np.where(went[..., None], values.astype(np.float32) * 2 + destinations[..., None], 0)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(marks, np.where(went, codes, 0))
    assert sum(arrived) == went.sum()
    if kind == "all to one":
        assert len(arrived) == devices * -(-COUNT // room)  # rounds


@pytest.mark.parametrize("room", [None, 2])
def test_items_that_share_rows_bring_them(on_devices, room):
    rng = np.random.default_rng(2)
    peers = Peers(axes=(DP,), count=2)
    rows = rng.integers(0, 256, (2, 5, 7), dtype=np.uint8)  # no whole words
    numbers = rng.integers(-9, 9, (2, 15)).astype(np.int32)
    destinations = rng.integers(-1, 2, (2, 15)).astype(np.int32)

    def body(rows, numbers, destinations):
        def answer(arrived, is_item):
            number, (row,) = arrived
            return jnp.sum(row, axis=1, dtype=jnp.int32) + number

        return ask(numbers, destinations, answer, peers, rows=(rows,), room=room)

    found = on_devices(body, 2, 1, rows, numbers, destinations)
    want = np.repeat(rows.sum(axis=2, dtype=np.int32), 3, axis=1) + numbers
    np.testing.assert_array_equal(found, np.where(destinations >= 0, want, 0))


@pytest.mark.parametrize(
    "num_items, count, room", [(768, 2, 768), (768, 8, 192), (768, 64, 64), (40, 8, 40), (0, 4, 0), (98304, 4, 49152)]
)
def test_room_of_a_round(num_items, count, room):
    assert room_for_each(num_items, Peers(axes=(DP,), count=count)) == room
