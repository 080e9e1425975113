"""Strings to token ids and back, through the `tokenizers` library and one of two policies.

`release` is the policy of the released checkpoints: fixed ids and sizes, checked at load. `native`
takes what the model config says. Both put BOS in front of plain text and keep special tokens when
decoding (spec: interface 5.3, checkpoint 5).
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from deepinfer_jax.config.model import ModelConfig

if TYPE_CHECKING:
    import tokenizers

Compatibility = Literal["release", "native"]

RELEASE_VOCAB_SIZE = 129_280
RELEASE_IMAGE_ID = 129_264
# Config field -> (id, spelling) that the release policy demands.
RELEASE_TOKENS: dict[str, tuple[int, str]] = {
    "bos_token_id": (0, "<｜begin▁of▁sentence｜>"),
    "eos_token_id": (1, "<｜end▁of▁sentence｜>"),
    "pad_token_id": (2, "<｜▁pad▁｜>"),
}
_NATIVE_ADVICE = (
    'give the released tokenizer.json, or set "tokenizer_compatibility": "native" in config.json '
    "if this tokenizer belongs to the model"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A byte-level tokenizer whose ids fit the model it was loaded for."""

    path: Path  # the tokenizer.json
    compatibility: Compatibility
    vocab_size: int  # largest id of the file plus 1; the model's vocabulary may be larger
    bos_id: int
    eos_id: int
    pad_id: int
    image_id: int | None  # None when the file has no token with the model's image id
    backend: "tokenizers.Tokenizer" = dataclasses.field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text with BOS in front; spellings of added tokens become those tokens.

        Text that already starts with the spelling of BOS (a rendered prompt) gets no second one.
        """
        ids = self.encode_bare(text)
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def encode_bare(self, text: str) -> list[int]:
        """Ids of the text alone: nothing is put in front or behind."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character "
                f"{error.start}, which is no Unicode text; remove it or join it to its pair"
            ) from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included.

        Bytes that form no character become U+FFFD; ids that the file does not define give nothing.
        """
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> str | None:
        """Vocabulary string of an id (byte-level alphabet form), None for an unknown id."""
        return self.backend.id_to_token(token_id)

    def token_id(self, token_text: str) -> int | None:
        """Id of a vocabulary string, None for an unknown one."""
        return self.backend.token_to_id(token_text)


def load_tokenizer(path: str | Path, *, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a model directory (or a tokenizer.json), checked against the model config.

    Raises ValueError when the file is absent or unusable, or does not fit the config's
    `tokenizer_compatibility`.
    """
    file, raw = read_tokenizer_json(path)
    backend = load_backend(file)
    decoder = (raw.get("decoder") or {}).get("type")
    if decoder != "ByteLevel":
        raise ValueError(
            f"{file}: decoder type {decoder!r} is not supported; it must be 'ByteLevel', "
            "the kind of the released tokenizer"
        )
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if config.tokenizer_compatibility == "release":
        _check_release(file, backend, vocab_size, config)
    else:
        _check_native(file, vocab_size, config)
    has_image = backend.id_to_token(config.image_token_id) is not None
    return Tokenizer(
        path=file,
        compatibility=cast(Compatibility, config.tokenizer_compatibility),
        vocab_size=vocab_size,
        bos_id=config.bos_token_id,
        eos_id=config.eos_token_id,
        pad_id=config.pad_token_id,
        image_id=config.image_token_id if has_image else None,
        backend=backend,
    )


def read_tokenizer_json(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Path and parsed content of the tokenizer.json at a path or in the directory at that path."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    advice = "give a local model directory (or file) with the checkpoint's tokenizer.json"
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer {file}: {error.strerror}; {advice}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a JSON text: {error}; {advice}") from error
    model = raw.get("model") if isinstance(raw, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise ValueError(f"{file} has no model with a vocab, so it is no tokenizer.json; {advice}")
    return file, raw


def load_backend(file: Path) -> "tokenizers.Tokenizer":
    """The library's tokenizer for a file that `read_tokenizer_json` accepted."""
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(file))


def _check_release(file: Path, backend: "tokenizers.Tokenizer", vocab_size: int, config: ModelConfig) -> None:
    problems: list[str] = []
    for field, (token_id, spelling) in RELEASE_TOKENS.items():
        configured = getattr(config, field)
        if configured != token_id:
            problems.append(f"config {field}={configured} must be {token_id}")
        found = backend.id_to_token(token_id)
        if found != spelling:
            problems.append(f"id {token_id} is {found!r} and must be {spelling!r}")
    if vocab_size != RELEASE_VOCAB_SIZE:
        problems.append(f"the vocabulary has {vocab_size} ids and must have {RELEASE_VOCAB_SIZE}")
    if config.vocab_size < RELEASE_VOCAB_SIZE:
        problems.append(f"config vocab_size={config.vocab_size} is below {RELEASE_VOCAB_SIZE}")
    if config.image_token_id != RELEASE_IMAGE_ID:
        problems.append(f"config image_token_id={config.image_token_id} must be {RELEASE_IMAGE_ID}")
    image = backend.id_to_token(RELEASE_IMAGE_ID)
    if image is None or "image" not in image:  # the V4 and V4.1 files spell it differently
        problems.append(f"id {RELEASE_IMAGE_ID} is {image!r} and must be the image token")
    if problems:
        raise ValueError(
            f"{file} does not fit tokenizer_compatibility='release': {'; '.join(problems)}; {_NATIVE_ADVICE}"
        )


def _check_native(file: Path, vocab_size: int, config: ModelConfig) -> None:
    if vocab_size > config.vocab_size:
        raise ValueError(
            f"{file} has {vocab_size} ids, the model has vocab_size={config.vocab_size}; "
            "give the tokenizer that belongs to the model"
        )
    for field in RELEASE_TOKENS:
        token_id = getattr(config, field)
        if token_id >= vocab_size:
            raise ValueError(
                f"config {field}={token_id} is not an id of {file} (0..{vocab_size - 1}); "
                "correct the id in config.json or give the tokenizer that belongs to the model"
            )
