"""Runs the rows of the matrix and compares each with its base."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.kernels.registry import ASCEND
from deepinfer_jax.testing import microscope
from deepinfer_jax.testing.determinism import processes
from deepinfer_jax.testing.determinism.perturbations import PERTURBATIONS, Perturbation
from deepinfer_jax.testing.determinism.report import Report, Row, read_report, write_report
from deepinfer_jax.testing.determinism.results import Difference, Result, compare_results, num_states
from deepinfer_jax.testing.determinism.session import Session
from deepinfer_jax.testing.programs import forget_programs


class BaseDiffers(RuntimeError):
    """Two processes with the same facts gave other bits."""


type Progress = Callable[[Sequence[Perturbation]], Any]


def choose(pattern: str, *, is_quick: bool) -> tuple[Perturbation, ...]:
    """The rows whose name or axis fits a pattern. Raises ValueError where none does."""
    found = tuple(
        each
        for each in PERTURBATIONS
        if (fnmatchcase(each.name, pattern) or fnmatchcase(each.axis, pattern)) and (each.is_quick or not is_quick)
    )
    if not found:
        names = ", ".join(each.name for each in PERTURBATIONS if each.is_quick or not is_quick)
        raise ValueError(f"--only={pattern!r} fits no row; rows are {names}")
    return found


def can_split(chosen: Sequence[Perturbation]) -> bool:
    """Whether the rows are some for a second process, and that process is a row itself."""
    return any(each.is_apart for each in chosen) and any(each.run is processes.second for each in chosen)


def run_matrix(
    session: Session,
    chosen: Sequence[Perturbation],
    facts: Mapping[str, Any],
    *,
    json_path: Path | None = None,
    progress: Progress = lambda rows: rows,
    is_split: bool = False,
) -> Report:
    """The report of the chosen rows; with json_path those that are in that file under the same facts are kept.

    The file is written after each row. progress: wraps the list of rows to run, as `tqdm` does. is_split: the
    second process, where it is one of the rows, runs those that have programs of their own. Raises ValueError for
    a file of other facts or of another kind, and `BaseDiffers` where this process gives another base than the one that
    began the file.
    """
    earlier = None if json_path is None else read_report(json_path, facts)
    lacking = left_out(
        chosen, has_vision=session.has_vision, max_drafts=session.max_drafts, device=session.model.device
    )
    finished = set() if earlier is None else {row.name for row in earlier.rows}
    todo = [each for each in chosen if each.name not in finished and each.name not in lacking]
    with _worker(session, todo, is_split=is_split) as worker:
        base = session.base("plain").results
        fingerprints = {name: result.fingerprint for name, result in base.items()}
        if earlier is not None:
            _check_base(earlier, fingerprints)
        report = earlier or Report(facts=dict(facts), fingerprints=fingerprints)
        report = dataclasses.replace(report, left_out=lacking)
        for perturbation in progress(_in_turn(todo, worker)):
            forget_programs()
            report = report.with_row(run_row(session, perturbation, worker))
            if json_path is not None:
                write_report(report, json_path)
    return report


def _worker(
    session: Session, todo: Sequence[Perturbation], *, is_split: bool
) -> contextlib.AbstractContextManager[processes.Worker | None]:
    """A process for the rows that may run in another one, if there are some, and another process is among the rows."""
    if is_split and can_split(todo):
        return processes.beside(session, tuple(each.name for each in todo if each.is_apart))
    return contextlib.nullcontext()


def _in_turn(todo: Sequence[Perturbation], worker: processes.Worker | None) -> list[Perturbation]:
    """The rows in the order in which they are there: those of the worker last, and its base set behind them."""
    if worker is None:
        return list(todo)
    return sorted(todo, key=lambda each: (each.run is processes.second, each.name in worker.rows))


def run_row(session: Session, perturbation: Perturbation, worker: processes.Worker | None = None) -> Row:
    """One row; where something differs, the microscope looks for the first tensor.

    worker: has run the base set in a second process, and some rows.
    """
    want = session.base(perturbation.base).results
    start = time.perf_counter()
    if worker is not None and perturbation.run is processes.second:
        run, seconds = worker.run()
    elif worker is not None and perturbation.name in worker.rows:
        run, seconds = worker.run(perturbation.name)
    else:
        run = perturbation.run(session)
        seconds = time.perf_counter() - start
    difference, equal = compare_results(run.results, want)
    return Row(
        name=perturbation.name,
        axis=perturbation.axis,
        equal=equal,
        requests=len(want),
        states=num_states(run.results, want),
        notes=run.notes,
        seconds=round(seconds, 2),
        difference=difference,
        missing=perturbation.missing(run.notes),
        microscope="" if difference is None else _look(session, difference, want[difference.request]),
    )


def _look(session: Session, difference: Difference, want: Result) -> str:
    """What the microscope says of the tokens up to a difference."""
    request = next(each for each in session.requests if each.name == difference.request)
    num_output = len(want.token_ids) if difference.column == "state" else difference.position
    tokens = np.asarray([*request.prompt, *want.token_ids[:num_output]], np.int32)
    # Bounded replay changes which rows exist, not how one is computed.
    config = dataclasses.replace(session.main.runtime, replay_mode="off", replay_keep_tokens=0)
    finding = microscope.look(session.main.params, tokens, config=config)
    return str(finding) if finding else microscope.NOTHING


def left_out(
    chosen: Sequence[Perturbation], *, has_vision: bool, max_drafts: int, device: str = "auto"
) -> dict[str, str]:
    """The rows that do not apply to this model or machine, and why."""
    found, num_devices, is_ascend = {}, len(jax.devices()), device == ASCEND
    for each in chosen:
        if each.devices > 1 and is_ascend:
            found[each.name] = "a model runs on one Ascend device"
        elif each.devices > num_devices:
            found[each.name] = f"needs {each.devices} devices, here are {num_devices}"
        elif each.needs_vision and not has_vision:
            found[each.name] = "an Ascend device takes no images" if is_ascend else "the model has no vision weights"
        elif each.drafts > max_drafts and is_ascend:
            found[each.name] = "draft stages do not run on an Ascend device"
        elif each.drafts > max_drafts:
            found[each.name] = f"needs {each.drafts} drafts, the model makes {max_drafts}"
    return found


def _check_base(earlier: Report, fingerprints: Mapping[str, str]) -> None:
    differs = [name for name, value in fingerprints.items() if earlier.fingerprints.get(name) != value]
    if differs:
        raise BaseDiffers(
            f"the base of this process differs from the file's in {', '.join(differs)}: two processes with the same "
            "facts gave other bits; look at the row 'second process', and name another file"
        )
