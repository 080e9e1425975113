#!/usr/bin/env python3
"""One prompt of up to a million tokens at the widths of a released shape, in chunks, and then a few decode steps.

One JSON line tells what the caches take against the formula of the specification (backbone 9), what a step takes beside
them, and whether the entries that index sources select are those that NumPy selects, with the specification's
roundings and ties to the earlier entry, on sampled rows of the last chunk and on every decode row. Few layers, random
weights made on the device; `--table-rows` and `--experts` keep the rest small.

    python scripts/long_selection.py [--context 1048576] [--chunk 8192] [--layers 3] [--kernels mosaic_sm90]
"""

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.roles import LayerRole, layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.steps import compiler_options
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import RATIOS, State, init_state
from deepinfer_jax.testing import step_bench
from deepinfer_jax.testing.cache_formula import cache_bytes
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.testing.rank_model import ENGRAM_BASE, rank_model

CAPTURE = ("layers.*.index_q", "layers.*.index_weight", "layers.*.topk_idxs")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
KEYS_AT_ONCE = 1 << 16  # that NumPy scores


def main() -> None:
    """Prints the line."""
    args = _parser().parse_args()
    released = load_config(args.model)
    model = rank_model(released, num_layers=args.layers, engram_base=args.table_rows)
    target = {"gpu": "nvidia"}.get(jax.default_backend(), "cpu")
    config = RuntimeConfig(model=model, target=target, is_invariant=False, kernels=args.kernels)
    num_experts = min(args.experts, model.n_routed_experts)
    params = step_bench.make_params(config, num_experts=num_experts)
    num_pages = -(-(args.context + args.decode) // config.page_tokens)
    state = init_state(config, num_slots=1, num_pages=num_pages)
    tokens = np.random.default_rng(args.seed).integers(3, model.vocab_size, args.context + args.decode).tolist()
    experts = functools.partial(_experts_in_turn, config, num_experts)
    run = _Runner(config, params, state, tokens, num_pages, experts)
    first, count = 0, 0
    stages: dict[str, jax.Array] = {}
    start = time.perf_counter()
    with tqdm(total=args.context, desc="prompt", unit="token", disable=None) as bar:
        for first in range(0, args.context, args.chunk):
            count = min(args.chunk, args.context - first)
            stages = run.step(first, count)
            bar.update(count)
    prefill_s = time.perf_counter() - start
    sampled = np.unique(np.linspace(0, count - 1, args.rows).astype(int)).tolist()
    checks = check_rows(model, run.state, stages, [(row, first + row) for row in sampled])
    for position in range(args.context, args.context + args.decode):
        stages = run.step(position, 1)
        checks += check_rows(model, run.state, stages, [(0, position)])
    paged, slots = cache_bytes(config, num_pages=num_pages, num_slots=1)
    held = lambda *trees: sum(leaf.nbytes for leaf in jax.tree.leaves(trees))  # noqa: E731
    own = run.state
    figures = {
        "script": "long_selection",
        "kernels": args.kernels,
        "layers": model.num_hidden_layers,
        "context": args.context,
        "chunk": args.chunk,
        "prefill_s": round(prefill_s, 1),
        "paged_bytes": held(own.main_kv, own.index_k),
        "paged_bytes_formula": paged,
        "slot_bytes": held(own.window, own.tails, own.history),
        "slot_bytes_formula": slots,
        "temporary_bytes": run.temporary_bytes,
        "finite": run.is_finite,
        "sets": len(checks),
        "sets_equal": sum(not check["missing"] for check in checks),
        "differing": [check for check in checks if check["missing"]][:8],
        **run_facts(),
    }
    print(json.dumps(figures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=shipped_config("model/deepseek-v4.1-flash.json"), help="a config.json")
    parser.add_argument("--layers", type=int, default=3, help="of every role if possible")
    parser.add_argument("--experts", type=int, default=8, help="of a layer; rows take turns among them")
    parser.add_argument("--table-rows", type=int, default=ENGRAM_BASE, help="of each hash column of a table, about")
    parser.add_argument("--context", type=int, default=1_048_576, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=8192, help="of them in a step")
    parser.add_argument("--decode", type=int, default=4, help="steps behind the prompt")
    parser.add_argument("--rows", type=int, default=4, help="of the last chunk that NumPy selects for")
    parser.add_argument("--kernels", default="auto", help="as DEEPINFER_JAX_KERNELS; default: auto")
    parser.add_argument("--seed", type=int, default=0)
    return parser


class _Runner:
    """Steps of one request on random tokens; pages lie in their order."""

    def __init__(
        self, config: RuntimeConfig, params: Params, state: State, tokens: list[int], num_pages: int, experts: Any
    ) -> None:
        self.state, self.temporary_bytes, self.is_finite = state, 0, True
        self._params, self._tokens, self._experts = params, tokens, experts
        self._table = np.arange(num_pages, dtype=np.int32)[None]
        self._compiled: dict[int, Any] = {}
        step = functools.partial(forward, config=config, capture=CAPTURE)

        def run(params: Params, state: State, batch: Any, experts: Any) -> Any:
            output, state = step(params, state, batch, forced_selection=experts)
            return output.logits, output.stages, state

        self._jitted = jax.jit(run, donate_argnums=(1,), compiler_options=compiler_options(config))

    def step(self, first: int, count: int) -> dict[str, jax.Array]:
        """The stages of a step of so many tokens from position `first` on."""
        batch = make_batch([self._tokens[first : first + count]], [first], [0], self._table)
        inputs = (self._params, self.state, batch, self._experts(count))
        if count not in self._compiled:
            self._compiled[count] = self._jitted.lower(*inputs).compile()
            memory = self._compiled[count].memory_analysis()
            self.temporary_bytes = max(self.temporary_bytes, memory.temp_size_in_bytes)
        logits, stages, self.state = self._compiled[count](*inputs)
        self.is_finite &= bool(jnp.isfinite(logits).all())
        return stages


def _experts_in_turn(config: RuntimeConfig, num_experts: int, count: int) -> dict[str, jax.Array]:
    """Experts of each row by turns: the router would choose among more than were made."""
    per_row = config.model.num_experts_per_tok
    ids = (np.arange(count)[:, None] * per_row + np.arange(per_row)[None]) % num_experts
    return {f"layers.{role.layer}.router_ids": jnp.asarray(ids, jnp.int32) for role in layer_roles(config.model)}


def check_rows(
    model: ModelConfig, state: State, stages: dict[str, jax.Array], rows: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """What NumPy selects and the step does not, for each index source and row (its place in the step, its position)."""
    blocks: dict[int, np.ndarray] = {}
    found = []
    for role in layer_roles(model):
        if role.index_ordinal < 0:
            continue
        keys = index_keys(state, role)
        name = f"layers.{role.layer}"
        for row, position in rows:
            queries, weights = (np.asarray(stages[f"{name}.{what}"][row]) for what in ("index_q", "index_weight"))
            scores = numpy_scores(queries, weights, keys)
            scores[(position + 1) // role.ratio :] = -np.inf
            if role.is_candidate_source:
                blocks[row] = candidate_blocks(scores, (position + 1) // role.ratio, model)
            if role.uses_candidates:
                scores = np.where(
                    np.isin(np.arange(len(scores)) // model.candidate_block_size, blocks[row]), scores, -np.inf
                )
            want = best_entries(scores, model.index_topk)
            got = np.asarray(stages[f"{name}.topk_idxs"][row])
            missing = np.setdiff1d(want, got[got >= 0])
            found.append({"layer": role.layer, "position": position, "selected": len(want), "missing": len(missing)})
    return found


def index_keys(state: State, role: LayerRole) -> np.ndarray:
    """All index keys of a source, [entries, K] float32: codes times powers of two."""
    cache = state.index_k[RATIOS.index(role.ratio)]
    assert cache.scale is not None
    payload, scale = (np.asarray(a[role.cache_ordinal]) for a in (cache.payload, cache.scale))
    payload, scale = payload.reshape(-1, payload.shape[-1]), scale.reshape(-1, scale.shape[-1])
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1)
    return E2M1[codes] * np.repeat(np.exp2(scale.astype(np.float32) - 127), codes.shape[1] // scale.shape[1], axis=1)


def numpy_scores(queries: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Scores of all entries for one row (spec: backbone 5.3): products, terms and their sum rounded to bfloat16."""
    queries, weights = queries.astype(np.float64), weights.astype(np.float32)
    parts = []
    for first in range(0, len(keys), KEYS_AT_ONCE):
        dots = keys[first : first + KEYS_AT_ONCE].astype(np.float64) @ queries.T
        terms = _rounded(np.maximum(_rounded(dots), 0) * weights)
        total = np.zeros(len(terms), np.float32)
        for head in range(terms.shape[1]):
            total += terms[:, head]
        parts.append(_rounded(total))
    return np.concatenate(parts)


def candidate_blocks(scores: np.ndarray, visible: int, model: ModelConfig) -> np.ndarray:
    """The blocks that later layers choose from (spec: backbone 5.4)."""
    size = model.candidate_block_size
    padded = np.pad(scores, (0, -len(scores) % size), constant_values=-np.inf)
    best = padded.reshape(-1, size).max(axis=1)
    best[(visible - 1) // size] = np.inf
    return best_entries(best, model.candidate_topk_blocks)


def best_entries(scores: np.ndarray, count: int) -> np.ndarray:
    """The places of the best scores, of equal ones the earlier; -inf is never taken (spec: backbone 5.5)."""
    order = np.argsort(-scores, kind="stable")[:count]
    return np.sort(order[scores[order] > -np.inf])


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


if __name__ == "__main__":
    main()
