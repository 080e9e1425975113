"""The step loop: plan, launch, read the step in front, commit; and what happens when one of these breaks.

With asynchronous scheduling a step is launched before the one in front of it is read, so that the device finds its
next work ready while the host reads, detokenizes and plans.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from deepinfer_jax.engine.outputs import Drawn
from deepinfer_jax.engine.pipeline import Launched, Pipeline
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.engine.steps import num_compiled
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.plan import Plan
from deepinfer_jax.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)


class StepLoop:
    """Runs the plans of a scheduler on a pipeline.

    took_tokens: told about each request that has taken new tokens. planned: sees each plan before its launch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        stats: EngineStats,
        *,
        is_async: bool,
        took_tokens: Callable[[scheduling.Sequence, Sequence[Drawn]], None],
        planned: Callable[[Plan], None] | None = None,
    ) -> None:
        self._scheduler, self._pipeline, self._stats = scheduler, pipeline, stats
        self._is_async, self._took_tokens, self._planned = is_async, took_tokens, planned
        self._in_flight: deque[Launched] = deque()
        self._busy_at: float | None = None  # when the device was last known to work; None: it had nothing to do

    def step(self) -> None:
        """Launches the next plan, if there is one, and reads what is in front of it."""
        plan = self._scheduler.schedule()
        if plan is not None:
            if self._planned is not None:
                self._planned(plan)
            self._launch(plan)
        num_kept = 1 if self._is_async and plan is not None else 0
        while len(self._in_flight) > num_kept:
            self._read()
        if not self._scheduler.num_unfinished:
            self._busy_at = None

    def read_all(self) -> None:
        """Reads every launched step."""
        while self._in_flight:
            self._read()

    def _launch(self, plan: Plan) -> None:
        shape, before, start = self._pipeline.shape_of(plan), num_compiled(), time.perf_counter()
        idle_s = self._idle_s(start)
        try:
            launched = self._pipeline.launch(plan)
        except BaseException as error:
            self.read_all()
            self._fail(plan, error)
            if not isinstance(error, Exception):
                raise
            return
        self._in_flight.append(launched)
        self._busy_at = time.perf_counter()
        if num_compiled() > before:
            self._stats.compiled(shape.name, self._busy_at - start)
        self._stats.launched(
            rows=sum(rank.num_rows for rank in plan.ranks),
            padded_rows=self._pipeline.computed_rows(plan, shape),
            is_prefill=plan.is_prefill,
            bucket=shape.name,
            idle_s=idle_s,
            copies=plan.num_copies,
        )

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

    def _commit(self, plan: Plan, drawn: Sequence[Drawn]) -> None:
        found: dict[str, Drawn] = {}
        for chunk, one in zip(plan.ranks[0].drawing, drawn, strict=True):
            request_id = chunk.sequence.request_id
            if chunk.is_stale:
                continue
            if math.isnan(one.logprob):
                error = RuntimeError(
                    f"the logits of request {request_id} at position {chunk.draw_position} are not finite; "
                    "the weights or the device are at fault"
                )
                self._scheduler.end(request_id, "abort", error=error)
                continue
            found[request_id] = one
        tokens = {request_id: [one.token_id] for request_id, one in found.items()}
        for sequence, taken in self._scheduler.commit(plan, tokens):
            self._stats.emitted(sequence.request_id, len(taken))
            self._took_tokens(sequence, [found[sequence.request_id]])

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
