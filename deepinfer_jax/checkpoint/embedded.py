"""The model that is used when none is named: a small one trained on Python code, shipped in the released format."""

from pathlib import Path

from deepinfer_jax.config.places import shipped_model

NAME = "tiny-code"


def embedded_model() -> Path:
    """The directory of the embedded model; `MODEL_CARD.md` in it says what it is and what it can do."""
    return shipped_model(NAME)
