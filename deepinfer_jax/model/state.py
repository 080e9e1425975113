"""Everything a request leaves on the device between steps (spec: backbone 9, 7.3)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from deepinfer_jax.config.roles import sources_of_ratio
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.ops.quant import FP8_GROUP, INDEX_GROUP, MAIN_KV_GROUP, Form, ScaledArray
from deepinfer_jax.ops.scatter import put_where
from deepinfer_jax.pytree import pytree_dataclass

PAGED_LEAVES = (".main_kv", ".index_k")  # names of leaves whose second axis counts pages
RATIOS = (2, 1)  # compression ratios that have caches, in the order of the cache tuples


@pytree_dataclass
class DraftState:
    """What the drafter keeps of all slots (spec: dspark 3); position p lives in ring row p modulo the ring's length.

    window: [draft stages, S, ring, L] context KV in the form of the backbone's window rings.
    """

    window: ScaledArray


@pytree_dataclass
class State:
    """Caches and rings of all slots. Rows of position p live in ring row p modulo the ring's length.

    window: [layers, S, ring, L] window KV, FP8 with 16 scale bytes (528 bytes a row in the released shape).
    main_kv, index_k: one cache for each ratio of `RATIOS`: [sources, P, page entries, width], FP4 with E4M3 scales
        (288 bytes) and FP4 with power-of-two scales (68 bytes).
    tails: [ratio-2 sources, S, tail, L2 = 2 L] unrounded [kv | score] rows of the compressors.
    history: [S, history] compressed token ids for Engram, -1 for image tokens.
    draft: the drafter's rings; None where nothing is drafted. The backbone hands it on as it is.
    Under the policy fp32_noqdq the caches hold float32 rows without scales.
    """

    window: ScaledArray
    main_kv: tuple[ScaledArray, ScaledArray]
    index_k: tuple[ScaledArray, ScaledArray]
    tails: Float32[Array, "N S Q L2"]
    history: Int[Array, "S M"]
    draft: DraftState | None = None


def init_state(config: RuntimeConfig, *, num_slots: int, num_pages: int, with_draft: bool = False) -> State:
    """An empty state for `num_slots` requests and `num_pages` pages of `config.page_tokens` tokens."""
    if num_slots < 1 or num_pages < 1:
        raise ValueError(f"num_slots={num_slots} and num_pages={num_pages} must both be at least 1")
    model = config.model

    def paged(ratio: int, width: int, group: int, form: Form) -> ScaledArray:
        lead = (len(sources_of_ratio(model, ratio)), num_pages, config.page_tokens // ratio)
        return _blank_rows(config, *lead, width=width, group=group, form=form)

    return State(
        window=_blank_rings(config, model.num_hidden_layers, num_slots),
        main_kv=(
            paged(2, model.head_dim, MAIN_KV_GROUP, "fp4_e4m3"),
            paged(1, model.head_dim, MAIN_KV_GROUP, "fp4_e4m3"),
        ),
        index_k=(
            paged(2, model.index_head_dim, INDEX_GROUP, "fp4"),
            paged(1, model.index_head_dim, INDEX_GROUP, "fp4"),
        ),
        tails=jnp.zeros((len(sources_of_ratio(model, 2)), num_slots, config.tail_len, 2 * model.head_dim), jnp.float32),
        history=jnp.zeros((num_slots, config.history_len), jnp.int32),
        draft=init_draft_state(config, num_slots=num_slots) if with_draft else None,
    )


def init_draft_state(config: RuntimeConfig, *, num_slots: int) -> DraftState:
    """Empty context rings of the draft stages for `num_slots` requests."""
    if num_slots < 1:
        raise ValueError(f"num_slots={num_slots} must be at least 1")
    return DraftState(window=_blank_rings(config, config.model.num_nextn_predict_layers, num_slots))


def _blank_rings(config: RuntimeConfig, num_layers: int, num_slots: int) -> ScaledArray:
    lead = (num_layers, num_slots, config.ring_len)
    return _blank_rows(config, *lead, width=config.model.head_dim, group=FP8_GROUP, form="fp8")


def _blank_rows(config: RuntimeConfig, *lead: int, width: int, group: int, form: Form) -> ScaledArray:
    if not config.policy.quantizes_caches:
        return ScaledArray(payload=jnp.zeros((*lead, width), jnp.float32), scale=None)
    return ScaledArray(
        payload=jnp.zeros((*lead, width if form == "fp8" else width // 2), jnp.uint8),
        scale=jnp.zeros((*lead, width // group), jnp.uint8),
        form=form,
        block=(1, group),
    )


def copy_slots(state: State, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> State:
    """What slots hold, copied to other slots; all are read before any is written, and targets of -1 are left out."""
    return _with_slots(state, lambda a, axis: _put(a, targets, _take(a, sources, axis), axis))


def copy_pages(state: State, sources: Int[Array, " C"], targets: Int[Array, " C"]) -> State:
    """What pages hold, copied to other pages; all are read before any is written, and targets of -1 are left out."""
    return _with_pages(state, lambda a, axis: _put(a, targets, _take(a, sources, axis), axis))


def take_request(state: State, slot: Int[Array, ""], pages: Int[Array, " M"]) -> State:
    """A state of one slot and M pages: what a request has left behind. Pages of -1 come as page 0."""
    return _with_pages(
        _with_slots(state, lambda a, axis: _take(a, slot[None], axis)), lambda a, axis: _take(a, pages, axis)
    )


def put_request(state: State, request: State, slot: Int[Array, ""], pages: Int[Array, " M"]) -> State:
    """The state with what `take_request` gave in this slot and these pages; pages of -1 are left out."""
    rings, own_rings = (state.window, state.draft), (request.window, request.draft)
    window, draft = jax.tree.map(lambda a, own: _put(a, slot[None], own, 1), rings, own_rings)
    state = dataclasses.replace(
        state,
        window=window,
        draft=draft,
        tails=_put(state.tails, slot[None], request.tails, 1),
        history=_put(state.history, slot[None], request.history, 0),
    )
    caches, own = (state.main_kv, state.index_k), (request.main_kv, request.index_k)
    main_kv, index_k = jax.tree.map(lambda a, b: _put(a, pages, b, 1), caches, own)
    return dataclasses.replace(state, main_kv=main_kv, index_k=index_k)


def _with_slots(state: State, change: Callable[[Array, int], Array]) -> State:
    return dataclasses.replace(
        state,
        window=jax.tree.map(lambda a: change(a, 1), state.window),
        draft=jax.tree.map(lambda a: change(a, 1), state.draft),
        tails=change(state.tails, 1),
        history=change(state.history, 0),
    )


def _with_pages(state: State, change: Callable[[Array, int], Array]) -> State:
    main_kv, index_k = jax.tree.map(lambda a: change(a, 1), (state.main_kv, state.index_k))
    return dataclasses.replace(state, main_kv=main_kv, index_k=index_k)


def _take(array: Array, index: Int[Array, " C"], axis: int) -> Array:
    return jnp.take(array, jnp.maximum(index, 0), axis=axis)


def _put(array: Array, index: Int[Array, " C"], values: Array, axis: int) -> Array:
    return put_where(array, (slice(None),) * axis + (index,), values, index >= 0)
