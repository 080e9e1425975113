"""While a step is launched nobody in that thread reads the device; before, after and elsewhere everybody may."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine import guard
from deepinfer_jax.engine.guard import SyncError, no_device_reads
from deepinfer_jax.testing import tiny
from tests.engine.driving import add, check_free, drain, facts_of, params_of, prompt_of

READS = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "int": int,
    "float": float,
    "bool": bool,
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "repr": repr,
    "format": lambda x: f"{x}",
    "memoryview": memoryview,
    "from_dlpack": np.from_dlpack,
    "device_get": jax.device_get,
    "device_get of several": lambda x: jax.device_get([x, x]),
    "block_until_ready": lambda x: x.block_until_ready(),
    "jax.block_until_ready": jax.block_until_ready,
    "jax.block_until_ready of several": lambda x: jax.block_until_ready([x, x + 1]),
    "comparison": lambda x: 1 if x > 0 else 0,
    "shard": lambda x: np.asarray(x.addressable_data(0)),
    "pickle": pickle.dumps,
    "deepcopy to host": lambda x: np.asarray(copy.deepcopy(x)),
}


@pytest.fixture
def array():
    return jax.block_until_ready(jnp.asarray(3, jnp.int32))


@pytest.mark.parametrize("name", READS)
def test_a_read_is_refused(array, name):
    fresh = array + 1
    with no_device_reads(), pytest.raises(SyncError, match="while a step was launched"):
        READS[name](fresh)
    READS[name](fresh)


def test_launching_goes_on(array):
    with no_device_reads():
        moved = jax.device_put(np.arange(3, dtype=np.int32))
        result = jax.jit(lambda a, b: a + b)(array, moved)
        result.copy_to_host_async()
        assert isinstance(result.is_ready(), bool) and result.shape == (3,)
    assert np.asarray(result).tolist() == [3, 4, 5]


def is_shared(array: jax.Array) -> bool:
    """Whether numpy looks at the memory of the device array itself."""
    return np.asarray(array).ctypes.data == array.unsafe_buffer_pointer()


def test_afterwards_arrays_are_read_without_a_copy():
    assert is_shared(jnp.arange(4096))
    with no_device_reads(), no_device_reads():
        pass
    assert is_shared(jnp.arange(4096))
    assert memoryview(jnp.arange(4096)).nbytes == 4 * 4096


def test_an_exception_inside_ends_the_guard(array):
    with pytest.raises(KeyError), no_device_reads(), no_device_reads():
        raise KeyError
    assert int(array) == 3


def test_an_interrupt_while_the_guard_begins_leaves_none(array, monkeypatch):
    monkeypatch.setattr(guard, "_guards", set())  # so that what it leaves behind ends with this test
    monkeypatch.setattr(guard, "_launching", threading.local())

    replacements = guard._replacements()

    def interrupt():
        yield from replacements[:2]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(guard, "_replacements", interrupt)
        with pytest.raises(KeyboardInterrupt), no_device_reads():
            pass
    with no_device_reads(), pytest.raises(SyncError):
        int(array + 1)
    assert int(array + 2) == 5


def test_other_threads_may_read(array):
    found: list[object] = []

    def read() -> None:
        found.append(int(array + 1))
        with no_device_reads():
            try:
                int(array + 2)
            except SyncError as error:
                found.append(error)
        found.append(np.asarray(array + 3).tolist())

    with no_device_reads():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        with pytest.raises(SyncError):
            int(array)
    assert found[0] == 4 and isinstance(found[1], SyncError) and found[2] == 6
    assert int(array) == 3


def reading_launch(engine, monkeypatch, at: int) -> None:
    """Makes the launch of one step read a device array in its middle."""
    pack, calls = engine.pipeline._contents, []

    def pack_and_read(*args):
        calls.append(None)
        if len(calls) == at:
            int(jnp.asarray(7))
        return pack(*args)

    monkeypatch.setattr(engine.pipeline, "_contents", pack_and_read)


def run(engine) -> dict:
    add(engine, "a", prompt_of(9), params_of(1, 8))
    found = drain(engine)
    add(engine, "b", prompt_of(9), params_of(1, 8))
    return found | drain(engine)


@pytest.mark.parametrize("at", [1, 4])
def test_a_read_during_a_launch_ends_the_requests_of_that_step(tiny_model, monkeypatch, at):
    want = facts_of(run(tiny.tiny_engine(tiny_model))["a"])
    engine = tiny.tiny_engine(tiny_model)
    reading_launch(engine, monkeypatch, at)
    sequence = add(engine, "first", prompt_of(9), params_of(1, 8))
    found = drain(engine)
    assert isinstance(sequence.error, SyncError)
    assert [output.finish_reason for output in found["first"]][-1] == "abort"
    assert facts_of(found["first"][:-1]) == want[: at - 1]
    found = run(engine)
    assert facts_of(found["a"]) == facts_of(found["b"]) == want
    check_free(engine)


def test_the_variable_allows_it(tiny_model, monkeypatch):
    want = run(tiny.tiny_engine(tiny_model))
    engine = tiny.tiny_engine(tiny_model, {"DEEPINFER_DISABLE_SYNC_GUARD": "1"})
    reading_launch(engine, monkeypatch, 4)
    assert run(engine) == want
