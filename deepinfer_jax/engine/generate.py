"""`deepinfer-jax generate`: prompts from the command line, a file or standard input, texts on standard output."""

import argparse
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any, cast

from deepinfer_jax.engine.describe import parse_mesh
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.outputs import CompletionOutput, RequestOutput
from deepinfer_jax.parallel.processes import join_processes, leave_processes
from deepinfer_jax.sampling.params import SamplingParams

DEFAULT_MAX_TOKENS = 128


def add_generate_parser(subparsers: Any) -> None:
    """Adds `generate` to the subparsers of an `argparse` parser."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text for prompts",
        description="Generates text for each prompt; without one, for all of standard input. Control characters are "
        "shown as escapes, except in --json.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; several make a batch")
    parser.add_argument("--file", metavar="PATH", help="a UTF-8 file that is one more prompt (one last newline cut)")
    parser.add_argument("--model", metavar="MODEL", help="directory, config file or Hugging Face id")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer, if not the model's own")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default: %(default)s")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: %(default)s (off)")
    parser.add_argument("--top-k", type=int, default=-1, metavar="K", help="default: %(default)s (off)")
    parser.add_argument("--seed", type=int, metavar="N", help="of every prompt's draws; default: another in each run")
    parser.add_argument("--json", action="store_true", help="one JSON object in a line for each prompt")
    parser.add_argument("--mesh", type=parse_mesh, metavar="DPxCP", help="devices: data parallel x context parallel")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where several processes run this")
    parser.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process-id", type=int, metavar="I", help="which one this is; process 0 writes the results")
    parser.add_argument("--cluster", action="store_true", help="in place of these three: SLURM, Kubernetes and others")


def run_generate(args: argparse.Namespace) -> int:
    """Writes one result for each prompt to standard output."""
    if args.cluster or args.coordinator is not None:
        join_processes(args.coordinator, num_processes=args.num_processes, process_id=args.process_id)
    results = _generate(args)
    if leave_processes() > 0:
        return 0
    is_batch = len(results) > 1
    for number, (prompt, outputs) in enumerate(results):
        if args.json:
            sys.stdout.write(json.dumps(_record(number, prompt, outputs)) + "\n")
        else:
            text = visible(CompletionOutput.from_outputs(outputs).text)
            sys.stdout.write(f"== {visible(prompt)}\n{text}\n" if is_batch else f"{text}\n")
    return 0


def _generate(args: argparse.Namespace) -> list[tuple[str, list[RequestOutput]]]:
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        seq_seed=args.seed,
    )
    prompts = _read_prompts(args)
    sizes = {} if args.mesh is None else {"mesh_shape": args.mesh}
    llm = LLM(args.model, tokenizer=args.tokenizer, decode_sequence=False, seed=args.seed, **sizes)
    llm.get_tokenizer()
    outputs = cast(list[list[RequestOutput]], llm.generate(prompts, params))
    return list(zip(prompts, outputs, strict=True))


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompts)
    if args.file is not None:
        prompts.append(_text_of(Path(args.file).read_bytes(), args.file))
    if not prompts:
        if sys.stdin.isatty():
            raise ValueError("no prompt was given; give one as argument, with --file, or on standard input")
        prompts.append(_text_of(sys.stdin.buffer.read(), "standard input"))
    return prompts


def _text_of(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error


def visible(text: str) -> str:
    """The text with control characters, other than line breaks and tabs, as escapes: safe for a terminal."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else c.encode("unicode_escape").decode() for c in text
    )


def _record(number: int, prompt: str, outputs: list[RequestOutput]) -> dict[str, Any]:
    summary = CompletionOutput.from_outputs(outputs)
    return {
        "index": number,
        "prompt": prompt,
        "prompt_len": outputs[0].prompt_len,
        "text": summary.text,
        "token_ids": list(summary.token_ids),
        "token_logprobs": [output.token_logprobs for output in outputs],
        "finish_reason": summary.finish_reason,
    }
