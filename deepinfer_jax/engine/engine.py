"""`LLMEngine`: requests come at any time, `step()` gives the tokens (spec: interface 6.1, 7).

With asynchronous scheduling a step is launched before the one in front of it is read, so that the device finds its
next work ready while the host reads, detokenizes and plans. Outputs come one step late; they are the same.
"""

import dataclasses
import gc
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer_jax.config.args import EngineArgs, EngineConfig, resolve
from deepinfer_jax.engine import intake, snapshot
from deepinfer_jax.engine.answers import Answers, EngineHooks
from deepinfer_jax.engine.constraints import GRAMMAR_FAILED, Constraints, PendingGrammars
from deepinfer_jax.engine.draft_stats import DraftRecords
from deepinfer_jax.engine.intake import make_intake
from deepinfer_jax.engine.masking import make_mask_maker
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.engine.profiling import Profiler
from deepinfer_jax.engine.setup import load_engine_model, sample_settings
from deepinfer_jax.engine.sizes import engine_sizes
from deepinfer_jax.engine.stats import EngineStats, scheduler_gauges
from deepinfer_jax.engine.stepping import StepLoop
from deepinfer_jax.engine.warmup import ImageSteps, check_policy, warm_up
from deepinfer_jax.model.params import Params
from deepinfer_jax.sampling.grammar import GrammarTicket
from deepinfer_jax.sampling.params import SamplingParams, derived_seed, request_seed
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.batching import RequestOptions
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.verification import VerificationPolicy

TOO_LONG = "prompt_length_exceeded"
GRAMMAR_WAIT_S = 0.02  # how long a step waits for a grammar when it has nothing else to do
_log = logging.getLogger(__name__)


