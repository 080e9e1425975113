#!/usr/bin/env python3
"""Times steps of the released widths on meshes of the devices at hand: one JSON line for each mesh and kind of step.

Decode is expert-parallel over dp: each device has 48 experts of a layer and 128 rows of its own, so that work grows
with the devices (weak scaling). Prefill is context-parallel over cp: one chunk, cut (strong scaling). The same code
runs on one device. Each line also has the time of the step's expert exchanges alone, and the first line what an
all-to-all of large blocks reached in the same run. Exchange sends the rows of one layer to random devices and back, in
one round and in as many as a smaller room needs, and says whether what came back is right in every byte. Moves adds to
decode steps what it takes to give every expert of a layer to another device, alone and behind each step.

    python scripts/bench_mesh.py [--mesh 1x1 2x1 1x2] [--kinds decode prefill exchange moves] [--layers 6]
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.mesh_steps import MeshSteps
from deepinfer_jax.engine.steps import compiler_options, pack_experts
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.kernel_weights import for_kernels
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.model.shardings import STATE_SPECS, config_on_mesh, forward_on_mesh, spread
from deepinfer_jax.model.state import init_state
from deepinfer_jax.parallel.exchange import Peers, ask, peers_along, room_for_each
from deepinfer_jax.parallel.mesh import CP, DP, make_mesh
from deepinfer_jax.testing import step_bench
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.testing.rank_model import rank_model, rank_params

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
LINK_BYTES = 256 << 20  # of each device, for the measurement of the links
KINDS = ("decode", "prefill", "exchange", "moves")
MOST_NAMES = 16  # kernels of a profile, the longest
QUEUED = 5  # steps launched before the host waits
_jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every mesh runs."""

    experts_each: int  # of a layer, for each device of the decode mesh
    decode_rows: int  # of each dp rank, one for each request
    prefill_rows: int  # of one request
    context: int  # tokens of each request, the step's included
    num_layers: int
    kernels: str  # see RuntimeConfig
    turns: int
    options: dict[str, str]  # of the compiler, in front of those of the engine's steps


def main() -> int:
    """Prints the lines."""
    count = len(jax.devices())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=shipped_config("model/deepseek-v4.1-flash.json"), help="a config.json")
    parser.add_argument("--mesh", nargs="+", metavar="DPxCP", help="default: 1x1, and all devices along either axis")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["decode", "prefill"])
    parser.add_argument("--layers", type=int, default=6, help="of every role if possible")
    parser.add_argument("--experts", type=int, default=48, help="of a layer, on each device of a decode step")
    parser.add_argument("--rows", type=int, default=128, help="rows of a decode step, for each dp rank")
    parser.add_argument("--chunk", type=int, default=2048, help="rows of a prefill step")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each request")
    parser.add_argument("--kernels", default="auto", help="as DEEPINFER_JAX_KERNELS; default: auto")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="more options of XLA's compiler")
    parser.add_argument("--profile", action="store_true", help="also what a GPU did in a step")
    args = parser.parse_args()
    sizes = Sizes(
        experts_each=args.experts,
        decode_rows=args.rows,
        prefill_rows=args.chunk,
        context=args.context,
        num_layers=args.layers,
        kernels=args.kernels,
        turns=args.turns,
        options=dict(text.split("=", 1) for text in args.option),
    )
    if args.chunk > args.context:
        parser.error(f"--chunk {args.chunk} is more than --context {args.context}")
    model, facts = load_config(args.model), run_facts() | ({"options": sizes.options} if sizes.options else {})
    meshes = [tuple(map(int, text.split("x"))) for text in args.mesh or ("1x1", f"{count}x1", f"1x{count}")]
    write({"op": "link", **measure_link(count, sizes.turns), **facts})
    for dp, cp in dict.fromkeys(meshes):
        if dp * cp > count:
            parser.error(f"a mesh of {dp}x{cp} needs {dp * cp} devices; {count} are here")
        mesh = make_mesh(dp, cp, devices=jax.devices()[: dp * cp])
        if "exchange" in args.kinds and dp * cp > 1:
            for record in compare_forms(mesh, args.rows * model.num_experts_per_tok, model, sizes):
                write({**record, **facts})
        for kind in args.kinds:
            # A mesh is compared with 1x1: along dp by decode steps, along cp by prefill.
            if (kind == "decode" and cp == 1) or (kind == "prefill" and dp == 1):
                write(
                    {
                        **measure_step(kind, model, mesh, sizes, is_profiled=args.profile, moves="moves" in args.kinds),
                        **facts,
                    }
                )
    return 0


