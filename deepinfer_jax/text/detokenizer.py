"""Text of a growing id sequence in pieces: no half characters, and the pieces join to the whole.

`tokenizers.decoders.DecodeStream` is not used: it holds all text back while the last byte forms no
character, and has no end-of-stream call, so its pieces need not join to the decoded whole.
"""

import dataclasses
from collections.abc import Sequence

from deepinfer_jax.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A held-back tail has at most 3 bytes and every known token one or more, so the last 4 tokens hold
# the tail and a byte before it; with that byte the tail decodes the same whatever stood earlier.
_WINDOW_KEEP = 4
_WINDOW_MAX = 16


@dataclasses.dataclass(frozen=True)
class DetokenizerState:
    """Ids whose text may still change, and how many characters of it were already emitted."""

    window: tuple[int, ...] = ()
    num_emitted: int = 0


def push(tokenizer: Tokenizer, state: DetokenizerState, token_ids: Sequence[int]) -> tuple[str, DetokenizerState]:
    """The text that the ids settle, and the new state, which holds an unfinished character."""
    known = (i for i in token_ids if tokenizer.token_text(i) is not None)
    window = (*state.window, *known)
    text = tokenizer.decode(window)
    settled = _settled(text)
    delta = settled[state.num_emitted :]
    if len(settled) == len(text):
        return delta, DetokenizerState()
    if len(window) <= _WINDOW_MAX:
        return delta, DetokenizerState(window, len(settled))
    window = window[-_WINDOW_KEEP:]
    return delta, DetokenizerState(window, len(_settled(tokenizer.decode(window))))


def flush(tokenizer: Tokenizer, state: DetokenizerState) -> tuple[str, DetokenizerState]:
    """The text still held back (an unfinished character as U+FFFD), and an empty state."""
    return tokenizer.decode(state.window)[state.num_emitted :], DetokenizerState()


def _settled(text: str) -> str:
    """The text without a last U+FFFD, the only character that later bytes can change."""
    return text[:-1] if text.endswith(_REPLACEMENT) else text
