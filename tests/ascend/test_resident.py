"""A7, A8: handles that were overtaken are errors, orders that were asked for hold, and nothing outlives its step."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import ascend
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.scatter_rows import cann as scatter_rows
from deepinfer_jax.testing.ascend_order import unordered_reads

FAILURES = (jax.errors.JaxRuntimeError, ValueError)
CACHE = np.asarray([[3.0, 4.0], [6.0, 8.0]], np.float32)
NORMED = CACHE / np.sqrt(np.mean(CACHE**2, axis=1, keepdims=True))


@pytest.fixture
def placed(bridge):
    """Cache, weight, index and rows on the device."""
    arrays = (CACHE, np.ones(2, np.float32), np.asarray([1], np.int32), np.zeros((1, 2), np.float32))
    return [bridge.put(array) for array in arrays]


@jax.jit
def write(cache, index, rows):
    return scatter_rows.scatter_rows(cache, index, rows)


@jax.jit
def read(cache, weight):
    return rms_norm.rms_norm(cache, weight, eps=0.0)


def test_a_handle_that_was_written_is_stale(bridge, placed):
    cache, weight, index, rows = placed
    written = write(cache, index, rows)
    with pytest.raises(FAILURES, match="stale device handle"):
        jax.block_until_ready(read(cache, weight))
    np.testing.assert_array_equal(bridge.get(written), [[3.0, 4.0], [0.0, 0.0]])


def test_a_write_waits_for_the_readers_that_it_names(bridge, placed, simulator):
    cache, weight, index, rows = placed

    @jax.jit
    def step(cache, weight, index, rows):
        seen = rms_norm.rms_norm(cache, weight, eps=0.0)
        return seen, scatter_rows.scatter_rows(cache, index, rows, after=(seen,))

    simulator.slow_down(jitter_us=100)
    for _ in range(50):
        fresh = bridge.put(CACHE)
        seen, written = step(fresh, weight, index, rows)
        np.testing.assert_allclose(bridge.get(seen), NORMED, rtol=1e-6)
        np.testing.assert_array_equal(bridge.get(written)[1], [0.0, 0.0])
        bridge.release(written)
        bridge.end_step()


def test_the_order_of_readers_means_nothing_to_arrays(bridge):
    cache, index, rows = jnp.asarray(CACHE), jnp.asarray([1], jnp.int32), jnp.zeros((1, 2))
    made = write(cache, index, rows)
    np.testing.assert_array_equal(cache, CACHE)
    np.testing.assert_array_equal(made[1], [0.0, 0.0])
    again = scatter_rows.scatter_rows(cache, index, rows, after=(made,))
    np.testing.assert_array_equal(again, made)
    with pytest.raises(ValueError, match="arrays and device arrays"):
        scatter_rows.scatter_rows(cache, index, rows, after=(bridge.put(CACHE),))


def test_two_equal_calls_make_two_tensors(bridge, placed):
    cache, weight, *_ = placed
    first, second = jax.jit(lambda c, w: (rms_norm.rms_norm(c, w, eps=0.0), rms_norm.rms_norm(c, w, eps=0.0)))(
        cache, weight
    )
    assert int(first.words[2]) != int(second.words[2])


def test_a_thousand_steps_leave_nothing(bridge, placed, simulator):
    cache, weight, *_ = placed
    bridge.end_step(read(cache, weight))
    at_rest = simulator.counters()
    for _ in range(1000):
        bridge.end_step(read(cache, weight))
    bridge.synchronize()
    assert simulator.counters() == at_rest
    assert bridge.usage() == (4, 0)


def test_a_temporary_ends_with_its_step(bridge, placed):
    cache, weight, *_ = placed
    made = read(cache, weight)
    with pytest.raises(ascend.AscendError, match="released by end_step"):
        bridge.release(made)
    bridge.end_step(made)
    with pytest.raises(ascend.AscendError, match="stale device handle"):
        bridge.get(made)


def test_memory_is_freed_behind_the_work_that_uses_it(bridge, placed, simulator):
    """The stream is slow: the tensor is still being read when it is released. The simulator would note a free."""
    cache, weight, *_ = placed
    simulator.slow_down(delay_us=20_000)
    made = read(cache, weight)
    jax.block_until_ready(made)
    bridge.release(cache)
    np.testing.assert_allclose(bridge.get(made), NORMED, rtol=1e-6)
    with pytest.raises(ascend.AscendError, match="stale device handle"):
        bridge.release(cache)


def test_what_a_failure_dropped_cannot_be_read(bridge, placed, simulator):
    """A late fault drops the work behind it; what was complete before stays."""
    cache, weight, index, rows = placed
    before = read(cache, weight)
    bridge.synchronize()
    simulator.plan({"call": "aclnnRmsNorm", "code": 507056, "message": "link", "when": "async"})
    behind = read(cache, weight)
    written = write(cache, index, rows)
    jax.block_until_ready((behind, written))
    with pytest.raises(ascend.AscendError, match="UNAVAILABLE.*link"):
        bridge.synchronize()
    for lost in (behind, written):
        with pytest.raises(ascend.AscendError, match="lost device tensor"):
            bridge.get(lost)
    np.testing.assert_allclose(bridge.get(before), NORMED, rtol=1e-6)
    again = read(bridge.put(CACHE), weight)
    np.testing.assert_allclose(bridge.get(again), NORMED, rtol=1e-6)
    bridge.release(written)


def test_words_that_are_no_handle_are_refused(bridge, placed):
    cache, *_ = placed
    for words, text in ((cache.words.at[0].add(1), "magic"), (cache.words.at[2].add(1), "check word")):
        forged = ascend.DeviceArray(words=words, shape=cache.shape, dtype=cache.dtype)
        with pytest.raises(ValueError, match=text):
            bridge.get(forged)


def test_a_handle_of_a_closed_bridge_is_refused(open_bridge):
    """The next bridge counts its tensors from the same number on."""
    first = open_bridge()
    old = first.put(CACHE)
    first.close()
    second = open_bridge()
    new = second.put(CACHE)
    for use in (second.get, second.release):
        with pytest.raises(ValueError, match="check word"):
            use(old)
    np.testing.assert_array_equal(second.get(new), CACHE)


def test_a_tensor_of_another_device_is_refused(bridge, placed):
    _, weight, *_ = placed
    elsewhere = bridge.put(CACHE, device=1)
    here = ascend.DeviceArray(words=jnp.asarray(np.asarray(elsewhere.words)), shape=(2, 2), dtype=elsewhere.dtype)
    with pytest.raises(FAILURES, match="is on device 1, and this call runs on device 0"):
        jax.block_until_ready(read(here, weight))


def test_handles_of_a_reset_device_are_stale(bridge, placed):
    bridge.reset_device(0)
    with pytest.raises(ascend.AscendError, match="stale device handle"):
        bridge.get(placed[0])


def test_a_process_may_end_with_an_open_bridge(native):
    code = (
        "import numpy as np; from deepinfer_jax.kernels import ascend;"
        "b = ascend.open_bridge(ascend.AscendOptions(use_simulator=True)); b.put(np.ones(3)); print(b.soc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "SIM_Ascend950\n"), done.stderr


def test_host_access_to_device_memory_crashes(simulator):
    """Device pointers have no access rights; the child dies of it."""
    code = (
        "import ctypes, sys; sim = ctypes.CDLL(sys.argv[1]); sim.aclInit(None); sim.aclrtSetDevice(0);"
        "p = ctypes.c_void_p(); sim.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(64), 0); ctypes.memset(p, 0, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code, simulator.library._name], capture_output=True, text=True)
    assert done.returncode < 0


def test_reads_without_an_order_are_found_before_running(placed):
    cache, weight, index, rows = placed

    def wrong(cache, weight, index, rows):
        return read(cache, weight), write(cache, index, rows)

    def right(cache, weight, index, rows):
        seen = read(cache, weight)
        return seen, scatter_rows.scatter_rows(cache, index, rows, after=(seen,))

    (text,) = unordered_reads(wrong, cache, weight, index, rows)
    assert "scatter_rows.v2 writes what deepinfer.cann.rms_norm.v2 reads" in text
    assert unordered_reads(jax.jit(right), cache, weight, index, rows) == []
    assert (
        unordered_reads(wrong, *(jnp.asarray(a) for a in (CACHE, np.ones(2, np.float32), [1], np.zeros((1, 2))))) == []
    )
