"""The base set in other processes. `python -m deepinfer_jax.testing.determinism.processes TASK` is such a process.

A task is JSON: a model, the output tokens, a folder, and what is to be done there.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.snapshot import save_snapshot
from deepinfer_jax.testing.determinism.driving import Arrival, Model, Run
from deepinfer_jax.testing.determinism.results import Result, load_results, save_results
from deepinfer_jax.testing.determinism.session import Session

TIMEOUT_S = 3600
_SHOWN = 2000  # characters of a failed process's last words
_RESULTS, _NOTES = "results.npz", "notes.json"


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


def _task(session: Session, folder: str, *, part: Literal["whole", "begin", "finish"] = "whole") -> Task:
    return Task(model=session.model, num_tokens=session.texts.num_tokens, folder=folder, part=part)


def _joined(first: Result, rest: Result | None) -> Result:
    """One answer; rest None: it was finished in the first part."""
    return first if rest is None else first.followed_by(rest)


def _in_process(task: Task) -> Run:
    """Runs a task in a process of its own. Raises RuntimeError if that fails."""
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(task))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"a process for the part {task.part!r} failed: {done.stderr[-_SHOWN:]}")
    folder = Path(task.folder)
    return Run(results=load_results(folder / _RESULTS), notes=json.loads((folder / _NOTES).read_text()))


def main(text: str) -> None:
    """Does a task and leaves its results in the folder."""
    facts = json.loads(text)
    task = Task(**facts | {"model": Model(**facts["model"])})
    folder = Path(task.folder)
    session = Session(task.model, num_tokens=task.num_tokens)
    try:
        run = _run(session, task, folder)
    finally:
        session.close()
    save_results(run.results, folder / _RESULTS)
    (folder / _NOTES).write_text(json.dumps(run.notes))


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
