"""Running a model chunk by chunk in tests: one compiled shape for each padded row count."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import StepBatch, make_batch, pad_rows
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State, init_state

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@functools.cache
def compiled_forward(config: RuntimeConfig) -> Callable[..., tuple[jax.Array, State]]:
    """`forward` without stages under jit, the state donated."""

    def logits_and_state(params: Params, state: State, batch: StepBatch) -> tuple[jax.Array, State]:
        output, state = forward(params, state, batch, config=config)
        return output.logits, state

    return jax.jit(logits_and_state, donate_argnums=(1,), compiler_options=COMPILER_OPTIONS)


def padded(batch: StepBatch, *, multiple: int = 8) -> StepBatch:
    """Rows and logit rows padded, so that batches of unlike sizes share one compiled shape."""
    missing = -batch.logit_rows.shape[0] % multiple
    logit_rows = jnp.pad(batch.logit_rows, (0, missing), constant_values=-1)
    return dataclasses.replace(pad_rows(batch, multiple=multiple), logit_rows=logit_rows)


def new_state(config: RuntimeConfig, *, num_slots: int = 3, pages_per_slot: int = 4) -> tuple[State, np.ndarray]:
    """A state and a page table that gives every slot its own pages, deliberately out of order."""
    num_pages = num_slots * pages_per_slot
    pages = np.random.default_rng(5).permutation(num_pages).reshape(num_slots, pages_per_slot)
    return init_state(config, num_slots=num_slots, num_pages=num_pages), pages.astype(np.int32)


def run_chunks(
    params: Params, tokens: Sequence[int], chunks: Sequence[int], *, config: RuntimeConfig, slot: int = 1
) -> tuple[np.ndarray, State]:
    """Logits of every row of one request computed in the given chunk lengths, and the final state."""
    state, pages = new_state(config)
    step, rows, start = compiled_forward(config), [], 0
    for length in chunks:
        batch = make_batch([list(tokens[start : start + length])], [start], [slot], pages, logits="all")
        logits, state = step(params, state, padded(batch))
        rows.append(np.asarray(logits)[:length])
        start += length
    assert start == len(tokens)
    return np.concatenate(rows), state


def assert_same_bits(got: object, expected: object) -> None:
    """Equal trees, bit for bit, naming the first leaf that differs."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        where = np.argwhere(np.atleast_1d(a != b))[:1].tolist() if a.shape == b.shape else (a.shape, b.shape)
        assert same, f"{jax.tree_util.keystr(path)} differs, first at {where}"
