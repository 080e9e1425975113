"""A9, A10, A12: several threads, several devices, and the same bits each time."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax.kernels import ascend
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.testing import compare


def operands(seed: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    arrays = (rng.standard_normal((8, 64), np.float32), rng.standard_normal((16, 64), np.float32))
    return jnp.asarray(arrays[0], jnp.bfloat16), jnp.asarray(arrays[1], jnp.bfloat16)


def test_threads_share_devices(bridge, simulator):
    simulator.slow_down(jitter_us=50)
    product = jax.jit(linear.linear)
    x, w = operands(0)
    want = product(x, w)

    def work(index: int) -> list[jax.Array]:
        device = jax.devices("cpu")[index % 2]
        return [product(*jax.device_put((x, w), device)) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for made in pool.map(work, range(8)):
            compare.assert_bitwise(made, [want] * 20)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_rows_on_several_devices_are_the_rows_of_one(bridge, num_devices):
    x, w = operands(1)
    mesh = jax.make_mesh((num_devices,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("dp"), PartitionSpec()
    sharded = jax.shard_map(linear.linear, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    made = jax.jit(sharded)(x, w)
    assert len(made.addressable_shards) == num_devices
    compare.assert_bitwise(np.asarray(made), np.asarray(jax.jit(linear.linear)(x, w)))
    for device in range(num_devices):
        assert bridge.usage(device=device) == (0, 0)


def test_resident_tensors_live_on_their_device(bridge):
    x, w = operands(2)
    want = np.asarray(jax.jit(linear.linear)(x, w))
    placed = bridge.put(x, device=1), bridge.put(w, device=1)
    made = jax.jit(linear.linear)(*placed)
    compare.assert_bitwise(bridge.get(made), want)
    bridge.end_step(made, device=1)


def test_twenty_runs_give_the_same_bits(bridge):
    x, w = operands(3)
    product = jax.jit(linear.linear)
    compare.assert_bitwise([product(x, w) for _ in range(20)], [product(x, w)] * 20)


def test_the_determinism_level_reaches_the_library(open_bridge, simulator):
    open_bridge(determinism=3)
    assert simulator.counters()["determinism level"] == 3


def test_visible_devices_are_cut_at_the_first_bad_one(simulator, monkeypatch):
    for text, count in (("0,2", 2), ("1", 1), ("0,x,1", 1), ("2,1", 1)):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
        bridge = ascend.open_bridge(ascend.AscendOptions(use_simulator=True))
        assert bridge.num_devices == count, text
        bridge.close()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "x")
    with pytest.raises(ascend.AscendError, match="no Ascend device is visible"):
        ascend.open_bridge(ascend.AscendOptions(use_simulator=True))


def test_a_device_that_is_not_there_is_named(bridge):
    with pytest.raises(ValueError, match="device=8 needs a JAX CPU device for each of 9 Ascend devices"):
        bridge.put(np.ones(1), device=8)
    with pytest.raises(ascend.AscendError, match="NOT_FOUND: device 99 does not exist; there are 8"):
        bridge.synchronize(device=99)
