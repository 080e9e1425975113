"""Steps of one rank of the real model, timed on the device at hand (`scripts/bench_steps.py`)."""

import dataclasses
import glob
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.steps import compiler_options, pack_experts
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.kernel_weights import for_kernels
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.shardings import HOST_MEMORY
from deepinfer_jax.model.state import State
from deepinfer_jax.testing import hlo
from deepinfer_jax.testing.rank_model import StepLoad, rank_params

# step(params, state, batch, experts) -> logits, state
Step = Callable[[Params, State, StepBatch, Mapping[str, Any]], tuple[jax.Array, State]]
COLLECTIVE = "nccl"  # what the names of NCCL's kernels begin with
RUNS = 9  # steps behind one another in the longer measurement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a profile of one GPU shows."""

    kernels: int
    idle: float  # share of the time between the first kernel's start and the last one's end
    busy_us: float
    by_name: dict[str, tuple[int, float]]  # kernels and microseconds of each name
    collective_us: float  # of busy_us, while a collective ran
    hidden_us: float  # of collective_us, while another kernel ran too


def make_params(config: RuntimeConfig, *, num_experts: int, seed: int = 0) -> Params:
    """Random weights in the forms that the config's kernels read, Engram tables where the config has them."""
    params = rank_params(config.model, num_experts=num_experts, seed=seed)
    if config.engram_on_host:
        embed = jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind(HOST_MEMORY)), params.engram.embed)
        params = dataclasses.replace(params, engram=dataclasses.replace(params.engram, embed=embed))
    return jax.block_until_ready(for_kernels(params, config=config, pack=pack_experts))


def compile_step(
    config: RuntimeConfig, params: Params, state: State, case: StepLoad, options: Mapping[str, Any] | None = None
) -> Any:
    """The step for these shapes; arguments may be shape structs. options: more of them for the compiler."""
    lowered = jitted_step(config).lower(params, state, case.batch(config), case.experts(config))
    return lowered.compile(compiler_options={**compiler_options(config), **(options or {})})


def jitted_step(config: RuntimeConfig) -> Any:
    """`step(params, state, batch, experts)` to be compiled, with the state donated."""

    def step(params: Params, state: State, batch: StepBatch, experts: Mapping[str, Any]) -> tuple[jax.Array, State]:
        output, state = forward(params, state, batch, config=config, forced_selection=experts)
        return output.logits, state

    return jax.jit(step, donate_argnums=(1,), compiler_options=compiler_options(config))


def device_bytes() -> int | None:
    """What JAX may use of the device's memory; None where the device does not say."""
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")


def time_step(
    step: Step, params: Params, state: State, batch: StepBatch, experts: Mapping[str, Any], *, turns: int
) -> tuple[float, State]:
    """Microseconds of the device for one step, and the state behind all of them.

    Steps are dispatched one after the other and waited for once: the difference between many and one, by their number,
    has no host time in it, unless the host is slower than the device in dispatching. Median over the turns.
    """

    def run(count: int, state: State) -> tuple[float, State]:
        start = time.perf_counter()
        logits = None
        for _ in range(count):
            logits, state = step(params, state, batch, experts)
        jax.block_until_ready((logits, state))
        return time.perf_counter() - start, state

    times = []
    _, state = run(2, state)
    for _ in range(turns):
        one, state = run(1, state)
        many, state = run(RUNS, state)
        times.append(1e6 * (many - one) / (RUNS - 1))
    return statistics.median(times), state


def trace_step(
    step: Step, params: Params, state: State, batch: StepBatch, experts: Mapping[str, Any]
) -> tuple[Trace | None, State]:
    """What a profile of one step shows, None where it holds no kernels of a GPU; and the state behind it."""
    traces, (_, state) = trace(lambda: step(params, state, batch, experts))
    return (traces[0] if traces else None), state


def trace[R](run: Callable[[], R]) -> tuple[list[Trace], R]:
    """What a profile of `run()` shows of each GPU that ran something, and what it gave."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            found = jax.block_until_ready(run())
        files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = [plane for file in files for plane in jax.profiler.ProfileData.from_file(file).planes]
        kernels = [
            [
                (event.name, event.start_ns, event.duration_ns)
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
            for plane in planes
            if plane.name.startswith("/device:GPU")
        ]
    return [read_kernels(of_device) for of_device in kernels if of_device], found


def read_kernels(kernels: Sequence[tuple[str, float, float]]) -> Trace:
    """The figures of kernels given as name, start and duration in nanoseconds, at least one."""
    spans = [(start, start + duration) for _, start, duration in kernels]
    others = [span for span, kernel in zip(spans, kernels, strict=True) if not kernel[0].startswith(COLLECTIVE)]
    by_name: dict[str, tuple[int, float]] = {}
    for name, _, duration in kernels:
        count, time_us = by_name.get(name, (0, 0.0))
        by_name[name] = (count + 1, time_us + duration / 1e3)
    busy, collective = (
        _covered(spans),
        _covered([span for span, kernel in zip(spans, kernels, strict=True) if kernel[0].startswith(COLLECTIVE)]),
    )
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return Trace(
        kernels=len(kernels),
        idle=1 - busy / whole if whole else 0.0,
        busy_us=busy / 1e3,
        by_name=by_name,
        collective_us=collective / 1e3,
        hidden_us=(collective + _covered(others) - busy) / 1e3,
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Time within at least one of the spans."""
    covered, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def counted_kernels(compiled: Any) -> int:
    """Kernels of a step by the text of the program: what runs by itself, loops by their trip counts."""
    text = compiled.as_text()
    found = hlo.instructions(text)
    times = hlo.repetitions(found, text)
    launched = ("fusion", "custom-call", "copy", "sort", "reduce", "scatter", "dot", "convolution", "rng-bit-generator")
    return sum(times.get(one.computation, 0) for one in found if not one.is_fused and one.opcode in launched)


def compare_logits(config: RuntimeConfig, case: StepLoad, names: tuple[str, str], *, seed: int = 0) -> float:
    """|a - b| / |b| of the logits of one step through two choices of kernels, on equal weights, caches and inputs."""
    a, b = (next(_logits(dataclasses.replace(config, kernels=name), case, seed, (0.0,))) for name in names)
    return _distance(a, b)


def sensitivity(config: RuntimeConfig, case: StepLoad, *, shares: Sequence[float], seed: int = 0) -> list[float]:
    """|a - b| / |b| of the logits where such a share of the embeddings' values differs by one unit in the last place.

    What a step makes of differences that no two implementations avoid: roundings to four bits and choices of entries.
    """
    b, *moved = _logits(config, case, seed, (0.0, *shares))
    return [_distance(a, b) for a in moved]


def _logits(config: RuntimeConfig, case: StepLoad, seed: int, shares: Iterable[float]) -> Iterator[np.ndarray]:
    """Logits of a step, for each share of moved values; the device holds one model at a time."""
    params = make_params(config, num_experts=case.num_experts, seed=seed)
    step = compile_step(config, params, jax.eval_shape(lambda: case.state(config)), case)
    for share in shares:
        own = dataclasses.replace(params, embed=_moved(params.embed, share))
        logits, _ = step(own, case.state(config), case.batch(config), case.experts(config))
        yield np.asarray(logits, np.float64)


def _moved(embed: jax.Array, share: float) -> jax.Array:
    """bfloat16 values of which a share is one unit in the last place larger."""
    is_moved = jax.random.bernoulli(jax.random.key(1), share, embed.shape)
    bits = lax.bitcast_convert_type(embed, jnp.uint16) + is_moved.astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
