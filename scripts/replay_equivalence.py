"""Shows that the two forms of bounded replay, mask and compact, leave the same bits: one JSON line for each prompt.

Compared are tokens, log-probabilities, and what the request has on the device afterwards: the window rings of every
layer (in the decoder layers from the tail on), compressor tails, Engram history, main KV and index K. Beside it: how
many rows each form computed in the decoder layers, and how far the result is from full prefill, which it need not
equal. Exits with 1 if mask and compact differ anywhere.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.config.args import resolve
from deepinfer_jax.config.roles import replay_boundary
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.engine.snapshot import RequestSnapshot
from deepinfer_jax.testing.facts import commit_of_checkout

ROOT = Path(__file__).parents[1]
MODES = ("off", "mask", "compact")
SPARE = 8  # tokens that a request could still draw when its state is read


def main() -> int:
    """Reads the options, prints one JSON line for each prompt; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "configs/model/tiny.json"))
    parser.add_argument("--keep", type=int, default=140, help="last prompt tokens that run the decoder layers")
    parser.add_argument("--lengths", nargs="+", type=int, default=[20, 139, 140, 141, 500, 1000])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens")
    parser.add_argument("--chunk", type=int, default=64, help="rows of a prefill step, 0 for whole prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=commit_of_checkout(), help="recorded with the results")
    args = parser.parse_args()
    engines = {mode: make_engine(args, mode) for mode in MODES}
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "commit": args.commit}
    is_equal = True
    for length in args.lengths:
        figures = compare(engines, length, args)
        is_equal &= figures["equal"]
        print(json.dumps({"script": "replay_equivalence", "chunk": args.chunk, "keep": args.keep} | figures | facts))
    return 0 if is_equal else 1


def make_engine(args: argparse.Namespace, mode: str) -> LLMEngine:
    """One engine for each mode; all have the same sizes."""
    max_model_len = max(args.lengths) + args.tokens + SPARE
    variables = {"DEEPINFER_ENFORCE_EAGER": "1", "DEEPINFER_JAX_PREFIX_CACHE": "off"}
    variables |= {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": mode}
    if mode != "off":
        variables["DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"] = str(args.keep)
    engine_args = EngineArgs(
        model=args.model,
        max_model_len=max_model_len,
        max_num_seqs=4,
        chunked_prefill=bool(args.chunk),
        max_num_batched_tokens=args.chunk or max_model_len,
        disable_log_stats=True,
    )
    return LLMEngine(resolve(engine_args, variables))


def compare(engines: dict[str, LLMEngine], length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one prompt in every mode."""
    prompt = np.random.default_rng([args.seed, length]).integers(3, 259, length).tolist()
    params = SamplingParams(max_tokens=args.tokens + SPARE, ignore_eos=True, seq_seed=args.seed)
    runs, decoder_rows = {}, {}
    for mode, engine in engines.items():
        before = engine.pipeline.num_decoder_rows
        runs[mode] = run(engine, prompt, params, args.tokens)
        decoder_rows[mode] = engine.pipeline.num_decoder_rows - before
    (mask, mask_state), (compact, compact_state) = runs["mask"], runs["compact"]
    differing = differing_arrays(mask_state, compact_state, engines["mask"])
    is_same = [(o.token_id, o.token_logprobs) for o in mask] == [(o.token_id, o.token_logprobs) for o in compact]
    same_as_off = [o.token_id == p.token_id for o, p in zip(mask, runs["off"][0], strict=True)]
    return {
        "prompt_len": length,
        "equal": is_same and not differing,
        "differing": differing,
        "decoder_rows": decoder_rows,
        "tokens_as_off": sum(same_as_off),
        "tokens": len(same_as_off),
        "first_logprob_distance_to_off": abs(mask[0].token_logprobs - runs["off"][0][0].token_logprobs),
    }


def run(
    engine: LLMEngine, prompt: list[int], params: SamplingParams, num_tokens: int
) -> tuple[list[RequestOutput], RequestSnapshot]:
    """The first tokens of a request, and its state behind them."""
    engine.add_request("replay", "one", params, prompt)
    outputs: list[RequestOutput] = []
    while len(outputs) < num_tokens:
        outputs += engine.step()
    saved = engine.save_request("one")
    engine.flush_inflight_reqs()
    engine.abort_request("one")
    engine.flush_inflight_reqs()
    return outputs[:num_tokens], saved


def differing_arrays(a: RequestSnapshot, b: RequestSnapshot, engine: LLMEngine) -> list[str]:
    """Names of state arrays that are not the same bytes; ring rows that nobody may read are left out."""
    assert a.state is not None and b.state is not None and a.num_written == b.num_written
    boundary, ring_len = replay_boundary(engine.model), engine.runtime.ring_len
    first = max(0, a.num_written - engine.model.sliding_window)
    found = []
    leaves = zip(*(jax.tree_util.tree_leaves_with_path(each.state) for each in (a, b)), strict=True)
    for (path, mine), (_, other) in leaves:
        name = jax.tree_util.keystr(path)
        if name.startswith(".window"):
            for layer in range(mine.shape[0]):
                start = max(first, a.tail_start) if layer >= boundary else first
                rows = np.arange(start, a.num_written) % ring_len
                if not np.array_equal(mine[layer, 0, rows], other[layer, 0, rows]):
                    found.append(f"{name}[{layer}]")
        elif name.startswith((".main_kv", ".index_k")):
            known = [entries(array, a.num_written, engine.runtime.page_tokens) for array in (mine, other)]
            if not np.array_equal(known[0], known[1]):
                found.append(name)
        elif not np.array_equal(mine, other):
            found.append(name)
    return found


def entries(pages: np.ndarray, num_tokens: int, page_tokens: int) -> np.ndarray:
    """The entries of a paged cache that belong to so many tokens."""
    ratio = page_tokens // pages.shape[2]
    flat = pages.reshape(pages.shape[0], -1, pages.shape[-1])
    return flat[:, : num_tokens // ratio]


if __name__ == "__main__":
    sys.exit(main())
