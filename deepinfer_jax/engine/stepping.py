"""The step loop: plan, launch, read the step in front, commit; and what happens when one of these breaks.

With asynchronous scheduling a step is launched before the one in front of it is read, so that the device finds its
next work ready while the host reads, detokenizes and plans. A step with rows that need the tokens of the one in front
(grammars, penalties) is launched in two calls: its forward runs while the step in front is read and masks are made.
"""

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from deepinfer_jax.engine.constraints import GRAMMAR_FAILED
from deepinfer_jax.engine.images import IMAGE_FAILED
from deepinfer_jax.engine.masking import MaskMaker, arrays_of, needs_host
from deepinfer_jax.engine.outputs import NO_DRAFTS, ChunkDraws, Drawn, Proposal, Round
from deepinfer_jax.engine.pipeline import Launched, Pipeline, num_compiled
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.parallel.processes import ProcessesDifferError
from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar import GrammarError
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.plan import Chunk, Plan
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.verification import ESTIMATES_KEPT

MASK_POLL_S = 0.02  # how long a step waits for a mask when it has nothing else to do
_log = logging.getLogger(__name__)


@runtime_checkable
class StepListener(Protocol):
    """Who is told what a step brought."""

    def planned(self, plan: Plan) -> None:
        """A plan is about to be launched."""

    def took_tokens(self, sequence: scheduling.Sequence, drawn: Sequence[Drawn], step: Round) -> None:
        """A request has taken these tokens in one step; it may have ended with the last one."""

    def took_scores(self, sequence: scheduling.Sequence, start: int, logprobs: Sequence[float]) -> None:
        """The log-probabilities of a request's prompt tokens from position `start` on are known."""


