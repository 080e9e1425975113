import dataclasses
import json
import random
from pathlib import Path

import pytest

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.text import tiny_tokenizer
from deepinfer_jax.text.tokenizer import RELEASE_TOKENS, Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"
CONFIG = load_config(DATA / "tiny_a")
NATIVE = dataclasses.replace(CONFIG, tokenizer_compatibility="native")
RELEASE = dataclasses.replace(CONFIG, vocab_size=129_280, image_token_id=129_264)


@pytest.fixture(scope="module")
def tiny_byte(tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny_byte")
    tiny_tokenizer.write_tiny_byte(directory)
    return load_tokenizer(directory, config=NATIVE)


def write_release_like(directory: Path, *, changes: dict[int, str], size: int = 129_280) -> Path:
    """A tokenizer.json with the released size and fixed ids, and fillers elsewhere."""
    spellings = dict(RELEASE_TOKENS.values())
    spellings |= {129_264: "<｜deepseek_image｜>"} | changes
    vocab = {spellings.get(i, f"t{i}"): i for i in range(size)}
    raw = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(raw))
    return file


def test_tiny_byte_has_the_agreed_layout(tiny_byte):
    assert tiny_byte.vocab_size == tiny_tokenizer.VOCAB_SIZE == 299
    assert (tiny_byte.bos_id, tiny_byte.eos_id, tiny_byte.pad_id) == (0, 1, 2)
    for byte in range(256):
        text = tiny_byte.decode([3 + byte])
        assert text == bytes([byte]).decode("utf-8", "replace")
    for position, token in enumerate(tiny_tokenizer.MERGED_TOKENS):
        assert tiny_byte.decode([259 + position]) == token.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "token",
    [b'{"', b'":', b' "', b"  ", b" " * 4, b" " * 16, "é".encode(), b"10", b"38"],
    ids=repr,
)
def test_tiny_byte_uses_its_merged_tokens(tiny_byte, token):
    want = tiny_tokenizer.FIRST_MERGED_ID + tiny_tokenizer.MERGED_TOKENS.index(token)
    assert tiny_byte.encode_bare(token.decode()) == [want]


def test_tiny_byte_splits_characters_into_parts(tiny_byte):
    merged = tiny_tokenizer.MERGED_TOKENS
    halves = [259 + merged.index(half) for half in (b"\xf0\x9f", b"\x98\x80")]
    assert tiny_byte.encode_bare("😀") == halves
    euro = [259 + merged.index(b"\xe2\x82"), *tiny_tokenizer.byte_ids(b"\xac")]
    assert tiny_byte.encode_bare("€") == euro


def test_tiny_byte_round_trips_every_text(tiny_byte, seed_from_name):
    rng = random.Random(seed_from_name)
    letters = [chr(c) for c in range(0x300)] + list('{":} 0123é€😀日本\u2028\ufeff\U0010ffff')
    for _ in range(300):
        text = "".join(rng.choices(letters, k=rng.randrange(60)))
        assert tiny_byte.decode(tiny_byte.encode_bare(text)) == text


def test_tiny_byte_decodes_every_byte_string(tiny_byte, seed_from_name):
    rng = random.Random(seed_from_name)
    for _ in range(300):
        data = rng.randbytes(rng.randrange(40))
        want = data.decode("utf-8", "replace")
        assert tiny_byte.decode(tiny_tokenizer.byte_ids(data)) == want


@pytest.mark.parametrize("text, want", [("", [0]), ("A", [0, 68]), ("A\nA", [0, 68, 13, 68])])
def test_plain_text_gets_bos(tiny_byte, text, want):
    assert tiny_byte.encode(text) == want


def test_text_that_spells_bos_gets_no_second_one(tiny_byte):
    text = tiny_tokenizer.SPECIAL_TOKENS[0] + "A"
    assert tiny_byte.encode(text) == [0, 68]
    assert tiny_byte.decode([0, 68, 1]) == text + tiny_tokenizer.SPECIAL_TOKENS[1]


