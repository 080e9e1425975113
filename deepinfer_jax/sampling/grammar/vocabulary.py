"""The bytes behind each token id, which is all that a grammar needs to know of a tokenizer."""

import dataclasses
import functools
from typing import TYPE_CHECKING

from deepinfer_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Bytes of each id. Ids beyond `token_bytes`, blocked ids and ids without bytes are never in a grammar."""

    token_bytes: tuple[bytes, ...]
    blocked_ids: frozenset[int]  # control tokens, whatever their spelling; EOS included
    eos_id: int
    vocab_size: int  # ids of the model, at least len(token_bytes)

    def __post_init__(self) -> None:
        if not 0 <= self.eos_id < len(self.token_bytes):
            raise ValueError(
                f"eos_id={self.eos_id} is not an id of the tokenizer (0..{len(self.token_bytes) - 1}); "
                "give the tokenizer that belongs to the model"
            )
        if self.vocab_size < len(self.token_bytes):
            raise ValueError(
                f"vocab_size={self.vocab_size} is below the tokenizer's {len(self.token_bytes)} ids; "
                "give the tokenizer that belongs to the model"
            )

    @property
    def mask_words(self) -> int:
        """32-bit words of one mask row."""
        return -(-self.vocab_size // 32)

    @functools.cached_property
    def backend(self) -> "llguidance.LLTokenizer":
        """The backend's view of the vocabulary, built at the first use (about a second for 129,280 ids)."""
        import llguidance

        slices = [*dict.fromkeys([*llguidance.LLTokenizer.json_slices(), *llguidance.LLTokenizer.general_slices()])]
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_BackendView(self)), slices=slices)


def vocabulary_of(tokenizer: Tokenizer, *, vocab_size: int) -> Vocabulary:
    """The vocabulary of a byte-level tokenizer for a model with `vocab_size` ids.

    Every added token (control tokens, special or not) is blocked: a constrained text never holds one.
    """
    added = tokenizer.backend.get_added_tokens_decoder()
    byte_of = _byte_of_letter()
    token_bytes: list[bytes] = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token_id)
        if text is None:
            token_bytes.append(b"")
        elif token_id in added:
            token_bytes.append(text.encode())
        else:
            unknown = [letter for letter in text if letter not in byte_of]
            if unknown:
                raise ValueError(
                    f"token {token_id} of {tokenizer.path} is {text!r}, which is not spelled in the byte-level "
                    f"alphabet (first odd letter {unknown[0]!r}); structured output needs a byte-level tokenizer"
                )
            token_bytes.append(bytes(byte_of[letter] for letter in text))
    return Vocabulary(
        token_bytes=tuple(token_bytes),
        blocked_ids=frozenset(added) | {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id},
        eos_id=tokenizer.eos_id,
        vocab_size=vocab_size,
    )


class _BackendView:
    """The attributes that the backend reads once, and a greedy encoder that it uses for hints only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_id
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.blocked_ids)
        names = {token_id: b"<%d>" % token_id for token_id in vocabulary.blocked_ids}
        self.tokens = [names.get(token_id, data) for token_id, data in enumerate(vocabulary.token_bytes)]
        self._id_of_byte = {
            data[0]: token_id
            for token_id, data in enumerate(vocabulary.token_bytes)
            if len(data) == 1 and token_id not in vocabulary.blocked_ids
        }

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._id_of_byte[byte] for byte in data if byte in self._id_of_byte]


def _byte_of_letter() -> dict[str, int]:
    """Byte of each letter of the byte-level alphabet: printable Latin-1 is itself, the rest follows from U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}
