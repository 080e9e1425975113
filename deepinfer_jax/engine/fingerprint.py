"""The bit fingerprint of a request: one short text that is equal where every bit of a result is.

It can be logged beside a result, and compared later without the result: with another batch, engine or process.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

FORMAT = b"deepinfer_jax bits 1"
NUM_DIGITS = 32  # hexadecimal: 128 bits


@runtime_checkable
class TokenOutput(Protocol):
    """What a fingerprint reads of an output; `RequestOutput` is one."""

    @property
    def token_id(self) -> int:
        """The token, -1 for an end without one."""
        ...

    @property
    def token_logprobs(self) -> float:
        """Its log-probability, a float32 value."""
        ...

    @property
    def finish_reason(self) -> str:
        """Why the request ended with it, "" if it did not."""
        ...


def bit_fingerprint(outputs: Sequence[TokenOutput]) -> str:
    """The fingerprint of one request's outputs, in order (see `fingerprint_of`).

    An end that came without a token counts for its reason only, so that `fold_end` changes nothing.
    Alternatives and texts are not hashed.
    """
    kept = [output for output in outputs if output.token_id >= 0]
    return fingerprint_of(
        [output.token_id for output in kept],
        [output.token_logprobs for output in kept],
        outputs[-1].finish_reason if outputs else "",
    )


def fingerprint_of(token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str) -> str:
    """32 hexadecimal digits of a SHA-256, over the number of tokens, their ids (int64), the bits of their
    log-probabilities (float32), both little endian, and the finish reason.

    Raises ValueError unless there are as many ids as log-probabilities.
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} token ids and {len(logprobs)} logprobs must be equally many")
    digest = hashlib.sha256(FORMAT + len(token_ids).to_bytes(8, "little"))
    digest.update(np.asarray(token_ids, "<i8").tobytes() + np.asarray(logprobs, "<f4").tobytes())
    digest.update(finish_reason.encode())
    return digest.hexdigest()[:NUM_DIGITS]
