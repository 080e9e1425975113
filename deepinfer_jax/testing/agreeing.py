"""A tiny model whose drafter agrees with it in part: half of its drafts are kept, so that both outcomes can be seen.

A random drafter is right once in a vocabulary. Here the sublayers of a random target are quietened, so that the next
token follows mostly from the newest one, and the drafter's Markov head holds as much of that as its rank allows; its
stages keep their random weights and disturb it a little.
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.load import TOKENIZER_NAME, load_model
from deepinfer_jax.checkpoint.write import write_released
from deepinfer_jax.model.params import Params
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.testing.tiny import tiny_byte_model

QUIETER = 4  # binary orders by which the outputs of the target's sublayers are smaller
STAGES_SHARE = 0.1  # of the drafter's stages in its logits


def write_agreeing_model(directory: str | Path, *, seed: int) -> Path:
    """Writes the checkpoint and tokenizer of a TinyByte model with such a drafter, and returns the directory."""
    target = Path(directory)
    with tempfile.TemporaryDirectory() as source:
        tiny_byte_model(source, seed=seed)
        params, config = load_model(source, with_draft=True, with_vision=True, progress=False)
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
        tokenizer = Path(source) / TOKENIZER_NAME
        write_released(agreeing(params), config, target, tokenizer=tokenizer)
    return target


def agreeing(params: Params) -> Params:
    """The parameters with a quieter target, and with a drafter that knows what follows a token alone."""
    draft = params.draft
    assert draft is not None, "load the parameters with with_draft=True"
    moe, engram = params.moe, params.engram
    experts = dataclasses.replace(moe.experts, w2=_quieter(moe.experts.w2))
    shared = dataclasses.replace(moe.shared, w2=_quieter(moe.shared.w2))
    params = dataclasses.replace(
        params,
        attention=dataclasses.replace(params.attention, wo_b=_quieter(params.attention.wo_b)),
        moe=dataclasses.replace(moe, experts=experts, shared=shared),
        engram=dataclasses.replace(engram, wkv=_quieter(engram.wkv)),
    )
    embed, head, norm = (np.asarray(a, np.float64) for a in (params.embed, params.head, params.norm))
    hidden = embed / np.sqrt(np.mean(embed**2, axis=1, keepdims=True)) * norm
    left, values, right = np.linalg.svd(hidden @ head.T)
    rank = draft.markov.embed.shape[1]
    root = np.sqrt(values[:rank])
    markov = dataclasses.replace(
        draft.markov,
        embed=_like(draft.markov.embed, left[:, :rank] * root),
        head=_like(draft.markov.head, right[:rank].T * root),
    )
    stages_norm = _like(draft.norm, STAGES_SHARE * np.asarray(draft.norm, np.float64))
    return dataclasses.replace(params, draft=dataclasses.replace(draft, markov=markov, norm=stages_norm))


def _quieter(weights: ScaledArray) -> ScaledArray:
    assert weights.scale is not None
    scale = np.maximum(np.asarray(weights.scale, np.int64) - QUIETER, 1).astype(np.uint8)
    return dataclasses.replace(weights, scale=jnp.asarray(scale))


def _like(leaf: Any, values: np.ndarray) -> Any:
    return jnp.asarray(values.astype(leaf.dtype))
