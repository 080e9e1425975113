"""`deepinfer-jax describe`: the figures of a model, and with --step those of one step compiled for a mesh.

The step is compiled, not run: for CPUs that XLA makes up, or for GPUs that are not there (`testing/aot.py`).
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from deepinfer_jax.engine import describe
from deepinfer_jax.testing.aot import StepCase, compile_apart

CONFIG_NAME = "config.json"
# Rows, slots and pages of a data-parallel rank: decode at 8,192 tokens of context, a prefill chunk of a 16,384 prompt.
SIZES: dict[str, dict[str, int]] = {
    "decode": {"num_rows": 128, "num_slots": 128, "num_pages": 128 * 128, "pages_per_slot": 128},
    "prefill": {"num_rows": 8192, "num_slots": 8, "num_pages": 8 * 256, "pages_per_slot": 256},
}
LINK_BYTES_PER_S = {"H200": 450e9, "B200": 900e9}  # of NVLink, in each direction, by data sheet


def add_describe_parser(subparsers: Any) -> None:
    """Adds `describe` to the subparsers of an `argparse` parser."""
    parser = describe.add_describe_parser(subparsers)
    parser.add_argument("--step", choices=tuple(SIZES), help="with --mesh: compile this step and count what travels")
    parser.add_argument("--target", choices=("cpu", "h200", "b200"), default="cpu", help="of --step; default: cpu")


def run_describe(args: argparse.Namespace) -> int:
    """Writes the figures to standard output. Raises ValueError for what cannot be described or compiled."""
    if args.step is not None and args.mesh is None:
        raise ValueError(f"--step {args.step} needs a mesh; give --mesh DPxCP")
    figures, location = describe.describe_model(args)
    step = None if args.step is None else compile_step(args, location)
    if args.json:
        record = dataclasses.asdict(figures) | ({} if step is None else {"step": step})
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
        return 0
    sys.stdout.write(describe.to_text(figures))
    if step is not None:
        sys.stdout.write("\n" + step_text(step))
    return 0


def compile_step(args: argparse.Namespace, location: Path) -> dict[str, Any]:
    """The record of `testing.aot` for the step that the options name."""
    file = location / CONFIG_NAME if location.is_dir() else location
    dp, cp = args.mesh
    sizes: dict[str, Any] = SIZES[args.step]
    return compile_apart(StepCase(target=args.target, dp=dp, cp=cp, model=str(file.resolve()), **sizes))


def step_text(step: dict[str, Any]) -> str:
    """What a device holds and what travels, with the time that it takes on a link at full speed."""
    rows = [("bytes of one device", "")]
    rows += [(f"  {name.replace('_', ' ')}", f"{step[f'{name}_bytes']:,}") for name in ("argument", "temporary")]
    rows += [("  of the arguments, caches (updated in place)", f"{step['donated_bytes']:,}")]
    rows += [("collectives of a step, and the bytes that they make on one device", "")]
    for kind, found in sorted(step["collectives"].items()):
        rows.append((f"  {found['count']} {kind}", f"{found['bytes']:,}"))
    total = sum(found["bytes"] for found in step["collectives"].values())
    for name, speed in LINK_BYTES_PER_S.items():
        rows.append((f"  estimate: us at the {speed / 1e9:.0f} GB/s of {name} NVLink", f"{1e6 * total / speed:,.0f}"))
    head = f"step of {step['num_rows']} rows on {step['dp']}x{step['cp']} devices, compiled for {step['target']}"
    return f"{head} in {step['compile_s']:.0f} s:\n" + describe.table(rows) + "\n"
