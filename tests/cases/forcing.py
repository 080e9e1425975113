"""Forcing texts and reading which tokens were allowed next, for the cases about structured output."""

from collections.abc import Sequence
from typing import Any

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.text import tiny_tokenizer

EOS = tiny_tokenizer.EOS_ID
MODEL_VOCAB_SIZE = 301  # two added tokens behind those of TinyByte
ALL_LOGPROBS = 320  # more alternatives than there are tokens: the whole processed row
FLOOR = -9999.0

# What each token spells; tokens that are not here are never part of a grammar.
SPELLED = {
    **{tiny_tokenizer.FIRST_BYTE_ID + byte: bytes([byte]) for byte in range(256)},
    **{tiny_tokenizer.FIRST_MERGED_ID + place: text for place, text in enumerate(tiny_tokenizer.MERGED_TOKENS)},
}


def ids(text: str) -> list[int]:
    """One token for each byte."""
    return tiny_tokenizer.byte_ids(text.encode())


def forced(text: str | Sequence[int], num_more: int = 1, **options: Any) -> SamplingParams:
    """Forces the text, samples `num_more` tokens behind it, and shows the whole row of each."""
    golden = ids(text) if isinstance(text, str) else list(text)
    common = {"golden_token_ids": golden, "max_tokens": len(golden) + num_more, "top_logprobs": ALL_LOGPROBS}
    return SamplingParams(**(common | {"seq_seed": 1} | options))


def allowed(output: RequestOutput) -> set[int]:
    """The tokens that could have come instead of this one, itself among them."""
    row = zip(output.top_token_ids, output.top_logprobs, strict=True)
    return {token_id for token_id, logprob in row if logprob > FLOOR}


def texts(output: RequestOutput) -> set[bytes]:
    """What the allowed tokens spell, EOS as b"EOS"."""
    return {b"EOS" if token_id == EOS else SPELLED[token_id] for token_id in allowed(output)}


def run(llm: LLM, params: Sequence[SamplingParams], prompt: str = "It is:", **options: Any) -> list:
    """The outputs of one prompt under each of these parameters."""
    return llm.generate([prompt] * len(params), list(params), use_tqdm=False, **options)


def next_row(llm: LLM, text: str | Sequence[int], **options: Any) -> RequestOutput:
    """The output behind a forced text."""
    params = forced(text, **options)
    [outputs] = run(llm, [params])
    assert len(outputs) == params.max_tokens, outputs[-1].finish_reason
    return outputs[-1]


def text_of(outputs: Sequence[RequestOutput]) -> str:
    """The text of an answer, without the EOS that ended it."""
    return b"".join(SPELLED[output.token_id] for output in outputs if output.token_id != EOS).decode()
