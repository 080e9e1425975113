#!/usr/bin/env python3
"""Times steps of one rank of the real model on the device at hand: one JSON line for each cell.

The rank has all layers of the model, 48 of the 384 routed experts of each, as one of eight, random weights in the
released forms, small Engram tables and no drafts. Each row chooses six of the rank's experts, so that it does the work
that a rank of eight gets when all have equally many rows. Nothing travels. `fraction` is the time that the step's bytes
or its products need at the rates that were measured in the same run (the first line), whichever is more, divided by the
time that was measured.

    python scripts/bench_steps.py --kernels mosaic_sm90 [--layers 40] [--rows 1 16 128 512] [--contexts 4096 8192 65536]
        [--prefill 8192 ...] [--tables device host] [--batch-invariant off on] [--option NAME=VALUE ...] [--check]
        [--profile]

Decode steps have a row of each request; --prefill adds steps with the newest so many rows of one prompt, for each
context that holds them.

--tables host keeps the Engram tables in the memory of the host, which gathers rows inside the step; beside a line of
the same cell with tables on the device it shows what the layers in front of the first table do not hide.

--batch-invariant off on runs every cell without the mode and then with it, in the tiles of an engine.

A cell whose weights, caches and temporaries do not fit says so. --check also compares the logits with those of
kernels=reference, for which few layers are enough: 6 have one of each role; and those of the reference with what it
makes of embeddings that differ here and there by one unit in the last place. --profile adds the kernels that take most
time.

--predict runs nothing and needs no GPU: for each cell it tells the least time at the rates of a GPU's data sheet.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.setup import ROW_TILES
from deepinfer_jax.kernels.catalog import OPS
from deepinfer_jax.kernels.registry import MOSAIC_SM90, MOSAIC_SM100, REFERENCE, check_choice
from deepinfer_jax.model.params import Params
from deepinfer_jax.testing import kernel_bench, step_bench
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.testing.rank_model import ENGRAM_BASE, StepLoad, rank_model
from deepinfer_jax.testing.step_work import PUBLISHED, floor_us, step_bytes, step_flops

MODEL = Path(__file__).parents[1] / "configs/model/deepseek-v4.1-flash.json"
KERNELS_OF = {"h200": MOSAIC_SM90, "b200": MOSAIC_SM100}
MOST_NAMES = 25  # of kernels in a profile
MOVED_SHARES = (0.001, 0.1)  # of the embeddings' values, see step_bench.sensitivity


def main() -> int:
    """Prints the lines; the exit status is 1 where a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL), help="a config.json; default: the released shape")
    parser.add_argument("--kernels", default="mosaic_sm90", help="auto, reference or the name of implementations")
    parser.add_argument("--layers", type=int, help="so many layers, of every role if possible; default: all")
    parser.add_argument("--experts", type=int, default=48, help="routed experts of the rank in each layer")
    parser.add_argument("--rows", nargs="*", type=int, default=[128, 16, 1, 512], help="of decode steps")
    parser.add_argument("--prefill", nargs="+", type=int, default=[], metavar="ROWS", help="of a prompt's chunk")
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 65536, 4096], help="tokens of each request")
    parser.add_argument("--tables", nargs="+", choices=("device", "host"), default=["device"], help="Engram's")
    parser.add_argument("--batch-invariant", nargs="+", choices=("off", "on"), help="default: on for a CPU, off else")
    parser.add_argument("--table-rows", type=int, default=ENGRAM_BASE, help="of each hash column of a table, about")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="more options of XLA's compiler")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="also compare the logits with kernels=reference")
    parser.add_argument("--profile", action="store_true", help="also list the kernels that take most time")
    parser.add_argument("--predict", nargs="+", choices=tuple(PUBLISHED), default=[], help="GPUs that may be absent")
    args = parser.parse_args()
    if args.predict:
        predict(args)
        return 0
    target = {"gpu": "nvidia"}.get(jax.devices()[0].platform, "cpu")
    model = rank_model(load_config(args.model), num_layers=args.layers, engram_base=args.table_rows)
    modes = args.batch_invariant or ["on" if target == "cpu" else "off"]
    config = in_mode(modes[0], RuntimeConfig(model=model, target=target, is_invariant=False, kernels=args.kernels))
    check_choice(OPS, config.backend)
    facts = run_facts()
    ceilings = kernel_bench.measure_ceilings() if target == "nvidia" else None  # elsewhere it shows that a step runs
    if ceilings is not None:
        write({"op": "ceilings", **dataclasses.asdict(ceilings), **facts})
    cases, is_good = cases_of(args), []
    for place in args.tables:
        own = dataclasses.replace(config, engram_on_host=place == "host")
        params = step_bench.make_params(own, num_experts=args.experts)
        configs = [in_mode(mode, own) for mode in modes]
        is_good += [run_cell(each, params, case, ceilings, args, facts) for case in cases for each in configs]
        del params
    if args.check:
        is_good += [check_cell(config, case, facts) for case in cases]
    return 0 if all(is_good) else 1


def in_mode(mode: str, config: RuntimeConfig) -> RuntimeConfig:
    """Batch-invariant mode `on`, in the tiles of an engine, or `off`."""
    return dataclasses.replace(config, is_invariant=mode == "on", row_tile=ROW_TILES[config.target])


