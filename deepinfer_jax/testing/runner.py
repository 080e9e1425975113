"""Runs the product's forward for comparisons: sequences into steps, stages and caches back out."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config.roles import LayerRole, layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import RATIOS, State, init_state
from deepinfer_jax.ops.quant import ScaledArray, dequantize

ALL_STAGES = ("*",)
ROW_MULTIPLE = 64  # steps are padded to multiples of this: few compiled shapes, whatever the prompts
DECODE_MULTIPLE = 8
SLOT_MULTIPLE = 8
# One entry for each closed group of `ratio` positions; a forward has one row for each position, of which the last
# position of a group is the entry.
ENTRY_STAGES = frozenset({"compress_latent", "compress_kv", "index_k"})
MASK_STAGES = frozenset({"candidate_mask"})

Rows = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Runner:
    """What a forward is compiled for: fixed sizes, so that few programs are made."""

    params: Params
    config: RuntimeConfig
    num_rows: int  # of a prefill step
    num_slots: int
    pages_per_slot: int
    step: Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one request at consecutive positions, and its state's slot."""

    slot: int
    start: int
    tokens: tuple[int, ...]

    @property
    def positions(self) -> range:
        """Absolute positions of the tokens."""
        return range(self.start, self.start + len(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ran:
    """One step's stages for each chunk, logits included, and the state after it."""

    stages: list[dict[str, np.ndarray]]
    state: State


def make_runner(params: Params, config: RuntimeConfig, *, num_rows: int, num_slots: int, max_len: int) -> Runner:
    """A runner for prefill steps of `num_rows` rows and requests of `max_len` tokens."""
    step = jax.jit(
        functools.partial(forward, config=config),
        static_argnames=("capture",),
        compiler_options={"xla_allow_excess_precision": False},
    )
    return Runner(
        params=params,
        config=config,
        num_rows=_round_up(num_rows, ROW_MULTIPLE),
        num_slots=_round_up(num_slots, SLOT_MULTIPLE),
        pages_per_slot=_round_up(max_len, config.page_tokens) // config.page_tokens,
        step=step,
    )


def empty_state(runner: Runner) -> State:
    """The state before the first token of every request."""
    return init_state(runner.config, num_slots=runner.num_slots, num_pages=runner.num_slots * runner.pages_per_slot)


def run(
    runner: Runner,
    state: State,
    chunks: Sequence[Chunk],
    *,
    forced: Sequence[Rows] = (),
    capture: tuple[str, ...] = ALL_STAGES,
    num_rows: int | None = None,
) -> Ran:
    """One forward over the chunks, every row's logits wanted, padded to `num_rows` (a prefill's, where not given).

    forced: for each chunk, stage name -> its rows (or entries), or no rows at all. All chunks' names are forced, with
    zeros for the rows of a chunk that gives no value.
    """
    num_rows = num_rows or runner.num_rows
    batch = _make_batch(runner, chunks, num_rows)
    output, state = runner.step(
        runner.params, state, batch, capture=capture, forced_selection=_pack(runner, chunks, forced, num_rows)
    )
    values = {name: np.asarray(value) for name, value in output.stages.items()}
    values["logits"] = np.asarray(output.logits)
    values |= _router_choices(runner, values)
    stages, first = [], 0
    for chunk in chunks:
        rows = slice(first, first + len(chunk.tokens))
        stages.append({name: _entries_of(runner, name, value[rows], chunk) for name, value in values.items()})
        first = rows.stop
    return Ran(stages=stages, state=state)


def window_rows(runner: Runner, state: State, layer: int, slot: int, length: int) -> np.ndarray:
    """Live window KV of a request of `length` tokens, oldest first."""
    positions = np.arange(max(0, length - runner.config.model.sliding_window), length)
    return _take(state.window, (layer, slot, positions % runner.config.ring_len), runner)


def cache_entries(runner: Runner, state: State, name: str, layer: int, slot: int, length: int) -> np.ndarray:
    """Every entry of a request of `length` tokens in the main KV ("compress_kv") or index K cache of a source."""
    role = _role(runner, layer)
    caches = {"compress_kv": state.main_kv, "index_k": state.index_k}[name]
    entries = np.arange(length // role.ratio)
    page_entries = runner.config.page_tokens // role.ratio
    pages = slot * runner.pages_per_slot + entries // page_entries
    return _take(caches[RATIOS.index(role.ratio)], (role.cache_ordinal, pages, entries % page_entries), runner)


def tail_rows(runner: Runner, state: State, name: str, layer: int, slot: int, length: int) -> np.ndarray:
    """Live rows of a compressor ("kv_state" or "score_state"): those of the positions of the open group."""
    role = _role(runner, layer)
    positions = np.arange(length - length % role.ratio, length)
    rows = np.asarray(state.tails[role.cache_ordinal, slot])[positions % runner.config.tail_len]
    return np.split(rows, 2, axis=-1)[("kv_state", "score_state").index(name)]


def ratio_of(runner: Runner, name: str) -> int:
    """Compression ratio of the layer of a stage name."""
    return _role(runner, int(name.split(".")[1])).ratio


def _role(runner: Runner, layer: int) -> LayerRole:
    return layer_roles(runner.config.model)[layer]


def _take(cache: ScaledArray, index: tuple[Any, ...], runner: Runner) -> np.ndarray:
    scale = None if cache.scale is None else cache.scale[index]
    rows = dataclasses.replace(cache, payload=cache.payload[index], scale=scale)
    return np.asarray(dequantize(rows, jnp.dtype(runner.config.activation_dtype)))


def _make_batch(runner: Runner, chunks: Sequence[Chunk], num_rows: int) -> StepBatch:
    """The chunks one after the other, then padding rows."""
    tokens, positions = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    slots, logit_rows = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
    first = 0
    for chunk in chunks:
        rows = slice(first, first + len(chunk.tokens))
        tokens[rows], positions[rows], slots[rows] = chunk.tokens, chunk.positions, chunk.slot
        first = rows.stop
    logit_rows[:first] = np.arange(first)
    table = np.arange(runner.num_slots * runner.pages_per_slot, dtype=np.int32)
    return StepBatch(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        slots=jnp.asarray(slots),
        page_table=jnp.asarray(table.reshape(runner.num_slots, runner.pages_per_slot)),
        logit_rows=jnp.asarray(logit_rows),
    )


def _pack(runner: Runner, chunks: Sequence[Chunk], forced: Sequence[Rows], num_rows: int) -> dict[str, jax.Array]:
    """The forced values of all chunks as rows of the step, in the widths of the step."""
    packed: dict[str, np.ndarray] = {}
    first = 0
    for chunk, rows in zip(chunks, forced or [{}] * len(chunks), strict=True):
        for name, value in rows.items():
            value = _widen(runner, name, value)
            if name not in packed:
                packed[name] = np.zeros((num_rows, *value.shape[1:]), value.dtype)
            if len(value):
                packed[name][first + _closing_rows(runner, name, chunk)] = value
        first += len(chunk.tokens)
    return {name: jnp.asarray(value) for name, value in packed.items()}


def _widen(runner: Runner, name: str, value: np.ndarray) -> np.ndarray:
    """Selected ids and candidate masks, recorded in the width of their own context, in the width of the step."""
    leaf = name.rsplit(".", 1)[-1]
    width = runner.pages_per_slot * runner.config.page_tokens
    if leaf == "topk_idxs":
        missing = min(runner.config.model.index_topk, width) - value.shape[1]
        return np.pad(value.astype(np.int32), ((0, 0), (0, missing)), constant_values=-1)
    if leaf in MASK_STAGES:
        missing = width // ratio_of(runner, name) - value.shape[1]
        return np.pad(value.astype(np.bool_), ((0, 0), (0, missing)))
    return value


def _closing_rows(runner: Runner, name: str, chunk: Chunk) -> np.ndarray:
    """Rows of a chunk that a stage has a value for: all, or those that close an entry."""
    rows = np.arange(len(chunk.tokens))
    if name.rsplit(".", 1)[-1] not in ENTRY_STAGES:
        return rows
    ratio = ratio_of(runner, name)
    return rows[(chunk.start + rows + 1) % ratio == 0]


def _entries_of(runner: Runner, name: str, rows: np.ndarray, chunk: Chunk) -> np.ndarray:
    return rows[_closing_rows(runner, name, chunk)]


def _router_choices(runner: Runner, values: Rows) -> dict[str, np.ndarray]:
    """What experts are chosen by: scores and bias, under the name "router_choice"."""
    names = [name for name in values if name.endswith(".router_scores")]
    biases = np.asarray(runner.params.moe.bias)
    return {
        name.replace("router_scores", "router_choice"): values[name] + biases[int(name.split(".")[1])] for name in names
    }


def decode_rows(num_sequences: int) -> int:
    """Rows of a decode step of so many sequences, padding included."""
    return _round_up(num_sequences, DECODE_MULTIPLE)


def _round_up(value: int, multiple: int) -> int:
    return -(-max(value, 1) // multiple) * multiple
