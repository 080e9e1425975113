"""How many drafts the network would accept: measured on texts that it wrote itself (spec: dspark 6.5)."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from deepinfer_jax.model.params import Params
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.training.draft import markov_logits, run_blocks
from deepinfer_jax.training.forward import run_sequences
from deepinfer_jax.training.numerics import TrainingConfig

_REPEAT_LEN = 4


@pytree_dataclass
class Records:
    """Raw confidences of drafts and how many of each block were accepted: what calibration reads."""

    confidence: Float32[Array, "M G"]
    accepted: Int[Array, " M"]


def continue_greedily(
    params: Params, tokens: Int[Array, "B R"], prompt_len: int, *, config: TrainingConfig
) -> Int[Array, "B R"]:
    """The sequences with everything behind their first `prompt_len` tokens replaced by the likeliest tokens.

    Runs whole sequences for each token: simple, and quick enough for a few hundred tokens on an accelerator.
    """

    def step(position: Array, tokens: Array) -> Array:
        output = run_sequences(params, tokens, config=config, strength=jnp.float32(1.0))
        best = jnp.argmax(lax.dynamic_index_in_dim(output.logits, position - 1, axis=1, keepdims=False), axis=-1)
        return lax.dynamic_update_index_in_dim(tokens, best.astype(tokens.dtype), position, axis=1)

    return lax.fori_loop(prompt_len, tokens.shape[1], step, tokens)


def record_acceptance(
    params: Params, tokens: Int[Array, "B R"], anchors: Int[Array, "B A"], *, config: TrainingConfig
) -> Records:
    """Greedy drafts behind each anchor against the tokens that follow it, as full verification at temperature 0 does.

    tokens: written greedily by the same network from before the first anchor on; an anchor is below R - G.
    """
    full, size = jnp.float32(1.0), config.model.dspark_block_size
    target = run_sequences(params, tokens, config=config, strength=full)
    blocks = run_blocks(params, target.main_hidden, tokens, anchors, config=config, strength=full)
    sequence = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None, None]
    following = tokens[sequence, anchors[..., None] + jnp.arange(size + 1, dtype=jnp.int32)[None, None]].reshape(
        -1, size + 1
    )
    before, drafts, confidences = following[:, 0], [], []
    for place in range(size):
        at = slice(place, place + 1)
        logits, confidence = markov_logits(params, blocks.base[:, at], blocks.hidden[:, at], before[:, None])
        before = jnp.argmax(logits[:, 0], axis=-1).astype(tokens.dtype)
        drafts.append(before)
        confidences.append(confidence[:, 0])
    is_right = jnp.stack(drafts, axis=1) == following[:, 1:]
    accepted = jnp.sum(jnp.cumprod(is_right.astype(jnp.int32), axis=1), axis=1)
    return Records(confidence=jnp.stack(confidences, axis=1), accepted=accepted)


def round_starts(accepted: Int[np.ndarray, "B A"]) -> Bool[np.ndarray, "B A"]:
    """At which of A consecutive anchors a request whose first round is at the first one begins its rounds.

    A round gives one token more than it accepts. Anchors inside a long round accept much as well, so that the mean over
    all anchors is larger than the one over rounds, which is what an engine gives in a step.
    """
    starts = np.zeros(accepted.shape, bool)
    for row, lengths in zip(starts, accepted, strict=True):
        place = 0
        while place < len(lengths):
            row[place] = True
            place += 1 + int(lengths[place])
    return starts


def repeated_share(tokens: Int[np.ndarray, " R"]) -> float:
    """Which share of a text's runs of 4 tokens has occurred before in it: a text in a loop accepts any draft."""
    runs = np.lib.stride_tricks.sliding_window_view(tokens, _REPEAT_LEN)
    return 1.0 - len(np.unique(runs, axis=0)) / len(runs)
