"""Which keys a row attends to, as model/attention.py lists them: recorded window sets and brute force.

Queries are zero, so every key that is seen weighs the same and the output tells the set. The recorded DSpark sets
(ring slots, then draft rows) belong to the draft module, which is not part of the text backbone.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.attention import attend
from deepinfer_jax.model.batch import StepBatch, derive_rows
from deepinfer_jax.model.sources import ring_places
from deepinfer_jax.model.state import State, init_state
from deepinfer_jax.model.variants import all_layers
from deepinfer_jax.ops import paged
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.testing import compare

MODEL = load_config(Path(__file__).parent.parent / "data" / "tiny_a" / "config.json")
CONFIG = RuntimeConfig(model=MODEL, numerics="fp32_noqdq", page_tokens=16)
WINDOW, WIDTH, HEADS = MODEL.sliding_window, MODEL.head_dim, MODEL.num_attention_heads
WINDOW_LAYER, RATIO_1_LAYER, RATIO_2_LAYER = 0, 4, 1
NUM_PAGES = 20
# The mean of up to 12 float32 values.
MEAN_REL_L2 = 3e-7
NO_SINK = -1e30


@functools.partial(jax.jit, static_argnames="layer", compiler_options={"xla_allow_excess_precision": False})
def attend_rows(state: State, kv: jax.Array, entries: jax.Array, start: jax.Array, slots: jax.Array, *, layer: int):
    """Outputs [T, K] of zero queries for rows from `start` on, and the state with the ring written."""
    count = kv.shape[0]
    batch = StepBatch(
        tokens=jnp.zeros(count, jnp.int32),
        positions=start + jnp.arange(count, dtype=jnp.int32),
        slots=slots,
        page_table=jnp.tile(jnp.arange(NUM_PAGES, dtype=jnp.int32)[None], (2, 1)),
        logit_rows=jnp.zeros(0, jnp.int32),
    )
    rows = derive_rows(batch)
    new_kv = ScaledArray(payload=kv, scale=None)
    out = attend(
        jnp.zeros((count, HEADS, WIDTH)),
        new_kv,
        state,
        entries,
        jnp.full(HEADS, NO_SINK),
        rows,
        all_layers(MODEL)[layer],
        config=CONFIG,
    )
    window = paged.put_rows(state.window, new_kv, layer, *ring_places(rows, CONFIG.ring_len))
    return out[:, 0], dataclasses.replace(state, window=window)


def attend_chunk(state: State, kv: np.ndarray, entries: np.ndarray, start: int, slot: int, *, layer: int):
    """`attend_rows` for one chunk of a request, filled up with padding rows to whole tiles as a step is."""
    count, fill = len(kv), -len(kv) % CONFIG.row_tile
    slots = np.concatenate([np.full(count, slot, np.int32), np.full(fill, -1, np.int32)])
    kv, entries = np.pad(kv, ((0, fill), (0, 0))), np.pad(entries, ((0, fill), (0, 0)), constant_values=-1)
    out, state = attend_rows(state, kv, entries, jnp.int32(start), slots, layer=layer)
    return np.asarray(out)[:count], state


def one_hot(positions: np.ndarray) -> np.ndarray:
    return np.eye(WIDTH, dtype=np.float32)[positions]


def no_entries(count: int) -> np.ndarray:
    return np.full((count, MODEL.index_topk), -1, np.int32)


def run(kv: np.ndarray, chunks: list[int], *, entries: np.ndarray | None = None, layer: int = WINDOW_LAYER):
    """The outputs of a whole sequence in chunks of these lengths."""
    state = init_state(CONFIG, num_slots=2, num_pages=NUM_PAGES)
    entries = no_entries(len(kv)) if entries is None else entries
    outputs, start = [], 0
    for length in chunks:
        part = slice(start, start + length)
        out, state = attend_chunk(state, kv[part], entries[part], start, 1, layer=layer)
        outputs.append(out)
        start += length
    return np.concatenate(outputs)


@pytest.mark.parametrize("length", [1, 5, 8, 13])
def test_recorded_prefill_windows_are_met(component, length: int):
    recorded = component("window_idxs")[f"prefill_len{length}"]
    seen = run(one_hot(np.arange(length)), [length]) > 0
    for row in range(length):
        assert set(np.flatnonzero(seen[row])) == set(recorded[row][recorded[row] >= 0])


@pytest.mark.parametrize("position", [1, 3, 7, 8, 9, 20])
def test_recorded_decode_windows_are_met(component, position: int):
    """Recorded are slots of a ring of 8; the slot's newest position is the one that is seen."""
    recorded = component("window_idxs")[f"decode_pos{position}"][0]
    seen = run(one_hot(np.arange(position + 1)), [position, 1])[-1] > 0
    newest = {position - (position - slot) % WINDOW for slot in recorded[recorded >= 0]}
    assert set(np.flatnonzero(seen)) == newest


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 129, 301])
def test_window_holds_the_last_positions_at_every_position_and_chunking(chunk: int):
    """Random latents at 0..300: the output is the mean over max(0, t - W + 1)..t, wherever a key was kept."""
    kv = np.random.default_rng(0).standard_normal((301, WIDTH), np.float32)
    chunks = [chunk] * (301 // chunk) + ([301 % chunk] if 301 % chunk else [])
    want = np.stack([kv[max(0, t - WINDOW + 1) : t + 1].astype(np.float64).mean(axis=0) for t in range(301)])
    compare.assert_close(run(kv, chunks), want, rel_l2=MEAN_REL_L2)


@pytest.mark.parametrize("layer, ratio", [(RATIO_2_LAYER, 2), (RATIO_1_LAYER, 1)])
def test_window_and_selected_entries_share_one_softmax(layer: int, ratio: int):
    """Selected entries come from the request's pages of the layer's own cache; -1 entries count nothing."""
    count, rng = 40, np.random.default_rng(ratio)
    kv, main = (rng.standard_normal((size, WIDTH), np.float32) for size in (count, count // ratio))
    entries = no_entries(count)
    for t in range(count):
        visible = (t + 1) // ratio
        chosen = np.sort(rng.permutation(visible)[: MODEL.index_topk - t % 2])
        entries[t, : len(chosen)] = chosen
    state = init_state(CONFIG, num_slots=2, num_pages=NUM_PAGES)
    which = {2: 0, 1: 1}[ratio]
    cache = state.main_kv[which].payload
    page_entries = CONFIG.page_tokens // ratio
    places = np.arange(len(main))
    ordinal = all_layers(MODEL)[layer].cache_ordinal
    cache = cache.at[ordinal, places // page_entries, places % page_entries].set(main)
    caches = list(state.main_kv)
    caches[which] = ScaledArray(payload=cache, scale=None)
    state = dataclasses.replace(state, main_kv=tuple(caches))
    out, _ = attend_chunk(state, kv, entries, 0, 0, layer=layer)
    want = []
    for t in range(count):
        keys = [kv[max(0, t - WINDOW + 1) : t + 1], main[entries[t][entries[t] >= 0]]]
        want.append(np.concatenate(keys).astype(np.float64).mean(axis=0))
    compare.assert_close(out, np.stack(want), rel_l2=MEAN_REL_L2)


def test_padding_rows_attend_to_nothing():
    state = init_state(CONFIG, num_slots=2, num_pages=NUM_PAGES)
    kv = one_hot(np.arange(8))
    out, after = attend_chunk(state, kv, no_entries(8), 0, -1, layer=WINDOW_LAYER)
    compare.assert_bitwise(out, np.zeros((8, WIDTH), np.float32))
    compare.assert_bitwise(after, state)
