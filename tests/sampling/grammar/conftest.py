"""A TinyByte vocabulary and the few moves that every test of a grammar needs."""

import random
from typing import Any

import numpy as np
import pytest

from deepinfer_jax.sampling.grammar import (
    Grammar,
    GrammarError,
    Matcher,
    Vocabulary,
    compile_grammar,
    parse_so_args,
)
from deepinfer_jax.text import tiny_tokenizer

EOS = tiny_tokenizer.EOS_ID
# More ids than the tokenizer has, and no multiple of 32, as a padded model has them.
MODEL_VOCAB_SIZE = tiny_tokenizer.VOCAB_SIZE + 30


class Tools:
    """Compiles on one vocabulary, forces texts and reads masks."""

    eos = EOS

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, schema_type: str, schema: Any, *, whitespace: int = 8, **more: Any) -> Grammar:
        request = parse_so_args({"schema_type": schema_type, "schema": schema, **more})
        return compile_grammar(request, self.vocabulary, whitespace=whitespace)

    def ids(self, text: str | bytes) -> list[int]:
        return tiny_tokenizer.byte_ids(text if isinstance(text, bytes) else text.encode())

    def force(self, grammar: Grammar, text: str | bytes) -> Matcher:
        matcher = grammar.matcher()
        for token_id in self.ids(text):
            matcher.advance(token_id)
        return matcher

    def allowed(self, matcher: Matcher) -> list[int]:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()

    def texts(self, matcher: Matcher) -> set[bytes]:
        """Bytes of the allowed tokens, EOS as b"EOS"."""
        return {b"EOS" if i == EOS else self.vocabulary.token_bytes[i] for i in self.allowed(matcher)}

    def accepts(self, grammar: Grammar, text: str | bytes) -> bool:
        """True when the whole text may be emitted and EOS may follow."""
        try:
            return EOS in self.allowed(self.force(grammar, text))
        except GrammarError:
            return False

    def walk(self, grammar: Grammar, rng: random.Random, *, max_tokens: int) -> bytes | None:
        """One answer by uniform choice among the allowed tokens, None when EOS did not come in time."""
        matcher, out = grammar.matcher(), bytearray()
        for _ in range(max_tokens):
            allowed = self.allowed(matcher)
            assert allowed, f"no token is allowed after {bytes(out)!r}"
            token_id = rng.choice(allowed)
            matcher.advance(token_id)
            if token_id == EOS:
                return bytes(out)
            out += self.vocabulary.token_bytes[token_id]
        return None


@pytest.fixture(scope="session")
def tools() -> Tools:
    merged = tiny_tokenizer.MERGED_TOKENS
    vocabulary = Vocabulary(
        token_bytes=(b"<bos>", b"<eos>", b"<pad>", *(bytes([byte]) for byte in range(256)), *merged),
        blocked_ids=frozenset({tiny_tokenizer.BOS_ID, EOS, tiny_tokenizer.PAD_ID}),
        eos_id=EOS,
        vocab_size=MODEL_VOCAB_SIZE,
    )
    return Tools(vocabulary)
