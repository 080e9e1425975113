"""Engram on the host: token map, primes, offsets, multipliers, and the NumPy hash (spec: engram 2).

The device hash is compared with `hash_rows`. Nothing here is cached: a caller keeps what it builds.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64

from deepinfer_jax.text.tokenizer import load_backend, read_tokenizer_json

if TYPE_CHECKING:
    import tokenizers

_LAYER_SEED = 10_007
_INT64_MAX = 2**63 - 1
_SPACE_MARK = "\ue000"  # stands for a text that is one space while the ends are stripped


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConstants:
    """Integers of the hash, exact; the first index of each is the Engram layer in config order."""

    primes: tuple[tuple[tuple[int, ...], ...], ...]  # [layer][n-gram size - 2][head]
    offsets: tuple[tuple[int, ...], ...]  # [layer][column], column = (size - 2) * heads + head
    multipliers: tuple[tuple[int, ...], ...]  # [layer][look-back], look-back 0 is the current token

    @property
    def num_rows(self) -> tuple[int, ...]:
        """Table rows that each layer addresses; a stored table may have more."""
        return tuple(sum(map(sum, layer)) for layer in self.primes)


def token_map(
    path: str | Path, *, compressed_vocab_size: int, vocab_size: int | None = None
) -> Int32[np.ndarray, " V"]:
    """Compressed id of every token id, checked against the configured number of compressed ids.

    `vocab_size` is the model's when it exceeds the file's; ids without a token share one class.
    The check is never skipped: with another size every multiplier, hence the whole table, is wrong.
    """
    compressed = build_token_map(path, vocab_size=vocab_size)
    found = int(compressed.max(initial=-1)) + 1
    if found != compressed_vocab_size:
        raise ValueError(
            f"the token map of {path} has {found} compressed ids, the config says "
            f"engram_compressed_vocab_size={compressed_vocab_size}; give the tokenizer.json that "
            "belongs to the checkpoint, or check the installed version of the package tokenizers"
        )
    return compressed


def build_token_map(path: str | Path, *, vocab_size: int | None = None) -> Int32[np.ndarray, " V"]:
    """Compressed id of every token id, not compared with any config: for making a new model."""
    file, _ = read_tokenizer_json(path)
    backend = load_backend(file)
    file_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    size = file_size if vocab_size is None else vocab_size
    if size < file_size:
        raise ValueError(
            f"{file} has {file_size} ids, vocab_size={size} is smaller; give the tokenizer that belongs to the model"
        )
    texts = backend.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
    normalizer = _normalizer()
    first_seen: dict[str, int] = {}
    compressed = np.empty(size, np.int32)
    for token_id, text in enumerate(texts):
        raw = backend.id_to_token(token_id) if "\ufffd" in text else None
        key = raw if raw is not None else normalizer.normalize_str(text) or text
        compressed[token_id] = first_seen.setdefault(key, len(first_seen))
    return compressed


def engram_constants(
    *,
    layer_ids: Sequence[int],
    max_ngram: int,
    num_heads: int,
    vocab_base: int,
    compressed_vocab_size: int,
) -> EngramConstants:
    """Primes, offsets and multipliers of the Engram layers with these ids."""
    primes = bucket_primes(len(layer_ids), max_ngram, num_heads, vocab_base)
    return EngramConstants(
        primes=primes,
        offsets=tuple(_exclusive_sums(itertools.chain(*layer)) for layer in primes),
        multipliers=tuple(layer_multipliers(i, max_ngram, compressed_vocab_size) for i in layer_ids),
    )


def bucket_primes(
    num_layers: int, max_ngram: int, num_heads: int, vocab_base: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes [layer][n-gram size - 2][head] from `vocab_base` upwards, none used twice."""
    source = (n for n in itertools.count(max(vocab_base, 2)) if _is_prime(n))
    return tuple(
        tuple(tuple(itertools.islice(source, num_heads)) for _ in range(max_ngram - 1)) for _ in range(num_layers)
    )


def layer_multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> tuple[int, ...]:
    """Odd multipliers [look-back] of one layer; a product with a compressed id stays below 2^63."""
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    draws = np.random.default_rng(_LAYER_SEED * layer_id).integers(0, bound, size=max_ngram, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def hash_rows(
    token_ids: Int[np.ndarray, "*B T"],
    compressed: Int[np.ndarray, " V"],
    dead_mask: Bool[np.ndarray, "*B T"] | None = None,
    *,
    constants: EngramConstants,
    pad_token_id: int,
) -> Int64[np.ndarray, "*B T layers columns"]:
    """Table rows of every position of whole sequences (position 0 is the first token of a request).

    `compressed` is the token map; with ids that are compressed already it is `np.arange`.
    Look-back latches: from the sequence start or a dead token (image span) on, older tokens count
    as the pad token. `dead_mask` None means that no token is dead.
    """
    classes = compressed.astype(np.int64)[token_ids]
    pad = np.int64(compressed[pad_token_id])
    dead = np.zeros(token_ids.shape, bool) if dead_mask is None else dead_mask
    max_ngram = len(constants.multipliers[0])
    keys: list[np.ndarray] = []
    is_blocked = np.zeros(token_ids.shape, bool)
    for back in range(max_ngram):
        is_blocked = is_blocked | _shifted(dead, back, fill=True)
        keys.append(np.where(is_blocked, pad, _shifted(classes, back, fill=pad)))
    layers = zip(constants.primes, constants.offsets, constants.multipliers, strict=True)
    return np.stack([_layer_rows(keys, *layer) for layer in layers], axis=-2)


def _layer_rows(
    keys: list[np.ndarray],
    primes: tuple[tuple[int, ...], ...],
    offsets: tuple[int, ...],
    multipliers: tuple[int, ...],
) -> np.ndarray:
    """Rows [..., columns] of one layer: all n-gram sizes share one running XOR."""
    mixed = keys[0] * np.int64(multipliers[0])
    columns: list[np.ndarray] = []
    for key, multiplier, size_primes in zip(keys[1:], multipliers[1:], primes, strict=True):
        mixed = mixed ^ (key * np.int64(multiplier))
        columns.extend(mixed % np.int64(prime) for prime in size_primes)
    return np.stack(columns, axis=-1) + np.asarray(offsets, np.int64)


def _shifted(values: np.ndarray, back: int, *, fill: object) -> np.ndarray:
    """Value of `back` positions earlier along the last axis, `fill` before the start."""
    length = values.shape[-1]
    head = np.full((*values.shape[:-1], min(back, length)), fill, values.dtype)
    return np.concatenate([head, values[..., : max(length - back, 0)]], axis=-1)


def _normalizer() -> "tokenizers.normalizers.Normalizer":
    """The normal form of a token's text; the library's Unicode tables decide, not Python's."""
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _SPACE_MARK),
            normalizers.Strip(),
            normalizers.Replace(_SPACE_MARK, " "),
        ]
    )


def _exclusive_sums(values: "itertools.chain[int]") -> tuple[int, ...]:
    return tuple(itertools.accumulate(values, initial=0))[:-1]


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    divisors = itertools.chain((2,), itertools.count(3, 2))
    return all(number % d for d in itertools.takewhile(lambda d: d * d <= number, divisors))
