"""Drafts in tests: compiled functions, and recordings as one step for all of their drafts."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.draft import DraftOutput, draft_block, write_context
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import DraftState, init_draft_state
from deepinfer_jax.testing.fixtures import file_name, read_arrays
from tests.model.running import COMPILER_OPTIONS

TINY_A = Path(__file__).parents[1] / "data" / "tiny_a"


@functools.cache
def compiled_write(config: RuntimeConfig) -> Callable[..., DraftState]:
    step = functools.partial(write_context, config=config)
    return jax.jit(step, donate_argnums=(1,), compiler_options=COMPILER_OPTIONS)


@functools.cache
def compiled_draft(config: RuntimeConfig, capture: tuple[str, ...] = ()) -> Callable[..., DraftOutput]:
    return jax.jit(functools.partial(draft_block, config=config, capture=capture), compiler_options=COMPILER_OPTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Drafts of one decoding, recorded by another implementation; draft n follows position starts[n]."""

    hidden: np.ndarray  # main_hidden of every position from 0 on
    starts: np.ndarray
    tokens: list[int]  # the prompt and what was decoded
    anchors: np.ndarray
    ids: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray

    @property
    def num_drafts(self) -> int:
        return len(self.starts)


def recording(mode: str) -> Recording:
    arrays = read_arrays(TINY_A / file_name("dspark", mode))
    return Recording(
        hidden=np.concatenate([arrays["prefill_main_hidden"][0], arrays["main_hidden"][0]]),
        starts=arrays["start_pos"].astype(np.int32),
        tokens=[*arrays["prompt_ids"][0].tolist(), *arrays["input_token"][0].tolist()],
        anchors=arrays["next_token"][0].astype(np.int32),
        ids=arrays["draft_ids"][0, :, 1:].astype(np.int32),
        logits=arrays["draft_logits"][0],
        confidence=arrays["confidence"][0],
    )


def written(params: Params, recorded: Recording, *, config: RuntimeConfig) -> DraftState:
    """A state whose slot n holds the context in front of draft n."""
    positions = np.concatenate([np.arange(start + 1, dtype=np.int32) for start in recorded.starts])
    slots = np.repeat(np.arange(recorded.num_drafts, dtype=np.int32), recorded.starts + 1)
    state = init_draft_state(config, num_slots=recorded.num_drafts)
    hidden = jnp.asarray(recorded.hidden[positions])
    return compiled_write(config)(params, state, hidden, jnp.asarray(positions), jnp.asarray(slots))


def drafts(
    params: Params, state: DraftState, recorded: Recording, which: list[int], *, config: RuntimeConfig
) -> DraftOutput:
    """The recorded drafts with these numbers, in this order; -1 is padding."""
    at, is_there = np.maximum(which, 0), np.asarray(which) >= 0
    anchors = np.where(is_there, recorded.anchors[at], 0)
    positions = np.where(is_there, recorded.starts[at] + 1, 0)
    rows = [jnp.asarray(row, jnp.int32) for row in (anchors, positions, np.asarray(which))]
    return compiled_draft(config)(params, state, *rows)
