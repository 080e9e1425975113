"""The compiled steps: with those of `engine/mesh_steps.py`, the only `jax.jit`s of the package."""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8, UInt32

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import drafting, layout
from deepinfer_jax.engine.buckets import StepShape
from deepinfer_jax.engine.drafting import Draws, Speculation
from deepinfer_jax.engine.layout import Chunks, LogitRows, Newest
from deepinfer_jax.kernels.experts.api import PackedMatrix, pack_matrix
from deepinfer_jax.kernels.registry import NVIDIA
from deepinfer_jax.model import state as caches
from deepinfer_jax.model.backbone import Features, StepOutput, forward
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State
from deepinfer_jax.model.vision import encode_image, pixel_values
from deepinfer_jax.model.vision_params import VisionParams
from deepinfer_jax.ops.host import take_on_host
from deepinfer_jax.ops.invariant import map_rows
from deepinfer_jax.ops.paged import num_leading
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import logits as sampling
from deepinfer_jax.sampling.logits import SampleSettings

# A step rounds where the specification says, nowhere else and nowhere less.
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
# Recorded in graphs on a GPU: XLA's own list; and loops, so that the host waits for no condition of a step and makes
# the next one ready meanwhile.
_RECORDED = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION")
_LOOPS = ("CONDITIONAL", "WHILE")
# Nothing is chosen by timing it, which differs between processes, or added in the order of arrival.
_REPEATABLE = {"xla_gpu_autotune_level": 0, "xla_gpu_deterministic_ops": True}


