"""Completes Python code with drafts, says how fast that was, and answers in a JSON Schema; `demo.sh` runs it."""

import argparse
import json
import time

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine.generate import visible
from deepinfer_jax.engine.outputs import CompletionOutput

PROMPTS = (
    "class ParseError(Exception):\n",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n",
    'def read_lines(path):\n    """Return the lines of a text file."""\n    with open(',
)
SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "pattern": "^[a-z]{3,8}_[a-z]{3,8}$"},
        "returns": {"enum": ["int", "str", "list", "None"]},
        "num_arguments": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["function", "returns", "num_arguments"],
    "additionalProperties": False,
}
ANSWER_TOKENS = 160  # enough for every answer of the schema, with white space


def main() -> None:
    """Prints the completions, what they took, and the answer."""
    args = _parser().parse_args()
    print("loading the model and compiling its step; the first run takes a minute or two", flush=True)
    llm = LLM(args.model, max_model_len=1024, max_num_seqs=8, decode_sequence=False)
    _complete(llm, args.prompts or list(PROMPTS), args)
    _answer(llm, args)
    llm.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete; default: three of Python code")
    parser.add_argument("--model", metavar="MODEL", help="directory, config file or Hugging Face id; default: embedded")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)s (greedy)")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="of every prompt's draws; default: %(default)s"
    )
    return parser


def _complete(llm: LLM, prompts: list[str], args: argparse.Namespace) -> None:
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seq_seed=args.seed)
    start_s = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    for number, (prompt, outputs) in enumerate(zip(prompts, results, strict=True), start=1):
        print(f"\n== prompt {number}, continued behind >>>")
        print(visible(f"{prompt}>>>{CompletionOutput.from_outputs(outputs).text}"))
    num_tokens = sum(map(len, results))
    print(f"\n{num_tokens} tokens in {elapsed_s:.2f} s: {num_tokens / elapsed_s:.0f} tokens/s, {len(prompts)} at once")
    drafts = llm.stats().get("drafts")
    if drafts is None:
        print("this model has no draft stages: nothing was speculated")
    else:
        print(f"accepted length: {drafts['accepted_len_mean']:.2f} tokens of a request in a step, with drafts")


def _answer(llm: LLM, args: argparse.Namespace) -> None:
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=ANSWER_TOKENS,
        seq_seed=args.seed,
        so_args={"schema_type": "json", "schema": SCHEMA},
    )
    [outputs] = llm.generate(["# A function of the module, as JSON:\n"], params, use_tqdm=False)
    if outputs[-1].finish_reason == "stop":
        text = CompletionOutput.from_outputs(outputs[:-1]).text  # without EOS
        print(f"\n== an answer held to a JSON Schema\n{json.dumps(json.loads(text))}")
    else:
        text = CompletionOutput.from_outputs(outputs).text
        print(f"\n== an answer held to a JSON Schema, cut off after {ANSWER_TOKENS} tokens\n{visible(text)}")


if __name__ == "__main__":
    main()
