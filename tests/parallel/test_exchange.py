"""Items reach the device they are sent to, and their answers come back to where they came from."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from deepinfer_jax.parallel import exchange
from deepinfer_jax.parallel.exchange import Peers, peers_along, send, send_back
from deepinfer_jax.parallel.mesh import CP, DP
from tests.parallel.conftest import config_of


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all`, which XLA lacks on CPUs, by its definition: with everything gathered everywhere."""
    gathered = [lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    operands, starts, sizes, targets = gathered
    me, rows = lax.axis_index(axis_name), jnp.arange(operand.shape[0], dtype=jnp.int32)
    for peer in range(operands.shape[0]):
        is_mine = (rows >= starts[peer, me]) & (rows < starts[peer, me] + sizes[peer, me])
        place = jnp.where(is_mine, targets[peer, me] + rows - starts[peer, me], output.shape[0])
        output = output.at[place].set(operands[peer], mode="drop")
    return output


@pytest.fixture(params=["padded", "ragged"])
def is_ragged(request, monkeypatch):
    monkeypatch.setattr(exchange.lax, "ragged_all_to_all", emulated)
    return request.param == "ragged"


@pytest.mark.parametrize("dp, cp, axes", [(2, 1, (DP, CP)), (2, 4, (DP, CP)), (4, 2, (DP,)), (2, 4, (CP,))])
@pytest.mark.parametrize("kind", ["random", "all to one", "none"])
def test_answers_come_back(on_devices, is_ragged, dp, cp, axes, kind):
    count, rng = 13, np.random.default_rng(1)
    peers = Peers(axes=axes, count=config_of(dp, cp).num_pieces(axes), is_ragged=is_ragged)
    devices = dp * cp
    low, high = {"random": (-1, peers.count), "all to one": (peers.count - 1, peers.count), "none": (-1, 0)}[kind]
    destinations = rng.integers(low, high, (devices, count)).astype(np.int32)
    values = rng.standard_normal((devices, count, 3)).astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 256, (devices, count), dtype=np.uint8)

    def body(values, codes, destinations):
        (items, marks), is_item, way = send((values, codes), destinations, peers)
        me = lax.axis_index(axes).astype(jnp.float32)
        answers = items.astype(jnp.float32) * 2.0 + me
        answers = jnp.where(is_item[:, None], answers, jnp.nan)  # what nobody asked for goes nowhere
        return send_back((answers, marks), way), jnp.sum(is_item, dtype=jnp.int32)

    (found, marks), arrived = on_devices(body, dp, cp, values, codes, destinations)
    went = destinations >= 0
    want = np.where(went[..., None], values.astype(np.float32) * 2 + destinations[..., None], 0)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(marks, np.where(went, codes, 0))
    assert int(np.sum(arrived)) == went.sum()


def test_form_follows_the_target():
    assert not peers_along((DP, CP), config_of(2, 2)).is_ragged
    assert peers_along((DP,), config_of(2, 2, target="nvidia")) == Peers(axes=(DP,), count=2, is_ragged=True)
