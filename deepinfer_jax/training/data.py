"""Token streams for training: one file that can be carried to another machine, and rows drawn from it."""

import dataclasses
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt16

from deepinfer_jax.training.tokenizer import encode_files, train_tokenizer

_MAX_VOCAB = 2**16  # ids are kept as uint16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Encoded texts, each followed by EOS, and the tokenizer that made them."""

    train: UInt16[np.ndarray, " N"]
    held_out: UInt16[np.ndarray, " M"]
    held_out_bytes: int  # UTF-8 bytes of the held-out texts
    tokenizer: str  # tokenizer.json


def encode_corpus(
    train: Mapping[str, str], held_out: Mapping[str, str], directory: str | Path, *, vocab_size: int, eos_id: int
) -> TrainingData:
    """A tokenizer trained on the training texts (written to `directory`), and both parts encoded with it."""
    if vocab_size > _MAX_VOCAB:
        raise ValueError(f"vocab_size={vocab_size} is above {_MAX_VOCAB}, which ids of two bytes can tell apart")
    file = Path(directory) / "tokenizer.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(train_tokenizer(train.values(), vocab_size=vocab_size), encoding="utf-8")
    parts = [_stream(encode_files(file, list(part.values())), eos_id) for part in (train, held_out)]
    return TrainingData(
        train=parts[0],
        held_out=parts[1],
        held_out_bytes=sum(len(text.encode()) for text in held_out.values()),
        tokenizer=file.read_text(encoding="utf-8"),
    )


def save_data(data: TrainingData, file: str | Path) -> None:
    """Writes one compressed npz file."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        file,
        train=data.train,
        held_out=data.held_out,
        held_out_bytes=np.int64(data.held_out_bytes),
        tokenizer=np.frombuffer(data.tokenizer.encode(), np.uint8),
    )


def load_data(file: str | Path) -> TrainingData:
    """What `save_data` wrote. Raises ValueError where the file is absent."""
    if not Path(file).is_file():
        raise ValueError(f"{file} does not exist; make it with `scripts/train_tiny.py --stage data`")
    with np.load(file) as arrays:
        return TrainingData(
            train=arrays["train"],
            held_out=arrays["held_out"],
            held_out_bytes=int(arrays["held_out_bytes"]),
            tokenizer=arrays["tokenizer"].tobytes().decode(),
        )


def draw_rows(
    stream: UInt16[np.ndarray, " N"], *, step: int, seed: int, num_rows: int, row_len: int, bos_id: int
) -> Int32[np.ndarray, "B R1"]:
    """Rows of BOS and `row_len` tokens from random places of the stream: a function of seed and step alone."""
    if len(stream) < row_len:
        raise ValueError(f"the stream has {len(stream)} tokens, fewer than a row of {row_len}; give more text")
    starts = np.random.default_rng([seed, step]).integers(0, len(stream) - row_len + 1, num_rows)
    return _rows_at(stream, starts, row_len=row_len, bos_id=bos_id)


def whole_rows(
    stream: UInt16[np.ndarray, " N"], *, row_len: int, bos_id: int, eos_id: int
) -> tuple[Int32[np.ndarray, "B R1"], Int32[np.ndarray, " B"]]:
    """The stream in order as rows of BOS and `row_len` tokens, and how many tokens of each row are its own.

    The last row is filled up with EOS.
    """
    num_rows = -(-len(stream) // row_len)
    padded = np.concatenate([stream, np.full(num_rows * row_len - len(stream), eos_id, stream.dtype)])
    rows = _rows_at(padded, np.arange(num_rows) * row_len, row_len=row_len, bos_id=bos_id)
    counts = np.minimum(row_len, len(stream) - np.arange(num_rows) * row_len).astype(np.int32)
    return rows, counts


def _rows_at(stream: np.ndarray, starts: np.ndarray, *, row_len: int, bos_id: int) -> Int32[np.ndarray, "B R1"]:
    rows = stream[starts[:, None] + np.arange(row_len)[None, :]].astype(np.int32)
    return np.concatenate([np.full((len(starts), 1), bos_id, np.int32), rows], axis=1)


def _stream(texts: Sequence[Sequence[int]], eos_id: int) -> UInt16[np.ndarray, " N"]:
    return np.concatenate([np.asarray([*ids, eos_id], np.uint16) for ids in texts])


def xz_bits_per_byte(texts: Mapping[str, str]) -> float:
    """What `xz -9e` makes of the texts in one file: the number to be better than."""
    joined = "".join(texts.values()).encode()
    return 8 * len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)) / len(joined)