def test_lone_surrogate_is_refused(tiny_byte):
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D\) at character 2"):
        tiny_byte.encode("ab\ud83d")


def test_native_takes_the_ids_of_the_config(tmp_path):
    tiny_tokenizer.write_tiny_byte(tmp_path, extra_tokens=["<s>"])
    config = dataclasses.replace(NATIVE, bos_token_id=299, eos_token_id=2, pad_token_id=1)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", config=config)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (299, 2, 1)
    assert tokenizer.encode("A") == [299, 68]
    assert tokenizer.token_id("<s>") == 299
    assert tokenizer.token_text(300) is None


def test_native_refuses_a_vocabulary_above_the_models():
    config = dataclasses.replace(NATIVE, vocab_size=319, engram_pad_token_id=2, dspark_noise_token_id=4)
    with pytest.raises(ValueError, match="320 ids, the model has vocab_size=319"):
        load_tokenizer(DATA / "tiny_a", config=config)


def test_native_refuses_an_id_that_the_file_lacks(tmp_path):
    tiny_tokenizer.write_tiny_byte(tmp_path)
    config = dataclasses.replace(NATIVE, eos_token_id=299)
    with pytest.raises(ValueError, match=r"eos_token_id=299 is not an id of .*\(0\.\.298\)"):
        load_tokenizer(tmp_path, config=config)


def test_release_refuses_a_foreign_tokenizer_and_names_the_way_out(tmp_path):
    assert CONFIG.tokenizer_compatibility == "release"
    with pytest.raises(ValueError, match="'<bos>' and must be") as error:
        load_tokenizer(DATA / "tiny_a", config=CONFIG)
    assert "has 320 ids and must have 129280" in str(error.value)
    assert '"tokenizer_compatibility": "native"' in str(error.value)


def test_release_accepts_the_released_layout(tmp_path):
    tokenizer = load_tokenizer(write_release_like(tmp_path, changes={}), config=RELEASE)
    assert tokenizer.compatibility == "release"
    assert tokenizer.vocab_size == 129_280
    assert tokenizer.image_id == 129_264
    assert tokenizer.encode("") == [0]


RELEASE_FAULTS: dict[str, tuple[dict[int, str], int, ModelConfig, str]] = {
    "eos": ({1: "</s>"}, 129_280, RELEASE, "id 1 is '</s>' and must be"),
    "image": ({129_264: "<x>"}, 129_280, RELEASE, "must be the image token"),
    "size": ({}, 129_279, RELEASE, "129279 ids and must have 129280"),
    "config-pad": (
        {},
        129_280,
        dataclasses.replace(RELEASE, pad_token_id=1),
        "pad_token_id=1 must be 2",
    ),
    "config-image": (
        {},
        129_280,
        dataclasses.replace(RELEASE, image_token_id=7),
        "image_token_id=7 must be 129264",
    ),
}


@pytest.mark.parametrize("fault", RELEASE_FAULTS)
def test_release_refuses_each_deviation(tmp_path, fault):
    changes, size, config, message = RELEASE_FAULTS[fault]
    file = write_release_like(tmp_path, changes=changes, size=size)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(file, config=config)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot read the tokenizer .*tokenizer.json: No such file"),
        ("{", "tokenizer.json is not a JSON text"),
        ("[]", "tokenizer.json has no model with a vocab"),
        ('{"model": {"type": "BPE"}}', "tokenizer.json has no model with a vocab"),
    ],
    ids=["absent", "cut", "list", "no-vocab"],
)
def test_unusable_file_is_named_with_advice(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path, config=NATIVE)
    assert "give a local model directory" in str(error.value)


def test_other_decoder_is_refused(tmp_path):
    file = tiny_tokenizer.write_tiny_byte(tmp_path)
    raw = json.loads(file.read_text())
    raw["decoder"] = {"type": "Fuse"}
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="decoder type 'Fuse' is not supported"):
        load_tokenizer(file, config=NATIVE)
