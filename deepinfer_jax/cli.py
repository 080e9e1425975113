"""The command line, `deepinfer-jax COMMAND`: each command's code is imported when it runs.

Exit status: 0 done, 1 a comparison failed, 2 the arguments or the input are at fault (one line on standard error).
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.config.environ import use_cpu_without_gpu

EXIT_DIFFERS = 1
EXIT_REFUSED = 2
# What a caller can correct. Anything else is shown with its trace.
_REFUSALS = (ValueError, NotImplementedError, OSError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Where a command is: `add` takes the subparsers and adds its arguments, `run` takes what was parsed and returns
    the exit status.
    """

    summary: str
    module: str
    add: str
    run: str


# Every command. A new one is a line here and two functions in the package that it belongs to.
COMMANDS: dict[str, Command] = {
    "generate": Command(
        summary="generate text for prompts",
        module="deepinfer_jax.engine.generate",
        add="add_generate_parser",
        run="run_generate",
    ),
    "describe": Command(
        summary="parameters, bytes and arithmetic of a model",
        module="deepinfer_jax.testing.describe_step",
        add="add_describe_parser",
        run="run_describe",
    ),
    "determinism": Command(
        summary="show that nothing but a request itself changes its bits",
        module="deepinfer_jax.testing.determinism.command",
        add="add_determinism_parser",
        run="run_determinism",
    ),
    "ascend-verify": Command(
        summary="check the Ascend bridge and its operators, without a model",
        module="deepinfer_jax.testing.ascend_verify",
        add="add_ascend_verify_parser",
        run="run_ascend_verify",
    ),
    "bench": Command(
        summary="tokens per second with and without drafts",
        module="deepinfer_jax.testing.bench",
        add="add_bench_parser",
        run="run_bench",
    ),
    "verify": Command(
        summary="compare the network with recordings of another implementation",
        module=__name__,
        add="add_verify_parser",
        run="run_verify",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns the exit status."""
    use_cpu_without_gpu()
    given = list(sys.argv[1:] if argv is None else argv)
    named = next((word for word in given if not word.startswith("-")), None)
    args = _make_parser(named).parse_args(given)
    command = COMMANDS[args.command]
    try:
        return getattr(importlib.import_module(command.module), command.run)(args)
    except BrokenPipeError:
        # The reader of a pipe has gone; there is nobody to tell, and the interpreter must not try at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _REFUSALS as error:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"deepinfer-jax {args.command}: {text}", file=sys.stderr)
        return EXIT_REFUSED


def add_verify_parser(subparsers: Any) -> None:
    """Adds `verify` to the subparsers of an `argparse` parser."""
    parser = subparsers.add_parser(
        "verify",
        help=COMMANDS["verify"].summary,
        description="Runs the network on the recorded inputs of a fixture directory and compares every recorded stage. "
        f"Exits {EXIT_DIFFERS} when one is beyond its tolerance.",
    )
    parser.add_argument("fixture_dir", type=Path, metavar="FIXTURE_DIR", help="weights, prompts and recordings")
    parser.add_argument("--mode", required=True, metavar="MODE", help="fp32_noqdq, fp32, bf16 or q")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Writes the comparison of a fixture directory to standard output."""
    from tqdm import tqdm

    from deepinfer_jax.engine.setup import keep_compiled_programs
    from deepinfer_jax.testing.verify import verify

    keep_compiled_programs(None)
    with tqdm(desc="verify", unit=" runs", disable=None) as bar:  # None: shown on a terminal only

        def show(work: str) -> None:
            bar.set_postfix_str(work)
            bar.update()

        report = verify(args.fixture_dir, args.mode, progress=show)
    print(json.dumps(report.to_json(), indent=1) if args.json else report.to_text())
    return 0 if report.is_ok else EXIT_DIFFERS


def _make_parser(named: str | None) -> argparse.ArgumentParser:
    """A parser that knows every command by name, and the arguments of the named one."""
    parser = argparse.ArgumentParser(prog="deepinfer-jax", description="DeepSeek-V4.1-Flash inference in JAX.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if name == named:
            getattr(importlib.import_module(command.module), command.add)(subparsers)
        else:
            subparsers.add_parser(name, help=command.summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
