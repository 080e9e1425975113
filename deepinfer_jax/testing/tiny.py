"""The TinyByte model on which the cases run, and an engine over it that compiles few steps."""

import os
from pathlib import Path
from typing import Any

from deepinfer_jax.checkpoint.embedded import write_tiny_byte_model
from deepinfer_jax.engine.llm import LLM

CASE_SEEDS = (1, 2)  # weight seeds: every case runs on two models
# Engines of these sizes share their compiled steps, one of 8 rows and one of 64, within a process.
MAX_MODEL_LEN = 512  # tokens
MAX_NUM_SEQS = 4


def tiny_byte_model(directory: str | Path, seed: int) -> Path:
    """Writes the checkpoint and tokenizer of the TinyByte model with these weights, and returns its directory."""
    write_tiny_byte_model(directory, seed=seed)
    return Path(directory)


def tiny_llm(model: str | os.PathLike[str], **options: Any) -> LLM:
    """An engine of the shared sizes for a TinyByte model; it returns token objects unless told otherwise."""
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "decode_sequence": False}
    return LLM(model, **(sizes | options))
