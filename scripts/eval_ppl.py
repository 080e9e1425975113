#!/usr/bin/env python3
"""Bits per byte of a model on text files, beside what `xz -9e` makes of them, as one JSON line.

The files, each followed by EOS, are one stream of tokens, cut into rows that start without a past, as in training.
`--held-out` takes the files that the embedded model was not trained on; they are those of the Python release that
`scripts/train_tiny_files.json` names, and `--limit` keeps the first so many.

    python scripts/eval_ppl.py FILE... [--model DIR] [--row-len 512]
    python scripts/eval_ppl.py --held-out [--sources DIR] [--limit N]
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.checkpoint.embedded import embedded_model
from deepinfer_jax.checkpoint.load import TOKENIZER_NAME
from deepinfer_jax.config.released import load_config
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.training import corpus, data
from deepinfer_jax.training.tokenizer import encode_files

MANIFEST = Path(__file__).with_name("train_tiny_files.json")
ROWS_PER_CALL = 16


def main() -> None:
    """Prints the line."""
    args = _parser().parse_args()
    texts = _texts(args)
    model = args.model or embedded_model()
    rows, num_tokens = _rows(list(texts.values()), model, row_len=args.row_len)
    nats, elapsed_s = _score(rows, model)
    num_bytes = sum(len(text.encode()) for text in texts.values())
    report = {
        "script": "eval_ppl",
        "model": "embedded" if args.model is None else str(args.model),
        "files": len(texts),
        "bytes": num_bytes,
        "tokens": num_tokens,
        "row_len": args.row_len,
        "bits_per_byte": round(nats / math.log(2) / num_bytes, 5),
        "xz_bits_per_byte": round(data.xz_bits_per_byte(texts), 5),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
        **run_facts(),
    }
    print(json.dumps(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--held-out", action="store_true", help="the held-out files of the embedded model")
    parser.add_argument("--sources", type=Path, help="folder or tar of the standard library; default: this Python's")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N of the held-out files")
    parser.add_argument("--model", type=Path, help="directory in the released format; default: the embedded model")
    parser.add_argument("--row-len", type=int, default=512, metavar="N", help="tokens; default: %(default)s")
    return parser


def _texts(args: argparse.Namespace) -> dict[str, str]:
    """Name -> text of the files that the command line names."""
    if args.held_out == bool(args.files):
        raise SystemExit("give either files or --held-out")
    if args.files:
        return {str(file): file.read_text(encoding="utf-8") for file in args.files}
    sources = corpus.read_sources(args.sources or sysconfig.get_path("stdlib"))
    _, held_out = corpus.pinned_texts(corpus.read_manifest(MANIFEST), sources)
    return dict(list(held_out.items())[: args.limit])


def _rows(texts: list[str], model: Path, *, row_len: int) -> tuple[list[list[int]], int]:
    """Rows of BOS and up to `row_len` tokens, and the number of tokens without BOS."""
    config = load_config(model)
    encoded = encode_files(model / TOKENIZER_NAME, texts)
    stream = np.concatenate([np.asarray([*ids, config.eos_token_id], np.uint16) for ids in encoded])
    rows, counts = data.whole_rows(stream, row_len=row_len, bos_id=config.bos_token_id, eos_id=config.eos_token_id)
    return [row[: 1 + count].tolist() for row, count in zip(rows, counts, strict=True)], len(stream)


def _score(rows: list[list[int]], model: Path) -> tuple[float, float]:
    """The sum of the negative log-probabilities of all tokens behind the BOS of their rows, and the seconds it took."""
    longest = max(map(len, rows))
    llm = LLM(model, max_model_len=longest + 1, max_num_seqs=ROWS_PER_CALL, num_draft_tokens=0, decode_sequence=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=True)
    nats, begin_s = 0.0, time.perf_counter()
    for start in tqdm(range(0, len(rows), ROWS_PER_CALL), desc="rows", unit="call", disable=None):
        call = rows[start : start + ROWS_PER_CALL]
        results = llm.generate(prompt_token_ids=call, sampling_params=params, use_tqdm=False)
        for row, outputs in zip(call, results, strict=True):
            scores = outputs[0].prompt_logprobs
            assert len(scores) == len(row) - 1, f"{len(scores)} scores for a row of {len(row)} tokens"
            nats -= math.fsum(scores)
    return nats, time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
