"""Measured cost curves in a folder, one JSON file for each set of facts that a curve depends on.

The folder may be shared: only files of this module's own name are read or replaced, and nothing is removed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import time
import uuid
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import deepinfer_jax
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.scheduler.budget import CostCurve

SUFFIX = ".deepinfer-cost.json"
FORMAT = "deepinfer_jax cost curve 2"
VERSIONS = (deepinfer_jax.__version__, metadata.version("jax"), metadata.version("jaxlib"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveFacts:
    """What a measured curve depends on: with other facts it is another curve, in another file."""

    device: str  # of `device_name`
    mesh: tuple[int, ...]
    runtime: RuntimeConfig  # numerics, shape of the model, layout of the caches
    sizes: tuple[int, ...]  # rows of the compiled steps
    num_drafts: int
    spec_mode: str
    context_len: int  # tokens in front of the measured rows
    versions: tuple[str, ...] = VERSIONS

    @property
    def key(self) -> str:
        """A digest of all facts."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:32]


def device_name(device: Any) -> str:
    """Platform and kind of a device of JAX; of a CPU, which has no kind, its architecture and the usable cores."""
    if device.platform != "cpu":
        return f"{device.platform} {device.device_kind}"
    return f"cpu {platform.machine()} {len(os.sched_getaffinity(0))} cores"


def curve_path(folder: Path, facts: CurveFacts) -> Path:
    """Where the curve of these facts is kept."""
    return folder / f"{facts.key}{SUFFIX}"


def load_curve(folder: Path, facts: CurveFacts, *, max_age_s: int, now: float | None = None) -> CostCurve | None:
    """The curve of these facts, None where there is none that is new enough.

    now: seconds since 1970, by default the clock's. A file that cannot be read gives a warning and None.
    """
    path = curve_path(folder, facts)
    try:
        record = json.loads(path.read_bytes())
        curve, written_at = _parse(record, facts.key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} holds no cost curve, which will be measured again: {error}", stacklevel=2)
        return None
    age_s = (time.time() if now is None else now) - written_at
    return curve if 0 <= age_s <= max_age_s else None


def store_curve(folder: Path, facts: CurveFacts, curve: CostCurve, *, now: float | None = None) -> None:
    """Writes the curve of these facts in place of an older one; the file appears when it is whole.

    The folder is made if there is none. A folder that takes no file gives a warning.
    """
    record = {
        "format": FORMAT,
        "key": facts.key,
        "written_at": time.time() if now is None else now,
        "curve": curve.to_json(),
    }
    path = curve_path(folder, facts)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(record))
            os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"the cost curve is not kept: {error}; set DEEPINFER_DECODE_PERF_CACHE_DIR to a writable folder",
            stacklevel=2,
        )


def _parse(record: Any, key: str) -> tuple[CostCurve, float]:
    """Curve and time of a file's content. Raises ValueError for any other content."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is not of the format {FORMAT!r}")
    if record.get("key") != key:
        raise ValueError(f"it belongs to the key {record.get('key')!r}")
    written_at = record.get("written_at")
    if not isinstance(written_at, int | float):
        raise ValueError(f"written_at={written_at!r} must be seconds since 1970")
    return CostCurve.from_json(record.get("curve")), float(written_at)