class StepLoop:
    """Runs the plans of a scheduler on a pipeline."""

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        stats: EngineStats,
        listener: StepListener,
        masks: MaskMaker,
        *,
        is_async: bool,
    ) -> None:
        self._scheduler, self._pipeline, self._stats, self._listener = scheduler, pipeline, stats, listener
        self._masks, self._is_async = masks, is_async
        self._in_flight: deque[Launched] = deque()
        self._busy_at: float | None = None  # when the device was last known to work; None: it had nothing to do

    def step(self) -> None:
        """Launches the next plan, if there is one, and reads what is in front of it."""
        while len(self._in_flight) > 1:  # an interrupt came while they were read
            self._read()
        self._release_held(wait_s=0.0)
        plan = self._scheduler.schedule()
        if plan is not None:
            self._show(plan)
            is_masked = any(needs_host(chunk) for chunk in plan.chunks)
            launched = self._launch(plan, waits_for_masks=is_masked)
            if is_masked and launched is not None:
                self._finish_masked(launched)
        elif not self._in_flight:
            self._release_held(wait_s=MASK_POLL_S)
        self._encode_ahead()
        num_kept = 1 if self._is_async and plan is not None else 0
        while len(self._in_flight) > num_kept:
            self._read()
        if not self._scheduler.num_unfinished:
            self._busy_at = None

    def read_all(self) -> None:
        """Reads every launched step."""
        while self._in_flight:
            self._read()

    def close(self) -> None:
        """Ends the threads that make masks."""
        self._masks.close()

    def _show(self, plan: Plan) -> None:
        """Lets the listener see a plan; what it raises is its caller's, and the plan is given up."""
        try:
            self._listener.planned(plan)
        except BaseException as error:
            self.read_all()
            self._fail(plan, error)
            raise

    def _launch(self, plan: Plan, *, waits_for_masks: bool) -> Launched | None:
        """Puts a plan on the device; None if that broke."""
        before, start = num_compiled(), time.perf_counter()
        idle_s = self._idle_s(start)
        try:
            launched = self._pipeline.launch(plan, waits_for_masks=waits_for_masks)
        except BaseException as error:
            if isinstance(error, ProcessesDifferError):
                raise  # the steps in front wait for processes that may never launch them
            self.read_all()
            self._fail(plan, error)
            if not isinstance(error, Exception):
                raise
            return None
        self._in_flight.append(launched)
        self._busy_at, shape = time.perf_counter(), launched.shape
        if num_compiled() > before:
            self._stats.compiled(shape.name, self._busy_at - start, is_expected=waits_for_masks)
        self._stats.launched(
            rows=sum(rank.num_rows for rank in plan.ranks),
            padded_rows=self._pipeline.computed_rows(plan, shape),
            is_prefill=plan.is_prefill,
            bucket=shape.name,
            idle_s=idle_s,
            copies=plan.num_copies,
        )
        self._end_without_images(launched)
        return launched

    def _encode_ahead(self) -> None:
        """Starts on the next image that a prompt brings, while the device is busy with what was launched."""
        image = self._scheduler.next_image(self._pipeline.knows_image) if self._in_flight else None
        if image is not None:
            self._pipeline.encode_ahead(image)

    def _end_without_images(self, launched: Launched) -> None:
        """Ends the requests of a launched step whose images could not be encoded; their rows are worth nothing."""
        errors = launched.image_errors
        if not errors:
            return
        for chunk in launched.plan.chunks:
            error = next((errors[image.digest] for image in chunk.images if image.digest in errors), None)
            if error is not None and not chunk.is_stale:
                self._scheduler.end(chunk.sequence.request_id, IMAGE_FAILED, error=error)
        self._scheduler.clear_prefix_cache()  # which keeps rows of this step

    def _finish_masked(self, launched: Launched) -> None:
        """Reads the steps in front while the forward of this one runs, makes its masks and draws its tokens."""
        while len(self._in_flight) > 1:
            self._read()
        if launched not in self._in_flight:
            return  # a step in front broke
        try:
            made = [self._masks.make(rank, num_chunks=launched.shape.num_chunks) for rank in launched.plan.ranks]
            for chunk, error in (error for masks in made for error in masks.errors):
                self._scheduler.end(chunk.sequence.request_id, GRAMMAR_FAILED, error=error)
            self._pipeline.sample(launched, arrays_of(made))
        except Exception as error:  # noqa: BLE001 - ends this step, not the engine
            self._fail(launched.plan, error)
            return
        for rank, masks in zip(launched.plan.ranks, made, strict=True):
            for index in masks.late.nonzero()[0]:
                rank.chunks[index].sequence.is_held = True

    def _release_held(self, *, wait_s: float) -> None:
        """Lets requests take part again whose masks are ready, after a wait if there is nothing else to do."""
        for request_id in self._masks.waiting:
            sequence = self._scheduler.get(request_id)
            if sequence is None:
                self._masks.forget(request_id)
            elif not sequence.draws_in_flight and self._masks.is_ready(request_id, wait_s=wait_s):
                sequence.is_held, wait_s = False, 0.0  # the step that it sat out has been read

    def _idle_s(self, now: float) -> float:
        """At most how long the device has waited for the step that is about to be launched."""
        has_waited = not self._in_flight or self._in_flight[-1].is_done
        return now - self._busy_at if self._busy_at is not None and has_waited else 0.0

    def _read(self) -> None:
        """Waits for the oldest launched step and takes its tokens in."""
        launched = self._in_flight[0]
        try:
            drawn = self._pipeline.read(launched)
        except Exception as error:  # noqa: BLE001 - whatever the device reports ends this step, not the engine
            self._fail(launched.plan, error)
            return
        self._in_flight.popleft()
        self._busy_at = time.perf_counter()
        self._commit(launched.plan, drawn)

    def _commit(self, plan: Plan, drawn: Sequence[ChunkDraws]) -> None:
        found: dict[str, tuple[list[Drawn], Round]] = {}
        tokens: dict[str, list[int]] = {}
        failures: dict[str, _Failure] = {}
        max_model_len = self._scheduler.config.max_model_len
        for chunk, draws in zip(plan.chunks, drawn, strict=True):
            if chunk.is_stale:
                continue
            sequence = chunk.sequence
            if draws.scores:
                known = [one.logprob for one in draws.scores]
                self._listener.took_scores(sequence, chunk.start + 1, known)
            if not chunk.draws:
                continue
            request_id = sequence.request_id
            made, step = _with_proposal(draws, sequence.proposal)
            if draws.tokens:
                self._note_drafts(sequence, draws, step=plan.step)
            elif sequence.proposal is None:
                sequence.has_drafts = False  # it sat the step out; what was proposed before would still stand
            ids = [one.token_id for one in made]
            num_good, failure = _accept(chunk, made[: sequence.cut(ids, max_model_len)])
            found[request_id], tokens[request_id] = (made, step), ids[:num_good]
            if failure is not None and not num_good:
                self._scheduler.end(request_id, failure.reason, error=failure.error)
            elif failure is not None:
                failures[request_id] = failure
        kept = self._scheduler.commit(plan, tokens)
        self._stats.emitted({sequence.request_id: len(taken) for sequence, taken in kept})
        for sequence, taken in kept:
            request_id = sequence.request_id
            made, step = found[request_id]
            self._listener.took_tokens(sequence, made[: len(taken)], step)
            if request_id in failures:
                self._scheduler.end(request_id, failures[request_id].reason, error=failures[request_id].error)

    def _note_drafts(self, sequence: scheduling.Sequence, draws: ChunkDraws, *, step: int) -> None:
        """Counts what became of a request's drafts, and keeps the next ones."""
        if draws.num_verified:
            self._stats.verified(sequence.proposal.confidence, draws.num_verified, len(draws.tokens) - 1)
        sequence.proposal = draws.proposal
        if draws.proposal is not None:
            kept = (*sequence.estimates, (step, draws.proposal.survival))
            sequence.estimates = kept[-ESTIMATES_KEPT:]

    def _fail(self, plan: Plan, error: BaseException) -> None:
        """Ends the requests of the oldest unread plan; the others are computed again on an empty state."""
        _log.error("step %d broke: %s", plan.step, error)
        self._scheduler.fail(plan, error, state_is_lost=True)
        later = [launched.plan for launched in self._in_flight if launched.plan is not plan]
        self._in_flight.clear()
        for void in later:
            self._scheduler.commit(void, {})
        self._pipeline.reset()
        self._busy_at = None


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Why a request ends behind its good tokens."""

    reason: str
    error: BaseException


def _accept(chunk: Chunk, drawn: Sequence[Drawn]) -> tuple[int, _Failure | None]:
    """How many of the drawn tokens are some; the request's constraint takes these."""
    constraint: DrawState | None = chunk.sequence.options.constraint
    for place, one in enumerate(drawn):
        if math.isnan(one.logprob):
            return place, _not_finite(chunk, place)
        if constraint is not None:
            try:
                constraint.advance(one.token_id)
            except GrammarError as error:
                return place, _Failure(GRAMMAR_FAILED, error)
    return len(drawn), None


