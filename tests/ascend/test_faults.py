"""A6: every failure class at every place of every operator's call, open and close included: told, and nothing is left.

The simulator notes where faults can be planned while a call goes well; then each of these places fails in turn.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax.kernels import ascend, ffi
from deepinfer_jax.kernels.ascend import Bridge, DeviceArray
from deepinfer_jax.kernels.collectives import cann as collectives
from deepinfer_jax.testing import compare
from deepinfer_jax.testing.ascend_cases import CASES, Case
from tests.ascend.conftest import Simulator
from tests.ascend.test_errors import DIRTY, USABLE

STATUSES = USABLE | DIRTY
FAILURES = (jax.errors.JaxRuntimeError, ValueError, ascend.AscendError, ascend.AscendUnsupportedError)
# One case of each target.
ONE_OF_EACH = list({case.target: case for case in reversed(CASES)}.values())
AMOUNTS = ["some", pytest.param("all", marks=pytest.mark.slow)]

type Site = tuple[str, str, int]  # the call, "call" or "async", and which of its calls it is


def sites_of(simulator: Simulator, run: Callable[[], Any]) -> list[Site]:
    """Where a fault can be planned in what `run` does."""
    simulator.record_calls()
    run()
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for name, when in simulator.calls():
        seen[name, when] += 1
        found.append((name, when, seen[name, when]))
    return found


def faults(sites: list[Site], amount: str) -> Iterator[tuple[Site, int]]:
    """Each place with every status, or with a few in turn: one that leaves the device usable, and one that does not."""
    usable, dirty = itertools.cycle(USABLE), itertools.cycle(DIRTY)
    for site in sites:
        for status in STATUSES if amount == "all" else (next(usable), next(dirty)):
            yield site, status


def plan(simulator: Simulator, site: Site, status: int) -> None:
    name, when, nth = site
    simulator.plan({"call": name, "when": when, "nth": nth, "code": status, "message": "told why"})


def check_told(error: BaseException, site: Site, status: int) -> None:
    """The class of the status, the library's text, and the operator where one was called."""
    text, name = str(error), site[0]
    if name.startswith("aclCreate"):
        assert f"{name} made none" in text and text.startswith("INTERNAL"), text
        return
    assert "told why" in text and f"status {status}" in text, text
    # JAX raises a ValueError, without the word, where it waits for the call itself.
    assert STATUSES[status] in text or (STATUSES[status] == "INVALID_ARGUMENT" and isinstance(error, ValueError)), error
    if name.startswith("aclnn"):
        assert name.removesuffix("GetWorkspaceSize") in text, text


def recover(bridge: Bridge, site: Site, status: int) -> None:
    """A device that is dirty says so, and works after a reset."""
    if status not in DIRTY or site[0].startswith("aclCreate"):
        return
    with pytest.raises(FAILURES, match=r"takes no work until reset_device.*told why"):
        bridge.synchronize()
    bridge.reset_device(0)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=[case.name for case in ONE_OF_EACH])
def test_a_call_with_arrays(bridge, simulator, rng, case: Case, amount):
    call, arrays = jax.jit(case.call), case.make(rng)

    def run() -> Any:
        return jax.tree.map(np.asarray, jax.block_until_ready(call(*arrays)))

    want, at_rest = run(), simulator.counters()
    sites = sites_of(simulator, run)
    operators = {name for name, _, _ in sites if name.startswith("aclnn")}
    assert operators and {when for _, when, _ in sites} == {"call", "async"}
    for site, status in faults(sites, amount):
        plan(simulator, site, status)
        with pytest.raises(FAILURES) as caught:
            run()
        simulator.plan()
        check_told(caught.value, site, status)
        assert case.target in str(caught.value)
        recover(bridge, site, status)
        jax.tree.map(compare.assert_bitwise, run(), want)
        assert simulator.counters() == at_rest, (site, status)
        assert bridge.usage() == (0, 0)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=[case.name for case in ONE_OF_EACH])
