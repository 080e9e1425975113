"""Masks made beside the step loop, so that a slow one keeps no other row waiting.

The backend gives the interpreter lock back while it makes a mask, but cannot be interrupted. A job that takes long
therefore does not count against the number of threads: a new thread takes the place of its thread, which ends with
it. The limits of `compile_grammar` see to it that every job ends.
"""

import os
import queue
import threading
import time
from typing import Protocol, runtime_checkable

import numpy as np

from deepinfer_jax.sampling.grammar.errors import GrammarError

_SLOW_S = 0.02  # a job that runs longer than this is slow
_ADVICE = "make the grammar less ambiguous, or raise DEEPINFER_XGRAMMAR_TIMEOUT"


@runtime_checkable
class MaskSource(Protocol):
    """Whose mask is made: a `DrawState`."""

    def fill_mask(self, row: np.ndarray) -> None:
        """Writes which tokens may come next."""


class MaskJob:
    """One mask under way. Nothing is written to its row but by `wait`, in the caller's thread."""

    def __init__(self, jobs: "MaskJobs", source: MaskSource, row: np.ndarray) -> None:
        self._jobs, self._source, self._row = jobs, source, row
        self._lock, self._settled = threading.Lock(), threading.Event()
        self._mask: np.ndarray | None = None
        self._error: BaseException | None = None
        self._deadline = time.monotonic() + jobs.timeout_s

    @property
    def is_done(self) -> bool:
        """True when `wait` returns True or raises at once."""
        return self._settled.is_set()

    def wait(self, timeout_s: float) -> bool:
        """True once the mask stands in the row; False if it does not after timeout_s, and then the row is as it was.

        Raises what making the mask raised, and GrammarError if that takes longer than the limit or was cancelled.
        """
        end = time.monotonic() + timeout_s
        while not self._settled.wait(max(0.0, min(end - time.monotonic(), _SLOW_S))):
            self._jobs.relieve()
            if time.monotonic() >= self._deadline:
                self._settle(error=GrammarError(f"a mask was not ready within {self._jobs.timeout_s:g} s; {_ADVICE}"))
            elif time.monotonic() >= end:
                return False
        if self._error is not None:
            raise self._error
        assert self._mask is not None, "a job ends with a mask or an error"
        np.copyto(self._row, self._mask)
        return True

    def cancel(self) -> None:
        """Throws the job away: it does not begin, or what it makes is dropped."""
        self._settle(error=GrammarError("this mask was cancelled; start another one"))

    def run(self) -> None:
        """Makes the mask, in a thread of `MaskJobs`."""
        mask = np.empty(self._row.shape, self._row.dtype)
        try:
            self._source.fill_mask(mask)
        except BaseException as error:  # noqa: BLE001 (handed to whoever waits for the mask)
            self._settle(error=error)
        else:
            self._settle(mask=mask)

    def _settle(self, *, mask: np.ndarray | None = None, error: BaseException | None = None) -> None:
        with self._lock:
            if not self._settled.is_set():  # else it was too late or cancelled, which stands
                self._mask, self._error = mask, error
                self._settled.set()


class MaskJobs:
    """Makes masks on threads of its own, which begin with the first job.

    num_threads: for jobs that are not slow; there are never more than the cores of this process. Every slow job has
    a thread in addition. timeout_s: limit of a job, counted from `start`.
    """

    def __init__(self, *, num_threads: int = 4, timeout_s: float = 20.0) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads} must be 1 or more; correct DEEPINFER_SO_BUILDER_CPUS")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be above 0; correct DEEPINFER_XGRAMMAR_TIMEOUT")
        self.num_threads, self.timeout_s = min(num_threads, len(os.sched_getaffinity(0))), timeout_s
        self._queue: queue.SimpleQueue[MaskJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._begun_at: dict[MaskJob, float] = {}  # of jobs that run and are not known to be slow
        self._num_ready = 0  # threads that have none or such a job
        self._is_closed = False

    def start(self, source: MaskSource, row: np.ndarray) -> MaskJob:
        """Begins a mask. row: as `DrawState.fill_mask` takes it.

        Until the job is done, whoever uses the source waits for it, another job of the same source too.
        """
        job = MaskJob(self, source, row)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("these mask jobs are closed; make new ones")
            self._queue.put(job)
        self.relieve()
        return job

    def relieve(self) -> None:
        """Puts a new thread in the place of each whose job has turned out to be slow."""
        with self._lock:
            if self._is_closed:
                return
            now = time.monotonic()
            for job in [job for job, begun_at in self._begun_at.items() if now - begun_at > _SLOW_S]:
                del self._begun_at[job]
                self._num_ready -= 1
            while self._num_ready < self.num_threads:
                self._num_ready += 1
                threading.Thread(target=self._work, name="grammar-masks", daemon=True).start()

    def close(self) -> None:
        """Lets the threads end after what was started; nothing can be started afterwards."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._num_ready):
                    self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.is_done:
                continue
            with self._lock:
                self._begun_at[job] = time.monotonic()
            job.run()
            with self._lock:
                if self._begun_at.pop(job, None) is None:
                    return  # another thread has the place of this one
