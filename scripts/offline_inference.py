#!/usr/bin/env python3
"""Answers a file of prompts: JSON lines in, JSON lines out, one for one and in order, however large the file is.

A line is {"prompt": "..."} or {"prompt_token_ids": [...]}, and, if it likes, "id" and "sampling_params" (by name, as in
docs/sampling.md). An output line has index, id, text, token_ids, finish_reason, num_tokens and usage; a line that could
not be answered has "error" instead, or beside what there is of it, and the others go on. Started again, the script goes
on behind the last whole line of OUTPUT, also after a kill. Several processes share one input with `--shard i/n`, each
with an OUTPUT of its own.

    python scripts/offline_inference.py INPUT OUTPUT [--shard 0/4] [--sampling-params '{"max_tokens": 64}']
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from deepinfer_jax import EngineArgs, LLMEngine
from deepinfer_jax.engine.offline import run_offline
from deepinfer_jax.engine.offline_files import WHOLE, parse_shard
from deepinfer_jax.testing.facts import run_facts


def main() -> None:
    """Writes OUTPUT, and one line about the run to standard output."""
    args = _parser().parse_args()
    try:
        defaults = _defaults(args.sampling_params)
        shard = WHOLE if args.shard is None else parse_shard(args.shard)
        summary = run_offline(_engine(args), args.input, args.output, shard=shard, defaults=defaults)
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(f"offline_inference: {error}") from error
    print(json.dumps({"script": "offline_inference", **dataclasses.asdict(summary), **run_facts()}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("input", type=Path, metavar="INPUT", help="JSON lines, one prompt in each")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="continued if it is there")
    parser.add_argument("--model", metavar="MODEL", help="directory or Hugging Face id; default: the embedded model")
    parser.add_argument("--shard", metavar="I/N", help="only lines I, I + N, I + 2 N, ...; I is from 0 to N - 1")
    parser.add_argument(
        "--sampling-params", metavar="JSON", default="{}", help="an object, for what a line leaves open"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws follow from it and the line's number; default: 0")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="together; default: %(default)s")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer")
    return parser


def _defaults(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--sampling-params={text!r} is not JSON ({error}); give an object") from error
    if not isinstance(given, dict):
        raise ValueError(f"--sampling-params={text!r} is no object; give names and values in braces")
    return given


def _engine(args: argparse.Namespace) -> LLMEngine:
    engine_args = EngineArgs(
        model=args.model,
        seed=args.seed,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        disable_log_stats=True,
        stop_preempted_request=False,
        offline_inference=True,
    )
    return LLMEngine.from_engine_args(engine_args)


if __name__ == "__main__":
    main()
