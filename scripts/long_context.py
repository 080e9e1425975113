"""Runs one long prompt and compares the memory that its caches take with the formula: prints one JSON line.

The formula is that of the specification (`testing/cache_formula.py`). What is measured is the size of the arrays that
the engine holds. The shape's own limit of positions is raised where the prompt needs it.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.config.args import resolve
from deepinfer_jax.testing.cache_formula import cache_bytes
from deepinfer_jax.testing.facts import commit_of_checkout

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Reads the options and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "configs/model/tiny.json"))
    parser.add_argument("--prompt-len", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--replay-keep", type=int, default=0, help="bounded replay (compact) with such a tail")
    parser.add_argument("--commit", default=commit_of_checkout(), help="recorded with the results")
    args = parser.parse_args()
    variables = {"DEEPINFER_ENFORCE_EAGER": "1"}
    if args.replay_keep:
        variables["DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE"] = "compact"
        variables["DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"] = str(args.replay_keep)
    max_model_len = args.prompt_len + args.tokens
    folder = tempfile.TemporaryDirectory()
    engine = LLMEngine(
        resolve(
            EngineArgs(
                model=with_positions(args.model, max_model_len, Path(folder.name)),
                max_model_len=max_model_len,
                max_num_seqs=1,
                num_kv_tokens=int(max_model_len / 0.8) + 64,
                disable_log_stats=True,
            ),
            variables,
        )
    )
    prompt = np.random.default_rng(0).integers(3, 259, args.prompt_len).tolist()
    start = time.perf_counter()
    engine.add_request("long", "one", SamplingParams(max_tokens=args.tokens, ignore_eos=True, seq_seed=0), prompt)
    outputs, first_s = [], 0.0
    with tqdm(total=args.prompt_len, desc="prompt", unit="token", disable=None) as bar:
        while engine.has_unfinished_requests():
            found = engine.step()
            if found and not outputs:
                first_s = time.perf_counter() - start
            outputs += found
            bar.update(min(engine.pipeline.num_encoder_rows, args.prompt_len) - bar.n)
    state = engine.pipeline.state
    paged = sum(leaf.nbytes for leaf in jax.tree.leaves((state.main_kv, state.index_k)))
    slots = sum(leaf.nbytes for leaf in jax.tree.leaves((state.window, state.tails, state.history)))
    paged_formula, slots_formula = cache_bytes(
        engine.runtime, num_pages=engine.sizes.scheduler.num_pages, num_slots=engine.sizes.num_state_slots
    )
    figures = {
        "script": "long_context",
        "model": Path(args.model).name,
        "prompt_len": args.prompt_len,
        "tokens": [output.token_id for output in outputs],
        "finish_reason": outputs[-1].finish_reason,
        "first_token_s": round(first_s, 1),
        "paged_bytes": paged,
        "paged_bytes_formula": paged_formula,
        "slot_bytes": slots,
        "slot_bytes_formula": slots_formula,
        "equal": (paged, slots) == (paged_formula, slots_formula),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "encoder_rows": engine.pipeline.num_encoder_rows,
        "decoder_rows": engine.pipeline.num_decoder_rows,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": args.commit,
    }
    print(json.dumps(figures))


def with_positions(model: str, num_positions: int, folder: Path) -> str:
    """The model, or a copy of its config file that allows so many positions."""
    path = Path(model)
    if path.suffix != ".json":
        return model
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text["max_position_embeddings"] = max(text["max_position_embeddings"], num_positions)
    copy = folder / path.name
    copy.write_text(json.dumps(config))
    return str(copy)


if __name__ == "__main__":
    main()
