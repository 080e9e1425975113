"""Step sizes: few, ascending, and never too small."""

import pytest

from deepinfer_jax.engine.buckets import StepShape, make_buckets, prefill_limit


def buckets_of(rows=64, seqs=4, pages=8, skips_padding=False, interval=None, rows_per_request=(1,)):
    return make_buckets(
        max_prefill_rows=rows,
        max_requests=seqs,
        max_pages=pages,
        skips_padding=skips_padding,
        rows_per_request=rows_per_request,
        decode_interval=interval,
    )


def prefill_shape(buckets, rows, pages=1, **options):
    return buckets.shape_of(rows, pages, num_chunks=1, is_prefill=True, **options)


def decode_shape(buckets, requests, pages=1, *, rows=None):
    return buckets.shape_of(rows or requests, pages, num_chunks=requests, is_prefill=False)


def test_sizes_grow_by_four_up_to_the_limit():
    buckets = buckets_of(rows=4096, seqs=256, pages=100)
    assert buckets.prefill_rows == (8, 64, 256, 1024, 4096)
    assert buckets.decode_rows == (8, 32, 128, 256)
    assert buckets.pages == (16, 64, 100)


@pytest.mark.parametrize(
    "rows, seqs, prefill_rows, decode_rows",
    [(1, 1, (8,), (8,)), (8, 8, (8,), (8,)), (9, 9, (8, 16), (8, 16)), (64, 33, (8, 64), (8, 32, 40))],
)
def test_limits_are_rounded_up_to_whole_tiles(rows, seqs, prefill_rows, decode_rows):
    buckets = buckets_of(rows, seqs, 3)
    assert (buckets.prefill_rows, buckets.decode_rows, buckets.pages) == (prefill_rows, decode_rows, (3,))


def test_the_smallest_prefill_and_decode_steps_are_one_program():
    buckets = buckets_of()
    shapes = {shape(buckets, rows) for rows in (1, 8) for shape in (prefill_shape, decode_shape)}
    assert shapes == {buckets.first} == {StepShape(8, 8, 8, 8)}


@pytest.mark.parametrize("limits", [(7, 4), (64, 4), (64, 33), (300, 4), (64, 100)])
def test_where_padding_is_skipped_one_size_serves_decode_and_small_prefill_steps(limits):
    buckets = buckets_of(*limits, skips_padding=True)
    [rows] = buckets.decode_rows
    assert rows >= limits[1] and buckets.prefill_rows[0] == rows
    assert {shape(buckets, 1) for shape in (prefill_shape, decode_shape)} == {buckets.first}
    assert buckets.prefill_requests >= limits[1] and buckets.first.num_logits == rows


@pytest.mark.parametrize("interval, sizes", [(8, (8, 16, 24, 32, 40)), (16, (16, 32, 48)), (5, (8, 16, 24, 32, 40))])
def test_an_interval_gives_every_multiple_of_it_in_whole_tiles(interval, sizes):
    assert buckets_of(seqs=33, interval=interval).decode_rows == sizes
    skipping = buckets_of(seqs=33, interval=interval, skips_padding=True)
    assert skipping.decode_rows == sizes
    assert skipping.prefill_rows[0] == sizes[-1]


@pytest.mark.parametrize("skips_padding", [False, True])
def test_every_size_up_to_the_limits_has_a_compiled_shape(skips_padding):
    buckets = buckets_of(300, 50, 70, skips_padding)
    compiled = set(buckets.all_shapes(is_compact=True))
    for make, limit in ((prefill_shape, 300), (decode_shape, 50)):
        for rows in range(1, limit + 1):
            shape = make(buckets, rows, 70)
            assert shape.num_rows >= rows and shape.num_pages == 70 and shape.num_tail is None
            assert shape.num_logits <= shape.num_rows and shape.num_chunks >= (rows if make is decode_shape else 8)
            assert shape in compiled
    for rows in (1, 9, 64, 65, 300):
        for tail in {0, 1, 7, 8, rows - 1, rows}:
            shape = prefill_shape(buckets, rows, num_tail_rows=tail)
            assert shape in compiled
            assert shape.num_tail is None or shape.num_tail >= tail
            assert shape.num_tail is None or tail < rows


@pytest.mark.parametrize("skips_padding", [False, True])
def test_without_compact_replay_no_tail_is_compiled(skips_padding):
    shapes = buckets_of(300, 50, 70, skips_padding).all_shapes(is_compact=False)
    assert len(set(shapes)) == len(shapes)
    assert {shape.num_tail for shape in shapes} == {None}


def test_computed_rows_are_whole_tiles_or_the_whole_step():
    for skips_padding, wanted in ((True, [8, 8, 16, 64]), (False, [8, 8, 64, 64])):
        buckets = buckets_of(skips_padding=skips_padding)
        counts = (1, 8, 9, 64)
        shapes = [prefill_shape(buckets, rows) for rows in counts]
        computed = [buckets.computed_rows(shape, rows) for shape, rows in zip(shapes, counts, strict=True)]
        assert computed == wanted


def test_a_shape_is_named_by_its_sizes():
    assert StepShape(64, 8, 16, 4).name == "rows64-logits8-pages16-requests4"
    assert StepShape(64, 8, 16, 4, 0).name == "rows64-logits8-pages16-requests4-tail0"


@pytest.mark.parametrize("skips_padding", [False, True])
def test_decode_steps_have_room_for_drafts(skips_padding):
    buckets = buckets_of(seqs=33, skips_padding=skips_padding, rows_per_request=(1, 3, 6))
    compiled = set(buckets.all_shapes(is_compact=False))
    for requests in (1, 8, 9, 33):
        for rows in (requests, requests + 1, 3 * requests, 5 * requests, 6 * requests):
            shape = decode_shape(buckets, requests, rows=rows)
            assert shape in compiled
            assert shape.num_chunks >= requests and shape.num_rows == shape.num_logits >= rows
            if not skips_padding:
                assert shape.num_rows <= 3 * max(rows, shape.num_chunks), "fewer drafts need fewer rows"


def test_a_cpu_cuts_chunks_and_nothing_else():
    assert prefill_limit(4096, is_chunked=True, target="cpu") == 64
    assert prefill_limit(7, is_chunked=True, target="cpu") == 7
    assert prefill_limit(4096, is_chunked=False, target="cpu") == 4096
    assert prefill_limit(4096, is_chunked=True, target="nvidia") == 4096
