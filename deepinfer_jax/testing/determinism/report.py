"""The matrix: one row for each perturbation, as a table and as JSON that a later run goes on from."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.testing.determinism.results import COLUMNS, Difference

FORMAT = "deepinfer_jax determinism 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What one perturbation showed."""

    name: str
    axis: str
    equal: Mapping[str, bool]  # column of `COLUMNS` -> whether every request has the same bits
    requests: int  # compared
    states: int  # of them with a state
    notes: Mapping[str, int]
    seconds: float
    difference: Difference | None = None
    missing: str = ""  # what should have happened in it and did not
    microscope: str = ""  # where the network's tensors first differ, where something differs

    @property
    def is_ok(self) -> bool:
        """Whether nothing differs, and the perturbation was one."""
        return all(self.equal.values()) and not self.missing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All rows so far. facts: what they were made with; left_out: row -> why it does not apply here."""

    facts: Mapping[str, Any]
    fingerprints: Mapping[str, str]  # request of the base -> its bit fingerprint
    rows: tuple[Row, ...] = ()
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        """Whether every row is; a report without rows shows nothing and is not."""
        return bool(self.rows) and all(row.is_ok for row in self.rows)

    def with_row(self, row: Row) -> "Report":
        """The report with one more row."""
        return dataclasses.replace(self, rows=(*self.rows, row))

    def to_json(self) -> dict[str, Any]:
        """The report as values of JSON."""
        return {"format": FORMAT, "is_ok": self.is_ok, **dataclasses.asdict(self)}

    def to_text(self) -> str:
        """A table for people, then what differs."""
        head = ("perturbation", "axis", *COLUMNS, "rows/call", "s", "what happened")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        found = [text for row in self.rows for text in _complaints(row)]
        left_out = [f"left out: {name}: {why}" for name, why in self.left_out.items()]
        num_bad = sum(not row.is_ok for row in self.rows)
        verdict = f"{num_bad} of {len(self.rows)} rows FAILED" if num_bad else f"all {len(self.rows)} rows are equal"
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return "\n".join([*table, *found, *left_out, facts, verdict if self.rows else "no row was run: FAILED"])


def _cells(row: Row) -> tuple[str, ...]:
    cells = ["equal" if row.equal[column] else "DIFFERS" for column in COLUMNS]
    if row.equal["state"]:
        cells[-1] = f"equal ({row.states}/{row.requests})" if row.states else "not read"
    shown = ", ".join(f"{name} {count}" for name, count in row.notes.items() if count and name not in ("rows", "steps"))
    return (row.name, row.axis, *cells, str(row.notes.get("rows", 0)), f"{row.seconds:.1f}", shown)


def _complaints(row: Row) -> list[str]:
    found = []
    if row.difference is not None:
        first = row.difference
        found.append(f"{row.name}: {first.request}: {first.column} at {first.position}: {first.detail}")
    if row.microscope:
        found.append(f"{row.name}: microscope: {row.microscope}")
    if row.missing:
        found.append(f"{row.name}: did not happen: {row.missing}")
    return found


def write_report(report: Report, path: Path) -> None:
    """Writes the JSON file; it is always a whole one."""
    text = json.dumps(report.to_json(), indent=1) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_report(path: Path, facts: Mapping[str, Any]) -> Report | None:
    """The report of an earlier run with the same facts; None where there is none.

    Raises ValueError for one with other facts and for a file of another kind, so that neither is overwritten.
    """
    if not path.exists():
        return None
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--json={path} is no JSON: {error}; name another file") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise ValueError(f"--json={path} is no determinism report of this version; name another file")
    others = [f"{name} {read['facts'].get(name)}" for name in facts if read["facts"].get(name) != facts[name]]
    if others:
        raise ValueError(
            f"--json={path} holds a run with {', '.join(others)}, unlike this one; name another file, or delete it"
        )
    return Report(
        facts=read["facts"],
        fingerprints=read["fingerprints"],
        rows=tuple(_row_of(row) for row in read["rows"]),
        left_out=read["left_out"],
    )


def _row_of(read: dict[str, Any]) -> Row:
    values = dict(read)
    if values["difference"] is not None:
        values["difference"] = Difference(**values["difference"])
    return Row(**values)
