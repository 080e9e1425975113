"""The verification kit for people with an Ascend 950: what loads, what each operator computes, in one JSON report.

It needs no model. A component counts as verified on hardware only through such a report (docs/ascend.md). Run on the
simulator the report says so, and has no times.
"""

import argparse
import fnmatch
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.kernels import ascend, ffi
from deepinfer_jax.kernels.ascend import DTYPE_CODES, Bridge
from deepinfer_jax.kernels.collectives import cann as collectives
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.scatter_rows import cann as scatter_rows
from deepinfer_jax.testing.ascend_cases import CASES, Case, run_resident, run_staged
from deepinfer_jax.testing.facts import run_facts

SEED = 950
NUM_REPEATS = 20
MODES = ("staged", "resident")
# What a call through the bridge may raise; anything else is our own error.
FAILURES = (jax.errors.JaxRuntimeError, ValueError, ascend.AscendError, ascend.AscendUnsupportedError)


def verify(bridge: Bridge, *, only: str = "*", progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The report on an open bridge. `only` is a pattern of case names; `progress` is told each step."""
    cases = [case for case in CASES if fnmatch.fnmatch(case.name, only)]
    if not cases:
        raise ValueError(f"only={only!r} matches none of the cases {', '.join(case.name for case in CASES)}")
    report: dict[str, Any] = {
        "kind": "simulator" if bridge.is_simulator else "device",
        "soc": bridge.soc,
        "cann_version": bridge.version,
        "num_devices": bridge.num_devices,
        "libraries": list(bridge.libraries),
        "facts": run_facts(),
        "seed": SEED,
        "symbols": _symbols(bridge),
        "arrays": [_array_entry(bridge, dtype) for dtype in _told(DTYPE_CODES, progress)],
        "operators": [],
        "order": _order_entry(bridge),
        "collectives": _collective_entry(bridge),
    }
    for case in _told(cases, progress, lambda case: case.name):
        report["operators"] += [_case_entry(bridge, case, mode) for mode in MODES]
    entries = [*report["arrays"], *report["operators"], report["order"], report["collectives"]]
    report["passed"] = all(entry["passed"] for entry in entries) and not any(s["why_not"] for s in report["symbols"])
    return report


def _told[T](items: Iterable[T], progress: Callable[[str], None], name: Callable[[T], str] = str) -> Iterable[T]:
    for item in items:
        progress(name(item))
        yield item


def _symbols(bridge: Bridge) -> list[dict[str, str]]:
    entries = []
    for operator in ffi.operator_table(bridge.library):
        reason, library = ascend.why_not(bridge.library, operator["name"])
        entries.append(operator | {"library": library, "why_not": reason})
    return entries


def _array_entry(bridge: Bridge, dtype: np.dtype) -> dict[str, Any]:
    """Bytes of every value through `put` and `get`."""
    raw = np.arange(256, dtype=np.uint8)
    array = (raw % 2 if dtype == np.bool_ else raw).view(dtype)
    entry: dict[str, Any] = {"dtype": str(dtype), "passed": False}
    try:
        placed = bridge.put(array)
        entry["passed"] = bridge.get(placed).tobytes() == array.tobytes()
        bridge.release(placed)
    except FAILURES as error:
        entry["error"] = str(error)
    return entry


def _case_entry(bridge: Bridge, case: Case, mode: str) -> dict[str, Any]:
    """Error against the reference, a digest of the bits, and whether they repeat."""
    entry: dict[str, Any] = {"case": case.name, "target": case.target, "mode": mode, "passed": False}
    arrays = case.make(np.random.default_rng(SEED))
    run = run_staged if mode == "staged" else lambda call, given: run_resident(bridge, call, given)
    try:
        made = [np.asarray(run(case.call, arrays)) for _ in range(NUM_REPEATS)]
    except FAILURES as error:
        return entry | {"error": str(error)}
    digests = {hashlib.sha256(array.tobytes()).hexdigest() for array in made}
    want = np.asarray(case.reference(*arrays))
    is_equal = made[0].tobytes() == want.astype(made[0].dtype).tobytes()
    error = _relative_error(made[0], want)
    entry |= {
        "error_rel_l2": error,
        "is_bitwise": is_equal,
        "tolerance_rel_l2": case.rel_l2,
        "repeats": len(digests) == 1,
    }
    entry |= {"digest": hashlib.sha256(made[0].tobytes()).hexdigest()}
    entry["passed"] = entry["repeats"] and (is_equal if case.rel_l2 is None else error <= case.rel_l2)
    if mode == "resident" and not bridge.is_simulator:
        entry["time_us"] = _time_us(bridge, case, arrays)
    return entry


def _relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; infinite for another shape, and where values that are not finite do not agree."""
    if got.shape != want.shape:
        return float("inf")
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    is_finite = np.isfinite(want64)
    if not np.array_equal(got64[~is_finite], want64[~is_finite]) or not np.all(np.isfinite(got64[is_finite])):
        return float("inf")
    got64, want64 = got64[is_finite], want64[is_finite]
    size = float(np.linalg.norm(want64))
    difference = float(np.linalg.norm(got64 - want64))
    return difference / size if size else difference


def _time_us(bridge: Bridge, case: Case, arrays: tuple[Any, ...]) -> float:
    """Microseconds of one resident call, copies included, the median of the repeats: an upper bound."""
    times = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        run_resident(bridge, case.call, arrays)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def _order_entry(bridge: Bridge) -> dict[str, Any]:
    """A reader of an overtaken handle must fail, and a write must wait for the reader that it names."""
    host = (np.ones((2, 8), np.float32), np.ones(8, np.float32), np.zeros(1, np.int32), np.zeros((1, 8), np.float32))

    def step(cache: Any, weight: Any, index: Any, rows: Any) -> Any:
        seen = rms_norm.rms_norm(cache, weight, eps=0.0)
        return seen, scatter_rows.scatter_rows(cache, index, rows, after=(seen,))

    try:
        placed = [bridge.put(array) for array in host]
        seen, written = jax.jit(step)(*placed)
        is_read_first = bool(np.all(bridge.get(seen) == 1.0)) and not np.any(bridge.get(written)[0])
        is_refused = _is_stale(bridge, placed[0])
        for array in (written, *placed[1:]):
            bridge.release(array)
        bridge.end_step()
    except FAILURES as error:
        return {"passed": False, "error": str(error)}
    return {"passed": is_read_first and is_refused, "reads_first": is_read_first, "refuses_stale": is_refused}


def _collective_entry(bridge: Bridge) -> dict[str, Any]:
    """A sum over all visible devices. Passed also where it could not run; "skipped" then says why."""
    size, num_seats = bridge.num_devices, jax.local_device_count(ffi.PLATFORM)
    if size < 2 or num_seats < size:
        reason = f"{size} devices and {num_seats} CPU devices of JAX; XLA_FLAGS=--xla_force_host_platform_device_count"
        return {"passed": True, "skipped": reason}
    try:
        groups = bridge.make_groups([range(size)])
        mesh = jax.make_mesh((size,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.PartitionSpec("device")
        total = jax.shard_map(lambda x: collectives.psum(x, groups), mesh=mesh, in_specs=rows, out_specs=rows)
        made = np.asarray(jax.jit(total)(np.arange(size, dtype=np.float32)))
    except FAILURES as error:
        return {"passed": False, "error": str(error)}
    return {"passed": bool(np.all(made == size * (size - 1) / 2)), "size": size}


def _is_stale(bridge: Bridge, array: ascend.DeviceArray) -> bool:
    try:
        bridge.get(array)
    except ascend.AscendError as error:
        return "stale device handle" in str(error)
    return False


def to_text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = [f"{report['kind']}: {report['soc']}, CANN {report['cann_version']}, {report['num_devices']} devices"]
    missing = [entry for entry in report["symbols"] if entry["why_not"]]
    lines.append(f"operators found: {len(report['symbols']) - len(missing)} of {len(report['symbols'])}")
    lines += [f"  {entry['name']}: {entry['why_not']}" for entry in missing]
    for entry in report["operators"]:
        error = entry.get("error") or f"error {entry['error_rel_l2']:.2e}" + ("" if entry["repeats"] else ", differs")
        lines.append(f"  {'ok  ' if entry['passed'] else 'FAIL'} {entry['case']:22} {entry['mode']:9} {error}")
    num_arrays = sum(entry["passed"] for entry in report["arrays"])
    lines.append(f"element types: {num_arrays} of {len(report['arrays'])} keep their bytes")
    lines.append(f"order of reads and writes: {'ok' if report['order']['passed'] else 'FAIL'}")
    together = report["collectives"].get("skipped") or ("ok" if report["collectives"]["passed"] else "FAIL")
    lines.append(f"sum over all devices: {together}")
    lines.append("passed" if report["passed"] else "failed")
    if report["kind"] == "simulator":
        lines.append("this was the simulator: it says nothing about Ascend hardware")
    return "\n".join(lines)


def add_ascend_verify_parser(subparsers: Any) -> None:
    """Adds `ascend-verify` to the subparsers of an `argparse` parser."""
    parser = subparsers.add_parser(
        "ascend-verify",
        help="check the Ascend bridge and its operators, without a model",
        description="Resolves every operator, runs each against the reference, and writes a JSON report to send back. "
        "Which libraries: DEEPINFER_JAX_ASCEND_* and ASCEND_HOME_PATH (docs/ascend.md). Exits 1 when something fails.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only these cases, such as 'attend-*'")
    parser.set_defaults(run=run_ascend_verify)


def run_ascend_verify(args: argparse.Namespace) -> int:
    """Writes the report; 0 when everything passed, 1 otherwise."""
    import sys

    from tqdm import tqdm

    bridge = ascend.open_bridge()
    with jax.default_device(jax.local_devices(backend=ffi.PLATFORM)[0]), tqdm(desc="verify", disable=None) as bar:

        def show(work: str) -> None:
            bar.set_postfix_str(work)
            bar.update()

        report = verify(bridge, only=args.only, progress=show)
    bridge.close()
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(to_text(report) + "\n")
    return 0 if report["passed"] else 1