def _not_finite(chunk: Chunk, place: int) -> _Failure:
    """There is no best logit; place: tokens of the step in front of the one that is none."""
    sequence = chunk.sequence
    constraint: DrawState | None = sequence.options.constraint
    what, advice = "are not finite", "the weights or the device are at fault"
    if constraint is not None and constraint.restrictions:
        what = f"{what}, or {', '.join(constraint.restrictions)} leave no token"
        advice = f"{advice}, or those options: allow more"
    position = sequence.num_tokens + place
    error = RuntimeError(f"the logits of request {sequence.request_id} at position {position} {what}; {advice}")
    is_grammar = constraint is not None and constraint.has_grammar
    return _Failure(GRAMMAR_FAILED if is_grammar else "abort", error)


def _with_proposal(draws: ChunkDraws, proposal: Proposal | None) -> tuple[list[Drawn], Round]:
    """The tokens of a step with what the drafter said of those that it had proposed."""
    if proposal is None or not draws.num_verified:
        return draws.tokens, NO_DRAFTS
    num_accepted = len(draws.tokens) - 1
    tokens = [
        one._replace(draft_logprob=proposal.logprobs[place]) if place < num_accepted else one
        for place, one in enumerate(draws.tokens)
    ]
    chances = tuple(0.5 * (1.0 + math.tanh(0.5 * z)) for z in proposal.confidence[: draws.num_verified])
    return tokens, Round(num_positions=1 + draws.num_verified, confidence=chances)
