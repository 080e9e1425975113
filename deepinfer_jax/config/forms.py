"""How the text of a variable or argument becomes a value: one `Form` for each kind of value.

Nothing here reads the environment; `environ.VARIABLES` says which variable has which form.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_TOKEN_ID = 2**31 - 1
GIB = 2**30

Real = int | float
Value = bool | int | float | str | tuple[float, ...] | None


@dataclass(frozen=True)
class Form:
    """How the text of a variable becomes a value; `parse` raises ValueError with the reason."""

    kind: str
    allowed: str
    parse: Callable[[str], Value]


def parse_value(label: str, form: Form, text: str) -> Value:
    """The value of `text`; `label` is the variable or argument that the error names."""
    try:
        return form.parse(text.strip())
    except ValueError as error:
        raise ValueError(
            f"{label}={text!r} is refused: {error}; allowed: {form.allowed}; correct or unset it"
        ) from error


def _parse_bool(text: str) -> bool:
    words = {"0": False, "false": False, "off": False, "no": False}
    words |= {"1": True, "true": True, "on": True, "yes": True}
    if text.lower() not in words:
        raise ValueError("not a bool")
    return words[text.lower()]


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError("not an integer")
    return int(text)


def _parse_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError("not a number") from error
    if not math.isfinite(value):
        raise ValueError("not finite")
    return value


def _bounded(kind: str, read: Callable[[str], Real], low: Real, high: Real = math.inf) -> Form:
    def parse(text: str) -> Value:
        value = read(text)
        if not low <= value <= high:
            raise ValueError("out of bounds")
        return value

    return Form(kind, f"{kind} >= {low}" if high == math.inf else f"{kind} in {low}..{high}", parse)


def choice(*names: str) -> Form:
    """One of `names`, exactly as written."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("not one of the choices")
        return text

    return Form("choice", ", ".join(names), parse)


def _parse_kernels(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text):
        raise ValueError("not an implementation name")
    return text


def _parse_bytes(text: str) -> int:
    units = {"": 1, "kib": 2**10, "mib": 2**20, "gib": GIB}
    match = re.fullmatch(r"([1-9][0-9]*) ?([a-z]*)", text.lower())
    if match is None or match[2] not in units:
        raise ValueError("not a byte count")
    return int(match[1]) * units[match[2]]


def _parse_imbalance(text: str) -> float:
    value = _parse_float(text)
    if value != 0 and value < 1:
        raise ValueError("neither 0 nor at least 1")
    return value


def _parse_temperatures(text: str) -> float | tuple[float, ...]:
    values = tuple(_parse_float(part.strip()) for part in text.split(","))
    if min(values) <= 0:
        raise ValueError(f"{min(values)} is not above 0")
    return values[0] if len(values) == 1 else values


def token_ranges(text: str) -> tuple[range, ...]:
    """Token ids of `0..3,7,10..12`, ends included; they rise strictly, and "" holds none."""
    ranges: list[range] = []
    last = -1
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+))?", part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither an id nor a range")
        first, end = int(match[1]), int(match[2] or match[1])
        if first <= last or end < first:
            raise ValueError(f"{part.strip()!r} does not rise")
        if end > MAX_TOKEN_ID:
            raise ValueError(f"{end} is above {MAX_TOKEN_ID}")
        ranges.append(range(first, end + 1))
        last = end
    return tuple(ranges)


BOOL = Form("bool", "0, 1, true, false, on, off, yes, no (any case)", _parse_bool)
TEXT = Form("str", "any text, empty is unset", lambda text: text or None)
BYTES = Form("bytes", "an integer >= 1, with KiB, MiB or GiB after it if wanted", _parse_bytes)
KERNELS = Form("choice", "auto, reference, or the name of an implementation", _parse_kernels)
IMBALANCE = Form("float", "0 (off) or a number >= 1", _parse_imbalance)
TEMPERATURES = Form("float or list", "numbers above 0, commas between them", _parse_temperatures)
RANGES = Form("str", "rising ids and ranges, as in 0..3,7", lambda text: text if token_ranges(text) else "")
ANY_INT = Form("int", "an integer", _parse_int)
COUNT, STEPS = _bounded("int", _parse_int, 0), _bounded("int", _parse_int, 1)
PORT = _bounded("int", _parse_int, 1, 65535)
LEVEL = _bounded("int", _parse_int, 0, 3)
RATIO, SECONDS = _bounded("float", _parse_float, 1.0), _bounded("float", _parse_float, 0.0)
