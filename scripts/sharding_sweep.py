#!/usr/bin/env python3
"""Compiles the full-size step for meshes of GPUs that are not there, up to 64, and tells what each device holds.

One JSON line for each mesh on standard output, a table last. Needs requirements-nvidia.txt and no GPU; a case takes
one to several minutes of a core. `--jobs` of them run at the same time.
"""

import argparse
import concurrent.futures
import dataclasses
import json
from typing import Any

from deepinfer_jax.testing.aot import StepCase, compile_apart
from deepinfer_jax.testing.facts import run_facts

DECODE: dict[str, Any] = {
    "num_rows": 128,
    "num_slots": 128,
    "num_pages": 128 * 128,
    "pages_per_slot": 128,
}  # 8,192 tokens each
PREFILL: dict[str, Any] = {
    "num_rows": 8192,
    "num_slots": 8,
    "num_pages": 8 * 256,
    "pages_per_slot": 256,
}  # of 16,384 tokens
MESHES = {
    "decode": [(8, 1), (16, 1), (32, 1), (64, 1)],
    "prefill": [(1, 4), (2, 4), (8, 1), (16, 4)],
}


def main() -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", choices=("b200", "h200"), nargs="+", default=["b200"])
    parser.add_argument("--phase", choices=tuple(MESHES), nargs="+", default=list(MESHES))
    parser.add_argument("--mesh", nargs="+", metavar="DPxCP", help="in place of the meshes of each phase")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of a step, for each rank, in place of the phase's")
    parser.add_argument("--kernels", default="auto", help="what ops run through, as in DEEPINFER_JAX_KERNELS")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at the same time")
    args = parser.parse_args()
    own = {"kernels": args.kernels} | ({} if args.rows is None else {"num_rows": args.rows})
    cases = [
        (phase, StepCase(target=target, dp=dp, cp=cp, **(DECODE if phase == "decode" else PREFILL) | own))
        for target in args.target
        for phase in args.phase
        for dp, cp in ([tuple(map(int, mesh.split("x"))) for mesh in args.mesh] if args.mesh else MESHES[phase])
    ]
    facts, rows = run_facts(), []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for (phase, _), found in zip(cases, pool.map(compile_or_tell, [case for _, case in cases]), strict=True):
            row = {"kind": "sharding_sweep", "phase": phase, **found, **facts}
            print(json.dumps(row), flush=True)
            rows.append(row)
    print_table(rows)


def compile_or_tell(case: StepCase) -> dict[str, Any]:
    """One case in a process of its own; what the compiler said where it failed."""
    try:
        return compile_apart(case)
    except ValueError as error:
        return {**dataclasses.asdict(case), "error": str(error)}


def print_table(rows: list[dict[str, Any]]) -> None:
    """The sweep as a table in Markdown."""
    print(
        "| target | step | rows | dp x cp | GB of a device: arguments, temporary | fits | collectives (MB) | compiled |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        mesh = f"{row['num_rows']:,} | {row['dp']} x {row['cp']}"
        if "error" in row:
            print(f"| {row['target']} | {row['phase']} | {mesh} | failed: {row['error']} | | | |")
            continue
        kinds = ", ".join(
            f"{one['count']} {kind} ({one['bytes'] / 1e6:.1f})" for kind, one in sorted(row["collectives"].items())
        )
        sizes = f"{row['argument_bytes'] / 1e9:.1f}, {row['temporary_bytes'] / 1e9:.1f}"
        fits = "yes" if row["fits"] else "no"
        print(f"| {row['target']} | {row['phase']} | {mesh} | {sizes} | {fits} | {kinds} | {row['compile_s']:.0f} s |")


if __name__ == "__main__":
    main()