def cases_of(args: argparse.Namespace) -> list[StepLoad]:
    """Decode steps, then those of prompts."""
    cases = [
        StepLoad(num_rows=rows, context=context, num_experts=args.experts)
        for context in args.contexts
        for rows in args.rows
    ]
    return cases + [
        StepLoad(num_rows=rows, rows_each=rows, context=context, num_experts=args.experts)
        for context in args.contexts
        for rows in args.prefill
        if rows <= context
    ]


def predict(args: argparse.Namespace) -> None:
    """Writes a line for each GPU and case: not measured, but what bytes and products need at least."""
    model = rank_model(load_config(args.model), num_layers=args.layers, engram_base=args.table_rows)
    for gpu in args.predict:
        config = RuntimeConfig(model=model, target="nvidia", is_invariant=False, kernels=KERNELS_OF[gpu])
        params = jax.eval_shape(lambda config=config: step_bench.make_params(config, num_experts=args.experts))
        for case in cases_of(args):
            num_bytes, flops = step_bytes(config, params, case), step_flops(config, case)
            least_us, bound = floor_us(num_bytes, flops, PUBLISHED[gpu])
            head = {"op": op_of(case), "prediction": gpu, "case": case.name, "layers": model.num_hidden_layers}
            rates = dataclasses.asdict(PUBLISHED[gpu])
            least = {"floor_us": round(least_us, 1), "bound": bound, "bytes": num_bytes, "flops": flops}
            write({**head, **least, "rates": rates, **run_facts()})


def op_of(case: StepLoad) -> str:
    """What a step is called in a result line."""
    return "step_prefill" if case.rows_each > 1 else "step_decode"


def run_cell(
    config: RuntimeConfig,
    params: Params,
    case: StepLoad,
    ceilings: kernel_bench.Ceilings | None,
    args: argparse.Namespace,
    facts: dict[str, str],
) -> bool:
    """Writes the line of one case; False where it failed, in which case the line says why."""
    head = {"op": op_of(case), "impl": config.kernels, "case": case.name, "layers": config.model.num_hidden_layers}
    head |= {"tables": "host" if config.engram_on_host else "device", "batch_invariant": config.is_invariant}
    options = dict(text.split("=", 1) for text in args.option)
    head |= {"options": options} if options else {}
    try:
        start = time.perf_counter()
        abstract = jax.eval_shape(lambda: case.state(config))
        compiled = step_bench.compile_step(config, params, abstract, case, options)
        compile_s = time.perf_counter() - start
        memory = compiled.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        limit = step_bench.device_bytes()
        if limit is not None and needed > limit:
            write({**head, "left_out": f"needs {needed} bytes of the {limit} that JAX may use", **facts})
            return True
        inputs = case.batch(config), case.experts(config)
        median_us, state = step_bench.time_step(compiled, params, case.state(config), *inputs, turns=args.turns)
    except (ValueError, RuntimeError) as error:
        write({**head, "error": str(error)[:1000], **facts})
        return False
    trace = traced(compiled, params, state, inputs)
    num_bytes, flops = step_bytes(config, params, case), step_flops(config, case)
    least_us, bound = (None, None) if ceilings is None else floor_us(num_bytes, flops, ceilings)
    record = {
        **head,
        "median_us": round(median_us, 1),
        "bytes": num_bytes,
        "flops": flops,
        "bound": bound,
        "fraction": None if least_us is None else round(least_us / median_us, 4),
        "tokens_per_s": round(1e6 * case.num_rows / median_us, 1),
        "kernels_per_step": step_bench.counted_kernels(compiled) if trace is None else trace.kernels,
        "kernels_from": "program text" if trace is None else "profile",
        "idle": None if trace is None else round(trace.idle, 4),
        "busy_us": None if trace is None else round(trace.busy_us, 1),
        "compile_s": round(compile_s, 1),
        "temporary_bytes": memory.temp_size_in_bytes,
        **facts,
    }
    write(record)
    if args.profile and trace is not None:
        longest = sorted(trace.by_name.items(), key=lambda item: -item[1][1])[:MOST_NAMES]
        names = [{"name": name[:80], "count": count, "us": round(us, 1)} for name, (count, us) in longest]
        write({**head, "op": "step_profile", "kernels": names})
    return True


def traced(compiled: Any, params: Params, state: Any, inputs: tuple[Any, Any]) -> step_bench.Trace | None:
    """The profile of one step; None, with a word on standard error, where the profiler cannot make one."""
    try:
        return step_bench.trace_step(compiled, params, state, *inputs)[0]
    except RuntimeError as error:
        sys.stderr.write(f"no profile: {error}\n")
        return None


def check_cell(config: RuntimeConfig, case: StepLoad, facts: dict[str, str]) -> bool:
    """Writes how far the logits are from those of the reference; False where the comparison failed."""
    head = {"op": "step_check", "impl": config.kernels, "case": case.name, "layers": config.model.num_hidden_layers}
    try:
        error = step_bench.compare_logits(config, case, (config.kernels, REFERENCE))
        reference = dataclasses.replace(config, kernels=REFERENCE)
        moved = step_bench.sensitivity(reference, case, shares=MOVED_SHARES)
    except (ValueError, RuntimeError) as problem:
        write({**head, "error": str(problem)[:1000], **facts})
        return False
    write({**head, "rel_err": error, "moved_shares": MOVED_SHARES, "moved_rel_err": moved, **facts})
    return True


def write(record: dict[str, Any]) -> None:
    """One JSON line, at once."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
