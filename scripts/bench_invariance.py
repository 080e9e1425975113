"""What batch-invariant mode costs on this device: one JSON line for each component and number of rows.

Components: attention, experts and selection of one layer, head with sampling, and a whole step. Each is timed with the
mode (`RuntimeConfig.is_invariant`) and without it, in turns in one process; `ratio` is with / without. Every row is one
decode row of a request at the same position; the caches hold zeros, which does not matter to the time.

--rank takes so many layers of one rank of the released shape with random weights, for GPUs; --kernels what its ops run
through.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import forward, init_state, load_model
from deepinfer_jax.checkpoint.embedded import embedded_model
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.setup import ROW_TILES
from deepinfer_jax.engine.steps import compiler_options, pack_experts
from deepinfer_jax.kernels.registry import NVIDIA
from deepinfer_jax.model.attention import attend, window_rows
from deepinfer_jax.model.batch import StepBatch, derive_rows, make_batch
from deepinfer_jax.model.kernel_weights import for_kernels
from deepinfer_jax.model.moe import Routed, run_experts
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.selection import empty_selection, select
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.state import State
from deepinfer_jax.model.variants import Layer, all_layers, rope_tables
from deepinfer_jax.ops.invariant import map_rows, row_product
from deepinfer_jax.sampling.logits import SampleRows, sample
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.testing.rank_model import rank_model
from deepinfer_jax.testing.step_bench import make_params

RANK_EXPERTS = 48  # of 384: one rank of eight
NO_STAGES = Stages((), {})

type Component = Callable[["Setting", RuntimeConfig], Callable[[], Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model and one step of it: `num_rows` requests with one row each."""

    params: Params
    state: State
    batch: StepBatch
    num_rows: int
    key: jax.Array

    def normal(self, config: RuntimeConfig, *shape: int) -> jax.Array:
        """Random activations, one leading row for each request."""
        return jax.random.normal(self.key, (self.num_rows, *shape), config.activation_dtype)


