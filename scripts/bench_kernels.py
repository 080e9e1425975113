#!/usr/bin/env python3
"""Checks and times the kernels of each op on the GPU at hand: one JSON line for each implementation and case.

Cases are those of `deepinfer_jax/kernels/<op>/cases.py`, without the implementations that are for another GPU. Every
implementation is compared with the reference before it is timed, and with --rows each kernel is run with 1 to 256
live rows, and in calls of fewer rows where the case says how these look; bits of rows must not change. PyTorch's own
products are timed in the same run where it is installed. The first line holds the ceilings that were measured. Cases
that have an aim in docs/kernels.md come first. One that fails, or that takes longer than --limit-s, gives a line that
says so, and the others go on.

    python scripts/bench_kernels.py [OP ...] [--cases TEXT ...] [--impl NAME ...] [--rows] [--turns 20] [--limit-s 60]
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax

from deepinfer_jax import kernels
from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.testing import kernel_bench
from deepinfer_jax.testing.facts import run_facts

OPS = sorted(path.parent.name for path in Path(kernels.__path__[0]).glob("*/cases.py"))
MAX_ROWS = 256
FEWER_ROWS = (1, 8, 16, 33, 64, 96, 128, 200)


def main() -> int:
    """Prints the lines; the exit status is 1 where any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)}; all without one")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="only cases whose name holds one of these")
    parser.add_argument("--impl", nargs="+", metavar="NAME", help="only these implementations")
    parser.add_argument("--rows", action="store_true", help="also check that rows do not depend on each other")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=60.0, help="for one implementation of one case")
    args = parser.parse_args()
    unknown = sorted(set(args.ops) - set(OPS))
    if unknown:
        parser.error(f"{unknown[0]} has no cases; choose among {', '.join(OPS)}")
    facts = run_facts()
    if jax.devices()[0].platform != "gpu":
        parser.error(f"kernels are timed on a GPU; this is a {facts['device']}. Tests interpret them on a CPU")
    ceilings = kernel_bench.measure_ceilings()
    write({"op": "ceilings", **dataclasses.asdict(ceilings), **facts})
    capability = jax.devices()[0].compute_capability
    wanted = [case for op in args.ops or OPS for case in cases_of(op) if is_wanted(case, args)]
    wanted = [kernel_bench.runnable(case, capability) for case in wanted]
    wanted.sort(key=lambda case: not case.has_target)
    is_good = [run_case(case, ceilings, args, facts) for case in wanted]
    return 0 if all(is_good) else 1


def cases_of(op: str) -> tuple[Case, ...]:
    """The cases of one op."""
    return importlib.import_module(f"deepinfer_jax.kernels.{op}.cases").CASES


def is_wanted(case: Case, args: argparse.Namespace) -> bool:
    """Whether the options ask for this case."""
    return args.cases is None or any(text in case.name for text in args.cases)


def run_case(case: Case, ceilings: kernel_bench.Ceilings, args: argparse.Namespace, facts: dict[str, str]) -> bool:
    """Writes the lines of one case; False where something failed, in which case a line says why."""
    head = {"op": case.op, "case": case.name}
    with reported({**head, "impl": REFERENCE}, args.limit_s, facts) as is_good:
        prepared = kernel_bench.prepare(case)
    if not all(is_good):
        return False
    for name in [name for name in case.implementations if args.impl is None or name in args.impl]:
        with reported({**head, "impl": name}, args.limit_s, facts) as outcome:
            write({**kernel_bench.measure(prepared, name, ceilings, turns=args.turns), **facts})
            if args.rows and case.keep_rows is not None and name != REFERENCE:
                counts = range(1, min(case.num_rows, MAX_ROWS) + 1)
                changed = kernel_bench.dependent_rows(prepared, name, counts)
                rows = {"rows": [counts[0], counts[-1]], "rows_that_change_bits": changed}
                write({**head, "impl": name, **rows, **facts})
                outcome.append(not changed)
            if args.rows and case.cut_rows is not None and name != REFERENCE:
                counts = [count for count in FEWER_ROWS if count < case.num_rows]
                changed = kernel_bench.dependent_counts(prepared, name, counts)
                write({**head, "impl": name, "calls_of_rows": counts, "calls_that_change_bits": changed, **facts})
                outcome.append(not changed)
        is_good += outcome
    del prepared
    if args.impl is None and (torch := torch_on_gpu()) is not None:
        with reported({**head, "impl": "torch"}, args.limit_s, facts) as outcome:
            for record in kernel_bench.measure_peers(case, torch, turns=args.turns):
                write({**record, **facts, "torch": torch.__version__})
        is_good += outcome
        torch.cuda.empty_cache()
    return all(is_good)


@contextlib.contextmanager
def reported(head: dict[str, Any], limit_s: float, facts: dict[str, str]) -> Iterator[list[bool]]:
    """Gives an empty list, to which it adds False where what is inside fails or takes too long; writes why."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {limit_s:g} s; raise --limit-s")

    is_good: list[bool] = []
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield is_good
    except (ValueError, TypeError, RuntimeError, MemoryError, TimeoutError) as error:
        write({**head, "error": f"{type(error).__name__}: {error}"[:500], **facts})
        is_good.append(False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def torch_on_gpu() -> Any:
    """PyTorch's module; None where it is not installed or sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    return torch if torch.cuda.is_available() else None


def write(record: dict[str, Any]) -> None:
    """One JSON line, at once."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
