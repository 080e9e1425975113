#!/usr/bin/env python3
"""What drafts are worth on held-out code at temperature 0, one request at a time, as one JSON line.

The beginning of each held-out file is continued greedily with drafts and without, in turns. Texts in a loop accept any
draft, so those of which more than 30 % repeats runs of four tokens are left out; the figures are about the others,
except for accepted_length_all_texts. A round is a step of the request that verifies drafts; accepted_by_place is the
share of rounds that accept so many drafts at least.

With --training the code of training measures the drafter on the same texts: same_rounds is the share of rounds in
which it accepts as many drafts as the engine, accepted_length_by_position its mean over all positions of a text. The
latter is larger than a mean over rounds, because a round with many drafts covers many positions.

    python scripts/measure_drafts.py [--sources DIR] [--model DIR] [--numerics MODE] [--prompt-len 64] [--tokens 64]
"""

import argparse
import dataclasses
import functools
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from deepinfer_jax import LLM, SamplingParams, load_model
from deepinfer_jax.checkpoint.embedded import embedded_model
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.training import corpus
from deepinfer_jax.training.acceptance import record_acceptance, repeated_share
from deepinfer_jax.training.numerics import training_config
from deepinfer_jax.training.weights import plain_params

MANIFEST = Path(__file__).with_name("train_tiny_files.json")
MAX_REPEATED = 0.3
TEXTS_PER_CALL = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A greedy continuation with drafts, as long as was asked for unless it ended early."""

    prompt: list[int]
    outputs: list[RequestOutput]
    drafting_s: float
    plain_s: float  # the same without drafts

    @property
    def token_ids(self) -> list[int]:
        """What was written."""
        return [output.token_id for output in self.outputs]

    @property
    def rounds(self) -> list[RequestOutput]:
        """The last output of each step that verified drafts: it tells how many, and how many tokens the step gave."""
        return [output for output in self.outputs if output.draft_tok > 1]


def main() -> None:
    """Prints the line."""
    args = _parser().parse_args()
    plain, drafting = _load(args, num_draft_tokens=0), _load(args)
    prompts = _prompts(args, drafting)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for llm in (plain, drafting):
        _answer(llm, prompts[0], params)  # warms up
    answers = [_both(plain, drafting, p, params) for p in tqdm(prompts, desc="texts", unit="text", disable=None)]
    kept = [answer for answer in answers if _is_kept(answer, args.tokens)]
    if not kept:
        raise SystemExit("every text was in a loop or ended early; give fewer --tokens")
    lengths = np.array([output.accept_tok for answer in kept for output in answer.rounds])
    num_tokens = sum(len(answer.outputs) for answer in kept)
    plain_s, drafting_s = (sum(getattr(answer, name) for answer in kept) for name in ("plain_s", "drafting_s"))
    report = {
        "script": "measure_drafts",
        "model": args.model or "embedded",
        "numerics": args.numerics or "default",
        "texts": len(prompts),
        "texts_kept": len(kept),
        "prompt_len": args.prompt_len,
        "tokens": args.tokens,
        "rounds": len(lengths),
        "accepted_length": round(float(np.mean(lengths)), 4),
        "accepted_by_place": [round(float(np.mean(lengths > place)), 4) for place in range(1, max(lengths))],
        "accepted_length_all_texts": round(float(np.mean([o.accept_tok for a in answers for o in a.rounds])), 4),
        "tokens_per_s_off": round(num_tokens / plain_s, 1),
        "tokens_per_s_drafts": round(num_tokens / drafting_s, 1),
        "speed_up": round(plain_s / drafting_s, 4),
        **(_by_training(args, kept) if args.training else {}),
        **run_facts(),
    }
    print(json.dumps(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sources", type=Path, help="folder or tar of the standard library; default: this Python's")
    parser.add_argument("--model", metavar="DIR", help="with draft stages; default: the embedded model")
    parser.add_argument("--numerics", metavar="MODE", help="of the engine; default: the engine's")
    parser.add_argument("--training", action="store_true", help="also measure with the code of training")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer; default: %(default)s")
    return parser


def _load(args: argparse.Namespace, **options: Any) -> LLM:
    longest = args.prompt_len + args.tokens + 16
    return LLM(
        args.model, max_model_len=longest, max_num_seqs=1, decode_sequence=False, numerics=args.numerics, **options
    )


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


def _both(plain: LLM, drafting: LLM, prompt: list[int], params: SamplingParams) -> Answer:
    """The answer with and without drafts, which must be the same."""
    want, plain_s = _answer(plain, prompt, params)
    outputs, drafting_s = _answer(drafting, prompt, params)
    answer = Answer(prompt=prompt, outputs=outputs, drafting_s=drafting_s, plain_s=plain_s)
    assert answer.token_ids == [output.token_id for output in want], "drafts changed a text"
    return answer


def _is_kept(answer: Answer, num_tokens: int) -> bool:
    ids = np.asarray(answer.token_ids)
    return len(ids) == num_tokens and repeated_share(ids) <= MAX_REPEATED


def _by_training(args: argparse.Namespace, answers: list[Answer]) -> dict[str, Any]:
    """The drafter on the answers' texts, by the code that measures it in training."""
    packed, model = load_model(args.model or embedded_model(), with_draft=True, progress=False)
    length, size = args.prompt_len + args.tokens, model.dspark_block_size
    config = training_config(model, seq_len=length, has_bf16_products=False)
    params = plain_params(packed, model, dtype=config.activation_dtype, with_draft=True)
    record = jax.jit(functools.partial(record_acceptance, config=config))
    anchors = jnp.tile(jnp.arange(args.prompt_len, length - size, dtype=jnp.int32)[None], (TEXTS_PER_CALL, 1))
    texts = np.array([answer.prompt + answer.token_ids for answer in answers], np.int32)
    texts = np.pad(texts, ((0, -len(texts) % TEXTS_PER_CALL), (0, 0)))  # every call has one shape
    calls = [record(params, texts[start:][:TEXTS_PER_CALL], anchors) for start in range(0, len(texts), TEXTS_PER_CALL)]
    accepted = np.concatenate([np.asarray(call.accepted).reshape(anchors.shape) for call in calls])[: len(answers)]
    same = []
    for answer, own in zip(answers, accepted, strict=True):
        for output in answer.rounds:
            place = output.num_output_tokens - output.accept_tok - 1  # of the token in front of the round's drafts
            if output.draft_tok == 1 + size and place + 1 < len(own):  # the last round may have been cut
                same.append(own[place] == output.accept_tok - 1)
    return {
        "same_rounds": [int(np.sum(same)), len(same)],
        "accepted_length_by_position": round(1 + float(accepted.mean()), 4),
    }


if __name__ == "__main__":
    main()