class LLMEngine:
    """A model, its caches and the requests under way.

    Not thread-safe: one thread adds, steps and aborts. Bad input raises and changes nothing; what goes wrong while
    requests run ends those it concerns, with a finish reason, and the others go on.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        hooks: EngineHooks | None = None,
        verification: VerificationPolicy | None = None,
        params: Params | None = None,
    ) -> None:
        """verification: in place of what `varlen_verification` says. params: in place of those of the model's files, in
        the form of `checkpoint.load.load_model`, to be taken over with their memory; without a vision encoder images
        are refused. Raises ValueError where they do not fit the config.
        """
        self.config = config
        loaded = load_engine_model(config, params)
        self.model, self.tokenizer, self.max_model_len = loaded.runtime.model, loaded.tokenizer, loaded.max_model_len
        self.runtime = loaded.runtime
        self.sizes = engine_sizes(config, loaded)
        check_policy(verification, is_async=config.async_scheduling)
        self.scheduler = Scheduler(self.sizes.scheduler, verification)
        self.pipeline = Pipeline(
            loaded,
            self.sizes,
            [rank.page_table for rank in self.scheduler.ranks],
            settings=sample_settings(config, self.model.vocab_size),
            is_guarded=not config.sync_guard_disabled,
        )
        self._stats = EngineStats()
        self._profiler = Profiler(
            config.trace_dir,
            memory_profile_path=config.memory_profile_path,
            memory_tracing=config.memory_tracing,
            http_port=config.profile_http_port_base + loaded.device.id if config.profile_http_enable else None,
        )
        self._answers = Answers(
            self.scheduler,
            self._stats,
            self.tokenizer,
            hooks,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.intake = make_intake(config, loaded, self.sizes)
        self._constraints = Constraints(config, self.model, self.tokenizer)
        self._pending = PendingGrammars(self._constraints)
        self._loop = StepLoop(
            self.scheduler,
            self.pipeline,
            self._stats,
            self._answers,
            make_mask_maker(config, self.model.vocab_size, loaded.speculation.max_drafts),
            is_async=config.async_scheduling,
        )
        self._num_requests = self._num_steps = 0
        self._is_closed, self._fingerprint = False, ""
        self._image_steps = ImageSteps(config, loaded.speculation, self.pipeline, self._stats)
        warm_up(config, loaded, self.sizes, self.pipeline, self.scheduler, self._stats)

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, hooks: EngineHooks | None = None) -> "LLMEngine":
        """An engine for arguments under the process environment."""
        return cls(resolve(args), hooks=hooks)

    @property
    def params(self) -> Params:
        """The weights as they lie now; experts may move between steps."""
        return self.pipeline.params

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
        count from there. enqueue False: only checks and builds; `enqueue` queues it. chunk_checkpoints: positions of
        prompt_token_ids at which it is cut, and its beginning kept for others. multi_modal_data: {"images": [...]}, as
        for `LLM.generate`. Raises ValueError or TypeError for bad input. A prompt that can never fit ends at once with
        "prompt_length_exceeded".
        """
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = SamplingParams.from_dict(sampling_params)
        task = self.intake.read_request(prompt_token_ids, sampling_params, multi_modal_data)
        checkpoints = self.intake.read_checkpoints(chunk_checkpoints, prompt_token_ids, task.images)
        sequence = self._build(request_id, task, None, checkpoints)
        sequence.options = dataclasses.replace(
            sequence.options, user_id=user_id, extra=extra, arrival_time=arrival_time
        )
        if enqueue:
            self.enqueue(sequence)
        return sequence

    def add_task(
        self,
        request_id: str,
        task: intake.Task,
        *,
        index: int,
        sample: int,
        ticket: GrammarTicket | None,
        outbox: list[RequestOutput],
    ) -> scheduling.Sequence:
        """Takes in a request whose arguments were checked; index: its place, from which a seed may follow.

        sample: which of its n answers. ticket: of `compile_grammar`. outbox: gets its outputs, which `step` does not.
        """
        sequence = self._build(request_id, task, index)
        seed = derived_seed(sequence.options.seed, sample)
        sequence.options = dataclasses.replace(sequence.options, seed=seed)
        self._enqueue(sequence, ticket, outbox)
        return sequence

    def is_known(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""
        return self.scheduler.get(request_id) is not None or request_id in self._pending

    def compile_grammar(self, params: SamplingParams) -> GrammarTicket | None:
        """Starts to compile a request's grammar, None for one without. Raises ValueError for bad so_args."""
        return self._constraints.compile(params)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt that can run."""
        return self.intake.max_len

    def enqueue(self, sequence: scheduling.Sequence) -> None:
        """Queues a request that `add_request` built, as soon as its grammar is ready."""
        self._enqueue(sequence, None, None)

    def _enqueue(
        self, sequence: scheduling.Sequence, ticket: GrammarTicket | None, outbox: list[RequestOutput] | None
    ) -> None:
        self._require_new(sequence.request_id)
        params: SamplingParams = sequence.options.params
        ticket = ticket or self._constraints.compile(params)
        self._image_steps.expect(sequence)
        if ticket is None:
            state = self._constraints.build(params, sequence.prompt, None)
            sequence.options = dataclasses.replace(sequence.options, constraint=state)
            self.scheduler.add(sequence)
        else:
            self._pending.add(sequence, ticket)
        self._answers.follow(sequence, outbox)
        if ticket is None and len(sequence.prompt) > self.config.ignore_len:
            self.scheduler.end(sequence.request_id, TOO_LONG)
        self._answers.take_ended()

    def abort_request(self, request_ids: str | Iterable[str]) -> tuple[int, int]:
        """Ends requests, whatever they do at the moment; how many there were, and the tokens they had put out."""
        self._require_open()
        ids = [request_ids] if isinstance(request_ids, str) else list(dict.fromkeys(request_ids))
        found = [sequence for each in ids if (sequence := self.scheduler.get(each)) is not None]
        num_tokens = sum(len(sequence.output) for sequence in found)
        for sequence in found:
            self.scheduler.abort(sequence.request_id)
        pending = [sequence for each in ids if (sequence := self._pending.remove(each)) is not None]
        for sequence in pending:
            self._refuse(sequence, "abort")
        self._answers.take_ended()
        return len(found) + len(pending), num_tokens

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
        self._require_new(new_request_id)
        parent = self._pending.require_started(request_id, self.scheduler.get(request_id), "forked")
        num_kept = len(parent.output) if num_tokens is None else max(0, num_tokens - len(parent.prompt))
        limits, options, constraint = None, parent.options, parent.options.constraint
        if sampling_params is not None:
            if sampling_params.prompt_logprobs:
                raise ValueError("prompt_logprobs=True is not for forks, whose prompt is known; leave it False")
            params = self.intake.read_params(sampling_params)
            options, limits = self._options_of(params), intake.limits_of(params)
            constraint = self._constraints.behind(params, parent.prompt, parent.output[:num_kept])
        elif constraint is not None and num_kept <= len(parent.output):
            constraint = constraint.fork()
            constraint.rollback(len(parent.output) - num_kept)
        options = dataclasses.replace(options, constraint=constraint)
        forked = self.scheduler.fork(request_id, new_request_id, num_tokens=num_tokens, limits=limits, options=options)
        self._answers.follow(forked)
        self._answers.take_ended()
        return forked

    def save_request(self, request_id: str) -> snapshot.RequestSnapshot:
        """An unfinished request with all that it has on the device, as arrays on the host; it goes on unchanged."""
        self.settle()
        sequence = self._pending.require_started(request_id, self.scheduler.get(request_id), "saved")
        return snapshot.take(
            sequence, self.pipeline, fingerprint=self.fingerprint(), page_tokens=self.runtime.page_tokens
        )

    def restore_request(self, saved: snapshot.RequestSnapshot, request_id: str) -> scheduling.Sequence:
        """A saved request under a new id, from where it was. Raises ValueError if it is of another model or mode.

        Where there is no room it waits, and computes its tokens again: the result is the same.
        """
        self._require_new(request_id)
        snapshot.check(saved, fingerprint=self.fingerprint())
        sequence = snapshot.sequence_of(saved, request_id, intake.limits_of(saved.params))
        state = self._constraints.behind(saved.params, saved.prompt, saved.output)
        sequence.options = dataclasses.replace(sequence.options, constraint=state)
        self._image_steps.expect(sequence)
        if saved.state is not None and self.scheduler.adopt(sequence, saved.num_written, state_end=saved.state_end):
            sequence.window_start = saved.window_start
            num_pages = self.sizes.scheduler.pages_of(saved.num_written)
            pages = sequence.pages[:num_pages]
            self.pipeline.write_request(saved.state, sequence.slot, pages, rank=sequence.rank)
        elif saved.state is None:
            self.scheduler.add(sequence)
        self._answers.follow(sequence)
        self._answers.take_ended()
        return sequence

    def fingerprint(self) -> str:
        """What a saved state depends on: the weights, the numerics, the modes and the layout of the caches."""
        self._require_open()
        self._fingerprint = self._fingerprint or snapshot.fingerprint(self.params, self.runtime)  # also after moves
        return self._fingerprint

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has something to do or to give."""
        return bool(self.get_num_unfinished_requests() or self._answers.has_outputs)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run, those that wait for their grammar included."""
        return self.scheduler.num_unfinished + len(self._pending)

    def get_num_pendings(self) -> int:
        """Requests that wait for their grammar to be compiled."""
        return len(self._pending)

    def step(self) -> list[RequestOutput]:
        """Launches the next step and reads the one in front of it; the tokens that became known, in order."""
        self.advance()
        return self._answers.give_out()

    def advance(self) -> None:
        """`step` without fetching what it made."""
        self._require_open()
        self._num_steps += 1
        try:
            self._take_grammars()
            with self._profiler.step(self._num_steps):
                self._loop.step()
        finally:
            self._answers.take_ended()
        self._answers.tell()
        self._housekeeping()

    def flush_inflight_reqs(self) -> list[RequestOutput]:
        """Reads every launched step; the outputs that were not given out yet."""
        self.settle()
        return self._answers.give_out()

    def settle(self) -> None:
        """`flush_inflight_reqs` without fetching."""
        self._require_open()
        self._loop.read_all()
        self._answers.take_ended()
        self._answers.tell()

    def stats(self) -> dict[str, Any]:
        """What happened so far (`engine/stats.py`), and how things stand."""
        self._require_open()
        return self._stats.report(self._gauges())

    def draft_records(self) -> DraftRecords:
        """Raw confidences, verified and accepted drafts of the last rounds, for calibration."""
        return self._stats.drafts.records()

    def close(self) -> None:
        """Ends the profiler and frees the model and the caches; the engine cannot be used afterwards."""
        if not self._is_closed:
            self._is_closed = True
            self._profiler.close()
            self._constraints.close()
            self.intake.close()
            self._loop.close()
            del self.pipeline, self._loop

    def _require_new(self, request_id: str) -> None:
        self._require_open()
        if self.is_known(request_id):
            raise ValueError(f"request {request_id!r} is unfinished; a new one needs an id of its own")

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this engine is closed; make a new one")

    def _build(
        self, request_id: str, task: intake.Task, index: int | None, checkpoints: frozenset[int] = frozenset()
    ) -> scheduling.Sequence:
        self._require_open()
        tail_start = self.runtime.tail_start(len(task.prompt))
        if tail_start and self.sizes.scheduler.prefix_mode != "off":
            checkpoints |= {tail_start}  # the furthest that another request may take over
        return scheduling.Sequence(
            request_id=request_id,
            prompt=task.prompt,
            limits=intake.limits_of(task.params),
            tail_start=tail_start,
            options=self._options_of(task.params, index),
            checkpoints=checkpoints,
            images=task.images,
            scores_prompt=task.params.prompt_logprobs,
        )

    def _take_grammars(self) -> None:
        for sequence in self._pending.take_ready(wait_s=0.0 if self.scheduler.num_unfinished else GRAMMAR_WAIT_S):
            if sequence.error is not None:
                self._refuse(sequence, GRAMMAR_FAILED)
            elif len(sequence.prompt) > self.config.ignore_len:
                self._refuse(sequence, TOO_LONG)
            else:
                self.scheduler.add(sequence)

    def _refuse(self, sequence: scheduling.Sequence, reason: str) -> None:
        sequence.finish_reason = reason
        self._answers.close(sequence)

    def _options_of(self, params: SamplingParams, index: int | None = None) -> RequestOptions:
        if index is None:  # the next of this engine
            index, self._num_requests = self._num_requests, self._num_requests + 1
        return RequestOptions(params, request_seed(params, self.config.seed, index, random))

    def _housekeeping(self) -> None:
        if self._num_steps % self.config.gc_interval_step == 0:
            gc.collect()
        if not self.config.disable_log_stats and self._num_steps % self.config.logging_interval_steps == 0:
            _log.info(self._stats.log_line(self._stats.interval(self._gauges())))

    def _gauges(self) -> dict[str, Any]:
        return {
            **scheduler_gauges(self.scheduler),
            **self.pipeline.figures,
            **self._profiler.memory(),
        }
