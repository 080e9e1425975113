"""`LLMEngine`: requests come at any time, `step()` gives the tokens (spec: interface 6.1, 7).

With asynchronous scheduling a step is launched before the one in front of it is read, so that the device finds its
next work ready while the host reads, detokenizes and plans. Outputs come one step late; they are the same.
"""

import gc
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tqdm import tqdm

from deepinfer_jax.config.args import EngineArgs, EngineConfig, resolve
from deepinfer_jax.engine import intake, snapshot
from deepinfer_jax.engine.outputs import Drawn, Emitter, RequestOutput
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.engine.profiling import Profiler
from deepinfer_jax.engine.setup import load_engine_model
from deepinfer_jax.engine.sizes import engine_sizes
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.engine.stepping import StepLoop
from deepinfer_jax.sampling.params import SamplingParams, request_seed
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.batching import RequestOptions
from deepinfer_jax.scheduler.plan import Plan
from deepinfer_jax.scheduler.scheduler import Scheduler

TOO_LONG = "prompt_length_exceeded"
_log = logging.getLogger(__name__)


@runtime_checkable
class EngineHooks(Protocol):
    """What a service or a study may watch; every method is called in the thread of `step()`."""

    def post_schedule(self, plan: Plan) -> None:
        """A plan was made and is about to be launched."""

    def process_output(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs are about to be returned."""

    def finalize_seq(self, sequence: scheduling.Sequence) -> None:
        """A request has ended; what it held is free."""


class LLMEngine:
    """A model, its caches and the requests under way.

    Not thread-safe: one thread adds, steps and aborts. Bad input raises and changes nothing; what goes wrong while
    requests run ends those it concerns, with a finish reason, and the others go on.
    """

    def __init__(self, config: EngineConfig, *, hooks: EngineHooks | None = None) -> None:
        self.config = config
        loaded = load_engine_model(config)
        self.model, self.tokenizer, self.max_model_len = loaded.runtime.model, loaded.tokenizer, loaded.max_model_len
        self.runtime, self.params = loaded.runtime, loaded.params
        self.sizes = engine_sizes(config, loaded)
        self.scheduler = Scheduler(self.sizes.scheduler)
        self.pipeline = Pipeline(
            loaded, self.sizes, self.scheduler.ranks[0].page_table, is_guarded=not config.sync_guard_disabled
        )
        self._stats, self._hooks = EngineStats(), hooks
        self._profiler = Profiler(
            config.trace_dir,
            memory_profile_path=config.memory_profile_path,
            memory_tracing=config.memory_tracing,
            http_port=config.profile_http_port_base + loaded.device.id if config.profile_http_enable else None,
        )
        self._emitters: dict[str, Emitter] = {}  # of unfinished requests
        self._loop = StepLoop(
            self.scheduler,
            self.pipeline,
            self._stats,
            is_async=config.async_scheduling,
            took_tokens=self._put_out,
            planned=hooks.post_schedule if hooks is not None else None,
        )
        self._outputs: list[RequestOutput] = []  # not given out yet
        self._num_requests = self._num_steps = 0
        self._is_closed = False
        if not config.enforce_eager:
            self._warm_up()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, hooks: EngineHooks | None = None) -> "LLMEngine":
        """An engine for arguments under the process environment."""
        return cls(resolve(args), hooks=hooks)

    # Requests come and go.

    def add_request(
        self,
        user_id: str,
        request_id: str,
        sampling_params: SamplingParams | Mapping[str, Any],
        prompt_token_ids: intake.TokenIds,
        multi_modal_data: Any = None,
        arrival_time: float | None = None,
        extra: Any = None,
        enqueue: bool = True,
        chunk_checkpoints: Iterable[int] | None = None,
    ) -> scheduling.Sequence:
        """Takes in a request; its outputs come from `step()`.

        user_id, extra: kept in the sequence's options, for hooks. arrival_time: of `time.perf_counter()`; latencies
        count from there. enqueue False: only checks and builds; `enqueue` queues it. chunk_checkpoints: positions at
        which the prompt is cut, and its beginning kept for others. Raises ValueError or TypeError for bad input. A
        prompt that can never fit ends at once with "prompt_length_exceeded".
        """
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = SamplingParams.from_dict(sampling_params)
        task = intake.read_request(
            prompt_token_ids, sampling_params, multi_modal_data, model=self.model, has_replay=self._has_replay
        )
        checkpoints = intake.read_checkpoints(chunk_checkpoints, len(task.prompt))
        options = self._options_of(task, self._num_requests, user_id=user_id, extra=extra, arrival_time=arrival_time)
        sequence = self.build(request_id, task, options, checkpoints=checkpoints)
        if enqueue:
            self.enqueue(sequence)
        return sequence

    def add_task(self, request_id: str, task: intake.Task, *, index: int) -> scheduling.Sequence:
        """Takes in a request whose arguments were checked; index: its place, from which a seed may follow."""
        sequence = self.build(request_id, task, self._options_of(task, index))
        self.enqueue(sequence)
        return sequence

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that can run."""
        sizes = self.sizes.scheduler
        return min(self.max_model_len, sizes.num_pages * sizes.page_tokens, self.config.ignore_len)

    def build(
        self, request_id: str, task: intake.Task, options: RequestOptions, *, checkpoints: frozenset[int] = frozenset()
    ) -> scheduling.Sequence:
        """A sequence that is not queued yet."""
        self._require_open()
        tail_start = self.runtime.tail_start(len(task.prompt))
        if tail_start and self.sizes.scheduler.prefix_mode != "off":
            checkpoints |= {tail_start}  # the furthest that another request may take over
        return scheduling.Sequence(
            request_id=request_id,
            prompt=task.prompt,
            limits=scheduling.Limits(
                max_tokens=task.params.max_tokens, eos_id=task.params.eos_id, ignore_eos=task.params.ignore_eos
            ),
            tail_start=tail_start,
            options=options,
            checkpoints=checkpoints,
        )

    def enqueue(self, sequence: scheduling.Sequence) -> None:
        """Queues a request that `add_request` built."""
        self._require_open()
        self.scheduler.add(sequence)
        self._follow(sequence)
        if len(sequence.prompt) > self.config.ignore_len:
            self.scheduler.end(sequence.request_id, TOO_LONG)
        self._take_ended()

    def abort_request(self, request_ids: str | Iterable[str]) -> tuple[int, int]:
        """Ends requests, whatever they do at the moment; how many there were, and the tokens they had put out."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        found = [sequence for each in ids if (sequence := self.scheduler.get(each)) is not None]
        num_tokens = sum(len(sequence.output) for sequence in found)
        for sequence in found:
            self.scheduler.abort(sequence.request_id)
        self._take_ended()
        return len(found), num_tokens

    def fork_request(
        self,
        request_id: str,
        new_request_id: str,
        *,
        sampling_params: SamplingParams | None = None,
        num_tokens: int | None = None,
    ) -> scheduling.Sequence:
        """A new request that goes on from the first num_tokens tokens of an unfinished one, None for all known.

        Without sampling_params it has those of its parent, the seed included, and so the same continuation.
        """
        parent = self.scheduler.get(request_id)
        limits = options = None
        if parent is not None and sampling_params is not None:
            task = intake.read_request(
                parent.prompt, sampling_params, None, model=self.model, has_replay=self._has_replay
            )
            options = self._options_of(task, self._num_requests)
            limits = scheduling.Limits(
                max_tokens=task.params.max_tokens, eos_id=task.params.eos_id, ignore_eos=task.params.ignore_eos
            )
        forked = self.scheduler.fork(request_id, new_request_id, num_tokens=num_tokens, limits=limits, options=options)
        self._follow(forked)
        self._take_ended()
        return forked

    def save_request(self, request_id: str) -> snapshot.RequestSnapshot:
        """An unfinished request with all that it has on the device, as arrays on the host; it goes on unchanged."""
        self._loop.read_all()
        self._take_ended()
        sequence = self.scheduler.get(request_id)
        if sequence is None:
            raise ValueError(f"request {request_id!r} is not unfinished; only a waiting or running one can be saved")
        return snapshot.take(sequence, self.pipeline, fingerprint=self.fingerprint(), page_tokens=self._page_tokens)

    def restore_request(self, saved: snapshot.RequestSnapshot, request_id: str) -> scheduling.Sequence:
        """A saved request under a new id, from where it was. Raises ValueError if it is of another model or mode.

        Where there is no room it waits, and computes its tokens again: the result is the same.
        """
        self._require_open()
        snapshot.check(saved, fingerprint=self.fingerprint())
        sequence = snapshot.sequence_of(saved, request_id)
        if saved.state is not None and self.scheduler.adopt(sequence, saved.num_written, state_end=saved.state_end):
            sequence.window_start = saved.window_start
            num_pages = self.sizes.scheduler.pages_of(saved.num_written)
            self.pipeline.write_request(saved.state, sequence.slot, sequence.pages[:num_pages])
        elif saved.state is None:
            self.scheduler.add(sequence)
        self._follow(sequence)
        self._take_ended()
        return sequence

    def fingerprint(self) -> str:
        """What a saved state depends on: the weights, the numerics, the modes and the layout of the caches."""
        return snapshot.fingerprint(self.params, self.runtime)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has something to do or to give."""
        return bool(self.scheduler.num_unfinished or self._outputs)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return self.scheduler.num_unfinished

    def get_num_pendings(self) -> int:
        """Requests that wait for something outside the scheduler: none in this version."""
        return 0

    # Steps.

    def step(self) -> list[RequestOutput]:
        """Launches the next step and reads the one in front of it; the tokens that became known, in order."""
        self._require_open()
        self._num_steps += 1
        with self._profiler.step(self._num_steps):
            self._loop.step()
        self._take_ended()
        self._housekeeping()
        return self._give_out()

    def flush_inflight_reqs(self) -> list[RequestOutput]:
        """Reads every launched step; the outputs that were not given out yet."""
        self._loop.read_all()
        self._take_ended()
        return self._give_out()

    def stats(self) -> dict[str, Any]:
        """What happened so far (`engine/stats.py`), and how things stand."""
        return self._stats.report(self._gauges())

    def close(self) -> None:
        """Ends the profiler and frees the model and the caches; the engine cannot be used afterwards."""
        if not self._is_closed:
            self._is_closed = True
            self._profiler.close()
            del self.pipeline, self.params, self._loop

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this engine is closed; make a new one")

    def _warm_up(self) -> None:
        self.pipeline.warm_up(
            lambda shapes: tqdm(shapes, desc="compiling steps", unit="step", disable=None, leave=False),
            self._stats.compiled,
        )
        self._stats.warm_up_done()

    def _put_out(self, sequence: scheduling.Sequence, drawn: Sequence[Drawn]) -> None:
        """Outputs for tokens that a request has just taken."""
        emitter = self._emitters[sequence.request_id]
        for index, one in enumerate(drawn, start=1):
            reason = sequence.finish_reason if index == len(drawn) else ""
            self._outputs.append(emitter.emit(one, finish_reason=reason))

    def _follow(self, sequence: scheduling.Sequence) -> None:
        """Prepares the outputs of a request that the scheduler has taken in."""
        self._num_requests += 1
        self._stats.added(sequence.request_id, len(sequence.prompt), at=sequence.options.arrival_time)
        self._emitters[sequence.request_id] = Emitter(
            sequence.request_id,
            len(sequence.prompt),
            tokenizer=self.tokenizer,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            inherited=sequence.output,
        )

    def _take_ended(self) -> None:
        for sequence in self.scheduler.take_ended():
            emitter = self._emitters.pop(sequence.request_id)
            self._stats.ended(sequence.request_id, sequence.finish_reason)
            if not emitter.is_finished:
                self._outputs.append(emitter.end(sequence.finish_reason))
            if self._hooks is not None:
                self._hooks.finalize_seq(sequence)

    def _give_out(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        if outputs and self._hooks is not None:
            self._hooks.process_output(outputs)
        return outputs

    def _options_of(self, task: intake.Task, index: int, **kept: Any) -> RequestOptions:
        return RequestOptions(task.params, request_seed(task.params, self.config.seed, index, random), **kept)

    @property
    def _has_replay(self) -> bool:
        return self.runtime.replay_mode != "off"

    @property
    def _page_tokens(self) -> int:
        return self.runtime.page_tokens

    def _housekeeping(self) -> None:
        if self._num_steps % self.config.gc_interval_step == 0:
            gc.collect()
        if not self.config.disable_log_stats and self._num_steps % self.config.logging_interval_steps == 0:
            _log.info(self._stats.log_line(self._stats.interval(self._gauges())))

    def _gauges(self) -> dict[str, Any]:
        counters, gauges, config = self.scheduler.counters, self.scheduler.gauges, self.sizes.scheduler
        return {
            "running": sum(len(rank.running) for rank in self.scheduler.ranks),
            "waiting": sum(len(rank.waiting) for rank in self.scheduler.ranks),
            "kv_used": gauges.pages_used * config.page_tokens,
            "kv_total": config.num_pages * config.page_tokens,
            "kv_cached": gauges.pages_cached * config.page_tokens,
            "preemptions": counters.preemptions,
            "prefix_lookups": counters.prefix_lookups,
            "prefix_hits": counters.prefix_hits,
            "prefix_hit_tokens": counters.prefix_hit_tokens,
            "snapshots": gauges.num_snapshots,
            "snapshots_evicted": counters.snapshots_evicted,
            "encoder_rows": self.pipeline.num_encoder_rows,
            "decoder_rows": self.pipeline.num_decoder_rows,
            **self._profiler.memory(),
        }