def test_a_call_with_device_arrays(bridge, simulator, rng, case: Case, amount):
    call, arrays = jax.jit(case.call), case.make(rng)

    def run() -> Any:
        return run_and_free(bridge, call, arrays)

    want = run()
    bridge.synchronize()  # memory that was released is free now
    at_rest = simulator.counters()
    sites = sites_of(simulator, run)
    assert {"aclrtMalloc", "aclrtRecordEvent", "aclrtFree"} <= {name for name, _, _ in sites}
    for site, status in faults(sites, amount):
        plan(simulator, site, status)
        with pytest.raises(FAILURES) as caught:
            run()
        simulator.plan()
        check_told(caught.value, site, status)
        recover(bridge, site, status)
        jax.tree.map(compare.assert_bitwise, run(), want)
        bridge.synchronize()
        assert simulator.counters() == at_rest, (site, status)
        assert bridge.usage() == (0, 0)


def run_and_free(bridge: Bridge, call: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """A resident call, its results on the host; what it put on the device is released, also where it fails."""
    words: dict[int, DeviceArray] = {}  # by slot: what names its tensor now

    def put(array: Any) -> DeviceArray:
        placed = bridge.put(array)
        words[int(placed.words[2])] = placed
        return placed

    def is_placed(leaf: Any) -> bool:
        return isinstance(leaf, DeviceArray)

    try:
        placed = jax.tree.map(put, arrays)
        owned = set(words)
        made = jax.block_until_ready(call(*placed))
        words |= {int(one.words[2]): one for one in jax.tree.leaves(made, is_leaf=is_placed)}
        words = {slot: one for slot, one in words.items() if slot in owned}
        found = jax.tree.map(bridge.get, made, is_leaf=is_placed)
        bridge.end_step(made)
        for slot in list(words):
            bridge.release(words[slot])
            del words[slot]
    except FAILURES:
        for one in words.values():
            with contextlib.suppress(*FAILURES):  # of a dirty device, which a reset frees
                bridge.release(one)
        with contextlib.suppress(*FAILURES):
            bridge.end_step()
        raise
    return found


@pytest.mark.parametrize("amount", AMOUNTS)
def test_starting_a_device(open_bridge, simulator, amount):
    def start() -> Bridge:
        bridge = open_bridge()
        bridge.synchronize()
        return bridge

    simulator.record_calls()
    start().close()
    names = [name for name, _ in simulator.calls()]
    place = names.index("aclrtCreateStreamWithConfig"), names.index("aclrtMalloc")
    at_rest = simulator.counters()
    for site, status in faults([(names[index], "call", 1) for index in place], amount):
        bridge = open_bridge()
        plan(simulator, site, status)
        with pytest.raises(FAILURES) as caught:
            bridge.synchronize()
        simulator.plan()
        check_told(caught.value, site, status)
        recover(bridge, site, status)
        bridge.synchronize()
        bridge.close()
        assert simulator.counters() == at_rest, (site, status)


@pytest.mark.parametrize("status", STATUSES)
def test_opening(open_bridge, simulator, status):
    simulator.record_calls()
    open_bridge(determinism=1)
    names = {name for name, _ in simulator.calls()} - {"aclsysGetVersionStr"}  # without it, the version is unknown
    assert names == {"aclInit", "aclrtGetDeviceCount", "aclrtSetSysParamOpt", "aclrtSetDevice"}
    ascend.current_bridge().close()
    for name in sorted(names):
        plan(simulator, (name, "call", 1), status)
        with pytest.raises(FAILURES, match=f"{STATUSES[status]}.*{name} failed with status {status}: told why"):
            open_bridge(determinism=1)
        simulator.plan()
        assert set(simulator.counters().values()) <= {0, 1}  # the level of determinism alone
    bridge = open_bridge()
    np.testing.assert_array_equal(bridge.get(bridge.put(np.ones(3))), np.ones(3))


@pytest.mark.parametrize("status", [507056, 507015])
def test_closing_ends_everything_whatever_fails(open_bridge, simulator, status):
    def opened() -> Bridge:
        bridge = open_bridge()
        placed = [bridge.put(np.ones(4, np.float32)) for _ in range(2)]
        bridge.release(placed[0])
        return bridge

    sites = sites_of(simulator, opened().close)
    assert {"aclrtDestroyStream", "aclrtFree"} <= {name for name, _, _ in sites}
    for site in sites:
        if site[0] in ("aclFinalize", "aclrtResetDevice"):  # what ends the rest cannot fail itself
            continue
        bridge = opened()
        plan(simulator, site, status)
        bridge.close()
        simulator.plan()
        assert simulator.violations() == [], site


@pytest.mark.parametrize("status", [507056, 507015])
def test_a_reset_that_fails_can_be_done_again(bridge, simulator, status):
    def dirtied() -> None:
        placed = [bridge.put(np.ones(4, np.float32)) for _ in range(2)]
        bridge.release(placed[0])

    dirtied()
    sites = sites_of(simulator, lambda: bridge.reset_device(0))
    assert {"aclrtStreamAbort", "aclrtResetDevice"} <= {name for name, _, _ in sites}
    for site in sites:
        dirtied()
        plan(simulator, site, status)
        try:
            bridge.reset_device(0)
        except FAILURES as error:
            assert "told why" in str(error)
            with pytest.raises(FAILURES, match="takes no work until reset_device"):
                bridge.synchronize()
            bridge.reset_device(0)
        else:
            assert site[0] != "aclrtResetDevice"
        simulator.plan()
        np.testing.assert_array_equal(bridge.get(bridge.put(np.ones(3))), np.ones(3))
        bridge.reset_device(0)
        assert set(simulator.counters().values()) == {0}, site


COLLECTIVES = {
    "HcclAllReduce": collectives.psum,
    "HcclAllGather": collectives.all_gather,
    "HcclReduceScatter": collectives.reduce_scatter,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective(bridge, simulator, name):
    groups = bridge.make_groups([[0]])
    call = jax.jit(lambda x: COLLECTIVES[name](x, groups))

    def run() -> np.ndarray:
        return np.asarray(call(np.ones(2, np.float32)))

    want, at_rest = run(), simulator.counters()
    classes = {result: classify_collective(bridge, result) for result in range(1, 25)}
    assert len(set(classes.values())) == 8
    for result, what in classes.items():
        simulator.plan({"call": name, "code": result})
        with pytest.raises(FAILURES) as caught:
            run()
        simulator.plan()
        assert f"{name} failed with result {result} of HCCL" in str(caught.value)
        assert isinstance(caught.value, ValueError) if what == "INVALID_ARGUMENT" else what in str(caught.value)
        np.testing.assert_array_equal(run(), want)
        assert simulator.counters() == at_rest
    for status in STATUSES:  # found by the wait behind it
        site = (name, "async", 1)
        plan(simulator, site, status)
        with pytest.raises(FAILURES) as caught:
            run()
        simulator.plan()
        check_told(caught.value, site, status)
        assert name in str(caught.value)
        recover(bridge, site, status)
        np.testing.assert_array_equal(run(), want)
        assert simulator.counters() == at_rest


def classify_collective(bridge: Bridge, result: int) -> str:
    names = {3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND", 8: "RESOURCE_EXHAUSTED", 10: "ABORTED"}
    names |= {12: "UNIMPLEMENTED", 13: "INTERNAL", 14: "UNAVAILABLE"}
    return names[bridge.library.deepinfer_ascend_classify_collective(result)]


def test_groups_of_which_one_cannot_be_made_leave_nothing(bridge, simulator):
    at_rest = simulator.counters()
    simulator.plan({"call": "HcclCommInitAll", "nth": 2, "code": 11})
    with pytest.raises(ascend.AscendError, match="UNAVAILABLE"):
        bridge.make_groups([[0, 1], [2, 3]])
    assert simulator.counters() == at_rest


def test_a_stack_of_which_one_tensor_cannot_be_placed_leaves_nothing(bridge, simulator):
    bridge.synchronize()
    at_rest = simulator.counters()
    simulator.plan({"call": "aclrtMalloc", "nth": 3, "code": 207001, "message": "full"})
    with pytest.raises(ascend.AscendError, match="RESOURCE_EXHAUSTED.*full"):
        bridge.put_stack(np.ones((4, 2, 3), np.float32))
    simulator.plan()
    bridge.synchronize()
    assert simulator.counters() == at_rest and bridge.usage() == (0, 0)


def test_every_target_is_among_the_cases(native):
    targets = {entry["name"] for entry in ffi.target_table(ffi.load_bridge()) if entry["operators"]}
    assert targets == {case.target for case in ONE_OF_EACH}


@pytest.fixture
def rng(seed_from_name: int) -> np.random.Generator:
    return np.random.default_rng(seed_from_name)
