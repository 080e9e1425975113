"""What a decode step costs by its rows, measured on the compiled steps of an engine (spec: dspark 6.4)."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config.args import EngineConfig
from deepinfer_jax.engine import cost_cache
from deepinfer_jax.engine.cost_cache import CurveFacts
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.engine.sizes import EngineSizes
from deepinfer_jax.parallel.processes import Agreement
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.scheduler.batching import RequestOptions
from deepinfer_jax.scheduler.budget import CostCurve
from deepinfer_jax.scheduler.plan import Chunk, Plan, RankPlan
from deepinfer_jax.scheduler.sequence import Limits
from deepinfer_jax.scheduler.sequence import Sequence as Request

CONTEXT_LEN = 256  # tokens in front of the measured rows, fewer where the model is shorter
NUM_RUNS = 5  # of each size, behind one that is not counted
Progress = Callable[[Sequence[Any]], Any]


def cost_curve(
    config: EngineConfig, model: LoadedModel, sizes: EngineSizes, pipeline: Pipeline, progress: Progress
) -> CostCurve:
    """The curve of an engine, from the cache folder if there is one that is new enough, else measured.

    Measuring runs steps on the pipeline's state, which is empty afterwards. progress: wraps the list of sizes. Several
    processes measure together, and take the curve of process 0.
    """
    facts = CurveFacts(
        device=cost_cache.device_name(model.device),
        mesh=config.mesh_shape,
        runtime=model.runtime,
        sizes=measured_rows(sizes),
        num_drafts=model.speculation.max_drafts,
        spec_mode=model.speculation.rule,
        context_len=_context_len(sizes),
    )
    agreement = Agreement("costs")
    folder = None if config.decode_cost_cache_dir is None else Path(config.decode_cost_cache_dir)
    if folder is not None:
        known = cost_cache.load_curve(folder, facts, max_age_s=config.decode_cost_cache_ttl_s)
        if told := agreement.first(_text_of(known)):
            return CostCurve.from_json(json.loads(told))
    measured = CostCurve(
        points=tuple((rows, measure(pipeline, sizes, rows)) for rows in progress(facts.sizes)),
        draft_points=_rising([(count, draft_ms(pipeline, sizes, count)) for count in measured_requests(sizes)]),
        platform=facts.device,
        mesh=facts.mesh,
        dtype=str(model.runtime.numerics),
    )
    pipeline.reset()
    curve = CostCurve.from_json(json.loads(agreement.first(_text_of(measured))))
    if folder is not None and jax.process_index() == 0:
        cost_cache.store_curve(folder, facts, curve)
    return curve


def _text_of(curve: CostCurve | None) -> str:
    return "" if curve is None else json.dumps(curve.to_json())


def measured_rows(sizes: EngineSizes) -> tuple[int, ...]:
    """The rows of compiled decode steps; where padding is skipped, numbers of tiles that grow by half."""
    buckets = sizes.buckets
    if not buckets.skips_padding:
        return buckets.decode_rows
    most, tile = buckets.decode_rows[-1], buckets.computed_rows(buckets.first, 1)
    rows = [tile]
    while rows[-1] < most:
        rows.append(min(most, max(rows[-1] + tile, rows[-1] * 3 // 2 // tile * tile)))
    return tuple(rows)


def measured_requests(sizes: EngineSizes) -> tuple[int, ...]:
    """Numbers of requests whose drafts are timed: each twice the one before, up to all."""
    most = sizes.scheduler.max_num_seqs
    return tuple(sorted({min(most, 1 << power) for power in range(most.bit_length() + 1)}))


def measure(pipeline: Pipeline, sizes: EngineSizes, num_rows: int) -> float:
    """Milliseconds of a decode step of so many rows that makes no drafts: the median of a few runs."""
    most = sizes.scheduler.max_decode_rows
    num_requests = min(max(1, -(-num_rows // most)), sizes.scheduler.max_num_seqs)
    lengths = [min(most, num_rows - most * index) for index in range(num_requests)]
    return _median_ms(pipeline, _decode_plan(sizes, lengths, proposes=False))


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Drafts of more requests cost no less: differences of two noisy times need not say so."""
    counts, ms = zip(*points, strict=True)
    return tuple(zip(counts, itertools.accumulate(ms, max), strict=True))


def draft_ms(pipeline: Pipeline, sizes: EngineSizes, num_requests: int) -> float:
    """Milliseconds by which making drafts for so many requests lengthens a step."""
    without, having = (_decode_plan(sizes, [1] * num_requests, proposes=proposes) for proposes in (False, True))
    return max(0.0, _median_ms(pipeline, having) - _median_ms(pipeline, without))


def _median_ms(pipeline: Pipeline, plan: Plan) -> float:
    times = []
    for _ in range(1 + NUM_RUNS):
        start = time.perf_counter()
        pipeline.read(pipeline.launch(plan))
        times.append(1000.0 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def _decode_plan(sizes: EngineSizes, lengths: Sequence[int], *, proposes: bool) -> Plan:
    """Made-up requests with so many rows each behind a short context, the same on every rank."""
    most, context = sizes.scheduler.max_decode_rows, _context_len(sizes)
    options = RequestOptions(SamplingParams(max_tokens=most + 1, ignore_eos=True), seed=0)
    limits = Limits(max_tokens=most + 1, eos_id=-1)
    prompt = np.zeros(context, np.int32).tolist()
    chunks = [
        Chunk(
            sequence=Request(request_id=str(slot), prompt=prompt, limits=limits, options=options, slot=slot),
            start=context - 1,
            length=length,
            num_drafts=length - 1,
            draws=True,
            proposes=proposes,
            draw_position=context,
            first_unknown=context,
            epoch=0,
        )
        for slot, length in enumerate(lengths)
    ]
    return Plan(step=0, is_prefill=False, ranks=(RankPlan(chunks=tuple(chunks)),) * sizes.scheduler.num_ranks)


def _context_len(sizes: EngineSizes) -> int:
    return max(1, min(CONTEXT_LEN, sizes.scheduler.max_model_len - sizes.scheduler.max_decode_rows))
