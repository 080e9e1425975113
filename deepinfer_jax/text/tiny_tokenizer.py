"""The TinyByte tokenizer: BOS, EOS, PAD, the 256 bytes, and 40 merged tokens, as a tokenizer.json.

For tiny models with `tokenizer_compatibility` "native": every text round-trips, a forced text is
easy to spell by hand, and some tokens hold parts of a character.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
FIRST_BYTE_ID = 3
# The released spellings, so that texts cannot contain them by accident.
SPECIAL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
# Each is merged from two tokens that exist before it, in this order of priority.
_PAIRS: tuple[tuple[bytes, bytes], ...] = (
    *((b" " * n, b" " * n) for n in (1, 2, 4, 8)),
    (b"{", b'"'),
    (b'"', b":"),
    (b" ", b'"'),
    (b"\xf0", b"\x9f"),  # U+1F600, first half
    (b"\x98", b"\x80"),  # U+1F600, second half
    (b"\xc3", b"\xa9"),  # e with acute accent
    (b"\xe2", b"\x82"),  # euro sign, two of three bytes
    *((b"%d" % (n // 10), b"%d" % (n % 10)) for n in range(10, 39)),
)
MERGED_TOKENS: tuple[bytes, ...] = tuple(first + second for first, second in _PAIRS)
FIRST_MERGED_ID = FIRST_BYTE_ID + 256
VOCAB_SIZE = FIRST_MERGED_ID + len(MERGED_TOKENS)


def byte_ids(data: bytes) -> list[int]:
    """Ids of single bytes, also where `data` is no UTF-8 text or a merged token would fit."""
    return [FIRST_BYTE_ID + byte for byte in data]


def write_tiny_byte(directory: str | Path, *, extra_tokens: Sequence[str] = ()) -> Path:
    """Writes tokenizer.json and tokenizer_config.json and returns the path of the first.

    `extra_tokens` are special tokens with the ids from `VOCAB_SIZE` on.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "tokenizer.json"
    file.write_text(_tokenizer_json(extra_tokens), encoding="utf-8")
    bos, eos, pad = SPECIAL_TOKENS
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return file


def _tokenizer_json(extra_tokens: Sequence[str]) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = _byte_names()
    pairs = [(_name(a, names), _name(b, names)) for a, b in _PAIRS]
    tokens = [*SPECIAL_TOKENS, *names, *(a + b for a, b in pairs)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL_TOKENS, *extra_tokens]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer.to_str(pretty=True) + "\n"


def _byte_names() -> list[str]:
    """The 256 byte-level letters in byte order, as the library writes them.

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(b) if b in shown else chr(0x100 + hidden.index(b)) for b in range(256)]


def _name(data: bytes, names: Sequence[str]) -> str:
    return "".join(names[byte] for byte in data)
