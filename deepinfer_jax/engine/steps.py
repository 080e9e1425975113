"""The compiled steps: the only `jax.jit`s of the package."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.buckets import StepShape
from deepinfer_jax.model import state as caches
from deepinfer_jax.model.backbone import StepOutput, forward
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State
from deepinfer_jax.ops.invariant import map_rows
from deepinfer_jax.ops.paged import num_leading
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import logits as sampling
from deepinfer_jax.sampling.logits import SampleSettings
from deepinfer_jax.scheduler import batching

# A step rounds where the specification says, nowhere else and nowhere less.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
_step = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


@pytree_dataclass
class Carried:
    """What one step hands to the next on the device; donated."""

    state: State
    last_drawn: Int32[Array, " S"]  # the last token drawn for each slot


@pytree_dataclass
class StepResult:
    """What a step leaves for the host, beside what it hands on."""

    # of each logit row: the token, the bits of its float32 log-probability, and those of the mass of less likely ones
    drawn: Int32[Array, "three N"]
    logprobs: Float32[Array, "N V"]  # of every token; stays on the device unless somebody asks for the best


@functools.partial(_step, static_argnames=("shape", "config", "settings"), donate_argnames=("carried",))
def run_step(
    params: Params,
    carried: Carried,
    packed: Int32[Array, " L"],
    *,
    shape: StepShape,
    config: RuntimeConfig,
    settings: SampleSettings,
) -> tuple[StepResult, Int32[Array, " two"], Carried]:
    """Forward and sampling for one packed batch (layout: `scheduler/batching.py`).

    Also returns how many rows the encoder and the decoder layers computed.
    """
    fields = _fields(packed, shape)
    output, state = _forward(params, carried, fields, shape=shape, config=config)
    result, last_drawn = _sample(
        output.logits, carried.last_drawn, fields, None, None, config=config, settings=settings
    )
    return result, output.computed_rows, Carried(state=state, last_drawn=last_drawn)


@functools.partial(_step, static_argnames=("shape", "config"), donate_argnames=("carried",))
def run_forward(
    params: Params, carried: Carried, packed: Int32[Array, " L"], *, shape: StepShape, config: RuntimeConfig
) -> tuple[Float32[Array, "N V"], Int32[Array, " two"], Carried]:
    """The first half of `run_step`, for steps whose masks need tokens that the host has not read yet."""
    output, state = _forward(params, carried, _fields(packed, shape), shape=shape, config=config)
    return output.logits, output.computed_rows, Carried(state=state, last_drawn=carried.last_drawn)


@functools.partial(_step, static_argnames=("shape", "config", "settings"), donate_argnames=("last_drawn",))
def run_sampling(
    logits: Float32[Array, "N V"],
    last_drawn: Int32[Array, " S"],
    packed: Int32[Array, " L"],
    masks: UInt32[Array, "N W"],
    edits: sampling.Edits | None,
    *,
    shape: StepShape,
    config: RuntimeConfig,
    settings: SampleSettings,
) -> tuple[StepResult, Int32[Array, " S"]]:
    """The second half. masks: one bit for each token of each logit row, lowest first, 1 where it is allowed."""
    fields = _fields(packed, shape)
    return _sample(logits, last_drawn, fields, masks, edits, config=config, settings=settings)


@functools.partial(jax.jit, donate_argnames=("carried",))
def copy_states(carried: Carried, copies: Int32[Array, "C F"]) -> Carried:
    """States and pages copied from slot to slot and page to page; all are read before any is written."""
    source_slot, target_slot, source_page, target_page = copies.T
    state = caches.copy_slots(carried.state, source_slot, target_slot)
    state = caches.copy_pages(state, source_page, target_page)
    drawn = carried.last_drawn[jnp.maximum(source_slot, 0)]
    last_drawn = carried.last_drawn.at[_outside(target_slot)].set(drawn, mode="drop")
    return Carried(state=state, last_drawn=last_drawn)


@functools.partial(jax.jit, static_argnames=("count",))
def best_tokens(logprobs: Float32[Array, "N V"], *, count: int) -> tuple[Float32[Array, "N k"], Int32[Array, "N k"]]:
    """The `count` best log-probabilities of each row and their tokens, lowest id first on ties."""
    return sampling.top_logprobs(logprobs, count)


@jax.jit
def read_request(state: State, slot: Int32[Array, ""], pages: Int32[Array, " M"]) -> State:
    """The rings of one slot and the contents of these pages: a state of one slot."""
    return caches.take_request(state, slot, pages)


@functools.partial(jax.jit, donate_argnames=("carried",))
def write_request(carried: Carried, request: State, slot: Int32[Array, ""], pages: Int32[Array, " M"]) -> Carried:
    """Puts what `read_request` gave into a slot and pages; pages of -1 are left out."""
    return Carried(state=caches.put_request(carried.state, request, slot, pages), last_drawn=carried.last_drawn)


def num_compiled() -> int:
    """How many versions of the step functions this process has compiled so far."""
    functions: tuple[Any, ...] = (run_step, run_forward, run_sampling, copy_states, best_tokens)
    return sum(function._cache_size() for function in functions)


def _fields(packed: Int32[Array, " L"], shape: StepShape) -> dict[str, Array]:
    return batching.fields_of(
        packed,
        num_rows=shape.num_rows,
        num_logits=shape.num_logits,
        num_tail=shape.num_tail or 0,
        num_pages=shape.num_pages,
    )


def _forward(
    params: Params, carried: Carried, fields: dict[str, Array], *, shape: StepShape, config: RuntimeConfig
) -> tuple[StepOutput, State]:
    slots = fields["slots"]
    drawn = carried.last_drawn[jnp.maximum(slots, 0)]
    tokens = jnp.where(fields["tokens"] == batching.LAST_DRAWN, drawn, fields["tokens"])
    batch = StepBatch(
        tokens=tokens,
        positions=fields["positions"],
        slots=slots,
        page_table=fields["page_table"],
        logit_rows=fields["logit_rows"],
        tail_starts=fields["tail_starts"],
        tail_rows=None if shape.num_tail is None else fields["tail_rows"],
        window_starts=fields["window_starts"],
    )
    return forward(params, carried.state, batch, config=config)


def _sample(
    logits: Float32[Array, "N V"],
    last_drawn: Int32[Array, " S"],
    fields: dict[str, Array],
    masks: UInt32[Array, "N W"] | None,
    edits: sampling.Edits | None,
    *,
    config: RuntimeConfig,
    settings: SampleSettings,
) -> tuple[StepResult, Int32[Array, " S"]]:
    def on_tile(
        logits: Array, rows: sampling.SampleRows, masks: Array | None, edits: sampling.Edits | None
    ) -> tuple[Int32[Array, "B three"], Float32[Array, "B V"]]:
        allowed = None if masks is None else sampling.unpack_masks(masks, logits.shape[1])
        sampled = sampling.sample(logits, rows, edits=edits, allowed=allowed, settings=settings)
        bits = [lax.bitcast_convert_type(a, jnp.int32) for a in (sampled.token_logprobs, sampled.smaller_mass)]
        return jnp.stack([sampled.token_ids, *bits], axis=1), sampled.logprobs

    logit_rows = fields["logit_rows"]
    drawn, logprobs = map_rows(
        on_tile,
        logits,
        _sample_rows(fields),
        masks,
        edits,
        tile=config.product_tile,
        num_live=num_leading(logit_rows >= 0),
        has_fixed_trips=config.has_fixed_trips,
    )
    last_drawn = last_drawn.at[_outside(fields["draw_slots"])].set(drawn[:, 0], mode="drop")
    return StepResult(drawn=drawn.T, logprobs=logprobs), last_drawn


def _outside(index: Int32[Array, " N"]) -> Int32[Array, " N"]:
    """Negative indices moved beyond the end, where a scatter drops them."""
    return jnp.where(index >= 0, index, jnp.iinfo(jnp.int32).max)


def _sample_rows(fields: dict[str, Int32[Array, " N"]]) -> sampling.SampleRows:
    def floats(name: str) -> Float32[Array, " N"]:
        return lax.bitcast_convert_type(fields[name], jnp.float32)

    return sampling.SampleRows(
        seed_lo=lax.bitcast_convert_type(fields["seed_lo"], jnp.uint32),
        seed_hi=lax.bitcast_convert_type(fields["seed_hi"], jnp.uint32),
        positions=fields["draw_positions"],
        inverse_temperature=floats("inverse_temperature"),
        top_p=floats("top_p"),
        top_k=fields["top_k"],
        is_greedy=fields["is_greedy"] != 0,
        suppressed_ids=fields["suppressed_ids"],
        forced_ids=fields["forced_ids"],
        min_p_distance=floats("min_p_distance"),
    )
