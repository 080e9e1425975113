"""Sizes at which index scores and the choice of the best are tested and timed: released widths, decode or a chunk."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.kernels.indexer import mosaic_sm90, mosaic_sm100, topk
from deepinfer_jax.kernels.indexer.keys import EntryKeys, take_keys
from deepinfer_jax.ops import indexer
from deepinfer_jax.ops.quant import INDEX_GROUP, ScaledArray, dequantize, quantize_index

HEADS, WIDTH, COUNT = 32, 128, 512
PAGE_ENTRIES = 64
SHORT_CONTEXT, LONG_CONTEXT = 4096, 1_048_576
KEY_BYTES = WIDTH // 2 + WIDTH // INDEX_GROUP
SCORE_BYTES = 2
TORCH_ROWS = 128  # of a chunk whose products PyTorch keeps at a time
# A sum of bfloat16 terms that differ by more than 2^10 may round to a neighbour in another order.
TOLERANCE = 1e-4
CHOICE_FAMILIES = ("red.shared.add.u32", "redux.sync.add.s32", "cp.async.cg.shared.global")
FAMILIES = {
    "mosaic_sm90": ("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3", "cp.async.bulk.tensor"),
    "mosaic_sm100": (
        "tcgen05.mma.cta_group::1.kind::f8f6f4",
        "tcgen05.st.sync.aligned.32x32b",
        "tcgen05.ld",
        "tcgen05.commit",
        "cp.async.bulk.tensor",
    ),
}


def make_inputs(key: Array, *, num_rows: int, context: int, is_chunk: bool = False) -> tuple[Any, ...]:
    """Operands of `scores_of_pages`: every row has pages of its own, or all have the same; all are visible."""
    payload, scale, query, weight = jax.random.split(key, 4)
    pages_each = context // PAGE_ENTRIES
    num_pages = pages_each if is_chunk else num_rows * pages_each
    shape = (1, num_pages, PAGE_ENTRIES)
    cache = ScaledArray(
        payload=jax.random.bits(payload, (*shape, WIDTH // 2), jnp.uint8),
        scale=jax.random.randint(scale, (*shape, WIDTH // INDEX_GROUP), 120, 126, jnp.int32).astype(jnp.uint8),
        form="fp4",
        block=(1, INDEX_GROUP),
    )
    pages = jnp.broadcast_to(jnp.arange(num_pages, dtype=jnp.int32).reshape(-1, pages_each), (num_rows, pages_each))
    queries = quantize_index(jax.random.normal(query, (num_rows, HEADS, WIDTH), jnp.bfloat16))
    weights = jax.random.normal(weight, (num_rows, HEADS), jnp.bfloat16) * jnp.bfloat16(0.02)
    keys = EntryKeys(cache=cache, source=0, pages=pages, page_entries=PAGE_ENTRIES)
    return dequantize(queries, jnp.bfloat16), weights, keys, jnp.full((num_rows,), context, jnp.int32)


def reference_scores(queries: Array, weights: Array, keys: EntryKeys, num_visible: Array) -> Array:
    """The scores of all entries that pages have room for, without a kernel."""
    width = keys.pages.shape[1] * keys.page_entries
    # Behind a barrier: a compiler would pad and cut a list that it knows while it compiles, for seconds.
    row = jax.lax.optimization_barrier(jnp.arange(width, dtype=jnp.int32))
    everything = jnp.broadcast_to(row, (queries.shape[0], width))

    def load_keys(entries: Array) -> Array:
        return dequantize(take_keys(keys, entries), queries.dtype)

    listed = indexer.pad_entries(everything)
    return indexer.score_entries(queries, weights, listed, load_keys, num_visible, has_fixed_trips=True)[:, :width]


def keep_rows(inputs: tuple[Any, ...], count: Array) -> tuple[Any, ...]:
    """The first `count` rows see their entries, the others none."""
    queries, weights, keys, num_visible = inputs
    rows = jnp.arange(queries.shape[0], dtype=jnp.int32)
    return queries, weights, keys, jnp.where(rows < count, num_visible, 0)


def make_scores(key: Array, *, num_rows: int, context: int) -> tuple[Array]:
    """Scores of many entries, some of them equal."""
    return (jax.random.normal(key, (num_rows, context), jnp.bfloat16),)


def reference_places(scores: Array) -> Array:
    """The places of the best scores by a sort."""
    row = jax.lax.optimization_barrier(jnp.arange(scores.shape[1], dtype=jnp.int32))  # as in `reference_scores`
    everything = jnp.broadcast_to(row, scores.shape)
    return indexer.top_entries(scores.astype(jnp.float32), everything, count=COUNT)[0]


def _torch_top_k(torch: Any, copies: int, *, num_rows: int, context: int) -> list[Callable[[], Any]]:
    def call() -> Callable[[], Any]:
        scores = torch.randn(num_rows, context, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.topk(scores, COUNT, dim=-1)

    return [call() for _ in range(copies)]


def _torch_scores(torch: Any, copies: int, *, num_rows: int, context: int) -> list[Callable[[], Any]]:
    """The same arithmetic by PyTorch, of keys that lie together and in bfloat16 already."""

    def call() -> Callable[[], Any]:
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        queries, weights = make(num_rows, HEADS, WIDTH), make(num_rows, 1, HEADS)
        keys = make(num_rows, context, WIDTH)
        return lambda: torch.bmm(weights, torch.relu_(torch.bmm(queries, keys.mT)))[:, 0]

    return [call() for _ in range(copies)]


def _torch_chunk_scores(torch: Any, copies: int, *, num_rows: int, context: int) -> list[Callable[[], Any]]:
    """The same for rows that share their keys, a few rows at a time: products of all heads would take gigabytes."""

    def call() -> Callable[[], Any]:
        make = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        queries, weights, keys = make(num_rows, HEADS, WIDTH), make(num_rows, 1, HEADS), make(context, WIDTH)

        def run() -> list[Any]:
            parts = zip(queries.split(TORCH_ROWS), weights.split(TORCH_ROWS), strict=True)
            return [torch.bmm(weight, torch.relu_(query @ keys.T))[:, 0] for query, weight in parts]

        return run

    return [call() for _ in range(copies)]


def _scores_case(num_rows: int, context: int, *, is_chunk: bool = False) -> Case:
    size = {"num_rows": num_rows, "context": context}
    torch_scores = _torch_chunk_scores if is_chunk else _torch_scores
    return Case(
        op="index_scores",
        name=f"{'prefill' if is_chunk else 'decode'}_{num_rows}_rows_of_{context}",
        make=functools.partial(make_inputs, **size, is_chunk=is_chunk),
        implementations={
            REFERENCE: reference_scores,
            "mosaic_sm90": mosaic_sm90.scores_of_pages,
            "mosaic_sm100": mosaic_sm100.scores_of_pages,
        },
        num_bytes=context * ((1 if is_chunk else num_rows) * KEY_BYTES + num_rows * SCORE_BYTES),
        flops=num_rows * context * 2 * HEADS * WIDTH,
        rate="fp8",
        tolerance=TOLERANCE,
        keep_rows=keep_rows,
        num_rows=num_rows,
        has_target=context > SHORT_CONTEXT,
        reference_calls=1,
        families=FAMILIES,
        peers={"torch_bmm_bf16": functools.partial(torch_scores, **size)},
    )


def _choice_case(num_rows: int, context: int) -> Case:
    size = {"num_rows": num_rows, "context": context}
    return Case(
        op="index_choice",
        name=f"best_{COUNT}_of_{num_rows}_rows_of_{context}",
        make=functools.partial(make_scores, **size),
        implementations={
            REFERENCE: reference_places,
            "mosaic_sm90": functools.partial(topk.best_places, count=COUNT),
            "mosaic_sm100": functools.partial(topk.best_places, count=COUNT),
        },
        num_bytes=num_rows * (context * SCORE_BYTES + COUNT * 4),
        flops=num_rows * context,
        has_target=context == LONG_CONTEXT,
        reference_calls=1,
        families=dict.fromkeys(("mosaic_sm90", "mosaic_sm100"), CHOICE_FAMILIES),
        peers={"torch_topk": functools.partial(_torch_top_k, **size)},
    )


_SIZES = ((16, 65_536), (16, LONG_CONTEXT), (128, SHORT_CONTEXT))  # rows and entries of each
_CHOICE_SIZES = (*_SIZES, (128, 8192), (1, 8192))
CASES = (
    *(_scores_case(*size) for size in _SIZES),
    _scores_case(2048, 65_536, is_chunk=True),
    *(_choice_case(*size) for size in _CHOICE_SIZES),
)