def write(record: dict[str, Any]) -> None:
    """One JSON line, at once."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def measure_link(count: int, turns: int) -> dict[str, Any]:
    """Bytes per second that each device sent in an all-to-all of large blocks; None on one device."""
    if count == 1:
        return {"devices": 1, "sent_bytes_per_s": None}
    mesh = make_mesh(count, 1)
    sent = LINK_BYTES if target() == "nvidia" else LINK_BYTES // 64  # the devices of a CPU share its memory
    blocks = jax.jit(
        lambda: jnp.zeros((count, count, sent // count // 4), jnp.int32), out_shardings=NamedSharding(mesh, P(DP))
    )()

    def body(own: Any) -> Any:
        return lax.all_to_all(own, DP, split_axis=1, concat_axis=1, tiled=True)

    run = _jit(jax.shard_map(body, mesh=mesh, in_specs=P(DP), out_specs=P(DP)))
    seconds = median_s(lambda: run(blocks), turns)
    return {"devices": count, "sent_bytes_per_s": round(sent * (count - 1) / count / seconds)}


def measure_step(
    kind: str, released: ModelConfig, mesh: Mesh, sizes: Sizes, *, is_profiled: bool, moves: bool
) -> dict[str, Any]:
    """One line: the time of a step, of its exchanges alone, of moved experts, and what it ran."""
    dp, cp = mesh.shape[DP], mesh.shape[CP]
    num_experts = sizes.experts_each * (dp if kind == "decode" else 1)
    model = dataclasses.replace(rank_model(released, num_layers=sizes.num_layers), n_routed_experts=num_experts)
    config = config_on_mesh(
        RuntimeConfig(model=model, is_invariant=False, target=target(), kernels=sizes.kernels), mesh
    )
    params = for_kernels(rank_params(model, num_experts=num_experts, mesh=mesh), config=config, pack=pack_experts)
    rows = sizes.decode_rows if kind == "decode" else sizes.prefill_rows
    batch = batch_of(kind, rows, sizes.context, model, config, mesh)
    slots, pages = (batch.page_table.shape[1], batch.page_table.shape[1] * batch.page_table.shape[2])
    state = blank_state(config, mesh, num_slots=slots * dp, num_pages=pages * dp)
    step = jax.jit(
        functools.partial(forward_on_mesh, mesh=mesh, config=config),
        donate_argnums=(1,),
        compiler_options={**compiler_options(config), **sizes.options},
    )
    start = time.perf_counter()
    compiled = step.lower(params, state, batch).compile()
    compile_s = time.perf_counter() - start
    held = {"params": params, "state": state}
    del params, state

    def run() -> Any:
        logits, held["state"] = compiled(held["params"], held["state"], batch)
        return logits

    is_finite = bool(jnp.isfinite(run()).all())
    step_s = median_s(run, sizes.turns)
    record = {
        "op": f"step_{kind}",
        "mesh": f"{dp}x{cp}",
        "kernels": sizes.kernels,
        "layers": sizes.num_layers,
        "experts": num_experts,
        "rows": rows * (dp if kind == "decode" else 1),
        "context": sizes.context,
        "step_us": round(1e6 * step_s, 1),
        "finite": is_finite,
        "compile_s": round(compile_s, 1),
    }
    if is_profiled:
        record |= profiled(run)
    if moves and dp > 1:
        record |= measure_moves(held, config, mesh, run, sizes.turns)
    if dp * cp > 1:
        record |= measure_exchange(config, mesh, rows // cp, sizes)
    return record


def measure_moves(
    held: dict[str, Any], config: RuntimeConfig, mesh: Mesh, run: Callable[[], Any], turns: int
) -> dict[str, Any]:
    """The time in which all experts of one layer change their device, alone and behind steps, one move for each.

    held: "params", which `run` reads, and in whose place moved ones are put.
    """
    steps, payload = MeshSteps(mesh), held["params"].moe.experts.w1.payload
    num_layers, num_places = payload.shape[:2]
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(held["params"].moe.experts)) // num_layers // mesh.size
    sources = jnp.roll(jnp.arange(num_places, dtype=jnp.int32), num_places // mesh.size)

    def move() -> Any:
        held["params"] = steps.move_experts(held["params"], num_layers - 1, sources, config=config)
        return held["params"].moe.experts.w1.payload

    def step_and_move() -> Any:
        return run(), move()

    both_s, move_s = median_s(step_and_move, turns), median_s(move, turns)
    return {
        "step_and_move_us": round(1e6 * both_s, 1),
        "move_us": round(1e6 * move_s, 1),
        "move_sent_bytes": own,
        "move_bytes_per_s": round(own / move_s),
    }


def profiled(run: Callable[[], Any]) -> dict[str, Any]:
    """What a profile shows of the first GPU during one step; nothing elsewhere."""
    traces, _ = step_bench.trace(run)
    if not traces:
        return {}
    trace = traces[0]
    longest = sorted(trace.by_name.items(), key=lambda item: -item[1][1])[:MOST_NAMES]
    return {
        "kernels_per_step": trace.kernels,
        "busy_us": round(trace.busy_us, 1),
        "idle": round(trace.idle, 4),
        "collective_us": round(trace.collective_us, 1),
        "collective_hidden_us": round(trace.hidden_us, 1),
        "longest": [{"name": name[:60], "count": count, "us": round(us, 1)} for name, (count, us) in longest],
    }


def batch_of(kind: str, rows: int, context: int, model: ModelConfig, config: RuntimeConfig, mesh: Mesh) -> StepBatch:
    """Random tokens at the end of their contexts, with a leading axis of ranks."""
    dp = mesh.shape[DP]
    slots = rows if kind == "decode" else 1
    pages_each = -(-context // config.page_tokens)
    index = np.arange(rows, dtype=np.int32)
    is_decode = kind == "decode"

    def each(array: Any) -> Any:
        return jnp.broadcast_to(jnp.asarray(array, jnp.int32), (dp, *np.shape(array)))

    tokens = np.random.default_rng(0).integers(3, model.vocab_size, (dp, rows), dtype=np.int32)
    batch = {
        "tokens": jnp.asarray(tokens),
        "positions": each(np.full(rows, context - 1) if is_decode else context - rows + index),
        "slots": each(index if is_decode else np.zeros(rows)),
        "page_table": each(np.arange(slots * pages_each).reshape(slots, pages_each)),
        "logit_rows": each(index if is_decode else np.array([rows - 1])),
        "tail_starts": None,
        "tail_rows": None,
        "window_starts": None,
        "images": None,
    }
    return jax.device_put(unchecked(StepBatch, batch), NamedSharding(mesh, P(DP)))


def blank_state(config: RuntimeConfig, mesh: Mesh, *, num_slots: int, num_pages: int) -> Any:
    """An empty state, each device making its own part."""
    make = functools.partial(init_state, config, num_slots=num_slots, num_pages=num_pages)
    specs = spread(STATE_SPECS, jax.eval_shape(make))
    return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))()


def measure_exchange(config: RuntimeConfig, mesh: Mesh, rows: int, sizes: Sizes) -> dict[str, Any]:
    """The time of sending every (row, choice) pair to an expert's device and an output back, once for each layer."""
    peers, model = peers_along(config.expert_axes, config), config.model
    width, pairs = model.hidden_size, rows * model.num_experts_per_tok
    layers = model.num_hidden_layers

    def body(codes: Any, scales: Any, outputs: Any) -> Any:
        pair = jnp.arange(pairs, dtype=jnp.int32)

        def answer(arrived: Any, _is_item: Any) -> Any:
            (_, weights), _ = arrived
            return jnp.zeros((weights.shape[0], width), jnp.bfloat16) + weights[:, None].astype(jnp.bfloat16)

        for layer in range(layers):
            items = (pair, outputs[:, 0].astype(jnp.float32))
            outputs = ask(items, (pair * 7919 + layer) % peers.count, answer, peers, rows=(codes, scales))
            codes, scales, outputs = lax.optimization_barrier((codes, scales, outputs))
        return outputs

    everywhere = P((DP, CP))
    exchange = jax.shard_map(body, mesh=mesh, in_specs=(everywhere,) * 3, out_specs=everywhere, check_vma=False)
    run = jax.jit(exchange, compiler_options={**compiler_options(config), **sizes.options})
    count = mesh.size
    make = _jit(
        lambda: (
            jnp.zeros((count * rows, width), jnp.uint8),
            jnp.ones((count * rows, width // 32), jnp.uint8),
            jnp.zeros((count * pairs, width), jnp.bfloat16),
        ),
        out_shardings=NamedSharding(mesh, everywhere),
    )
    operands = make()
    seconds = median_s(lambda: run(*operands), sizes.turns)
    # To other devices: a row once to each that one of its pairs goes to, with three words for each pair; outputs back.
    pair = np.arange(pairs)
    way = np.stack([pair // model.num_experts_per_tok, (pair * 7919) % count], axis=1)[(pair * 7919) % count != 0]
    sent = layers * (len(np.unique(way, axis=0)) * (width + width // 32) + len(way) * (12 + 2 * width))
    return {
        "exchange_us": round(1e6 * seconds, 1),
        "exchange_sent_bytes": sent,
        "exchange_bytes_per_s": round(sent / seconds),
        "room": room_for_each(pairs, peers),
    }


def compare_forms(mesh: Mesh, pairs: int, model: ModelConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """One line for each room of an exchange: its time, and whether the answers are those of every item."""
    axes, count, width = (DP, CP), mesh.size, model.hidden_size
    config = RuntimeConfig(model=model, target=target(), dp=mesh.shape[DP], cp=mesh.shape[CP])
    options = {**compiler_options(config), **sizes.options}
    everywhere = P(axes)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (count * pairs, width), dtype=np.uint8)
    destinations = rng.integers(-1, count, count * pairs, dtype=np.int32)
    want = np.where((destinations >= 0)[:, None], codes ^ destinations[:, None].astype(np.uint8), 0)
    operands = jax.device_put((codes, destinations), NamedSharding(mesh, everywhere))
    records = []
    peers = Peers(axes=axes, count=count)
    for room in (pairs, -(-5 * pairs // (4 * count)), pairs // (2 * count)):

        def body(codes: Any, destinations: Any, room: int = room) -> Any:
            def answer(arrived: Any, _is_item: Any) -> Any:
                return arrived ^ lax.axis_index(axes).astype(jnp.uint8)

            return ask(codes, destinations, answer, peers, room=room)

        exchange = jax.shard_map(body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        run = jax.jit(exchange, compiler_options=options)
        is_equal = bool((np.asarray(run(*operands)) == want).all())
        seconds = median_s(lambda run=run: run(*operands), sizes.turns)
        records.append(
            {
                "op": "exchange",
                "mesh": f"{mesh.shape[DP]}x{mesh.shape[CP]}",
                "room": room,
                "pairs": pairs,
                "item_bytes": width,
                "us": round(1e6 * seconds, 1),
                "is_equal": is_equal,
            }
        )
    return records


def target() -> str:
    """What the devices are, as `RuntimeConfig` has it."""
    return "cpu" if jax.default_backend() == "cpu" else "nvidia"


def median_s(run: Callable[[], Any], turns: int) -> float:
    """Device seconds of one call: of several in a row less one, so that launching and waiting do not count."""

    def wall_s(count: int) -> float:
        start = time.perf_counter()
        results = [run() for _ in range(count)]
        jax.block_until_ready(results[-1])
        return time.perf_counter() - start

    wall_s(2)
    return statistics.median((wall_s(QUEUED) - wall_s(1)) / (QUEUED - 1) for _ in range(turns))


if __name__ == "__main__":
    sys.exit(main())
