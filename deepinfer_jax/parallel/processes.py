"""Several processes that run one engine: how they find each other, agree, and end together.

Every process runs the same program on the same requests, and makes the same plans; the devices of all of them form one
mesh. What differs only by the clock is waited for. Before a step is launched the processes compare what they are about
to launch: a difference is an error, where it would be a hang. A process that dies is missed within `LOST_AFTER_S`
seconds; the others then end with exit status 1 and say whom they miss.
"""

import ctypes
import functools
import itertools
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

import jax
import numpy as np

LOST_AFTER_S = 10.0
EXIT_LOST = 1
_BEAT_S = 1.0
_AGREE_TIMEOUT_MS = 600_000  # a process may be compiling
_KEPT = 10_000  # agreements that process 0 keeps for others to read
_ALIVE, _DONE = "deepinfer/alive/", "deepinfer/done/"


def join_processes(
    coordinator: str | None = None, *, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the other processes: call it before anything else of JAX.

    coordinator: HOST:PORT of process 0. With nothing given, the cluster that JAX finds in the environment (SLURM,
    Kubernetes and others). Raises ValueError for a part of the three, RuntimeError where the others do not come.
    """
    given = (coordinator, num_processes, process_id)
    if any(one is not None for one in given) and any(one is None for one in given):
        raise ValueError(
            f"coordinator={coordinator!r}, num_processes={num_processes} and process_id={process_id} go together; give "
            "all three, or none of them in a cluster that JAX knows"
        )
    # JAX aborts a process that misses another, later than our own watch; but at once where process 0 has died.
    jax.distributed.initialize(
        coordinator, num_processes, process_id, heartbeat_timeout_seconds=600, shutdown_timeout_seconds=60
    )
    if jax.process_count() > 1:
        _watches.append(_Watch(_client(), jax.process_index(), jax.process_count()))
        _watches[0].start()
        _end_on_abort()


def leave_processes() -> int:
    """Tells the others that this process is done, and waits for them. Its number among them, 0 where it is alone."""
    index = jax.process_index()
    while _watches:
        _watches.pop().stop()
        jax.distributed.shutdown()
    return index


_watches: list["_Watch"] = []  # of this process, which may join others once
_agreements = itertools.count()  # of this process; every process makes the same ones in the same order


class ProcessesDifferError(RuntimeError):
    """This process is about to do something else than process 0: neither can go on."""


class Agreement:
    """What the processes are about to do, compared one thing after the other."""

    def __init__(self, name: str) -> None:
        self._name, self._count = f"{name}-{next(_agreements)}", 0

    def check(self, what: str, contents: Iterable[np.ndarray] = ()) -> None:
        """Ends this process where process 0 is about to do something else; nothing to do for one process.

        what: in words. contents: all that is not said there, compared by a checksum. Raises ProcessesDifferError where
        the processes did not find each other by `join_processes`.
        """
        if jax.process_count() == 1:
            return
        checksum = functools.reduce(lambda value, part: zlib.crc32(part.tobytes(), value), contents, 0)
        what = f"{what} ({checksum:08x})"
        key, client = self._next_key(), _client()
        if jax.process_index() == 0:
            client.key_value_set(key, what)
            if self._count > _KEPT:
                client.key_value_delete(f"deepinfer/{self._name}/{self._count - _KEPT}")
            return
        first = client.blocking_key_value_get(key, _AGREE_TIMEOUT_MS)
        if first != what:
            error = ProcessesDifferError(
                f"process {jax.process_index()} is about to launch {what}, process 0 {first}: their requests differ; "
                "give every process the same requests in the same order, with the same images"
            )
            if _watches:  # an exception would wait, at the latest when Python ends, for steps that never end
                _end_now(f"{error}; it ends with the job")
            raise error

    def least(self, value: int) -> int:
        """The smallest value of all processes."""
        if jax.process_count() == 1:
            return value
        key, client = self._next_key(), _client()
        client.key_value_set(f"{key}/{jax.process_index()}", str(value))
        told = (client.blocking_key_value_get(f"{key}/{i}", _AGREE_TIMEOUT_MS) for i in range(jax.process_count()))
        return min(int(one) for one in told)

    def first(self, text: str) -> str:
        """The text of process 0."""
        if jax.process_count() == 1:
            return text
        key = self._next_key()
        if jax.process_index() > 0:
            return _client().blocking_key_value_get(key, _AGREE_TIMEOUT_MS)
        _client().key_value_set(key, text)
        return text

    def wait(self) -> None:
        """Waits until all processes are here: a collective of the CPU gives up where one comes half a minute late."""
        if jax.process_count() > 1:
            self._count += 1
            _client().wait_at_barrier(f"deepinfer-{self._name}-{self._count}", _AGREE_TIMEOUT_MS)

    def _next_key(self) -> str:
        self._count += 1
        return f"deepinfer/{self._name}/{self._count - 1}"


class _Watch(threading.Thread):
    """Tells the others once in a second that this process lives, and ends it when another one falls silent."""

    def __init__(self, client: Any, index: int, count: int) -> None:
        super().__init__(name="deepinfer-processes", daemon=True)
        self._client, self._index, self._count = client, index, count
        self._stopped = threading.Event()
        self._seen: dict[str, tuple[str, float]] = {}  # process -> its last beat, and since when that is the last

    def stop(self) -> None:
        """Ends the watch, and tells the others that this process needs it no more."""
        self._client.key_value_set(f"{_DONE}{self._index}", "1", allow_overwrite=True)
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Until `stop`."""
        beat = 0
        while not self._stopped.wait(_BEAT_S):
            beat += 1
            try:
                self._client.key_value_set(f"{_ALIVE}{self._index}", str(beat), allow_overwrite=True)
                beats, done = self._entries(_ALIVE), self._entries(_DONE)
            except Exception as error:  # noqa: BLE001 - whatever it is, the coordinator cannot be reached
                self._end(f"cannot reach process 0 any more ({type(error).__name__})")
            lost = [peer for peer in self._silent(beats) if peer not in done]
            if lost:
                self._end(f"has not heard from process {', '.join(lost)} for {LOST_AFTER_S:.0f} s")

    def _silent(self, beats: dict[str, str]) -> list[str]:
        now = time.monotonic()
        for peer, value in beats.items():
            if peer not in self._seen or self._seen[peer][0] != value:
                self._seen[peer] = value, now
        return sorted(peer for peer, (_, since) in self._seen.items() if now - since > LOST_AFTER_S)

    def _entries(self, folder: str) -> dict[str, str]:
        return {key.rsplit("/", 1)[1]: value for key, value in self._client.key_value_dir_get(folder)}

    def _end(self, why: str) -> NoReturn:
        _end_now(f"process {self._index} of {self._count} {why}; it ends with the job")


_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_int)


@_ABORT
def _aborted(_: int) -> None:
    _end_now(f"process {jax.process_index()} cannot reach process 0 any more; it ends")


def _end_now(why: str) -> NoReturn:
    """Ends this process, whatever its threads wait for: that may be a collective that never ends."""
    sys.stderr.write(f"deepinfer-jax: {why}\n")
    sys.stderr.flush()
    os._exit(EXIT_LOST)


def _end_on_abort() -> None:
    """Gives an abort of JAX's runtime the exit status of a lost process; Python's own handlers would never run."""
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)


def _client() -> Any:
    from jax._src import distributed  # JAX has no public name for its key-value store

    return distributed.global_state.client
