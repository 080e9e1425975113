"""`deepinfer-jax determinism`: the matrix on the command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from deepinfer_jax.config.environ import DEVICES, PROCESS_ENVIRON
from deepinfer_jax.config.places import shipped_config, shipped_model
from deepinfer_jax.kernels.ascend import current_bridge
from deepinfer_jax.kernels.ascend_coverage import MISSING_WORD
from deepinfer_jax.kernels.registry import ASCEND
from deepinfer_jax.testing.determinism.driving import Model
from deepinfer_jax.testing.determinism.matrix import BaseDiffers, can_split, choose, run_matrix
from deepinfer_jax.testing.determinism.perturbations import Perturbation
from deepinfer_jax.testing.determinism.processes import half_of_the_cores
from deepinfer_jax.testing.determinism.session import Session
from deepinfer_jax.testing.determinism.workload import SPARE
from deepinfer_jax.testing.facts import run_facts

EXIT_DIFFERS = 1
QUICK_TOKENS, FULL_TOKENS = 24, 512
MIN_TOKENS = 2 * SPARE  # half of them in front of the state that is compared
NUMERICS = ("q", "bf16")
# What is taken on an Ascend device: a shape that its operators take, with random weights, and the embedded tokenizer.
ASCEND_SHAPE, ASCEND_TOKENIZER = "model/tiny-ascend.json", "tiny-code"
ASCEND_PREFIX = "DEEPINFER_JAX_ASCEND_"


def add_determinism_parser(subparsers: Any) -> None:
    """Adds `determinism` to the subparsers of an `argparse` parser."""
    parser = subparsers.add_parser(
        "determinism",
        help="show that nothing but a request itself changes its bits",
        description="Runs a base set of requests, then again under each perturbation, and compares tokens, bits of "
        f"log-probabilities and bytes of states. Exits {EXIT_DIFFERS} when anything differs, or when a perturbation "
        "did not happen (docs/determinism.md).",
    )
    parser.add_argument("--model", metavar="MODEL", help="directory or Hugging Face id; default: the embedded one")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer, if not the model's own")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="default: JAX's first one. ascend: the simulator of DEEPINFER_JAX_ASCEND_SIM=1, of which alone bits are "
        "promised; the model is a small one that it takes, unless one is named",
    )
    parser.add_argument("--numerics", choices=NUMERICS, default="q", help="default: %(default)s")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_TOKENS} output tokens, and one further process; without it {FULL_TOKENS} tokens and all rows",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help=f"output tokens of each request, {MIN_TOKENS} or more")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="rows whose name or axis fits, as in 'among *'")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the report, after each row; rows that are in it already, with the same facts, are not run again",
    )


def run_determinism(args: argparse.Namespace) -> int:
    """Writes the matrix to standard output."""
    num_tokens = args.tokens if args.tokens is not None else QUICK_TOKENS if args.quick else FULL_TOKENS
    if num_tokens < MIN_TOKENS:
        raise ValueError(f"--tokens={num_tokens} is below {MIN_TOKENS}; raise it")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json={args.json} is in a folder that does not exist; make it, or name another file")
    chosen = choose(args.only, is_quick=args.quick)
    with half_of_the_cores(args.quick and can_split(chosen)) as spare_cores:
        return _run(args, chosen, num_tokens, spare_cores)


def _run(
    args: argparse.Namespace, chosen: Sequence[Perturbation], num_tokens: int, spare_cores: tuple[int, ...]
) -> int:
    model = model_of(args)
    session = Session(model, num_tokens=num_tokens, spare_cores=spare_cores)
    try:
        facts = {"model": _name_of(args, model), "numerics": args.numerics, "tokens": num_tokens}
        facts |= {**run_facts(), "devices": len(jax.devices())} | _ascend_facts(session)
        with tqdm(desc="determinism", unit="row", disable=None) as bar:  # None: shown on a terminal only

            def watched(rows: Any) -> Any:
                bar.reset(total=len(rows))
                for row in rows:
                    bar.set_postfix_str(row.name)
                    yield row
                    bar.update()

            report = run_matrix(session, chosen, facts, json_path=args.json, progress=watched, is_split=args.quick)
    except BaseDiffers as error:
        sys.stderr.write(f"deepinfer-jax determinism: {error}\n")
        return EXIT_DIFFERS
    finally:
        session.close()
    sys.stdout.write(report.to_text() + "\n")
    return 0 if report.is_ok else EXIT_DIFFERS


def model_of(args: argparse.Namespace) -> Model:
    """What the engines share. On an Ascend device variables say what CANN is, and what its operators lack is named."""
    if args.device != ASCEND:
        return Model(path=args.model, numerics=args.numerics, tokenizer=args.tokenizer, device=args.device)
    given = {name: value for name, value in PROCESS_ENVIRON.items() if name.startswith(ASCEND_PREFIX)}
    path, tokenizer = args.model, args.tokenizer
    if path is None:
        path = str(shipped_config(ASCEND_SHAPE))
        tokenizer = tokenizer or str(shipped_model(ASCEND_TOKENIZER))
    return Model(
        path=path,
        numerics=args.numerics,
        tokenizer=tokenizer,
        device=ASCEND,
        variables={f"{ASCEND_PREFIX}HOST_OPS": MISSING_WORD} | given,
    )


def _name_of(args: argparse.Namespace, model: Model) -> str:
    """The model in the report: as it was named, else what is taken."""
    return args.model or (ASCEND_SHAPE if model.device == ASCEND else "embedded")


def _ascend_facts(session: Session) -> dict[str, str]:
    """The device behind the host and where weights are; nothing where there is none."""
    bridge = current_bridge() if session.model.device == ASCEND else None
    return {} if bridge is None else {"device": bridge.soc, "weights": session.main.config.ascend_mode}
