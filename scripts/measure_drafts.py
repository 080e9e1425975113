#!/usr/bin/env python3
"""What drafts are worth on held-out code at temperature 0, one request at a time, as one JSON line.

The beginning of each held-out file is continued greedily with drafts and without, in turns. Texts in a loop accept any
draft, so those of which more than 30 % repeats runs of four tokens are left out; both figures are about the others.

    python scripts/measure_drafts.py [--sources DIR] [--model DIR] [--prompt-len 64] [--tokens 64]
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.training import corpus
from deepinfer_jax.training.acceptance import repeated_share

MANIFEST = Path(__file__).with_name("train_tiny_files.json")
MAX_REPEATED = 0.3


def main() -> None:
    """Prints the line."""
    args = _parser().parse_args()
    plain, drafting = _load(args, num_draft_tokens=0), _load(args)
    prompts = _prompts(args, drafting)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for llm in (plain, drafting):
        _answer(llm, prompts[0], params)  # warms up
    num_kept, num_tokens, plain_total_s, drafting_total_s = 0, 0, 0.0, 0.0
    rounds: list[int] = []
    for prompt in tqdm(prompts, desc="texts", unit="text", disable=None):
        want, plain_s = _answer(plain, prompt, params)
        outputs, drafting_s = _answer(drafting, prompt, params)
        ids = np.asarray([output.token_id for output in outputs])
        assert ids.tolist() == [output.token_id for output in want], "drafts changed a text"
        if len(ids) < args.tokens or repeated_share(ids) > MAX_REPEATED:
            continue
        num_kept += 1
        plain_total_s += plain_s
        drafting_total_s += drafting_s
        num_tokens += len(ids)
        rounds += _rounds(outputs)
    if not num_kept:
        raise SystemExit("every text was in a loop or ended early; give fewer --tokens")
    report = {
        "script": "measure_drafts",
        "model": args.model or "embedded",
        "texts": len(prompts),
        "texts_kept": num_kept,
        "prompt_len": args.prompt_len,
        "tokens": args.tokens,
        "accepted_length": round(float(np.mean(rounds)), 4),
        "tokens_per_s_off": round(num_tokens / plain_total_s, 1),
        "tokens_per_s_drafts": round(num_tokens / drafting_total_s, 1),
        "speed_up": round(plain_total_s / drafting_total_s, 4),
        **run_facts(),
    }
    print(json.dumps(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sources", type=Path, help="folder or tar of the standard library; default: this Python's")
    parser.add_argument("--model", metavar="DIR", help="with draft stages; default: the embedded model")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer; default: %(default)s")
    return parser


def _load(args: argparse.Namespace, **options: Any) -> LLM:
    longest = args.prompt_len + args.tokens + 16
    return LLM(args.model, max_model_len=longest, max_num_seqs=1, decode_sequence=False, **options)


def _prompts(args: argparse.Namespace, llm: LLM) -> list[list[int]]:
    """The beginnings of the held-out files that are long enough."""
    sources = corpus.read_sources(args.sources or sysconfig.get_path("stdlib"))
    _, held_out = corpus.pinned_texts(corpus.read_manifest(MANIFEST), sources)
    encoded = [llm.get_tokenizer().encode(text)[: args.prompt_len] for text in held_out.values()]
    return [ids for ids in encoded if len(ids) == args.prompt_len]


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[RequestOutput], float]:
    """The outputs of one request, and the seconds it took, the prompt's step included."""
    start_s = time.perf_counter()
    [outputs] = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    return outputs, time.perf_counter() - start_s


def _rounds(outputs: list[RequestOutput]) -> list[int]:
    """How many tokens each step gave that verified drafts; the last token of a step tells."""
    return [output.accept_tok for output in outputs if output.draft_tok > 1]


if __name__ == "__main__":
    main()
