"""A byte-level BPE tokenizer trained on given texts, with the special tokens of the released one."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from deepinfer_jax.config.model import ModelConfig

# Ids 0, 1, 2, and the last ids of the vocabulary, in their released spellings (spec: checkpoint 5).
FIRST_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
LAST_TOKENS = (
    "<｜System｜>",  # also the drafter's noise token, as in the release
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|EOT|>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜deepseek_image｜>",
)
# Digits in threes, then words, signs and white space as in the release.
_DIGITS = r"\p{N}{1,3}"
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> str:
    """The tokenizer.json of a BPE with exactly `vocab_size` ids, special tokens included.

    Raises ValueError where the texts are too small for that many merges, or the size too small for the bytes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    learned = vocab_size - len(LAST_TOKENS)
    smallest = len(FIRST_TOKENS) + 256 + len(LAST_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is below {smallest}, the bytes and the special tokens; raise it")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_DIGITS), behavior="isolated"),
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=learned,
        special_tokens=list(FIRST_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != learned:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, fewer than {learned}; give more text or lower "
            "vocab_size"
        )
    tokenizer.add_special_tokens(list(LAST_TOKENS))
    return tokenizer.to_str()


def check_special_tokens(config: ModelConfig) -> None:
    """Raises ValueError where a config's special ids are not those that `train_tokenizer` gives."""
    first = config.vocab_size - len(LAST_TOKENS)
    wanted = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": first + LAST_TOKENS.index("<｜deepseek_image｜>"),
        "dspark_noise_token_id": first + LAST_TOKENS.index("<｜System｜>"),
    }
    for field, token_id in wanted.items():
        if getattr(config, field) != token_id:
            raise ValueError(f"config {field}={getattr(config, field)} must be {token_id} for this tokenizer")


def encode_files(file: str | Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids of whole texts, without BOS and EOS; spellings of special tokens in a text stay plain text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
