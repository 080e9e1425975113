"""The result of a verification: one line for each recorded stage."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from deepinfer_jax.testing import tolerances as tol
from deepinfer_jax.testing.checks import Check

# What one unit of a line's error is.
UNITS = {"equal": "", "relative": "rel", "absolute": "abs", "ulp": "ulp", "margin": "of score", "boundary": "f32 ulp"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One stage of one part of the recordings, over all layers, sequences and steps."""

    part: str
    stage: str
    measure: tol.Measure
    tolerance: float
    max_error: float
    num_values: int
    num_different: int
    is_equal: bool
    rows: int
    rows_bad: int
    rows_forced: int
    rows_turned: int
    rows_excused: int
    worst: str  # where the first row beyond the tolerance is, "" for none
    is_ok: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that one `verify` found."""

    directory: str
    mode: str
    lines: tuple[Line, ...]
    remarks: tuple[str, ...]  # figures that have no tolerance
    not_covered: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Whether every line is within its tolerance, and most rows were held to one."""
        return bool(self.lines) and all(line.is_ok for line in self.lines) and not self.excuses_too_much

    @property
    def excuses_too_much(self) -> bool:
        """Whether more than the allowed share of rows could not be held to a tolerance."""
        rows = sum(line.rows for line in self.lines)
        return sum(line.rows_excused for line in self.lines) > tol.MAX_EXCUSED * max(rows, 1)

    @property
    def rows_forced(self) -> int:
        """Selections that went on with the recorded ids, and cached values that were turned, at ties and boundaries."""
        return sum(line.rows_forced for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        """The report as values of JSON; errors that are infinite become strings."""
        lines = [dataclasses.asdict(line) for line in self.lines]
        for line in lines:
            line["max_error"] = line["max_error"] if math.isfinite(line["max_error"]) else str(line["max_error"])
        return {
            "directory": self.directory,
            "mode": self.mode,
            "is_ok": self.is_ok,
            "rows_forced": self.rows_forced,
            "lines": lines,
            "remarks": list(self.remarks),
            "not_covered": list(self.not_covered),
        }

    def to_text(self) -> str:
        """A table for people."""
        head = (
            "part",
            "stage",
            "max error",
            "allowed",
            "equal",
            "differ",
            "rows",
            "bad",
            "forced",
            "turned",
            "excused",
            "",
        )
        body = [_cells(line) for line in self.lines]
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in [head, *body]]
        worst = [
            f"beyond the tolerance: {line.part} {line.worst}" for line in self.lines if not line.is_ok and line.worst
        ]
        extra = [f"remark: {text}" for text in self.remarks] + [f"not covered: {text}" for text in self.not_covered]
        if self.excuses_too_much:
            extra.append(f"more than {tol.MAX_EXCUSED:.0%} of the rows could not be held to a tolerance")
        verdict = f"{self.mode}: {'passed' if self.is_ok else 'FAILED'}, {self.rows_forced} rows forced"
        return "\n".join([*table, *worst, *extra, verdict])


def lines_of(part: str, checks: Sequence[Check]) -> list[Line]:
    """The checks of one part gathered by stage, in the order in which stages first occur."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(_title(check.name), []).append(check)
    return [_line(part, stage, group) for stage, group in groups.items()]


def _title(name: str) -> str:
    return f"final_cache.{tol.leaf_of(name)}" if "final_cache." in name else tol.leaf_of(name)


def _line(part: str, stage: str, checks: list[Check]) -> Line:
    values, different = sum(c.num_values for c in checks), sum(c.num_different for c in checks)
    bad = [c for c in checks if c.rows_bad]
    worst = f"{bad[0].sequence} {bad[0].name} row {bad[0].first_bad_row}" if bad else ""
    rule = checks[0].rule
    rows, turned = sum(c.num_rows for c in checks), sum(c.rows_turned for c in checks)
    too_many = ""
    if rule.measure == "ulp" and different > tol.MAX_DIFFERENT * values:
        too_many = f"{stage}: {different} of {values} values differ; allowed are {tol.MAX_DIFFERENT:.1%}"
    if turned > max(1, tol.MAX_TURNED * rows):
        too_many = f"{stage}: {turned} of {rows} rows are beyond one ulp; allowed are {tol.MAX_TURNED:.1%}"
    return Line(
        part=part,
        stage=stage,
        measure=rule.measure,
        tolerance=rule.tolerance,
        max_error=max(c.max_error for c in checks),
        num_values=values,
        num_different=different,
        is_equal=different == 0 and turned == 0,
        rows=rows,
        rows_bad=sum(c.rows_bad for c in checks),
        rows_forced=sum(c.rows_forced for c in checks),
        rows_turned=turned,
        rows_excused=sum(c.rows_excused for c in checks),
        worst=worst or too_many,
        is_ok=not bad and not too_many,
    )


def _cells(line: Line) -> tuple[str, ...]:
    is_exact = line.measure == "equal"
    return (
        line.part,
        line.stage,
        "-" if is_exact else f"{line.max_error:.2g}",
        "equal" if is_exact else f"{line.tolerance:.2g} {UNITS[line.measure]}",
        "yes" if line.is_equal else "no",
        f"{line.num_different}/{line.num_values}",
        str(line.rows),
        str(line.rows_bad),
        str(line.rows_forced),
        str(line.rows_turned),
        str(line.rows_excused),
        "ok" if line.is_ok else "FAIL",
    )
