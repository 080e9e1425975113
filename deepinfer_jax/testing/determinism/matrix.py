"""Runs the rows of the matrix and compares each with its base."""

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


def run_matrix(
    session: Session,
    chosen: Sequence[Perturbation],
    facts: Mapping[str, Any],
    *,
    json_path: Path | None = None,
    progress: Progress = lambda rows: rows,
) -> Report:
    """The report of the chosen rows; with json_path those that are in that file under the same facts are kept.

    The file is written after each row. progress: wraps the list of rows to run, as `tqdm` does. Raises ValueError for
    a file of other facts or of another kind, and `BaseDiffers` where this process gives another base than the one that
    began the file.
    """
    earlier = None if json_path is None else read_report(json_path, facts)
    base = session.base("plain").results
    fingerprints = {name: result.fingerprint for name, result in base.items()}
    if earlier is not None:
        _check_base(earlier, fingerprints)
    report = earlier or Report(facts=dict(facts), fingerprints=fingerprints)
    lacking = left_out(
        chosen, has_vision=session.has_vision, max_drafts=session.max_drafts, device=session.model.device
    )
    report = dataclasses.replace(report, left_out=lacking)
    finished = {row.name for row in report.rows}
    todo = [each for each in chosen if each.name not in finished and each.name not in report.left_out]
    for perturbation in progress(todo):
        forget_programs()
        report = report.with_row(run_row(session, perturbation))
        if json_path is not None:
            write_report(report, json_path)
    return report


def run_row(session: Session, perturbation: Perturbation) -> Row:
    """One row; where something differs, the microscope looks for the first tensor."""
    want = session.base(perturbation.base).results
    start = time.perf_counter()
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
