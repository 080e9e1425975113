"""Bounded replay: mask equals compact bit for bit, and compact really computes fewer rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import StepBatch, make_batch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State
from tests.model.running import assert_same_bits, compiled_forward, new_state, padded

SLOT, PROMPT_LEN, KEEP = 1, 47, 20


def prompt(vocab_size: int) -> list[int]:
    return np.random.default_rng(9).integers(3, vocab_size, PROMPT_LEN).tolist()


def tail_batch(tokens: list[int], start: int, pages: np.ndarray, *, mode: str, end: int) -> StepBatch:
    """One chunk with the tail fixed by the whole prompt; compact lists the chunk's rows inside the tail."""
    batch = padded(make_batch([tokens], [start], [SLOT], pages))
    first = max(0, end - KEEP)
    if mode == "off":
        return batch
    batch = dataclasses.replace(batch, tail_starts=jnp.full_like(batch.positions, first))
    if mode == "mask":
        return batch
    rows = [i for i in range(len(tokens)) if start + i >= first]
    rows += [-1] * (-len(rows) % 8 or (0 if rows else 8))
    return dataclasses.replace(batch, tail_rows=jnp.asarray(rows, jnp.int32))


def run(params: Params, config: RuntimeConfig, mode: str, chunk: int) -> tuple[np.ndarray, State]:
    """Logits of the prompt's last row and of three decoded rows, and the state."""
    state, pages = new_state(config)
    tokens, step, kept = prompt(config.model.vocab_size), compiled_forward(config), []
    for start in range(0, PROMPT_LEN, chunk):
        batch = tail_batch(tokens[start : start + chunk], start, pages, mode=mode, end=PROMPT_LEN)
        logits, state = step(params, state, batch)
    kept.append(np.asarray(logits)[0])
    for i in range(3):
        batch = tail_batch([5 + i], PROMPT_LEN + i, pages, mode=mode if mode == "off" else "mask", end=PROMPT_LEN)
        logits, state = step(params, state, batch)
        kept.append(np.asarray(logits)[0])
    return np.stack(kept), state


def live_state(state: State, config: RuntimeConfig) -> State:
    """The state with the ring rows that nobody may read any more put to zero."""
    ring_rows = [p % config.ring_len for p in range(PROMPT_LEN + 3 - config.ring_len, PROMPT_LEN + 3)]
    window = jax.tree.map(lambda a: np.asarray(a)[:, SLOT][:, ring_rows], state.window)
    return dataclasses.replace(state, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["q", "fp32"])
def test_mask_equals_compact(tiny_a: tuple[Params, RuntimeConfig], numerics: str):
    params, base = tiny_a
    config = RuntimeConfig(model=base.model, numerics=numerics)
    mask, mask_state = run(params, config, "mask", 64)
    compact, compact_state = run(params, config, "compact", 64)
    assert_same_bits(compact, mask)
    assert_same_bits(live_state(compact_state, config), live_state(mask_state, config))
    chunked, chunked_state = run(params, config, "compact", 8)
    assert_same_bits(chunked, mask)
    assert_same_bits(live_state(chunked_state, config), live_state(mask_state, config))
    off, _ = run(params, config, "off", 64)
    assert (off != mask).any(), "a tail of 20 rows is not exact for this model"


def test_decoder_layers_see_tail_rows_only(tiny_a: tuple[Params, RuntimeConfig]):
    params, config = tiny_a
    state, pages = new_state(config)
    batch = tail_batch(prompt(config.model.vocab_size), 0, pages, mode="compact", end=PROMPT_LEN)
    shapes = jax.eval_shape(
        lambda p, s, b: forward(p, s, b, config=config, capture=("layers.*.attn_in",))[0].stages, params, state, batch
    )
    rows = [shapes[f"layers.{layer}.attn_in"].shape[0] for layer in range(config.model.num_hidden_layers)]
    assert rows[:4] == [48] * 4
    assert rows[4:] == [24] * 4


def test_exact_tail_equals_off(tiny_a: tuple[Params, RuntimeConfig]):
    """W + (decoder layers - 1) (W - 1) rows lose nothing; the quantisers are off, as they could hide a lost row."""
    params, base = tiny_a
    config = RuntimeConfig(model=base.model, numerics="fp32_noqdq")
    window, decoders = base.model.sliding_window, 4
    assert window + (decoders - 1) * (window - 1) == 29
    step, tokens = compiled_forward(config), prompt(base.model.vocab_size)

    def last_row(first: int) -> np.ndarray:
        state, pages = new_state(config)
        batch = padded(make_batch([tokens], [0], [SLOT], pages))
        batch = dataclasses.replace(batch, tail_starts=jnp.full_like(batch.positions, first))
        return np.asarray(step(params, state, batch)[0])[0]

    whole = last_row(0)
    assert_same_bits(last_row(PROMPT_LEN - 29), whole)
    assert (last_row(PROMPT_LEN - 28) != whole).any()


def test_forcing_needs_every_row(tiny_a: tuple[Params, RuntimeConfig]):
    params, config = tiny_a
    state, pages = new_state(config)
    batch = tail_batch(prompt(config.model.vocab_size), 0, pages, mode="compact", end=PROMPT_LEN)
    forced = {"layers.0.attn_in": jnp.zeros((PROMPT_LEN + 1, config.model.hidden_size))}
    with pytest.raises(ValueError, match="tail_rows"):
        forward(params, state, batch, config=config, forced_selection=forced)
