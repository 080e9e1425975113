"""Prompts with pictures, for engine tests."""

import zlib
from typing import Any

import numpy as np

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.engine import LLMEngine
from tests.engine import driving

IMAGE_ID = 299  # of the tiny model
# Name -> (height, width): spans of 8, 14, 20 and 62 rows; a prefill step has 64.
SIZES = {"A": (84, 84), "B": (126, 126), "C": (60, 300), "D": (600, 900)}

type Parts = list[int | str]  # token ids, and names of pictures


def picture(name: str) -> np.ndarray:
    """Noise of its own, with a gradient."""
    height, width = SIZES[name[0]]
    noise = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 128, (height, width, 3))
    return (noise + np.linspace(0, 127, width).astype(int)[None, :, None]).astype(np.uint8)


def ids_of(parts: Parts) -> list[int]:
    return [IMAGE_ID if isinstance(part, str) else part for part in parts]


def data_of(parts: Parts) -> dict[str, Any] | None:
    images = [picture(part) for part in parts if isinstance(part, str)]
    return {"images": images} if images else None


def ask(engine: LLMEngine, name: str, parts: Parts, params: SamplingParams, **options: Any):
    return driving.add(engine, name, ids_of(parts), params, multi_modal_data=data_of(parts), **options)


def run(engine: LLMEngine, requests: dict[str, tuple[Parts, SamplingParams]]) -> dict[str, driving.Facts]:
    """What requests give that come at once."""
    for name, (parts, params) in requests.items():
        ask(engine, name, parts, params)
    found = driving.drain(engine)
    assert set(driving.reasons(found).values()) == {"length"}
    return driving.facts(found)
