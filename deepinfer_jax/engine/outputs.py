"""What a caller gets: one object for each token, and their summary (spec: interface 5.5)."""

import dataclasses
import itertools
from collections.abc import Sequence

from deepinfer_jax.scheduler.request import Request
from deepinfer_jax.text import detokenizer
from deepinfer_jax.text.tokenizer import Tokenizer

NOT_COMPUTED = -1.0  # sum_smaller_probs without DEEPINFER_COMPUTE_SUM_SMALLER_PROBS
NO_DRAFT = 1.0  # nextn_logprobs of a token that no draft proposed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One output token of a request."""

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

    @classmethod
    def from_outputs(cls, outputs: Sequence[RequestOutput]) -> "CompletionOutput":
        """The summary of one request's outputs, in order."""
        return cls(
            token_ids=tuple(output.token_id for output in outputs),
            text="".join(output.text for output in outputs),
            cumulative_logprob=sum(output.token_logprobs for output in outputs),
            finish_reason=outputs[-1].finish_reason if outputs else "",
        )


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One drawn token with its log-probabilities."""

    token_id: int
    logprob: float
    top: tuple[tuple[float, int], ...] = ()  # (log-probability, token id), best first


def request_outputs(
    request: Request,
    drawn: Sequence[Drawn],
    *,
    request_id: str,
    tokenizer: Tokenizer | None,
    max_num_batched_tokens: int,
) -> list[RequestOutput]:
    """The outputs of a finished request; without a tokenizer their texts are empty."""
    texts = _texts(tokenizer, [one.token_id for one in drawn]) if tokenizer else itertools.repeat("")
    last = len(drawn)
    return [
        RequestOutput(
            request_id=request_id,
            prompt_len=len(request.prompt),
            token_id=one.token_id,
            finish_reason=request.finish_reason if number == last else "",
            finished=number == last,
            max_num_batched_tokens=max_num_batched_tokens,
            token_logprobs=one.logprob,
            top_logprobs=[logprob for logprob, _ in one.top],
            top_token_ids=[token_id for _, token_id in one.top],
            num_output_tokens=number,
            text=text,
        )
        for number, (one, text) in enumerate(zip(drawn, texts, strict=False), start=1)
    ]


def _texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text that each token settles; an unfinished character at the end goes to the last one."""
    texts: list[str] = []
    state = detokenizer.DetokenizerState()
    for token_id in token_ids:
        text, state = detokenizer.push(tokenizer, state, [token_id])
        texts.append(text)
    rest, _ = detokenizer.flush(tokenizer, state)
    return [*texts[:-1], texts[-1] + rest]
