"""What a caller gets: one object for each token, and their summary (spec: interface 5.5)."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from deepinfer_jax.engine.fingerprint import bit_fingerprint
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.sampling.params import NO_TOKEN, SamplingParams
from deepinfer_jax.sampling.stop import StopWatch
from deepinfer_jax.text import detokenizer
from deepinfer_jax.text.tokenizer import Tokenizer

NOT_COMPUTED = -1.0  # sum_smaller_probs without DEEPINFER_COMPUTE_SUM_SMALLER_PROBS
NO_DRAFT = 1.0  # nextn_logprobs of a token that no draft proposed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One output token of a request; or its end, with token id -1, where that comes without a token."""

    request_id: str
    prompt_len: int  # tokens
    token_id: int
    finish_reason: str  # "" while the request goes on
    finished: bool
    max_num_batched_tokens: int
    token_logprobs: float  # processed log-probability of the token, at least -9999
    nextn_logprobs: float = NO_DRAFT
    sum_smaller_probs: float = NOT_COMPUTED
    top_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_output_tokens: int  # up to this one
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    draft_tok: int = 1  # positions verified in the step that this token ends
    accept_tok: int = 1  # tokens emitted in it
    confidence_score: list[float] | None = None
    text: str = ""  # what the token settles; the texts of a request join to its whole text


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """A whole result."""

    token_ids: tuple[int, ...]
    text: str
    cumulative_logprob: float
    finish_reason: str
    fingerprint: str  # of token ids, log-probability bits and finish reason (`bit_fingerprint`)

    @classmethod
    def from_outputs(cls, outputs: Sequence[RequestOutput]) -> "CompletionOutput":
        """The summary of one request's outputs, in order."""
        return cls(
            token_ids=tuple(output.token_id for output in outputs if output.token_id != NO_TOKEN),
            text="".join(output.text for output in outputs),
            cumulative_logprob=sum(output.token_logprobs for output in outputs),
            finish_reason=outputs[-1].finish_reason if outputs else "",
            fingerprint=bit_fingerprint(outputs),
        )


class Drawn(NamedTuple):
    """One drawn token with its log-probabilities."""

    token_id: int
    logprob: float
    smaller_mass: float = NOT_COMPUTED
    top: tuple[tuple[float, int], ...] = ()  # (log-probability, token id), best first
    draft_logprob: float = NO_DRAFT  # of an accepted draft, in the drafter's distribution


class Round(NamedTuple):
    """One step of a request: what its last token tells beside itself."""

    num_positions: int = 1  # verified
    confidence: tuple[float, ...] | None = None  # chances that the drafter gave to the drafts that were verified


NO_DRAFTS = Round()


@dataclasses.dataclass(frozen=True)
class Proposal:
    """The drafts behind a request's newest token."""

    token_ids: list[int]
    confidence: list[float]  # raw: the logit of the chance that a draft is accepted if those before it are
    survival: tuple[float, ...]  # the chance that it and all before it are accepted, temperatures applied
    logprobs: list[float]  # of each draft, in the processed distribution that the drafter drew it from


class ChunkDraws(NamedTuple):
    """What a step found for one chunk."""

    scores: list[Drawn]  # known prompt tokens
    tokens: list[Drawn]  # the tokens that it keeps: accepted drafts and one more
    num_verified: int  # drafts that had a row
    proposal: Proposal | None  # the next drafts, where tokens are drafted


class Emitter:
    """Makes the outputs of one request, token by token; without a tokenizer their texts are empty.

    inherited: output tokens that the request starts with, as a fork or a restored one does.
    """

    def __init__(
        self,
        request_id: str,
        prompt_len: int,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        max_num_batched_tokens: int,
        inherited: Sequence[int] = (),
        scores_prompt: bool = False,
    ) -> None:
        self._request_id, self._prompt_len = request_id, prompt_len
        self._watch = StopWatch(params)
        self._min_tokens = params.min_tokens
        self._scores = [0.0] * (prompt_len - 1) if scores_prompt else []
        self._is_first = True
        self._tokenizer, self._max_num_batched_tokens = tokenizer, max_num_batched_tokens
        self._text = detokenizer.DetokenizerState()
        self._num_tokens = 0
        self.is_finished = False
        for token_id in inherited:
            self._num_tokens += 1
            self._settle(token_id)

    def emit(
        self, drawn: Drawn, *, finish_reason: str, step: Round = NO_DRAFTS, place: int = 1, num_taken: int = 1
    ) -> RequestOutput:
        """The next token; with a finish reason it is the last one. A stop string that it completes makes it that.

        place: of the token among the `num_taken` of its step.
        """
        self._num_tokens += 1
        text = self._settle(drawn.token_id)
        if self._watch.found is not None:
            finish_reason = "stop"
        elif finish_reason:
            text += self._rest()
        if place < num_taken and not finish_reason:
            return self._output(drawn, text, "")
        return self._output(drawn, text, finish_reason, step, place)

    def score(self, start: int, logprobs: Sequence[float]) -> None:
        """Log-probabilities of the prompt tokens from position `start` on."""
        self._scores[start - 1 : start - 1 + len(logprobs)] = logprobs

    def end(self, finish_reason: str) -> RequestOutput:
        """The end of a request that comes without a token."""
        return self._output(Drawn(NO_TOKEN, 0.0), self._rest(), finish_reason)

    def _output(
        self, drawn: Drawn, text: str, finish_reason: str, step: Round = NO_DRAFTS, num_taken: int = 1
    ) -> RequestOutput:
        self.is_finished = bool(finish_reason)
        scores, self._is_first = self._scores if self._is_first else [], False
        fields = {
            "request_id": self._request_id,
            "prompt_len": self._prompt_len,
            "token_id": drawn.token_id,
            "finish_reason": finish_reason,
            "finished": self.is_finished,
            "max_num_batched_tokens": self._max_num_batched_tokens,
            "token_logprobs": drawn.logprob,
            "nextn_logprobs": drawn.draft_logprob,
            "sum_smaller_probs": drawn.smaller_mass,
            "top_logprobs": [logprob for logprob, _ in drawn.top],
            "top_token_ids": [token_id for _, token_id in drawn.top],
            "num_output_tokens": self._num_tokens,
            "prompt_logprobs": scores if drawn.token_id != NO_TOKEN else [],
            "draft_tok": step.num_positions,
            "accept_tok": num_taken,
            "confidence_score": None if step.confidence is None else list(step.confidence),
            "text": text,
        }
        return unchecked(RequestOutput, fields)  # in a third of the time in which a frozen class sets its fields

    def _settle(self, token_id: int) -> str:
        """The text that a token settles."""
        if self._tokenizer is None:
            return ""
        text, self._text = detokenizer.push(self._tokenizer, self._text, [token_id])
        return self._watch.push(text, may_stop=self._num_tokens >= self._min_tokens)[0]

    def _rest(self) -> str:
        """What is left of an unfinished character."""
        if self._tokenizer is None:
            return ""
        text, self._text = detokenizer.flush(self._tokenizer, self._text)
        return self._watch.push(text)[0] + self._watch.flush()


def fold_end(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """The outputs of a whole request, where an end that came without a token is told by its last token.

    A request that has no token at all keeps its one output, with token id -1.
    """
    folded = list(outputs)
    if len(folded) > 1 and folded[-1].token_id == NO_TOKEN:
        end = folded.pop()
        last = folded[-1]
        folded[-1] = dataclasses.replace(
            last, finish_reason=end.finish_reason, finished=True, text=last.text + end.text
        )
    return folded
