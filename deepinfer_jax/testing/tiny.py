"""The TinyByte model on which the cases run."""

from pathlib import Path

from deepinfer_jax.checkpoint.embedded import write_tiny_byte_model

CASE_SEEDS = (1, 2)  # weight seeds: every case runs on two models


def tiny_byte_model(directory: str | Path, seed: int) -> Path:
    """Writes the checkpoint and tokenizer of the TinyByte model with these weights, and returns its directory."""
    write_tiny_byte_model(directory, seed=seed)
    return Path(directory)
