"""A guard against waiting: while a step is launched, reading a device array is an error (spec: interface 7).

JAX's own transfer guard lets `np.asarray(x)` and `int(x)` pass on a CPU. This one replaces the ways in which an array
hands out its value, for the time of a launch; other threads are not affected by it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

_READERS = ("__array__", "__buffer__", "__dlpack__", "block_until_ready")  # `_value` serves int(), item(), repr() ...
_BATCH_WAIT = "batched_block_until_ready"  # what `jax.block_until_ready` calls for several arrays
_lock = threading.Lock()
_launching = threading.local()
_guards: set[object] = set()  # launches under way in all threads
_originals: dict[tuple[Any, str], Any] = {}  # empty: nothing is replaced


class SyncError(RuntimeError):
    """A device array was read, or waited for, while a step was launched."""


@contextlib.contextmanager
def no_device_reads() -> Iterator[None]:
    """Makes every read of a `jax.Array` in this thread raise `SyncError`; launching and transfers to it go on."""
    guard, depth = object(), getattr(_launching, "depth", 0)
    try:  # an interrupt may come anywhere: what is not there is not taken back
        _launching.depth = depth + 1
        _install(guard)
        yield
    finally:
        _launching.depth = depth
        _remove(guard)


def _install(guard: object) -> None:
    with _lock:
        _guards.add(guard)
        if _originals:
            return
        for place, name, replacement in _replacements():
            _originals[place, name] = getattr(place, name)
            setattr(place, name, replacement)


def _remove(guard: object) -> None:
    with _lock:
        _guards.discard(guard)
        if _guards:
            return
        for (place, name), original in _originals.items():
            setattr(place, name, original)
        _originals.clear()


@functools.cache
def _replacements() -> list[tuple[Any, str, Any]]:
    """What replaces each way to read a device array: where it is, its name, and the function or property."""
    array_type: Any = type(jnp.zeros((), jnp.int32))  # JAX does not export it
    found: list[tuple[Any, str, Any]] = [
        (array_type, name, _checked(name, getattr(array_type, name))) for name in _READERS
    ]
    found.append((array_type, "_value", property(_checked("a value", array_type._value.fget))))
    if hasattr(xla_client, _BATCH_WAIT):
        found.append((xla_client, _BATCH_WAIT, _checked("block_until_ready", getattr(xla_client, _BATCH_WAIT))))
    return found


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(*args: Any, **kwargs: Any) -> Any:
        if getattr(_launching, "depth", 0):
            raise SyncError(
                f"{name} of a device array was asked for while a step was launched, which would wait for the device; "
                "read it before or after, or set DEEPINFER_DISABLE_SYNC_GUARD=1"
            )
        return original(*args, **kwargs)

    return read
