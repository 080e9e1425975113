"""What requests have answered: tokens become outputs with texts, stop strings end them, each ends exactly once."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from deepinfer_jax.engine.outputs import Drawn, Emitter, RequestOutput, Round
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.scheduler import sequence as scheduling
from deepinfer_jax.scheduler.plan import Plan
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.text.tokenizer import Tokenizer


@runtime_checkable
class EngineHooks(Protocol):
    """What a service or a study may watch; every method is called in the thread of `step()`."""

    def post_schedule(self, plan: Plan) -> None:
        """A plan was made and is about to be launched."""

    def process_output(self, outputs: Sequence[RequestOutput]) -> None:
        """A step has made these outputs."""

    def finalize_seq(self, sequence: scheduling.Sequence) -> None:
        """A request has ended; what it held is free."""


class Answers:
    """The outputs of all unfinished requests, and those that nobody has fetched yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        tokenizer: Tokenizer | None,
        hooks: EngineHooks | None,
        *,
        max_num_batched_tokens: int,
    ) -> None:
        self._scheduler, self._stats, self._tokenizer, self._hooks = scheduler, stats, tokenizer, hooks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._emitters: dict[str, Emitter] = {}
        self._outputs: list[RequestOutput] = []
        self._outboxes: dict[str, list[RequestOutput]] = {}  # where outputs of claimed requests go
        self._unseen: list[RequestOutput] = []  # by the hooks

    @property
    def has_outputs(self) -> bool:
        """Whether there is something to fetch."""
        return bool(self._outputs)

    def follow(self, sequence: scheduling.Sequence, outbox: list[RequestOutput] | None = None) -> None:
        """Prepares for the outputs of a new request; outbox: where they go instead of to `give_out`.

        Raises ValueError for an id that is in use.
        """
        options = sequence.options
        self._stats.added(sequence.request_id, len(sequence.prompt), at=options.arrival_time)
        self._emitters[sequence.request_id] = Emitter(
            sequence.request_id,
            len(sequence.prompt),
            options.params,
            tokenizer=self._tokenizer,
            max_num_batched_tokens=self._max_num_batched_tokens,
            inherited=sequence.output,
            scores_prompt=sequence.scores_prompt,
        )
        if outbox is not None:
            self._outboxes[sequence.request_id] = outbox

    def planned(self, plan: Plan) -> None:
        """A plan is about to be launched."""
        if self._hooks is not None:
            self._hooks.post_schedule(plan)

    def took_tokens(self, sequence: scheduling.Sequence, drawn: Sequence[Drawn], step: Round) -> None:
        """Outputs for tokens that a request has just taken; a stop string among them ends it."""
        emitter = self._emitters[sequence.request_id]
        for index, one in enumerate(drawn, start=1):
            reason = sequence.finish_reason if index == len(drawn) else ""
            output = emitter.emit(one, finish_reason=reason, step=step, place=index, num_taken=len(drawn))
            self._put(output)
            if output.finished and output.finish_reason != reason:
                if sequence.finish_reason:
                    sequence.finish_reason = output.finish_reason
                else:
                    self._scheduler.end(sequence.request_id, output.finish_reason)
                break

    def took_scores(self, sequence: scheduling.Sequence, start: int, logprobs: Sequence[float]) -> None:
        """Log-probabilities of prompt tokens, which the first output will carry."""
        self._emitters[sequence.request_id].score(start, logprobs)

    def take_ended(self) -> None:
        """Closes requests that have ended; those whose last token did not say so get an output that does."""
        for sequence in self._scheduler.take_ended():
            self.close(sequence)

    def close(self, sequence: scheduling.Sequence) -> None:
        """Closes a request that has its finish reason."""
        emitter = self._emitters.pop(sequence.request_id)
        self._stats.ended(sequence.request_id, sequence.finish_reason)
        if not emitter.is_finished:
            self._put(emitter.end(sequence.finish_reason))
        self._outboxes.pop(sequence.request_id, None)
        if self._hooks is not None:
            self._hooks.finalize_seq(sequence)

    def tell(self) -> None:
        """Shows the hooks what was not shown yet."""
        outputs, self._unseen = self._unseen, []
        if outputs and self._hooks is not None:
            self._hooks.process_output(outputs)

    def give_out(self) -> list[RequestOutput]:
        """What was not fetched yet, in order, of requests without an outbox of their own."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _put(self, output: RequestOutput) -> None:
        self._outboxes.get(output.request_id, self._outputs).append(output)
        if self._hooks is not None:
            self._unseen.append(output)
