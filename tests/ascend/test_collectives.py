"""A10: collectives between simulated devices inside `shard_map`, staged and resident, and their failures."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from deepinfer_jax.kernels import ascend
from deepinfer_jax.kernels.ascend import DeviceArray
from deepinfer_jax.kernels.collectives import cann as collectives
from deepinfer_jax.kernels.linear import cann as linear
from deepinfer_jax.testing import compare

FAILURES = (jax.errors.JaxRuntimeError, ValueError)
ROWS = PartitionSpec("ep")


def mesh_of(num_devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((num_devices,), ("ep",), axis_types=(AxisType.Auto,))


def on_mesh(function, num_devices: int, *arrays, out_specs=ROWS):
    return jax.jit(jax.shard_map(function, mesh=mesh_of(num_devices), in_specs=ROWS, out_specs=out_specs))(*arrays)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32], ids=["f32", "bf16", "int32"])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_staged_collectives(bridge, num_devices, dtype):
    groups = bridge.make_groups([range(num_devices)])
    x = jnp.asarray(np.arange(num_devices * 8 * 3).reshape(num_devices * 8, 3) % 17, dtype)
    parts = np.asarray(x).astype(np.float32).reshape(num_devices, 8, 3)
    total = parts.sum(axis=0).astype(x.dtype)
    summed = on_mesh(lambda x: collectives.psum(x, groups), num_devices, x)
    compare.assert_bitwise(np.asarray(summed), np.tile(total, (num_devices, 1)))
    gathered = on_mesh(lambda x: collectives.all_gather(x, groups), num_devices, x)
    compare.assert_bitwise(np.asarray(gathered), np.tile(np.asarray(x), (num_devices, 1)))
    scattered = on_mesh(lambda x: collectives.reduce_scatter(x, groups), num_devices, x)
    compare.assert_bitwise(np.asarray(scattered), total)


def test_groups_along_one_axis_do_not_meet(bridge):
    groups = bridge.make_groups([[0, 2], [1, 3]])
    made = on_mesh(lambda x: collectives.psum(x, groups), 4, jnp.asarray([1.0, 10.0, 100.0, 1000.0]))
    np.testing.assert_array_equal(made, [101.0, 1010.0, 101.0, 1010.0])


def test_ranks_follow_the_order_of_a_group(bridge):
    groups = bridge.make_groups([[1, 0]])
    made = on_mesh(lambda x: collectives.all_gather(x, groups), 2, jnp.asarray([5.0, 6.0]))
    np.testing.assert_array_equal(made, [6.0, 5.0, 6.0, 5.0])


def test_collectives_keep_the_order_that_they_were_given(bridge, simulator):
    """Many collectives of different sizes without data between them; out of order they would meet wrongly."""
    groups = bridge.make_groups([[0, 1]])
    simulator.slow_down(jitter_us=200)

    def many(x):
        sums, last = [], ()
        for width in range(1, 9):
            sums.append(collectives.psum(x[:, :width], groups, after=last))
            last = (sums[-1],)
        return tuple(sums)

    made = on_mesh(many, 2, jnp.ones((2, 8)))
    for width, total in enumerate(made, start=1):
        np.testing.assert_array_equal(total, np.full((2, width), 2.0))


def test_a_call_depends_on_what_it_comes_after(bridge):
    groups = bridge.make_groups([[0, 1]])

    def two(x):
        first = collectives.psum(x, groups)
        return first, collectives.psum(x, groups, after=(first,))

    first, second = jax.make_jaxpr(two)(jnp.ones(2)).eqns
    assert second.invars == [*first.invars, *first.outvars]


def test_handle_words_that_were_added_are_refused(bridge):
    placed = bridge.put(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="no device handle"):
        bridge.get(jax.tree.map(lambda words: words + words, placed))


def test_a_product_split_over_devices_is_the_whole_product(bridge):
    """Rows of the weight on different devices: each computes its outputs, all are gathered."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 64), np.float32), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((8, 64), np.float32), jnp.bfloat16)
    groups = bridge.make_groups([range(4)])

    def part(w):
        return collectives.all_gather(linear.linear(x, w).T, groups)

    made = on_mesh(part, 4, w, out_specs=PartitionSpec())
    compare.assert_bitwise(np.asarray(made).T, np.asarray(jax.jit(linear.linear)(x, w)))


def test_device_arrays_are_summed_where_they_are(bridge):
    groups = bridge.make_groups([[0, 1]])
    host = [np.full(4, value, np.float32) for value in (1, 20)]
    placed = [bridge.put(array, device=i) for i, array in enumerate(host)]
    words = jnp.asarray(np.stack([np.asarray(array.words) for array in placed]))

    def total(words):
        x = DeviceArray(words=words[0], shape=(4,), dtype=np.dtype(np.float32))
        return collectives.psum(x, groups).words[None]

    made = on_mesh(total, 2, words)
    for device in range(2):
        result = DeviceArray(words=jnp.asarray(np.asarray(made)[device]), shape=(4,), dtype=np.dtype(np.float32))
        np.testing.assert_array_equal(bridge.get(result), np.full(4, 21, np.float32))
        bridge.release(placed[device])
        bridge.end_step(device=device)


def test_a_rank_that_does_not_come_is_a_deadline(bridge, simulator):
    groups = bridge.make_groups([[0, 1]])
    simulator.library.sim_set_collective_timeout(ctypes.c_int64(50))
    with pytest.raises(FAILURES, match="DEADLINE_EXCEEDED.*HcclAllReduce of 2 FLOAT: a rank did not come"):
        jax.block_until_ready(collectives.psum(jnp.ones(2), groups))
    simulator.library.sim_set_collective_timeout(ctypes.c_int64(60_000))


def test_failures_of_the_library_are_told(bridge, simulator):
    simulator.plan({"call": "HcclCommInitAll", "code": 11})
    with pytest.raises(ascend.AscendError, match="UNAVAILABLE: HcclCommInitAll failed with result 11 of HCCL"):
        bridge.make_groups([[0, 1]])
    groups = bridge.make_groups([[0]])
    simulator.plan({"call": "HcclAllReduce", "code": 9})
    with pytest.raises(FAILURES, match="DEADLINE_EXCEEDED.*HcclAllReduce failed with result 9 of HCCL"):
        jax.block_until_ready(collectives.psum(jnp.ones(2), groups))
    np.testing.assert_array_equal(collectives.psum(jnp.ones(2), groups), [1.0, 1.0])


def test_groups_that_cannot_be_are_refused(bridge):
    for groups, text in (
        ([], "at least one group"),
        ([[0], [1, 2]], "equally many devices"),
        ([[0, 1], [1, 2]], "device 1 is in two places"),
        ([[0, 99]], "device 99 does not exist"),
    ):
        with pytest.raises((ValueError, ascend.AscendError), match=text):
            bridge.make_groups(groups)
    outside = bridge.make_groups([[1, 2]])
    with pytest.raises(FAILURES, match="device 0 is in no group"):
        jax.block_until_ready(collectives.psum(jnp.ones(2), outside))
