"""Sizes at which sparse attention is tested and timed: the released widths, decode rows of many requests or a chunk."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.attention import api, mosaic_sm90, mosaic_sm100
from deepinfer_jax.kernels.attention.keys import KeySources, RowPlaces
from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.ops.quant import FP8_GROUP, MAIN_KV_GROUP, ScaledArray

HEADS, WIDTH, WINDOW, ENTRIES = 64, 512, 128, 512
RING_LEN, PAGE_ENTRIES = WINDOW + 6, 64
TARGET_ROWS = 128
CONTEXT = 4096  # entries of each request, of which ENTRIES are selected
CHUNK_ROWS, CHUNK_CONTEXT = 2048, 8192  # of one prompt
ROW_BYTES = ENTRIES * (WIDTH // 2 + WIDTH // MAIN_KV_GROUP) + WINDOW * (WIDTH + WIDTH // FP8_GROUP)
# Sums in another order and approximate exponentials; a probability or a result may round to a neighbour.
TOLERANCE = 5e-4
FAMILIES = {
    "mosaic_sm90": (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
        "cp.async.bulk.tensor",
    ),
    "mosaic_sm100": (
        "tcgen05.mma.cta_group::1.kind::f16",
        "tcgen05.ld",
        "tcgen05.commit",
        "cp.async.bulk.tensor",
    ),
}


def random_fp8(key: Array, *shape: int) -> ScaledArray:
    """Packed window rows of any bits but NaN, with scales of a few neighbouring powers of two."""
    payload, scale = jax.random.split(key)
    return ScaledArray(
        payload=jax.random.bits(payload, (*shape, WIDTH), jnp.uint8) & jnp.uint8(0xF7),
        scale=jax.random.randint(scale, (*shape, WIDTH // FP8_GROUP), 116, 120, jnp.int32).astype(jnp.uint8),
        form="fp8",
        block=(1, FP8_GROUP),
    )


def random_fp4(key: Array, *shape: int) -> ScaledArray:
    """Packed entries of any bits, with E4M3 scales from 2^-3 to 1/2."""
    payload, scale = jax.random.split(key)
    return ScaledArray(
        payload=jax.random.bits(payload, (*shape, WIDTH // 2), jnp.uint8),
        scale=jax.random.randint(scale, (*shape, WIDTH // MAIN_KV_GROUP), 0x20, 0x30, jnp.int32).astype(jnp.uint8),
        form="fp4_e4m3",
        block=(1, MAIN_KV_GROUP),
    )


def make_inputs(key: Array, *, num_rows: int) -> tuple[Any, ...]:
    """Operands of `attend`: one row for each slot, at the end of its context, with entries from all over it."""
    keys = jax.random.split(key, 6)
    pages_each = CONTEXT // PAGE_ENTRIES
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    positions = CONTEXT - 1 - rows % 7
    chosen = jax.lax.top_k(jax.random.uniform(keys[0], (num_rows, CONTEXT - 7)), ENTRIES)[1]
    sources = KeySources(
        new=random_fp8(keys[1], num_rows),
        ring=random_fp8(keys[2], 1, num_rows, RING_LEN),
        layer=0,
        cache=random_fp4(keys[3], 1, num_rows * pages_each, PAGE_ENTRIES),
        source=0,
        page_table=jnp.arange(num_rows * pages_each, dtype=jnp.int32).reshape(num_rows, pages_each),
        window=WINDOW,
        ring_len=RING_LEN,
        page_entries=PAGE_ENTRIES,
    )
    places = RowPlaces(
        slots=rows,
        positions=positions,
        first_row=rows,
        first_position=positions,
        floor=jnp.zeros_like(rows),
    )
    q = jax.random.normal(keys[4], (num_rows, HEADS, WIDTH), jnp.bfloat16) * jnp.bfloat16(0.5)
    sink = jax.random.normal(keys[5], (HEADS,), jnp.float32)
    return q, sources, places, jnp.sort(chosen, axis=1), sink, jnp.int32(num_rows)


def make_chunk(key: Array, *, num_rows: int) -> tuple[Any, ...]:
    """Operands of `attend`: consecutive rows at the end of one prompt, with entries from all over what is before it."""
    keys = jax.random.split(key, 6)
    num_pages, start = CHUNK_CONTEXT // PAGE_ENTRIES, CHUNK_CONTEXT - num_rows
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    chosen = jax.lax.top_k(jax.random.uniform(keys[0], (num_rows, start)), ENTRIES)[1]
    sources = KeySources(
        new=random_fp8(keys[1], num_rows),
        ring=random_fp8(keys[2], 1, 1, RING_LEN),
        layer=0,
        cache=random_fp4(keys[3], 1, num_pages, PAGE_ENTRIES),
        source=0,
        page_table=jnp.arange(num_pages, dtype=jnp.int32)[None],
        window=WINDOW,
        ring_len=RING_LEN,
        page_entries=PAGE_ENTRIES,
    )
    none = jnp.zeros_like(rows)
    places = RowPlaces(
        slots=none, positions=start + rows, first_row=none, first_position=jnp.full_like(rows, start), floor=none
    )
    q = jax.random.normal(keys[4], (num_rows, HEADS, WIDTH), jnp.bfloat16) * jnp.bfloat16(0.5)
    sink = jax.random.normal(keys[5], (HEADS,), jnp.float32)
    return q, sources, places, jnp.sort(chosen, axis=1), sink, jnp.int32(num_rows)


def keep_rows(inputs: tuple[Any, ...], count: Array) -> tuple[Any, ...]:
    """The first `count` rows are live."""
    q, sources, places, entries, sink, _ = inputs
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    places = dataclasses.replace(places, slots=jnp.where(rows < count, places.slots, -1))
    return q, sources, places, entries, sink, count


def _torch_dense(torch: Any, copies: int, *, num_rows: int) -> list[Callable[[], Any]]:
    """The two products and the softmax by PyTorch, of keys that are gathered and in bfloat16 already."""

    def call() -> Callable[[], Any]:
        q = torch.randn(num_rows, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
        keys = torch.randn(num_rows, WINDOW + ENTRIES, WIDTH, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.softmax(torch.bmm(q, keys.mT) * WIDTH**-0.5, dim=-1) @ keys

    return [call() for _ in range(copies)]


def _case(num_rows: int, *, is_chunk: bool = False) -> Case:
    given = {"tile": min(num_rows, TARGET_ROWS), "has_fixed_trips": True}
    entry_bytes = WIDTH // 2 + WIDTH // MAIN_KV_GROUP
    # Rows of a chunk read the same entries, and each other's window rows: what is there counts once.
    key_bytes = (
        CHUNK_CONTEXT * entry_bytes + num_rows * (WIDTH + WIDTH // FP8_GROUP) if is_chunk else num_rows * ROW_BYTES
    )
    return Case(
        op="attention",
        name=f"{'prefill' if is_chunk else 'decode'}_{num_rows}_rows",
        make=functools.partial(make_chunk if is_chunk else make_inputs, num_rows=num_rows),
        implementations={
            REFERENCE: functools.partial(api.attend, **given, backend=Backend(kernels=REFERENCE)),
            "mosaic_sm90": functools.partial(mosaic_sm90.attend, **given),
            "mosaic_sm100": functools.partial(mosaic_sm100.attend, **given),
        },
        num_bytes=key_bytes + num_rows * 2 * HEADS * WIDTH * 2,
        flops=num_rows * 4 * HEADS * (WINDOW + ENTRIES) * WIDTH,
        tolerance=TOLERANCE,
        keep_rows=keep_rows,
        num_rows=num_rows,
        has_target=num_rows in (TARGET_ROWS, CHUNK_ROWS),
        reference_calls=1,
        families=FAMILIES,
        peers={"torch_gathered_bf16": functools.partial(_torch_dense, num_rows=num_rows)},
    )


CASES = (*(_case(num_rows) for num_rows in (TARGET_ROWS, 16, 1, 512)), _case(CHUNK_ROWS, is_chunk=True))
