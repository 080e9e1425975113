"""Measures the engine: one JSON line for each scenario; what is compared runs in turns in one process.

batch: tokens/s of 40 requests together against one alone. async: asynchronous against synchronous stepping, and how
long the device waits between steps. replay: time to the first token of a long prompt with compact bounded replay
against without. prefix: the same with a warm against a cold prefix cache. trace: throughput and latencies of requests
that arrive at random times, with shared beginnings.

--drawn-on-device makes random weights for a config.json where they are used; a host would need minutes for those of
configs/model/flash-one-rank.json, which has the layers of the released model and 48 routed experts in each.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax import EngineArgs, LLMEngine, SamplingParams
from deepinfer_jax.checkpoint.write import released_config
from deepinfer_jax.config.args import resolve
from deepinfer_jax.config.released import load_config
from deepinfer_jax.testing.facts import commit_of_checkout
from deepinfer_jax.testing.rank_model import rank_model, rank_params

ROOT = Path(__file__).parents[1]
REPLAY_KEEP = "140"


class Bench:
    """Engines of one model and size that share their compiled steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = args.model
        if args.layers is not None:
            self._folder = tempfile.TemporaryDirectory()
            self.model = f"{self._folder.name}/config.json"
            shape = rank_model(load_config(args.model), num_layers=args.layers)
            Path(self.model).write_text(json.dumps(released_config(shape)))
        self.rng = np.random.default_rng(args.seed)
        self._num_requests = 0

    def engine(self, **environ: str) -> LLMEngine:
        """An engine under these variables (without their common prefix)."""
        args = EngineArgs(
            model=self.model,
            max_model_len=self.args.max_model_len,
            max_num_seqs=self.args.batch,
            num_kv_tokens=2 * self.args.batch * 512 + 2 * self.args.max_model_len,
            disable_log_stats=True,
            stop_preempted_request=False,
            seed=self.args.seed,
            num_draft_tokens=0,  # drafts have a benchmark of their own: deepinfer-jax bench
            kernels=self.args.kernels,
        )
        if self.args.decode_interval is not None:
            environ["CUDAGRAPH_BATCH_SIZE_INTERVAL"] = str(self.args.decode_interval)
        if self.args.eager:
            environ["ENFORCE_EAGER"] = "1"
        config = resolve(args, {f"DEEPINFER_{name}": value for name, value in environ.items()})
        if not self.args.drawn_on_device:
            return LLMEngine(config)
        model = load_config(self.model)
        return LLMEngine(config, params=rank_params(model, num_experts=model.n_routed_experts, seed=self.args.seed))

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return self.rng.integers(3, 259, length).tolist()

    def add(self, engine: LLMEngine, prompt: list[int], max_tokens: int, **options: Any) -> str:
        """Queues one request with random draws and no early end."""
        self._num_requests += 1
        request_id = f"bench-{self._num_requests}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seq_seed=self._num_requests)
        engine.add_request("bench", request_id, params, prompt, **options)
        return request_id

    def tokens_per_s(self, engine: LLMEngine, num_requests: int, *, prompt_len: int, max_tokens: int) -> float:
        """Output tokens/s of equal requests that start together, from the first to the last token of all."""
        for _ in range(num_requests):
            self.add(engine, self.prompt(prompt_len), max_tokens)
        num_first, num_tokens, start = 0, 0, time.perf_counter()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if num_first < num_requests:  # prefill is another measurement
                num_first += sum(output.num_output_tokens == 1 for output in outputs)
                start, num_tokens = time.perf_counter(), 0
            else:
                num_tokens += len(outputs)
        return num_tokens / (time.perf_counter() - start)

    def first_token_s(self, engine: LLMEngine, prompt: list[int]) -> float:
        """Seconds from a request to its first and only token."""
        start = time.perf_counter()
        self.add(engine, prompt, 1)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - start

    # Scenarios.

    def batch(self) -> dict[str, Any]:
        """One request against a full batch."""
        engine, size, tokens = self.engine(), self.args.batch, self.args.tokens
        one, many = self._in_turns(
            lambda: self.tokens_per_s(engine, 1, prompt_len=32, max_tokens=tokens),
            lambda: self.tokens_per_s(engine, size, prompt_len=32, max_tokens=tokens),
        )
        return {
            "batch": size,
            "tokens_per_s_1": one,
            f"tokens_per_s_{size}": many,
            "step_ms_1": 1e3 / one,
            f"step_ms_{size}": 1e3 * size / many,
            "ratio": many / one,
        }

    def asynchronous(self) -> dict[str, Any]:
        """The same decode load with and without asynchronous stepping."""
        engines = {
            "async": self.engine(ZERO_OVERHEAD_SCHEDULING="1"),
            "sync": self.engine(ZERO_OVERHEAD_SCHEDULING="0"),
        }
        size, tokens, shares = self.args.batch, self.args.tokens, {}

        def run(name: str) -> Callable[[], float]:
            def measured() -> float:
                before = engines[name].stats()
                rate = self.tokens_per_s(engines[name], size, prompt_len=32, max_tokens=tokens)
                after = engines[name].stats()
                work_s = after["work_s"] - before["work_s"]
                shares.setdefault(name, []).append((after["idle_s"] - before["idle_s"]) / work_s)
                return rate

            return measured

        rates = dict(zip(engines, self._in_turns(*(run(name) for name in engines)), strict=True))
        idle = {name: statistics.median(found) for name, found in shares.items()}
        return {
            "batch": size,
            "step_ms": 1e3 * size / rates["sync"],
            **{f"tokens_per_s_{name}": rate for name, rate in rates.items()},
            **{f"idle_share_{name}": share for name, share in idle.items()},
            "host_time_hidden": 1 - idle["async"] / idle["sync"],
            "ratio": rates["async"] / rates["sync"],
        }

    def replay(self) -> dict[str, Any]:
        """A long prompt with compact bounded replay and without."""
        off = self.engine(JAX_PREFIX_CACHE="off")
        compact = self.engine(
            JAX_PREFIX_CACHE="off",
            YOCO_PREFILL_TRUNCATION_MODE="compact",
            YOCO_PREFILL_KEEP_TOKENS=REPLAY_KEEP,
        )
        prompt = self.prompt(self.args.prompt_len)
        slow, fast = self._in_turns(
            lambda: self.first_token_s(off, prompt), lambda: self.first_token_s(compact, prompt)
        )
        return {"prompt_len": len(prompt), "off_s": slow, "compact_s": fast, "speed_up": slow / fast}

    def prefix(self) -> dict[str, Any]:
        """A prompt that is known up to its last 64 tokens, and one that is not."""
        engine = self.engine(JAX_PREFIX_CACHE="exact")
        length = self.args.prompt_len
        known = self.prompt(length - 64)
        self.first_token_s(engine, known)
        warm, cold = self._in_turns(
            lambda: self.first_token_s(engine, known + self.prompt(64)),
            lambda: self.first_token_s(engine, self.prompt(length)),
        )
        stats = engine.stats()
        return {
            "prompt_len": length,
            "cold_s": cold,
            "warm_s": warm,
            "speed_up": cold / warm,
            "prefix_hits": stats["prefix_hits"],
            "prefix_hit_tokens": stats["prefix_hit_tokens"],
        }

    def trace(self) -> dict[str, Any]:
        """Requests with log-normal lengths that arrive at random; half of them share one of four beginnings."""
        engine, number, rate = self.engine(), self.args.requests, self.args.rate
        beginnings = [self.prompt(256) for _ in range(4)]
        due = np.cumsum(self.rng.exponential(1 / rate, number))
        lengths = np.clip(self.rng.lognormal(4.5, 1.0, (number, 2)), 1, (512, 256)).astype(int)
        start, num_added = time.perf_counter(), 0
        while num_added < number or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while num_added < number and due[num_added] <= now:
                prompt_len, max_tokens = lengths[num_added]
                shared = beginnings[num_added % 4] if num_added % 2 else []
                self.add(
                    engine,
                    shared + self.prompt(int(prompt_len)),
                    int(max_tokens),
                    arrival_time=start + float(due[num_added]),
                )
                num_added += 1
            if engine.has_unfinished_requests():
                engine.step()
            elif num_added < number:
                time.sleep(max(0.0, due[num_added] - (time.perf_counter() - start)))
        stats = engine.stats()
        names = ("tokens_per_s", "prompt_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
        names += ("idle_share", "padding_share", "prefix_hits", "prefix_hit_tokens", "preemptions", "recompilations")
        return {"requests": number, "rate": rate, **{name: stats[name] for name in names}}

    def _in_turns(self, *runs: Callable[[], float]) -> list[float]:
        """The median of each, after one turn that warms up."""
        found: list[list[float]] = [[] for _ in runs]
        for turn in range(self.args.turns + 1):
            for values, run in zip(found, runs, strict=True):
                value = run()
                if turn:
                    values.append(value)
        return [statistics.median(values) for values in found]


def main(arguments: Iterable[str] | None = None) -> None:
    """Reads the options and prints one JSON line for each scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    scenarios = {"batch": Bench.batch, "async": Bench.asynchronous, "replay": Bench.replay, "prefix": Bench.prefix}
    scenarios["trace"] = Bench.trace
    parser.add_argument("scenarios", nargs="*", choices=[*scenarios, []], help="default: all")
    parser.add_argument("--model", default=str(ROOT / "configs/model/tiny.json"))
    parser.add_argument("--layers", type=int, help="run so many of the layers only, of every role if possible")
    parser.add_argument("--drawn-on-device", action="store_true", help="random weights of the shape of --model")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=100, help="output tokens of each request")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=100, help="of the trace")
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals in a second")
    parser.add_argument("--eager", action="store_true", help="compile steps when they are first needed")
    parser.add_argument("--kernels", default="auto", help="as DEEPINFER_JAX_KERNELS; default: auto")
    parser.add_argument("--decode-interval", type=int, help="spacing of the sizes of decode steps; default: few sizes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default=commit_of_checkout(), help="recorded with the results")
    args = parser.parse_args(None if arguments is None else list(arguments))
    bench = Bench(args)
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "commit": args.commit}
    for name in args.scenarios or scenarios:
        figures = scenarios[name](bench)
        shown = {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}
        record = {"script": "bench_engine", "scenario": name, "model": Path(args.model).name}
        record |= {"layers": args.layers} if args.layers is not None else {}
        record |= {"kernels": args.kernels} | shown | facts
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
