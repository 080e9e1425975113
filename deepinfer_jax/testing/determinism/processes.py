"""The base set, and rows of the matrix, in other processes. `python -m` this module with a task is such a process.

A task is JSON: a model, the output tokens, a folder, and what is to be done there.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.snapshot import save_snapshot
from deepinfer_jax.testing.determinism.driving import Arrival, Model, Run
from deepinfer_jax.testing.determinism.results import Result, load_results, save_results
from deepinfer_jax.testing.determinism.session import Session
from deepinfer_jax.testing.programs import forget_programs

TIMEOUT_S = 3600  # that a result is waited for
# Memory maps behind which a process forgets its programs between rows: those of a row that it runs take up to 9,000.
_MAX_MAPS = 40_000
_POLL_S = 0.05
_SHOWN = 2000  # characters of a failed process's last words
_LOG = "log.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a process does.

    whole: runs the base set. begin: runs it up to the middle of each answer and saves the requests in the folder.
    finish: goes on with the requests that are saved there.
    """

    model: Model
    num_tokens: int
    folder: str
    part: Literal["whole", "begin", "finish"] = "whole"
    rows: tuple[str, ...] = ()  # perturbations that it runs in front of its part
    cores: tuple[int, ...] = ()  # processors that it runs on; none: those of the process that starts it


class Worker:
    """A process that does a task while this one goes on. `close` ends it, whatever it is doing."""

    def __init__(self, task: Task) -> None:
        self._task, self._folder, self._last = task, Path(task.folder), time.time()
        command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(task))]
        self._log: IO[bytes] = (self._folder / _LOG).open("wb")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def rows(self) -> tuple[str, ...]:
        """The perturbations that it runs."""
        return self._task.rows

    def run(self, row: str | None = None) -> tuple[Run, float]:
        """What a row, or the part of the task, gave, and the seconds that it took; waits for that.

        To be asked for in the order of the task. Raises RuntimeError if the process has ended without it.
        """
        name = _file_name(self._task, row)
        marker, end = self._folder / f"{name}.json", time.monotonic() + TIMEOUT_S
        while not marker.exists():
            if self._process.poll() is not None and not marker.exists():
                raise RuntimeError(f"a process for the part {self._task.part!r} failed: {self._last_words()}")
            if time.monotonic() > end:
                raise RuntimeError(f"a process for the part {self._task.part!r} took more than {TIMEOUT_S} s")
            time.sleep(_POLL_S)
        begun, self._last = self._last, marker.stat().st_mtime
        run = Run(results=load_results(self._folder / f"{name}.npz"), notes=json.loads(marker.read_text()))
        return run, self._last - begun

    def close(self) -> None:
        """Ends the process if it has not ended."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        words = (self._folder / _LOG).read_text(errors="replace")[-_SHOWN:]
        return words or f"it ended with status {self._process.returncode} and said nothing"


@contextlib.contextmanager
def half_of_the_cores(is_wanted: bool) -> Iterator[tuple[int, ...]]:
    """Keeps this thread, and those that it starts, on half of its processors; gives the others, for a process beside.

    Threads of two processes that want the same processors cost a tenth more. To be entered before JAX makes its
    threads; without effect, and no processors given, where there is one only or the system cannot do it.
    """
    cores = sorted(os.sched_getaffinity(0)) if is_wanted and hasattr(os, "sched_setaffinity") else []
    half = len(cores) // 2
    if not half:
        yield ()
        return
    os.sched_setaffinity(0, cores[half:])
    try:
        yield tuple(cores[:half])
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def beside(session: Session, rows: tuple[str, ...]) -> Iterator[Worker]:
    """A process that runs these rows, and then the base set, which is the row `second process`.

    By then the programs of the base are in the cache, where this process has compiled them.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Worker(_task(session, folder, rows=rows, cores=session.spare_cores))) as worker,
    ):
        yield worker


def second(session: Session) -> Run:
    """The base set in a new process, which finds the programs that this one has compiled."""
    with tempfile.TemporaryDirectory() as folder:
        return _in_process(_task(session, folder))


def restarted(session: Session) -> Run:
    """A process that ends in the middle of every answer, and another that goes on from the files it left."""
    with tempfile.TemporaryDirectory() as folder:
        first = _in_process(_task(session, folder, part="begin"))
        rest = _in_process(_task(session, folder, part="finish"))
    results = {name: _joined(result, rest.results.get(name)) for name, result in first.results.items()}
    return Run(results=results, notes=rest.notes)


def with_cold_cache(session: Session) -> Run:
    """The base set in a process that has to compile everything."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        task = _task(session, folder)
        return _in_process(dataclasses.replace(task, model=dataclasses.replace(task.model, jit_cache_dir=cache)))


def _task(
    session: Session,
    folder: str,
    *,
    part: Literal["whole", "begin", "finish"] = "whole",
    **more: tuple[Any, ...],
) -> Task:
    return Task(model=session.model, num_tokens=session.texts.num_tokens, folder=folder, part=part, **more)


def _joined(first: Result, rest: Result | None) -> Result:
    """One answer; rest None: it was finished in the first part."""
    return first if rest is None else first.followed_by(rest)


def _in_process(task: Task) -> Run:
    """Runs a task in a process of its own. Raises RuntimeError if that fails."""
    with contextlib.closing(Worker(task)) as worker:
        return worker.run()[0]


def _file_name(task: Task, row: str | None) -> str:
    """What the files of a result are called: of the part, or of one of the rows."""
    return task.part if row is None else f"row{task.rows.index(row)}"


def main(text: str) -> None:
    """Does a task and leaves its results in the folder."""
    from deepinfer_jax.testing.determinism.perturbations import PERTURBATIONS  # which imports this module

    facts = json.loads(text)
    task = Task(**facts | {"model": Model(**facts["model"]), "rows": tuple(facts["rows"])})
    if task.cores:
        os.sched_setaffinity(0, task.cores)
    session = Session(task.model, num_tokens=task.num_tokens)
    try:
        for row in task.rows:
            [perturbation] = [each for each in PERTURBATIONS if each.name == row]
            _leave(perturbation.run(session), task, row)
            forget_programs(_MAX_MAPS)
        _leave(_run(session, task, Path(task.folder)), task, None)
    finally:
        session.close()


def _leave(run: Run, task: Task, row: str | None) -> None:
    """Writes results; who waits for them looks for the last file, which is always a whole one."""
    folder, name = Path(task.folder), _file_name(task, row)
    save_results(run.results, folder / f"{name}.npz")
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(run.notes))
    os.replace(unfinished, folder / f"{name}.json")


def _run(session: Session, task: Task, folder: Path) -> Run:
    def save(engine: LLMEngine, request_id: str, _: str) -> None:
        save_snapshot(engine.save_request(request_id), folder / f"{request_id}.safetensors")
        engine.abort_request(request_id)

    if task.part == "begin":
        return session.run(session.arrivals, interrupt=save)
    if task.part == "finish":
        files = {request.name: folder / f"{request.name}.safetensors" for request in session.requests}
        saved = [
            Arrival(request, snapshot=files[request.name])
            for request in session.requests
            if files[request.name].exists()
        ]
        return session.run(saved)
    return session.run(session.arrivals)


if __name__ == "__main__":
    main(sys.argv[1])
