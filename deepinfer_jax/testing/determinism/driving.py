"""Runs requests in an engine and keeps what is compared of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.outputs import RequestOutput, fold_end
from deepinfer_jax.engine.snapshot import load_snapshot
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.plan import Plan
from deepinfer_jax.testing.determinism.results import Result, StateRows, result_of, state_rows
from deepinfer_jax.testing.determinism.workload import Request, Texts

# Goes on with a request in another way: (engine, id of the request, id to go on under).
Interrupt = Callable[[LLMEngine, str, str], None]
_USER = "determinism"
_SPARE_STEPS = 1000  # beyond a step for each token of all requests


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request and when it comes."""

    request: Request
    step: int = 0  # steps of the engine in front of it
    is_watched: bool = True  # False: a neighbour, whose result nobody looks at
    snapshot: Path | None = None  # a file in which it was saved: it goes on from there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one run gave, and figures that show what happened in it."""

    results: dict[str, Result]
    notes: dict[str, int]


class RowCounter:
    """Hooks of an engine: the most rows that one decode step computed together, since `restart`."""

    def __init__(self) -> None:
        self.largest_step = 0

    def restart(self) -> None:
        """Forgets the steps so far."""
        self.largest_step = 0

    def post_schedule(self, plan: Plan) -> None:
        """Counts the rows of a plan."""
        if not plan.is_prefill:
            self.largest_step = max(self.largest_step, plan.num_rows)

    def process_output(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs are fetched from `step`."""

    def finalize_seq(self, sequence: scheduling.Sequence) -> None:
        """Ends are seen in the outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """How an engine differs from the one that gives the base: arguments, and variables without their prefix."""

    options: tuple[tuple[str, Any], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What all engines of a matrix share."""

    path: str | None  # None: the embedded model
    numerics: str
    jit_cache_dir: str | None = None
    tokenizer: str | None = None  # None: the model's own
    device: str = "auto"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the environment: where CANN is


def make_engine(model: Model, max_len: int, setup: EngineSetup, counter: RowCounter) -> LLMEngine:
    """An engine in batch-invariant mode that compiles a step when it is first needed.

    Of the process environment only the model's variables count. max_len: tokens of the longest request.
    """
    variables = {"ENFORCE_EAGER": "1", "DFLASH_ENFORCE_EAGER": "1"} | dict(setup.variables)
    environ = dict(model.variables) | {f"DEEPINFER_{name}": value for name, value in variables.items()}
    if model.jit_cache_dir is not None:
        environ["DEEPINFER_JIT_CACHE_DIR"] = model.jit_cache_dir
    options: dict[str, Any] = {
        "max_model_len": max_len,
        "num_draft_tokens": 0,
        "disable_log_stats": True,
        "stop_preempted_request": False,
        "batch_invariant": True,
        "numerics": model.numerics,
        "tokenizer": model.tokenizer,
        "device": model.device,
    }
    args = EngineArgs(model.path, **options | dict(setup.options))
    return LLMEngine(resolve(args, environ), hooks=counter)


class Watch:
    """The requests of one run under way: outputs and states by request name."""

    def __init__(self, engine: LLMEngine, texts: Texts, interrupt: Interrupt | None) -> None:
        self._engine, self._texts, self._interrupt = engine, texts, interrupt
        self._names: dict[str, str] = {}  # id that a watched request runs under -> its name
        self._interrupted: set[str] = set()
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.states: dict[str, StateRows] = {}

    def add(self, arrival: Arrival) -> None:
        """Queues a request."""
        request, engine = arrival.request, self._engine
        if arrival.snapshot is not None:
            engine.restore_request(load_snapshot(arrival.snapshot, engine.runtime), request.name)
        else:
            images = {"images": list(request.images)} if request.images else None
            engine.add_request(
                _USER, request.name, request.params, request.prompt, images, chunk_checkpoints=request.cuts or None
            )
        if arrival.is_watched:
            self._names[request.name] = request.name
            self.outputs[request.name] = []

    def step(self) -> None:
        """One step of the engine, then whatever is due for the requests that it moved."""
        self._take(self._engine.step())
        for request_id, name in list(self._names.items()):
            outputs = self.outputs[name]
            num_tokens = outputs[-1].num_output_tokens if outputs else 0
            if self._interrupt and name not in self._interrupted and num_tokens >= self._texts.state_at // 2:
                self._go_on_otherwise(request_id, name)
            elif name not in self.states and num_tokens >= self._texts.state_at:
                self._read_state(request_id, name)

    @property
    def is_over(self) -> bool:
        """Whether every watched request that was added has ended."""
        return all(outputs and outputs[-1].finished for outputs in self.outputs.values())

    def results(self) -> dict[str, Result]:
        """What every watched request gave."""
        return {name: result_of(fold_end(outputs), self.states.get(name)) for name, outputs in self.outputs.items()}

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if name := self._names.get(output.request_id):
                self.outputs[name].append(output)

    def _go_on_otherwise(self, request_id: str, name: str) -> None:
        self._take(self._engine.flush_inflight_reqs())
        if not self._engine.is_known(request_id):
            return
        assert self._interrupt is not None
        new_id = f"{name} goes on"
        self._interrupt(self._engine, request_id, new_id)
        self._interrupted.add(name)
        del self._names[request_id]
        self._names[new_id] = name

    def _read_state(self, request_id: str, name: str) -> None:
        self._take(self._engine.flush_inflight_reqs())
        if not self._engine.is_known(request_id):
            return
        rows = state_rows(self._engine.save_request(request_id), self._engine.runtime)
        if rows is not None:  # else it was preempted a moment ago: the next step tries again
            self.states[name] = rows


def run_requests(
    engine: LLMEngine,
    counter: RowCounter,
    texts: Texts,
    arrivals: Sequence[Arrival],
    *,
    interrupt: Interrupt | None = None,
    keeps_prefixes: bool = False,
) -> Run:
    """Runs watched requests to their end, each from the step on at which it comes; nobody reads what others do then.

    interrupt: applied to each watched request once, in the middle of its answer. keeps_prefixes: what earlier runs
    left in the prefix cache stays there; else nothing is known. Raises RuntimeError for requests that do not end.
    """
    if not keeps_prefixes:
        engine.scheduler.clear_prefix_cache()
    counter.restart()
    before = _figures(engine)
    watch, waiting = Watch(engine, texts, interrupt), sorted(arrivals, key=lambda each: each.step)
    limit = _SPARE_STEPS + sum(len(each.request.prompt) + each.request.params.max_tokens for each in arrivals)
    for step in range(limit):
        while waiting and (waiting[0].step <= step):
            watch.add(waiting.pop(0))
        if watch.is_over and not any(arrival.is_watched for arrival in waiting):
            break
        if not waiting and not engine.has_unfinished_requests():
            break  # of a watched request that was interrupted nothing may go on here
        watch.step()
    else:
        raise RuntimeError(f"{engine.get_num_unfinished_requests()} requests have not ended after {limit} steps")
    for arrival in arrivals:
        if not arrival.is_watched and engine.is_known(arrival.request.name):
            engine.abort_request(arrival.request.name)
    engine.flush_inflight_reqs()
    after = _figures(engine)
    notes = {name: after[name] - before[name] for name in after} | {"rows": counter.largest_step}
    return Run(results=watch.results(), notes=notes)


def _figures(engine: LLMEngine) -> Mapping[str, int]:
    """Counts that tell what happened to requests."""
    stats, counters = engine.stats(), engine.scheduler.counters
    names = ("steps", "preemptions", "prefix_hits")
    drafts, balancer = stats.get("drafts", {}), engine.pipeline.balancer
    return {
        **{name: stats[name] for name in names},
        "forks": counters.forks_copied,
        "restored": counters.adopted,
        "accepted": drafts.get("drafts_accepted", 0),
        "images": stats.get("images_encoded", 0),
        "experts moved": sum(one.num_moved for one in balancer.history) if balancer is not None else 0,
    }
