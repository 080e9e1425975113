"""Step sizes: few, ascending, and never too small."""

import pytest

from deepinfer_jax.engine.buckets import StepShape, make_buckets, prefill_limit


def test_sizes_grow_by_four_up_to_the_limit():
    buckets = make_buckets(max_prefill_rows=4096, num_slots=256, max_pages=100)
    assert buckets.prefill_rows == (8, 64, 256, 1024, 4096)
    assert buckets.decode_rows == (8, 32, 128, 256)
    assert buckets.pages == (16, 64, 100)


@pytest.mark.parametrize(
    "rows, slots, prefill_rows, decode_rows",
    [(1, 1, (8,), (8,)), (8, 8, (8,), (8,)), (9, 9, (8, 16), (8, 16)), (64, 33, (8, 64), (8, 32, 40))],
)
def test_limits_are_rounded_up_to_whole_tiles(rows, slots, prefill_rows, decode_rows):
    buckets = make_buckets(max_prefill_rows=rows, num_slots=slots, max_pages=3)
    assert (buckets.prefill_rows, buckets.decode_rows, buckets.pages) == (prefill_rows, decode_rows, (3,))


def test_the_smallest_prefill_and_decode_steps_are_one_program():
    buckets = make_buckets(max_prefill_rows=64, num_slots=4, max_pages=8)
    shapes = {buckets.shape_of(rows, 1, is_prefill=is_prefill) for rows in (1, 8) for is_prefill in (True, False)}
    assert shapes == {buckets.first} == {StepShape(8, 8, 8)}


def test_every_size_up_to_the_limits_has_a_shape():
    buckets = make_buckets(max_prefill_rows=300, num_slots=50, max_pages=70)
    for is_prefill, limit in ((True, 300), (False, 50)):
        for rows in range(1, limit + 1):
            shape = buckets.shape_of(rows, 70, is_prefill=is_prefill)
            assert shape.num_rows >= rows
            assert shape.num_pages == 70
            assert shape.num_logits == (8 if is_prefill else shape.num_rows)


def test_a_cpu_cuts_chunks_and_nothing_else():
    assert prefill_limit(4096, is_chunked=True, target="cpu") == 64
    assert prefill_limit(7, is_chunked=True, target="cpu") == 7
    assert prefill_limit(4096, is_chunked=False, target="cpu") == 4096
    assert prefill_limit(4096, is_chunked=True, target="nvidia") == 4096
