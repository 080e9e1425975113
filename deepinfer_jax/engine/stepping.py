"""The step loop: plan, launch, read the step in front, commit; and what happens when one of these breaks.

With asynchronous scheduling a step is launched before the one in front of it is read, so that the device finds its
next work ready while the host reads, detokenizes and plans. A step with rows that need the tokens of the one in front
(grammars, penalties) is launched in two calls: its forward runs while the step in front is read and masks are made.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from deepinfer_jax.engine.constraints import GRAMMAR_FAILED, MaskedRows, needs_host
from deepinfer_jax.engine.outputs import Drawn
from deepinfer_jax.engine.pipeline import Launched, Pipeline
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.engine.steps import num_compiled
from deepinfer_jax.sampling.grammar import GrammarError
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.plan import Chunk, Plan
from deepinfer_jax.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


@runtime_checkable
class StepListener(Protocol):
    """Who is told what a step brought."""

    def planned(self, plan: Plan) -> None:
        """A plan is about to be launched."""

    def took_tokens(self, sequence: scheduling.Sequence, drawn: Sequence[Drawn]) -> None:
        """A request has taken these tokens; it may have ended with the last one."""

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
        *,
        vocab_size: int,
        is_async: bool,
    ) -> None:
        self._scheduler, self._pipeline, self._stats, self._listener = scheduler, pipeline, stats, listener
        self._vocab_size, self._is_async = vocab_size, is_async
        self._in_flight: deque[Launched] = deque()
        self._busy_at: float | None = None  # when the device was last known to work; None: it had nothing to do

    def step(self) -> None:
        """Launches the next plan, if there is one, and reads what is in front of it."""
        while len(self._in_flight) > 1:  # an interrupt came while they were read
            self._read()
        plan = self._scheduler.schedule()
        if plan is not None:
            self._show(plan)
            is_masked = any(needs_host(chunk) for chunk in plan.chunks)
            launched = self._launch(plan, waits_for_masks=is_masked)
            if is_masked and launched is not None:
                self._finish_masked(launched)
        num_kept = 1 if self._is_async and plan is not None else 0
        while len(self._in_flight) > num_kept:
            self._read()
        if not self._scheduler.num_unfinished:
            self._busy_at = None

    def read_all(self) -> None:
        """Reads every launched step."""
        while self._in_flight:
            self._read()

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
        shape, before, start = self._pipeline.shape_of(plan), num_compiled(), time.perf_counter()
        idle_s = self._idle_s(start)
        try:
            launched = self._pipeline.launch(plan, waits_for_masks=waits_for_masks)
        except BaseException as error:
            self.read_all()
            self._fail(plan, error)
            if not isinstance(error, Exception):
                raise
            return None
        self._in_flight.append(launched)
        self._busy_at = time.perf_counter()
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
        return launched

    def _finish_masked(self, launched: Launched) -> None:
        """Reads the steps in front while the forward of this one runs, makes its masks and draws its tokens."""
        while len(self._in_flight) > 1:
            self._read()
        if launched not in self._in_flight:
            return  # a step in front broke
        try:
            rows = MaskedRows(launched.plan.ranks[0], num_logits=launched.shape.num_logits, vocab_size=self._vocab_size)
            for chunk, row in rows.rows:
                self._fill(rows, chunk, row)
            self._pipeline.sample(launched, rows.masks, rows.edits())
        except Exception as error:  # noqa: BLE001 - ends this step, not the engine
            self._fail(launched.plan, error)

    def _fill(self, rows: MaskedRows, chunk: Chunk, row: int) -> None:
        """The mask of one row; a matcher that fails ends its request only."""
        if chunk.is_stale:
            return
        try:
            rows.fill(chunk, row)
        except GrammarError as error:
            self._scheduler.end(chunk.sequence.request_id, GRAMMAR_FAILED, error=error)

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

    def _commit(self, plan: Plan, drawn: Sequence[Sequence[Drawn]]) -> None:
        found: dict[str, Drawn] = {}
        for (chunk, _), rows in zip(plan.ranks[0].logit_chunks, drawn, strict=True):
            if chunk.is_stale:
                continue
            if chunk.scores:
                known = rows[: len(rows) - chunk.draws]
                self._listener.took_scores(chunk.sequence, chunk.start + 1, [one.logprob for one in known])
            if chunk.draws and self._accept(chunk, rows[-1]):
                found[chunk.sequence.request_id] = rows[-1]
        tokens = {request_id: [one.token_id] for request_id, one in found.items()}
        for sequence, taken in self._scheduler.commit(plan, tokens):
            self._stats.emitted(sequence.request_id, len(taken))
            self._listener.took_tokens(sequence, [found[sequence.request_id]])

    def _accept(self, chunk: Chunk, one: Drawn) -> bool:
        """Whether a drawn token is one; else its request ends here."""
        request_id, constraint = chunk.sequence.request_id, chunk.sequence.options.constraint
        if math.isnan(one.logprob):
            reason = "abort" if constraint is None else GRAMMAR_FAILED
            what = "are not finite" if constraint is None else "are not finite, or its constraints allow no token"
            advice = "the weights or the device are at fault" + ("" if constraint is None else ", or the constraints")
            error = RuntimeError(
                f"the logits of request {request_id} at position {chunk.draw_position} {what}; {advice}"
            )
            self._scheduler.end(request_id, reason, error=error)
            return False
        if constraint is not None:
            try:
                constraint.advance(one.token_id)
            except GrammarError as error:
                self._scheduler.end(request_id, GRAMMAR_FAILED, error=error)
                return False
        return True

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
