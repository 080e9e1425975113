"""Everything a request leaves on the device between steps (spec: backbone 9, 7.3)."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from deepinfer_jax.config.roles import sources_of_ratio
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.ops.quant import FP8_GROUP, INDEX_GROUP, MAIN_KV_GROUP, Form, ScaledArray
from deepinfer_jax.pytree import pytree_dataclass

RATIOS = (2, 1)  # compression ratios that have caches, in the order of the cache tuples


@pytree_dataclass
class State:
    """Caches and rings of all slots. Rows of position p live in ring row p modulo the ring's length.

    window: [layers, S, ring, L] window KV, FP8 with 16 scale bytes (528 bytes a row in the released shape).
    main_kv, index_k: one cache for each ratio of `RATIOS`: [sources, P, page entries, width], FP4 with E4M3 scales
        (288 bytes) and FP4 with power-of-two scales (68 bytes).
    tails: [ratio-2 sources, S, tail, L2 = 2 L] unrounded [kv | score] rows of the compressors.
    history: [S, history] compressed token ids for Engram, -1 for image tokens.
    Under the policy fp32_noqdq the caches hold float32 rows without scales.
    """

    window: ScaledArray
    main_kv: tuple[ScaledArray, ScaledArray]
    index_k: tuple[ScaledArray, ScaledArray]
    tails: Float32[Array, "N S Q L2"]
    history: Int[Array, "S M"]


def init_state(config: RuntimeConfig, *, num_slots: int, num_pages: int) -> State:
    """An empty state for `num_slots` requests and `num_pages` pages of `config.page_tokens` tokens."""
    if num_slots < 1 or num_pages < 1:
        raise ValueError(f"num_slots={num_slots} and num_pages={num_pages} must both be at least 1")
    model = config.model
    packs = config.policy.quantizes_caches

    def rows(*lead: int, width: int, group: int, form: Form) -> ScaledArray:
        if not packs:
            return ScaledArray(payload=jnp.zeros((*lead, width), jnp.float32), scale=None)
        return ScaledArray(
            payload=jnp.zeros((*lead, width if form == "fp8" else width // 2), jnp.uint8),
            scale=jnp.zeros((*lead, width // group), jnp.uint8),
            form=form,
            block=(1, group),
        )

    def paged(ratio: int, width: int, group: int, form: Form) -> ScaledArray:
        lead = (len(sources_of_ratio(model, ratio)), num_pages, config.page_tokens // ratio)
        return rows(*lead, width=width, group=group, form=form)

    ring = (model.num_hidden_layers, num_slots, config.ring_len)
    return State(
        window=rows(*ring, width=model.head_dim, group=FP8_GROUP, form="fp8"),
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
    )
