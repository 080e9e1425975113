"""A6: failures at each place of a call: the mapped error with its text, nothing left behind, and a way on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import ascend
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.scatter_rows import cann as scatter_rows

FAILURES = (jax.errors.JaxRuntimeError, ValueError)
X, W = np.ones((2, 8), np.float32), np.ones(8, np.float32)
# A status of each class that leaves the device usable, and how its text begins.
USABLE = {
    107017: "INVALID_ARGUMENT",
    561002: "INVALID_ARGUMENT",
    100001: "FAILED_PRECONDITION",
    107001: "NOT_FOUND",
    107002: "INTERNAL",
    107020: "DEADLINE_EXCEEDED",
    107022: "ABORTED",
    207001: "RESOURCE_EXHAUSTED",
    561003: "UNIMPLEMENTED",
    507056: "UNAVAILABLE",
}
DIRTY = {507015: "INTERNAL", 507053: "DATA_LOSS"}
SITES = [
    ("aclrtSetDevice", "call"),
    ("aclrtMemcpyAsync", "call"),
    ("aclrtMemcpyAsync", "async"),
    ("aclnnRmsNormGetWorkspaceSize", "call"),
    ("aclnnRmsNorm", "call"),
    ("aclnnRmsNorm", "async"),
    ("aclrtSynchronizeStreamWithTimeout", "call"),
]


@jax.jit
def call(x, weight):
    return rms_norm.rms_norm(x, weight, eps=0.0)


def normed() -> np.ndarray:
    return np.asarray(call(jnp.asarray(X), jnp.asarray(W)))


@pytest.fixture
def warm(bridge):
    """A bridge whose device has started, so that counters are those of a device at rest."""
    normed()
    return bridge


@pytest.mark.parametrize("place, when", SITES, ids=[f"{place}-{when}" for place, when in SITES])
def test_a_failure_is_told_and_leaves_nothing(warm, simulator, place, when):
    at_rest = simulator.counters()
    for status, name in USABLE.items():
        simulator.plan({"call": place, "code": status, "message": "told why", "when": when})
        with pytest.raises(
            FAILURES, match=f"{name if name != 'INVALID_ARGUMENT' else ''}.*simulator device 0.*told why"
        ):
            normed()
        simulator.plan()
        assert simulator.counters() == at_rest
        np.testing.assert_array_equal(normed(), X)


@pytest.mark.parametrize("place, when", SITES[1:], ids=[f"{place}-{when}" for place, when in SITES[1:]])
def test_a_broken_device_refuses_work_until_it_is_reset(warm, simulator, place, when):
    at_rest = simulator.counters()
    for status, name in DIRTY.items():
        simulator.plan({"call": place, "code": status, "message": "core broke", "when": when})
        with pytest.raises(FAILURES, match=f"{name}.*core broke.*reset_device"):
            normed()
        simulator.plan()
        with pytest.raises(FAILURES, match="FAILED_PRECONDITION.*takes no work.*core broke"):
            normed()
        warm.reset_device(0)
        np.testing.assert_array_equal(normed(), X)
        assert simulator.counters() == at_rest


@pytest.mark.parametrize("place", ["aclInit", "aclrtGetDeviceCount", "aclrtSetSysParamOpt", "aclrtSetDevice"])
def test_a_bridge_that_could_not_open_can_be_opened_again(open_bridge, simulator, place):
    simulator.plan({"call": place, "code": 207001, "message": "not now"})
    with pytest.raises(ascend.AscendError, match=f"RESOURCE_EXHAUSTED: {place}.*not now"):
        open_bridge(determinism=1)
    assert simulator.counters().get("memory block", 0) == 0
    open_bridge(determinism=1)
    np.testing.assert_array_equal(normed(), X)


@pytest.mark.parametrize("place", ["aclrtCreateStreamWithConfig", "aclrtMalloc"])
def test_a_device_that_could_not_start_is_started_again(bridge, simulator, place):
    simulator.plan({"call": place, "code": 207001, "message": "not now"})
    with pytest.raises(FAILURES, match=f"RESOURCE_EXHAUSTED.*{place}.*not now"):
        normed()
    assert simulator.counters().get("stream", 0) == 0
    np.testing.assert_array_equal(normed(), X)


def test_tensors_that_could_not_be_moved_leave_nothing(warm, simulator):
    placed = warm.put(X)
    at_rest = simulator.counters()
    simulator.plan({"call": "aclrtMemcpyAsync", "code": 507056, "message": "link", "when": "async"})
    with pytest.raises(ascend.AscendError, match="UNAVAILABLE.*link"):
        warm.put(X)
    simulator.plan({"call": "aclrtMemcpyAsync", "code": 507056, "message": "link"})
    with pytest.raises(ascend.AscendError, match="UNAVAILABLE.*link"):
        warm.get(placed)
    np.testing.assert_array_equal(warm.get(placed), X)
    assert simulator.counters() == at_rest


def test_a_late_fault_names_what_was_enqueued(warm, simulator):
    simulator.plan({"call": "aclnnRmsNorm", "code": 507015, "message": "core broke", "when": "async"})
    x, weight = warm.put(X), warm.put(W)
    made = call(x, weight)  # enqueued without a complaint
    with pytest.raises(ascend.AscendError, match="last enqueued: .*aclnnRmsNorm.*core broke"):
        warm.get(made)
    warm.reset_device(0)


def test_a_missing_text_is_said_to_be_missing(warm, simulator):
    simulator.plan({"call": "aclnnRmsNorm", "code": 561103, "message": None})
    with pytest.raises(FAILURES, match=r"aclnnRmsNorm failed with status 561103: \(the library gives no text\)"):
        normed()


def test_a_slow_stream_is_a_deadline(open_bridge, simulator):
    open_bridge(sync_timeout_ms=20)
    normed()
    simulator.slow_down(delay_us=30_000)
    with pytest.raises(FAILURES, match="DEADLINE_EXCEEDED.*did not become idle in 20 ms"):
        normed()
    simulator.slow_down()
    np.testing.assert_array_equal(normed(), X)


def test_an_operator_fault_is_told_at_once_when_blocking(open_bridge, simulator):
    bridge = open_bridge(is_blocking=True)
    x, weight = bridge.put(X), bridge.put(W)
    simulator.plan({"call": "aclnnRmsNorm", "code": 507056, "message": "link", "when": "async"})
    with pytest.raises(FAILURES, match="UNAVAILABLE.*link"):
        jax.block_until_ready(call(x, weight))


def test_memory_runs_out(bridge, simulator):
    simulator.plan({"call": "aclrtMalloc", "nth": 2, "code": 207001, "message": "full"})
    with pytest.raises(ascend.AscendError, match="RESOURCE_EXHAUSTED.*aclrtMalloc.*full"):
        bridge.put(X)
    np.testing.assert_array_equal(bridge.get(bridge.put(X)), X)


def test_a_small_arena_is_told_how_to_grow(open_bridge, simulator):
    open_bridge(arena_bytes=2048)
    with pytest.raises(FAILURES, match="RESOURCE_EXHAUSTED.*arena of 2048 bytes.*more arena_bytes"):
        normed()
    assert simulator.counters().get("executor", 0) == 0


def test_an_index_outside_is_a_fault_of_the_device(warm):
    with pytest.raises(FAILURES, match="INTERNAL.*index 9 of 2 rows"):
        jax.block_until_ready(scatter_rows.scatter_rows(jnp.asarray(X), jnp.asarray([9], jnp.int32), jnp.ones((1, 8))))
    warm.reset_device(0)
    np.testing.assert_array_equal(normed(), X)


def test_host_code_cannot_use_a_closed_bridge(native):
    with pytest.raises((*FAILURES, ascend.AscendError), match="FAILED_PRECONDITION: .*the Ascend bridge is not open"):
        normed()


def test_a_second_bridge_is_refused(bridge):
    with pytest.raises(ascend.AscendError, match="open already"):
        ascend.open_bridge(ascend.AscendOptions(use_simulator=True))


def test_a_fault_plan_that_cannot_be_read_is_refused(simulator):
    with pytest.raises(ValueError, match="one of the keys call, nth"):
        simulator.plan({"cal": "aclInit", "code": 1})