def main() -> None:
    """Reads the options and prints one JSON line for each component and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("components", nargs="*", help=f"of {', '.join(COMPONENTS)}; all without one")
    parser.add_argument("--model", help="directory in the released format; default: the embedded model")
    parser.add_argument("--numerics", choices=("q", "bf16"), default="q")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="decode rows of a step")
    parser.add_argument("--position", type=int, default=500, help="of every row")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rank", type=int, metavar="LAYERS", help="layers of a rank, in place of --model")
    parser.add_argument("--kernels", default="auto", help="as DEEPINFER_JAX_KERNELS; default: auto")
    args = parser.parse_args()
    unknown = sorted(set(args.components) - set(COMPONENTS))
    if unknown:
        parser.error(f"{unknown[0]} is no component; choose among {', '.join(COMPONENTS)}")
    params, config = make_model(args)
    for num_rows in args.rows:
        setting = make_setting(params, config, num_rows, args.position)
        for name in args.components or COMPONENTS:
            figures = compare(COMPONENTS[name], setting, config, turns=args.turns)
            load = {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
            record = {"script": "bench_invariance", "component": name, "rows": num_rows, "position": args.position}
            model = args.model or "embedded" if args.rank is None else f"rank of {args.rank} layers"
            record |= {"model": model, "numerics": args.numerics, "kernels": args.kernels, "row_tile": config.row_tile}
            record |= figures | run_facts() | load
            print(json.dumps(record), flush=True)


def make_model(args: argparse.Namespace) -> tuple[Params, RuntimeConfig]:
    """Weights in the forms that the kernels read, and a configuration for the device at hand."""
    target = {"gpu": NVIDIA}.get(jax.devices()[0].platform, "cpu")
    options = {"numerics": args.numerics, "target": target, "row_tile": ROW_TILES[target], "kernels": args.kernels}
    if args.rank is not None:
        model = rank_model(load_config(shipped_config("model/deepseek-v4.1-flash.json")), num_layers=args.rank)
        config = RuntimeConfig(model=model, **options)
        return make_params(config, num_experts=RANK_EXPERTS), config
    params, model = load_model(args.model or embedded_model(), progress=False)
    config = RuntimeConfig(model=model, **options)
    return for_kernels(params, config=config, pack=pack_experts), config


def make_setting(params: Params, config: RuntimeConfig, num_rows: int, position: int) -> Setting:
    """A decode step at this position, over caches that hold zeros."""
    num_pages = position // config.page_tokens + 1
    table = np.arange(num_rows * num_pages).reshape(num_rows, num_pages)
    slots = list(range(num_rows))
    batch = make_batch([[3 + slot] for slot in slots], starts=[position] * num_rows, slots=slots, page_table=table)
    state = init_state(config, num_slots=num_rows, num_pages=num_rows * num_pages)
    return Setting(params=params, state=state, batch=batch, num_rows=num_rows, key=jax.random.key(0))


def compare(component: Component, setting: Setting, config: RuntimeConfig, *, turns: int) -> dict[str, float]:
    """Medians in milliseconds with and without the mode, taken in turns, and their ratio."""
    runs = [component(setting, dataclasses.replace(config, is_invariant=is_on)) for is_on in (True, False)]
    times: list[list[float]] = [[], []]
    for run in runs:
        jax.block_until_ready(run())  # compiles
    for _ in range(turns):
        for found, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            found.append(1e3 * (time.perf_counter() - start))
    on, off = (statistics.median(found) for found in times)
    return {"on_ms": round(on, 4), "off_ms": round(off, 4), "ratio": round(on / off, 3)}


# Components: each gives a function that runs it once under a configuration.


def attention(setting: Setting, config: RuntimeConfig) -> Callable[[], Any]:
    """Scores and values over the window and the selected entries, at the first layer that has selected entries."""
    layer = _layer_with(config, lambda each: int(each.ratio_kind) != 0)
    heads, width = config.model.num_attention_heads, config.model.head_dim
    entries = np.arange(min(config.model.index_topk, int(setting.batch.positions[0])), dtype=np.int32)

    def run(state: State, q: jax.Array, latent: jax.Array, batch: StepBatch) -> jax.Array:
        listed = jnp.broadcast_to(jnp.asarray(entries), (q.shape[0], len(entries)))
        sink = setting.params.attention.attn_sink[layer.layer]
        new_kv = window_rows(latent, config=config)
        return attend(q, new_kv, state, listed, sink, derive_rows(batch), layer, config=config)

    q, latent = setting.normal(config, heads, width), setting.normal(config, width)
    return _compiled(run, config, setting.state, q, latent, setting.batch)


def experts(setting: Setting, config: RuntimeConfig) -> Callable[[], Any]:
    """The routed experts of one layer; each row goes to experts of its own choice."""
    model, count = config.model, config.model.num_experts_per_tok
    here = setting.params.moe.experts.w1.payload.shape[1]  # of a rank's layer
    order = np.random.default_rng(0).permuted(np.tile(np.arange(here), (setting.num_rows, 1)), axis=1)
    ids = jnp.asarray(order[:, :count], jnp.int32)
    weights = jnp.full((setting.num_rows, count), 1 / count, jnp.float32)

    def run(u: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        routed = Routed(u=u, expert_ids=ids, weights=weights)
        is_live = jnp.ones(u.shape[0], jnp.bool_)
        return run_experts(setting.params.moe, routed, is_live, layer=0, config=config)

    return _compiled(run, config, setting.normal(config, model.hidden_size), ids, weights)


def selection(setting: Setting, config: RuntimeConfig) -> Callable[[], Any]:
    """Index scores over all entries and the best of them, at the first layer that selects."""
    layer = _layer_with(config, lambda each: each.layer in config.model.index_source_layer_ids)

    def run(state: State, x: jax.Array, q_latent: jax.Array, batch: StepBatch) -> Any:
        rows = derive_rows(batch)
        tables = rope_tables(rows.positions, layer, config=config.model)
        before = empty_selection(rows, config=config)
        indexer = setting.params.indexer
        return select(indexer, before, state, x, q_latent, tables, rows, layer, config=config, stages=NO_STAGES)

    x, q_latent = setting.normal(config, config.model.hidden_size), setting.normal(config, config.model.q_lora_rank)
    return _compiled(run, config, setting.state, x, q_latent, setting.batch)


def head(setting: Setting, config: RuntimeConfig) -> Callable[[], Any]:
    """Logits of every row and a draw from each, with top-p and top-k."""

    def run(hidden: jax.Array, rows: SampleRows) -> Any:
        weights = setting.params.head.astype(hidden.dtype)
        logits = map_rows(
            lambda tile: row_product(tile, weights),
            hidden,
            tile=config.product_tile,
            has_fixed_trips=config.has_fixed_trips,
        )
        output = sample(logits, rows)
        return output.token_ids, output.token_logprobs

    return _compiled(run, config, setting.normal(config, config.model.hidden_size), _draws(setting.num_rows))


def whole_step(setting: Setting, config: RuntimeConfig) -> Callable[[], Any]:
    """The network and a draw from each row."""

    def run(params: Params, state: State, batch: StepBatch, rows: SampleRows) -> Any:
        output, state = forward(params, state, batch, config=config)
        drawn = sample(output.logits, rows)
        return drawn.token_ids, drawn.token_logprobs, state

    return _compiled(run, config, setting.params, setting.state, setting.batch, _draws(setting.num_rows))


def _draws(num_rows: int) -> SampleRows:
    """Rows that sample at temperature 1 from the best 40 tokens that have nine tenths of the mass."""
    numbers = jnp.arange(num_rows)
    nothing = jnp.full(num_rows, -1, jnp.int32)
    return SampleRows(
        seed_lo=numbers.astype(jnp.uint32),
        seed_hi=numbers.astype(jnp.uint32),
        positions=jnp.ones(num_rows, jnp.int32),
        inverse_temperature=jnp.ones(num_rows, jnp.float32),
        top_p=jnp.full(num_rows, 0.9, jnp.float32),
        top_k=jnp.full(num_rows, 40, jnp.int32),
        is_greedy=jnp.zeros(num_rows, jnp.bool_),
        suppressed_ids=nothing,
        forced_ids=nothing,
    )


def _layer_with(config: RuntimeConfig, is_wanted: Callable[[Layer], bool]) -> Layer:
    """The first layer of a kind. Raises ValueError for a model without one."""
    for layer in all_layers(config.model):
        if is_wanted(layer):
            return layer
    raise ValueError("this model has no layer that selects entries; name other components")


def _compiled(run: Callable[..., Any], config: RuntimeConfig, *arguments: Any) -> Callable[[], Any]:
    return functools.partial(jax.jit(run, compiler_options=compiler_options(config)), *arguments)


COMPONENTS: dict[str, Component] = {
    "attention": attention,
    "experts": experts,
    "selection": selection,
    "head and sampling": head,
    "whole step": whole_step,
}

if __name__ == "__main__":
    main()
