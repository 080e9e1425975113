"""`deepinfer-jax bench`: what drafts are worth, by the number of requests that decode together.

All ways to decode run in turns in one process, on the same requests; a figure is the median over the turns.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.testing.facts import run_facts
from deepinfer_jax.text.tokenizer import Tokenizer

MODES: dict[str, dict[str, Any]] = {
    "off": {"num_draft_tokens": 0},
    "fixed": {},
    "scheduled": {"varlen_verification": True},
    "rejection": {"spec_mode": "rejection"},
    "block": {"spec_mode": "block"},
}
DEFAULT_MODES = ("off", "fixed", "scheduled")
_PLOT_ADVICE = "--plot needs matplotlib, which is not installed; pip install 'deepinfer-jax[plot]', or leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Equal requests that start together."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float


def add_bench_parser(subparsers: Any) -> None:
    """Adds `bench` to the subparsers of an `argparse` parser."""
    parser = subparsers.add_parser(
        "bench",
        help="tokens per second with and without drafts",
        description="Measures output tokens per second without drafts, with all drafts verified, and with drafts "
        "scheduled by confidence, over numbers of requests; one JSON object in a line for each.",
    )
    parser.add_argument("--model", metavar="MODEL", help="directory, config file or Hugging Face id")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], metavar="N", help="default: 1 8 64")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(DEFAULT_MODES), metavar="MODE")
    parser.add_argument("--prompts", type=Path, metavar="PATH", help="UTF-8 lines to complete; default: random tokens")
    parser.add_argument("--prompt-len", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer; default: %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="compile steps when they are first needed")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="throughput against batch size")


def run_bench(args: argparse.Namespace) -> int:
    """Writes one line for each batch size and mode to standard output."""
    if args.plot is not None:
        _pyplot()  # refuse before the work
    engines = {mode: make_engine(args, mode) for mode in args.modes}
    rows: list[dict[str, Any]] = []
    for batch in tqdm(args.batch, desc="bench", unit="size", disable=None, leave=False):
        prompts = make_prompts(args, batch, engines[args.modes[0]].tokenizer)
        load = Load(prompts=prompts, max_tokens=args.tokens, temperature=args.temperature)
        for row in compare(engines, load, turns=args.turns):
            rows.append({"bench": "speculation", "model": str(args.model or "embedded"), **row, **run_facts()})
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


def make_engine(args: argparse.Namespace, mode: str) -> LLMEngine:
    """An engine for all batch sizes, which decodes in this mode."""
    engine_args = EngineArgs(
        model=args.model,
        max_model_len=args.prompt_len + args.tokens + 16,
        max_num_seqs=max(args.batch),
        disable_log_stats=True,
        stop_preempted_request=False,
        **MODES[mode],
    )
    environ = {"DEEPINFER_JAX_PREFIX_CACHE": "off", **({"DEEPINFER_ENFORCE_EAGER": "1"} if args.eager else {})}
    return LLMEngine(resolve(engine_args, environ))


def make_prompts(args: argparse.Namespace, count: int, tokenizer: Tokenizer | None) -> list[list[int]]:
    """The first `count` prompts of the file, over and over if need be; random tokens without one."""
    if args.prompts is None:
        rng = np.random.default_rng(0)
        return [rng.integers(3, 259, args.prompt_len).tolist() for _ in range(count)]
    if tokenizer is None:
        raise ValueError("--prompts needs a model with a tokenizer; leave it out for random tokens")
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts={args.prompts} has no lines with text")
    encoded = [tokenizer.encode(line)[: args.prompt_len] for line in lines]
    return [encoded[index % len(encoded)] for index in range(count)]


def compare(engines: dict[str, LLMEngine], load: Load, *, turns: int) -> list[dict[str, Any]]:
    """One row for each engine: its tokens per second, and what became of its drafts."""
    rates: dict[str, list[float]] = {mode: [] for mode in engines}
    before: dict[str, dict[str, Any]] = {}
    for turn in range(1 + turns):  # the first warms up
        for mode, engine in engines.items():
            if turn == 1:
                before[mode] = engine.stats()
            rate = decode_rate(engine, load)
            if turn:
                rates[mode].append(rate)
    rows = []
    for mode, engine in engines.items():
        rate = statistics.median(rates[mode])
        base = statistics.median(rates["off"]) if "off" in rates else None
        row = {"batch": len(load.prompts), "mode": mode, "temperature": load.temperature, "tokens_per_s": rate}
        row["speed_up"] = None if base is None else rate / base
        rows.append({**row, **_drafts(before[mode], engine.stats())})
    return rows


def decode_rate(engine: LLMEngine, load: Load) -> float:
    """Output tokens/s from the first token of the last request to the end of the first one; the rest is aborted.

    While prompts come in, prefill and decode steps take turns, so that early requests are well ahead of late ones.
    Raises ValueError where they never decode all together.
    """
    names = [f"bench-{index}" for index in range(len(load.prompts))]
    for index, (name, prompt) in enumerate(zip(names, load.prompts, strict=True)):
        params = SamplingParams(
            temperature=load.temperature, max_tokens=load.max_tokens, seq_seed=index, ignore_eos=True
        )
        engine.add_request("bench", name, params, prompt)
    num_begun, num_tokens, start, has_ended = 0, 0, 0.0, False
    while not has_ended:
        outputs = engine.step()
        has_ended = any(output.finished for output in outputs)
        if num_begun < len(names):
            num_begun += sum(output.num_output_tokens == 1 for output in outputs)
            start = time.perf_counter()
        else:
            num_tokens += len(outputs)
    elapsed_s = time.perf_counter() - start
    engine.abort_request(names)
    engine.flush_inflight_reqs()
    if not num_tokens:
        raise ValueError(
            f"with {len(names)} requests the first one ended before the last one began; raise "
            f"--tokens={load.max_tokens}, or lower --prompt-len"
        )
    return num_tokens / elapsed_s


def _drafts(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What became of the drafts between two reports; empty without drafts."""
    if "drafts" not in after:
        return {}
    old = before.get("drafts", {"rounds": 0, "drafts_verified": 0, "drafts_accepted": 0})
    rounds, verified, accepted = (
        after["drafts"][name] - old[name] for name in ("rounds", "drafts_verified", "drafts_accepted")
    )
    return {
        "tokens_per_round": 1 + accepted / rounds if rounds else None,
        "verified_per_round": verified / rounds if rounds else None,
        "acceptance": after["drafts"]["acceptance"],
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second against the batch size, one line for each mode, as PNG."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for mode in dict.fromkeys(row["mode"] for row in rows):
        own = sorted((row["batch"], row["tokens_per_s"]) for row in rows if row["mode"] == mode)
        axes.plot(*zip(*own, strict=True), marker="o", label=mode)
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="output tokens/s", title=rows[0]["device"])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(_PLOT_ADVICE) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
