#!/usr/bin/env python3
"""Measures the two curves of a serving engine on the devices that are there: JSON lines, and a plot as PNG.

prefill: uncached input tokens/s against the time to the first token, over numbers of prompts that arrive together.
decode: output tokens/s of all requests against those of one, over numbers of requests that decode together; only the
time counts in which all of them do. Each point is a median over the turns. In the plot, lines join the points that no
other point of their curve beats in both directions (the Pareto front).

    python scripts/sweep.py [--model DIR] [--batch 1 4 16] [--modes off fixed] [--plot PNG]
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deepinfer_jax import LLMEngine, SamplingParams
from deepinfer_jax.testing.bench import MODES, Load, decode_rate, make_engine
from deepinfer_jax.testing.facts import run_facts

type Row = dict[str, Any]

DRAW_FIRST_ID, DRAW_LAST_ID = 3, 259  # random prompts hold tokens that every vocabulary has
# Curve -> its axes: field and label of x and y, and whether a larger x is better. A larger y always is.
AXES: dict[str, tuple[tuple[str, str], tuple[str, str], bool]] = {
    "prefill": (("ttft_s", "time to first token, s"), ("input_tokens_per_s", "uncached input tokens/s"), False),
    "decode": (("tokens_per_s_per_user", "tokens/s per user"), ("output_tokens_per_s", "output tokens/s"), True),
}


def main() -> None:
    """Prints one line for each point."""
    args = _parser().parse_args()
    if args.plot is not None:
        _pyplot()  # refuse before the work
    rows: list[Row] = []
    for mode in args.modes:
        engine = make_engine(args, mode)
        for batch in tqdm(args.batch, desc=mode, unit="size", disable=None, leave=False):
            for point in (prefill_point(engine, args, batch), decode_point(engine, args, batch)):
                rows.append({"bench": "sweep", "model": str(args.model or "embedded"), "mode": mode, **point})
                rows[-1] |= run_facts()
                print(json.dumps(rows[-1]), flush=True)
        engine.close()
    if args.plot is not None:
        plot(rows, args.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", metavar="MODEL", help="directory, config file or Hugging Face id")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="default: 1 4 16")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["off"], metavar="MODE", help="default: off")
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each answer; default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="compile steps when they are first needed")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="both curves")
    return parser


def prefill_point(engine: LLMEngine, args: argparse.Namespace, batch: int) -> Row:
    """Prompts that nobody has seen before, all at once, each for one token."""
    rng = np.random.default_rng(batch)
    measured = _turns(lambda: time_prefill(engine, _prompts(rng, batch, args.prompt_len)), args.turns)
    elapsed_s, ttft_s = (statistics.median(values) for values in zip(*measured, strict=True))
    rate = batch * args.prompt_len / elapsed_s
    return {
        "curve": "prefill",
        "batch": batch,
        "prompt_len": args.prompt_len,
        "ttft_s": round(ttft_s, 5),
        "input_tokens_per_s": round(rate, 2),
    }


def decode_point(engine: LLMEngine, args: argparse.Namespace, batch: int) -> Row:
    """Equal requests that decode together."""
    prompts = _prompts(np.random.default_rng(batch), batch, args.prompt_len)
    load = Load(prompts=prompts, max_tokens=args.tokens, temperature=1.0)
    rate = statistics.median(_turns(lambda: decode_rate(engine, load), args.turns))
    return {
        "curve": "decode",
        "batch": batch,
        "prompt_len": args.prompt_len,
        "tokens": args.tokens,
        "output_tokens_per_s": round(rate, 2),
        "tokens_per_s_per_user": round(rate / batch, 2),
    }


def time_prefill(engine: LLMEngine, prompts: list[list[int]]) -> tuple[float, float]:
    """Seconds until all have their first token, and the median of the seconds until one has it."""
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request("sweep", f"sweep-{index}", SamplingParams(max_tokens=1, seq_seed=index), prompt)
    first_s: list[float] = []
    while engine.has_unfinished_requests():
        num_begun = len(engine.step())
        first_s += [time.perf_counter() - start] * num_begun
    return first_s[-1], statistics.median(first_s)


def pareto_front(points: list[tuple[float, float]], *, larger_x_is_better: bool) -> list[tuple[float, float]]:
    """The points that no other one beats in both directions, by rising x; a larger y is better."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: (-p[0] if larger_x_is_better else p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return sorted(front)


def plot(rows: list[Row], path: Path) -> None:
    """One panel for each curve, one colour for each mode; numbers beside the points are batch sizes."""
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, len(AXES), figsize=(11, 4.5))
    for axes, (curve, ((x, x_label), (y, y_label), larger_x_is_better)) in zip(panels, AXES.items(), strict=True):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            own = [row for row in rows if row["mode"] == mode and row["curve"] == curve]
            points = [(row[x], row[y]) for row in own]
            [line] = axes.plot(*zip(*pareto_front(points, larger_x_is_better=larger_x_is_better), strict=True))
            axes.plot(*zip(*points, strict=True), "o", color=line.get_color(), label=mode)
            for row, point in zip(own, points, strict=True):
                axes.annotate(str(row["batch"]), point, xytext=(4, 4), textcoords="offset points")
        axes.set(xlabel=x_label, ylabel=y_label, title=f"{curve}, {rows[0]['device']}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'deepinfer-jax[plot]', or leave it out") from error
    return importlib.import_module("matplotlib.pyplot")


def _turns[T](measure: Callable[[], T], turns: int) -> list[T]:
    """What each turn measured, but for a first one that warms up."""
    return [measure() for _ in range(1 + turns)][1:]


def _prompts(rng: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return [rng.integers(DRAW_FIRST_ID, DRAW_LAST_ID, length).tolist() for _ in range(count)]


if __name__ == "__main__":
    main()
