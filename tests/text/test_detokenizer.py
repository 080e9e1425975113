import dataclasses
import random
from pathlib import Path

import pytest

from deepinfer_jax.config.released import load_config
from deepinfer_jax.text import detokenizer, tiny_tokenizer
from deepinfer_jax.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny_byte")
    tiny_tokenizer.write_tiny_byte(directory)
    config = load_config(DATA / "tiny_a")
    return load_tokenizer(directory, config=dataclasses.replace(config, tokenizer_compatibility="native"))


def run_stream(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    """Delta of each chunk, then of the flush."""
    state = detokenizer.DetokenizerState()
    deltas: list[str] = []
    for chunk in chunks:
        delta, state = detokenizer.push(tokenizer, state, chunk)
        deltas.append(delta)
    delta, state = detokenizer.flush(tokenizer, state)
    assert state == detokenizer.DetokenizerState()
    return [*deltas, delta]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "é",
        "€",
        "😀",
        "a€b😀é",
        "日本語のテキスト",
        "\ufffd",
        "x\ufffd",
        "\ufffdy\ufffd\ufffd",
    ],
)
def test_pieces_of_text_join_and_hold_no_half_character(tokenizer, text):
    for ids in (tokenizer.encode_bare(text), tiny_tokenizer.byte_ids(text.encode())):
        deltas = run_stream(tokenizer, [[i] for i in ids])
        assert "".join(deltas) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas)
            assert deltas[-1] == ""


def test_a_character_comes_with_its_last_byte(tokenizer):
    chunks = [[i] for i in tiny_tokenizer.byte_ids("a😀b".encode())]
    assert run_stream(tokenizer, chunks) == ["a", "", "", "", "😀", "b", ""]


def test_flush_gives_an_unfinished_character_as_replacement(tokenizer):
    chunks = [[i] for i in tiny_tokenizer.byte_ids(b"a\xe2\x82")]
    assert run_stream(tokenizer, chunks) == ["a", "", "", "\ufffd"]


def test_special_tokens_stay_in_the_text(tokenizer):
    bos, eos, _ = tiny_tokenizer.SPECIAL_TOKENS
    assert run_stream(tokenizer, [[0], [68], [1]]) == [bos, "A", eos, ""]


def test_ids_without_a_token_give_nothing(tokenizer):
    first, second = tiny_tokenizer.byte_ids(b"\xc3\xa9")
    assert run_stream(tokenizer, [[first], [319], [318] * 50, [second]]) == ["", "", "", "é", ""]


def test_pieces_of_random_ids_join_to_the_decoded_whole(tokenizer, seed_from_name):
    rng = random.Random(seed_from_name)
    # Bytes that start, continue, or cannot be part of a character, alone and mixed with anything.
    pools = [
        range(320),
        tiny_tokenizer.byte_ids(bytes(range(0x80, 0x100))),
        tiny_tokenizer.byte_ids(bytes(range(0x80, 0xC0))),
        tiny_tokenizer.byte_ids(b"\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbd\xff"),
        [*tiny_tokenizer.byte_ids(b"\xed\xa0\x80\xf4\x90a"), 0, 1, 319],
    ]
    for trial in range(400):
        ids = rng.choices(pools[trial % len(pools)], k=rng.randrange(120))
        chunks: list[list[int]] = []
        rest = ids
        while rest:
            size = rng.choice((1, 1, 1, 2, 6, 40))
            chunks.append(rest[:size])
            rest = rest[size:]
        assert "".join(run_stream(tokenizer, chunks)) == tokenizer.decode(ids)


def test_every_prefix_is_emitted_up_to_one_open_character(tokenizer, seed_from_name):
    rng = random.Random(seed_from_name)
    ids = rng.choices(tiny_tokenizer.byte_ids(bytes(range(0x70, 0x100))), k=300)
    state, emitted = detokenizer.DetokenizerState(), ""
    for end, token_id in enumerate(ids, start=1):
        delta, state = detokenizer.push(tokenizer, state, [token_id])
        emitted += delta
        whole = tokenizer.decode(ids[:end])
        assert whole.startswith(emitted)
        assert len(whole) - len(emitted) <= 1


def test_state_stays_small_behind_bytes_that_form_no_character(tokenizer):
    state = detokenizer.DetokenizerState()
    for token_id in tiny_tokenizer.byte_ids(b"\x80" * 1000):
        _, state = detokenizer.push(tokenizer, state, [token_id])
        assert len(state.window) <= 16


def test_a_state_can_be_continued_twice(tokenizer):
    start, *_ = tiny_tokenizer.byte_ids(b"\xc3")
    _, state = detokenizer.push(tokenizer, detokenizer.DetokenizerState(), [start])
    for last in (b"\xa9", b"\xa8"):
        delta, _ = detokenizer.push(tokenizer, state, tiny_tokenizer.byte_ids(last))
        assert delta == (b"\xc3" + last).decode()