def compiler_options(config: RuntimeConfig) -> dict[str, Any]:
    """What a step of this configuration asks of XLA's compiler.

    Kernels of a recorded graph that do not read each other's results run side by side. In batch-invariant mode, whose
    sections stand between barriers, a step with recorded loops as well did not end on an H200 (docs/determinism.md):
    then either loops are not recorded, or all runs in order, as in the reference, which has the most loops.
    What data-parallel devices exchange is recorded too; CUDA refuses graphs with the gathers of context parallelism.
    """
    if config.target != NVIDIA:
        return COMPILER_OPTIONS
    in_order = config.is_invariant and config.runs_reference
    has_loops = in_order or not config.is_invariant
    has_exchange = config.dp > 1 and config.cp == 1
    recorded = _RECORDED + (_LOOPS if has_loops else ()) + (("COLLECTIVES",) if has_exchange else ())
    return {
        **COMPILER_OPTIONS,
        "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE" if in_order else "CONCURRENT",
        "xla_gpu_enable_command_buffer": ",".join(recorded),
        **(_REPEATABLE if config.is_repeatable else {}),
    }


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: tracing makes a million objects that stay, and each search reads them all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepFunction:
    """`jax.jit` of a step, with the compiler options that its `config` calls for."""

    def __init__(self, function: Callable[..., Any], **given: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._given = function, given
        self._jitted: dict[tuple[tuple[str, Any], ...], Any] = {}  # for the options that there were so far

    def __call__(self, *args: Any, config: RuntimeConfig, **static: Any) -> Any:
        """The step."""
        with _uncollected():
            return self._for(config)(*args, config=config, **static)

    def lower(self, *args: Any, config: RuntimeConfig, **static: Any) -> Any:
        """As `jax.jit` has it."""
        return self._for(config).lower(*args, config=config, **static)

    def num_compiled(self) -> int:
        """Versions that this process has compiled so far."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def _for(self, config: RuntimeConfig) -> Any:
        options = compiler_options(config)
        key = tuple(options.items())
        if key not in self._jitted:
            self._jitted[key] = jax.jit(self._function, compiler_options=options, **self._given)
        return self._jitted[key]


def step_function(**given: Any) -> Callable[[Callable[..., Any]], StepFunction]:
    """A decorator that makes a `StepFunction`; given: arguments of `jax.jit`."""
    return functools.partial(StepFunction, **given)


_STATIC = ("shape", "config", "settings", "speculation")
# What several steps have in common is traced once for each size, and written out in the program of each.
_traced_forward = jax.jit(forward, static_argnames=("config", "wants_features"), inline=True)
_traced_propose = jax.jit(drafting.propose, static_argnames=("config", "settings", "speculation"), inline=True)


@pytree_dataclass
class Carried:
    """What one step hands to the next on the device; donated."""

    state: State
    newest: Newest


@pytree_dataclass
class StepResult:
    """What a step leaves for the host, beside what it hands on."""

    # of each logit row: the token, the bits of its float32 log-probability, and those of the mass of less likely ones
    drawn: Int32[Array, "three N"]
    # of each chunk: tokens that it keeps, drafts that it verified, then what `drafting.propose` tells
    chunks: Int32[Array, "F C"]
    logprobs: Float32[Array, "N V"]  # of every token; stays on the device unless somebody asks for the best


@pytree_dataclass
class Computed:
    """What a step counts."""

    rows: Int32[Array, " two"]  # that the encoder and the decoder layers computed
    loads: Int32[Array, "layers E"] | None  # of each layer, rows that chose each expert, where the config counts them


@pytree_dataclass
class Masks:
    """What the host says of draws that depend on tokens so far: of chunk c, behind j drafts, in row c * G1 + j."""

    words: UInt32[Array, "M W"]  # one bit for each token, lowest first, 1 where it is allowed
    late: Bool[Array, " C"]  # chunks whose masks are not ready: nothing is drawn for them
    edits: sampling.Edits | None


@step_function(static_argnames=_STATIC, donate_argnames=("carried",))
def run_step(
    params: Params,
    carried: Carried,
    packed: Int32[Array, " L"],
    images: Float[Array, "table D"] | None = None,
    *,
    shape: StepShape,
    config: RuntimeConfig,
    settings: SampleSettings,
    speculation: Speculation,
) -> tuple[StepResult, Computed, Carried]:
    """Forward, draws and drafts for one packed batch (layout: `scheduler/batching.py`).

    images: rows of encoded images, for a shape that has some.
    """
    chunks = _place(packed, carried.newest, shape, speculation)
    output, state = _forward(params, carried, chunks, images, shape=shape, config=config, speculation=speculation)
    carried = Carried(state=state, newest=carried.newest)
    result, carried = _draw(
        params, carried, chunks, output.logits, output.features, None, shape, config, settings, speculation
    )
    return result, computed_of(output), carried


@step_function(static_argnames=("shape", "config", "speculation"), donate_argnames=("carried",))
def run_forward(
    params: Params,
    carried: Carried,
    packed: Int32[Array, " L"],
    images: Float[Array, "table D"] | None = None,
    *,
    shape: StepShape,
    config: RuntimeConfig,
    speculation: Speculation,
) -> tuple[Float32[Array, "N V"], Features | None, Computed, Carried]:
    """The first half of `run_step`, for steps whose masks need tokens that the host has not read yet."""
    chunks = _place(packed, carried.newest, shape, speculation)
    output, state = _forward(params, carried, chunks, images, shape=shape, config=config, speculation=speculation)
    return output.logits, output.features, computed_of(output), Carried(state=state, newest=carried.newest)


@step_function(static_argnames=_STATIC, donate_argnames=("carried",))
def run_sampling(
    params: Params,
    carried: Carried,
    logits: Float32[Array, "N V"],
    features: Features | None,
    packed: Int32[Array, " L"],
    masks: Masks,
    *,
    shape: StepShape,
    config: RuntimeConfig,
    settings: SampleSettings,
    speculation: Speculation,
) -> tuple[StepResult, Carried]:
    """The second half: draws and drafts."""
    chunks = _place(packed, carried.newest, shape, speculation)
    return _draw(params, carried, chunks, logits, features, masks, shape, config, settings, speculation)


@step_function(static_argnames=("config",))
def encode_span(
    vision: VisionParams,
    patches: UInt8[Array, "patches pixels"],
    grid: Int32[Array, " two"],
    *,
    config: RuntimeConfig,
) -> Float[Array, "span D"]:
    """The rows of one image (`model/vision.py`); patches: those of the grid, then padding."""
    return encode_image(vision, pixel_values(patches), grid, config=config).span


@functools.partial(jax.jit, donate_argnames=("table",))
def place_span(
    table: Float[Array, "table D"], span: Float[Array, "span D"], row: Int32[Array, ""]
) -> Float[Array, "table D"]:
    """The table with the rows of an image from `row` on. A call of its own, so that encoding waits for no step."""
    return lax.dynamic_update_slice(table, span, (row, jnp.int32(0)))


@functools.partial(jax.jit, donate_argnames=("carried",))
def copy_states(carried: Carried, copies: Int32[Array, "C F"]) -> Carried:
    """States and pages copied from slot to slot and page to page; all are read before any is written."""
    source_slot, target_slot, source_page, target_page = copies.T
    state = caches.copy_slots(carried.state, source_slot, target_slot)
    state = caches.copy_pages(state, source_page, target_page)
    return Carried(state=state, newest=carried.newest)


@functools.partial(jax.jit, static_argnames=("count",))
def best_tokens(logprobs: Float32[Array, "N V"], *, count: int) -> tuple[Float32[Array, "N k"], Int32[Array, "N k"]]:
    """The `count` best log-probabilities of each row and their tokens, lowest id first on ties."""
    return sampling.top_logprobs(logprobs, count)


samples_on_host = jax.jit(take_on_host)


@jax.jit
def read_request(state: State, slot: Int32[Array, ""], pages: Int32[Array, " M"]) -> State:
    """The rings of one slot and the contents of these pages: a state of one slot."""
    return caches.take_request(state, slot, pages)


@functools.partial(jax.jit, donate_argnames=("carried",))
def write_request(carried: Carried, request: State, slot: Int32[Array, ""], pages: Int32[Array, " M"]) -> Carried:
    """Puts what `read_request` gave into a slot and pages; pages of -1 are left out."""
    return Carried(state=caches.put_request(carried.state, request, slot, pages), newest=carried.newest)


def num_compiled() -> int:
    """How many versions of the step functions this process has compiled so far."""
    configured = (run_step, run_forward, run_sampling, encode_span)
    functions: tuple[Any, ...] = (copy_states, best_tokens, place_span)
    return sum(f.num_compiled() for f in configured) + sum(f._cache_size() for f in functions)


def computed_of(output: StepOutput) -> Computed:
    """The counts of a forward."""
    return Computed(rows=output.computed_rows, loads=output.loads)


def _place(packed: Int32[Array, " L"], newest: Newest, shape: StepShape, speculation: Speculation) -> Chunks:
    fields = layout.unpack(packed, shape, max_drafts=speculation.max_drafts)
    return drafting.place_chunks(fields, newest, speculation)


def _forward(
    params: Params,
    carried: Carried,
    chunks: Chunks,
    images: Float[Array, "table D"] | None,
    *,
    shape: StepShape,
    config: RuntimeConfig,
    speculation: Speculation,
) -> tuple[StepOutput, State]:
    batch = layout.step_batch(chunks, shape, images)
    return _traced_forward(params, carried.state, batch, config=config, wants_features=speculation.max_drafts > 0)


def _draw(
    params: Params,
    carried: Carried,
    chunks: Chunks,
    logits: Float32[Array, "N V"],
    features: Features | None,
    masks: Masks | None,
    shape: StepShape,
    config: RuntimeConfig,
    settings: SampleSettings,
    speculation: Speculation,
) -> tuple[StepResult, Carried]:
    """The draws of the logit rows, which of them stay, and the drafts behind them."""
    rows = layout.logit_rows(chunks, shape)
    draws = _sample(logits, chunks, rows, masks, config=config, settings=settings)
    draws, tokens, num_kept = drafting.accept(draws, chunks, carried.newest, speculation)
    num_kept = num_kept if masks is None else jnp.where(masks.late, 0, num_kept)
    state, newest = carried.state, drafting.settle(carried.newest, chunks, tokens, num_kept)
    told = [jnp.stack([num_kept, chunks.verified])]
    if features is not None and features.slots.shape[0]:  # else no row ran the last layers, and none draws
        state, newest, drafts = _traced_propose(
            params,
            state,
            newest,
            chunks,
            features,
            num_kept,
            config=config,
            settings=settings,
            speculation=speculation,
        )
        told.append(drafts)
    bits = [lax.bitcast_convert_type(a, jnp.int32) for a in (draws.token_logprobs, draws.smaller_mass)]
    result = StepResult(
        drawn=jnp.stack([draws.token_ids, *bits]), chunks=jnp.concatenate(told), logprobs=draws.logprobs
    )
    return result, Carried(state=state, newest=newest)


def _sample(
    logits: Float32[Array, "N V"],
    chunks: Chunks,
    rows: LogitRows,
    masks: Masks | None,
    *,
    config: RuntimeConfig,
    settings: SampleSettings,
) -> Draws:
    def on_tile(logits: Array, rows: sampling.SampleRows, words: Array | None, edits: sampling.Edits | None) -> Draws:
        allowed = None if words is None else sampling.unpack_masks(words, logits.shape[1])
        sampled = sampling.sample(logits, rows, edits=edits, allowed=allowed, settings=settings)
        return Draws(
            token_ids=sampled.token_ids,
            token_logprobs=sampled.token_logprobs,
            smaller_mass=sampled.smaller_mass,
            logprobs=sampled.logprobs,
        )

    words, edits = (None, None) if masks is None else _masks_of_rows(masks, chunks, rows)
    return map_rows(
        on_tile,
        logits,
        layout.sample_rows(chunks, rows),
        words,
        edits,
        num_live=num_leading(rows.rows >= 0),
        **config.tiles,
    )


def _masks_of_rows(masks: Masks, chunks: Chunks, rows: LogitRows) -> tuple[UInt32[Array, "N W"], sampling.Edits | None]:
    """The masks and edits of each logit row; a row that is no draw has none."""
    at = rows.chunks * (masks.words.shape[0] // chunks.starts.shape[0]) + rows.places
    words = jnp.where(rows.is_draw[:, None], masks.words[at], jnp.uint32(0xFFFFFFFF))
    if masks.edits is None:
        return words, None
    edits = jax.tree.map(lambda a: a[at], masks.edits)
    return words, dataclasses.replace(edits, token_ids=jnp.where(rows.is_draw[:, None], edits.token_ids, -1))


@functools.partial(jax.jit, donate_argnames=("w",))
def pack_experts(w: ScaledArray) -> PackedMatrix:
    """A matrix of all experts as their kernel reads it, in the place of the one that is given."""
    return pack_matrix(w)
