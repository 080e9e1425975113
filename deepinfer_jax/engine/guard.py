"""A guard against waiting: while a step is launched, reading a device array is an error (spec: interface 7).

JAX's own transfer guard lets `np.asarray(x)` and `int(x)` pass on a CPU. This one replaces the ways in which an array
hands out its value, for the time of a launch; other threads are not affected by it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

_READERS = ("__array__", "__buffer__", "__dlpack__", "block_until_ready")  # `_value` serves int(), item(), repr() ...
_lock = threading.Lock()
_launching = threading.local()
_depth = 0  # launches under way in all threads
_originals: dict[str, Any] = {}


class SyncError(RuntimeError):
    """A device array was read, or waited for, while a step was launched."""


@contextlib.contextmanager
def no_device_reads() -> Iterator[None]:
    """Makes every read of a `jax.Array` in this thread raise `SyncError`; launching and transfers to it go on."""
    _launching.depth = getattr(_launching, "depth", 0) + 1
    _install()
    try:
        yield
    finally:
        _remove()
        _launching.depth -= 1


def _install() -> None:
    global _depth
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        array_type = _array_type()
        for name in (*_READERS, "_value"):
            _originals[name] = getattr(array_type, name)
        for name in _READERS:
            setattr(array_type, name, _checked(name, _originals[name]))
        array_type._value = property(_checked("a value", _originals["_value"].fget))


def _remove() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            array_type = _array_type()
            for name, original in _originals.items():
                setattr(array_type, name, original)


@functools.cache
def _array_type() -> Any:
    """The class of device arrays, which JAX does not export."""
    return type(jnp.zeros((), jnp.int32))


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: jax.Array, *args: Any, **kwargs: Any) -> Any:
        if getattr(_launching, "depth", 0):
            raise SyncError(
                f"{name} of a device array was asked for while a step was launched, which would wait for the device; "
                "read it before or after, or set DEEPINFER_DISABLE_SYNC_GUARD=1"
            )
        return original(self, *args, **kwargs)

    return read
