"""Visibility, page look-up and ring writes against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import paged
from deepinfer_jax.ops.quant import ScaledArray, dequantize, quantize_index
from deepinfer_jax.testing import compare

WIDTH = 32
GUARD = 7.0
PACK = jax.jit(quantize_index)
VALUES = jax.jit(functools.partial(dequantize, dtype=jnp.float32))
PUT = jax.jit(paged.put_rows, static_argnums=2)
TAKE = jax.jit(paged.take_rows, static_argnums=1)


@pytest.mark.parametrize("ratio", [1, 2])
def test_visible_entries_are_those_whose_last_position_is_not_in_the_future(ratio: int):
    positions = np.arange(301)
    want = [sum((j + 1) * ratio <= t + 1 for j in range(310)) for t in positions]
    made = paged.num_visible(jnp.asarray(positions, jnp.int32), ratio=ratio)
    compare.assert_bitwise(made, np.asarray(want, np.int32))


@pytest.mark.parametrize(
    "slots",
    [[], [0], [3, 3, 3], [0, 0, 2, 2, 2, 1], [5, -1, -1], [-1], [1, 0, 0, -1, -1]],
    ids=["empty", "one row", "one request", "three requests", "padding", "only padding", "unequal"],
)
def test_rows_of_a_request_know_their_first_and_how_many_follow(slots: list[int]):
    array = jnp.asarray(slots, jnp.int32)
    first = [slots.index(slot) for slot in slots]
    after = [len(slots) - 1 - slots[::-1].index(slot) - row for row, slot in enumerate(slots)]
    compare.assert_bitwise(paged.first_rows(array), np.asarray(first, np.int32))
    compare.assert_bitwise(paged.rows_after(array), np.asarray(after, np.int32))


def test_entries_find_their_page_and_offset():
    pages = jnp.asarray([[9, 4, -1], [2, -1, -1]], jnp.int32)
    entries = jnp.asarray([[0, 7, 8, 15, 16, 24, -1], [7, 8, 0, -1, 23, 1000, 3]], jnp.int32)
    page, offset = paged.entry_place(entries, pages, page_entries=8)
    compare.assert_bitwise(page, np.int32([[9, 9, 4, 4, -1, -1, -1], [2, -1, 2, -1, -1, -1, 2]]))
    is_there = np.asarray(page) >= 0
    compare.assert_bitwise(np.asarray(offset)[is_there], (np.asarray(entries) % 8)[is_there])


def test_padding_rows_have_no_pages():
    table = jnp.asarray([[0, 1], [2, 3]], jnp.int32)
    made = paged.pages_of(table, jnp.asarray([1, -1, 0, 2], jnp.int32))
    compare.assert_bitwise(made, np.int32([[2, 3], [-1, -1], [0, 1], [-1, -1]]))


def packed_cache(*lead: int) -> ScaledArray:
    return PACK(jnp.full((*lead, WIDTH), GUARD, jnp.bfloat16))


def plain_cache(*lead: int) -> ScaledArray:
    return ScaledArray(payload=jnp.full((*lead, WIDTH), GUARD, jnp.float32), scale=None)


def rows_of(make, count: int) -> ScaledArray:
    """Rows whose values tell them apart, in the form of the cache."""
    values = jnp.broadcast_to(jnp.asarray([6.0, 3.0, 1.0, 0.5, 4.0])[:count, None], (count, WIDTH))
    return PACK(values) if make is packed_cache else ScaledArray(payload=values, scale=None)


def values(cache: ScaledArray) -> np.ndarray:
    return np.asarray(VALUES(cache))


@pytest.mark.parametrize("make", [packed_cache, plain_cache], ids=["packed", "plain"])
def test_rows_come_back_from_where_they_were_put(make):
    """A negative index in either place drops a row; everything else keeps its bits."""
    rows = rows_of(make, 5)
    page = jnp.asarray([2, 0, -1, 1, 2], jnp.int32)
    offset = jnp.asarray([1, 3, 0, -1, 0], jnp.int32)
    before = make(2, 3, 4)
    after = PUT(before, rows, 1, page, offset)
    want = values(before).copy()
    for row, at in {0: (2, 1), 1: (0, 3), 4: (2, 0)}.items():
        want[1][at] = values(rows)[row]
    compare.assert_bitwise(values(after), want)
    taken = values(TAKE(after, 1, page, offset))
    is_kept = np.asarray([True, True, False, False, True])
    compare.assert_bitwise(taken, np.where(is_kept[:, None], values(rows), np.float32(0)))


def test_entries_beyond_the_pages_of_a_request_read_zeros():
    cache = plain_cache(1, 3, 4)
    entries = jnp.asarray([[0, 5, 8, 11, 12, 10**6, -1]], jnp.int32)
    page, offset = paged.entry_place(entries, jnp.asarray([[2, -1, 0]], jnp.int32), page_entries=4)
    made = values(TAKE(cache, 0, page, offset))[0, :, 0]
    compare.assert_bitwise(made, np.float32([GUARD, 0, GUARD, GUARD, 0, 0, 0]))


@pytest.mark.parametrize("make", [packed_cache, plain_cache], ids=["packed", "plain"])
def test_rows_beyond_the_cache_are_dropped(make):
    before = make(1, 3, 4)
    outside = jnp.asarray([3, 0, 1000, 2], jnp.int32)
    offset = jnp.asarray([0, 4, 0, 10**6], jnp.int32)
    compare.assert_bitwise(PUT(before, rows_of(make, 4), 0, outside, offset), before)


def test_lead_axis_may_be_traced(exact_jit):
    before = packed_cache(2, 3, 4)
    place = jnp.asarray([1], jnp.int32)
    rows = rows_of(packed_cache, 1)
    made = exact_jit(lambda lead: paged.put_rows(before, rows, lead, place, place))(jnp.int32(1))
    compare.assert_bitwise(made, PUT(before, rows, 1, place, place))
    taken = exact_jit(lambda lead: paged.take_rows(made, lead, place, place))(jnp.int32(1))
    compare.assert_bitwise(taken, rows)


def test_missing_rows_are_zero_in_any_index_shape():
    cache = plain_cache(1, 3, 4)
    page = jnp.asarray([[0, -1, 2], [-1, -1, 1]], jnp.int32)
    made = values(TAKE(cache, 0, page, jnp.zeros_like(page)))
    compare.assert_bitwise(
        made, np.where(np.asarray(page)[..., None] >= 0, np.float32(GUARD), np.float32(0)) * np.ones(WIDTH, np.float32)
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10])
def test_ring_holds_the_last_rows_of_any_chunking(chunk: int):
    """Position p lies in ring row p modulo its length, and nothing of a longer chunk is written twice."""
    ring_len, total = 10, 64
    ring = plain_cache(1, 1, ring_len)
    for start in range(0, total, chunk):
        positions = np.arange(start, min(start + chunk, total))
        rows = ScaledArray(payload=jnp.asarray(positions, jnp.float32)[:, None] * jnp.ones((1, WIDTH)), scale=None)
        slots = jnp.zeros(len(positions), jnp.int32)
        ring = PUT(ring, rows, 0, slots, jnp.asarray(positions % ring_len, jnp.int32))
    held = values(ring)[0, 0, :, 0]
    want = [max(p for p in range(total) if p % ring_len == row) for row in range(ring_len)]
    compare.assert_bitwise(held, np.asarray(want, np.float32))


def test_select_rows_chooses_payload_and_scale_together():
    a = PACK(jnp.full((3, WIDTH), 6.0))
    b = PACK(jnp.full((3, WIDTH), 0.5))
    made = paged.select_rows(jnp.asarray([True, False, True]), a, b)
    compare.assert_bitwise(values(made)[:, 0], np.float32([6.0, 0.5, 6.0]))


def test_no_rows_change_nothing():
    none = jnp.zeros(0, jnp.int32)
    cache = packed_cache(1, 3, 4)
    compare.assert_bitwise(PUT(cache, rows_of(packed_cache, 0), 0, none, none), cache)
    assert values(TAKE(cache, 0, none, none)).shape == (0, WIDTH)
