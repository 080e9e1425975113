"""The kernels of index scores, interpreted, and the choice of the best: against the references."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.indexer import api, choice, mosaic_sm90, mosaic_sm100, page_scores, topk
from deepinfer_jax.kernels.indexer.keys import EntryKeys, take_keys
from deepinfer_jax.ops import indexer
from deepinfer_jax.ops.quant import dequantize, quantize_index, quantize_main_kv
from deepinfer_jax.testing import compare

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
HEADS, WIDTH = page_scores.HEADS, page_scores.WIDTH
KERNELS = {"sm90": mosaic_sm90, "sm100": mosaic_sm100}
on_both = pytest.mark.parametrize("name", KERNELS)


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def make_step(num_rows: int, num_pages: int, page_entries: int, *, seed: int = 0) -> tuple:
    """Queries on the FP4 grid, weights of both signs, and keys of two sources in shuffled pages."""
    rng = np.random.default_rng(seed)
    total = num_rows * num_pages + 2
    pages = rng.permutation(total)[: num_rows * num_pages].reshape(num_rows, num_pages)
    # Heads and groups of unequal size, so that their scales differ.
    sizes = jnp.asarray(2.0 ** rng.integers(-4, 3, (num_rows, HEADS, WIDTH // 32)), jnp.bfloat16)
    queries = normal(rng, num_rows, HEADS, WIDTH) * jnp.repeat(sizes, 32, axis=-1)
    keys = EntryKeys(
        cache=quantize_index(normal(rng, 2, total, page_entries, WIDTH)),
        source=1,
        pages=jnp.asarray(pages, jnp.int32),
        page_entries=page_entries,
    )
    weights = normal(rng, num_rows, HEADS) * jnp.bfloat16(0.02)
    return dequantize(quantize_index(queries), jnp.bfloat16), weights, keys


def every_entry(num_rows: int, width: int) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num_rows, width))


def reference_scores(queries: jax.Array, weights: jax.Array, keys: EntryKeys, num_visible: jax.Array) -> jax.Array:
    width = keys.pages.shape[1] * keys.page_entries
    everything = every_entry(len(queries), width)
    return indexer.score_entries(
        queries,
        weights,
        indexer.pad_entries(everything),
        lambda entries: dequantize(take_keys(keys, entries), queries.dtype),
        num_visible,
    )[:, :width]


def run_kernel(name: str, queries: jax.Array, weights: jax.Array, keys: EntryKeys, num_visible: jax.Array) -> jax.Array:
    scores = KERNELS[name].scores_of_pages(queries, weights, keys, num_visible, interpret=INTERPRET)
    jax.block_until_ready(scores)
    assert not gpu_callbacks.get_races().races_found
    return scores.astype(jnp.float32)


@on_both
@pytest.mark.parametrize(
    ("num_pages", "page_entries", "num_visible"),
    [(2, 64, [65, 0]), (3, 32, [96, 33]), (1, 128, [100, 1]), pytest.param(2, 192, [300], marks=pytest.mark.slow)],
    ids=["pages of 64", "odd number of half pages", "a page of 128", "pages of 192"],
)
def test_scores_equal_the_reference(name, num_pages, page_entries, num_visible):
    queries, weights, keys = make_step(len(num_visible), num_pages, page_entries)
    visible = jnp.asarray(num_visible, jnp.int32)
    want = reference_scores(queries, weights, keys, visible)
    compare.assert_bitwise(run_kernel(name, queries, weights, keys, visible), want)


@on_both
def test_scores_of_a_run_longer_than_the_stages(name, monkeypatch):
    monkeypatch.setattr(KERNELS[name], "_NUM_BLOCKS", 2)
    queries, weights, keys = make_step(1, 21, 64)
    visible = jnp.asarray([1300], jnp.int32)
    want = reference_scores(queries, weights, keys, visible)
    compare.assert_bitwise(run_kernel(name, queries, weights, keys, visible), want)


@on_both
def test_row_does_not_depend_on_others(name):
    queries, weights, keys = make_step(3, 2, 64)
    visible = jnp.asarray([128, 100, 70], jnp.int32)
    whole = run_kernel(name, queries, weights, keys, visible)
    own = dataclasses.replace(keys, pages=keys.pages[1:2])
    compare.assert_bitwise(run_kernel(name, queries[1:2], weights[1:2], own, visible[1:2]), whole[1:2])


def candidates(num_rows: int, width: int) -> jax.Array:
    """Every second block of 8 entries, so that a list ends with -1."""
    blocks = jnp.where(jnp.arange(16) * 16 < width, jnp.arange(16, dtype=jnp.int32) * 2, -1)
    return indexer.block_entries(jnp.broadcast_to(blocks, (num_rows, 16)), block_size=8)


@pytest.mark.parametrize("module", [mosaic_sm90, mosaic_sm100], ids=["sm90", "sm100"])
@pytest.mark.parametrize("is_listed", [False, True], ids=["all entries", "entries of candidate blocks"])
def test_best_entries_are_those_of_the_reference(is_listed, module):
    queries, weights, keys = make_step(2, 3, 64)
    visible = jnp.asarray([190, 40], jnp.int32)
    listed = candidates(2, 192) if is_listed else every_entry(2, 192)
    given = {"count": 48, "needs_scores": True, "has_fixed_trips": False}
    best = module.best_entries(
        queries, weights, listed if is_listed else None, visible, keys, **given, interpret=INTERPRET
    )
    jax.block_until_ready(best)  # before operations of the reference are dispatched: both call JAX
    padded = indexer.pad_entries(listed)
    want = api.best_entries(queries, weights, padded, visible, keys, **given, backend=Backend(kernels="reference"))
    assert best.scores.dtype == jnp.bfloat16
    width = listed.shape[1]
    best = dataclasses.replace(best, scores=best.scores[:, :width].astype(jnp.float32))
    compare.assert_bitwise(best, dataclasses.replace(want, scores=want.scores[:, :width]))


def refusal(listed: jax.Array | None = None, **changes) -> str | None:
    queries, weights, keys = make_step(1, 1, 64)
    queries = changes.pop("queries", queries)
    return page_scores.refuses(
        queries,
        weights,
        listed,
        jnp.zeros(1, jnp.int32),
        dataclasses.replace(keys, **changes),
        count=8,
        needs_scores=False,
        has_fixed_trips=False,
    )


def test_accepts_the_model_s_arrays():
    assert refusal() is None
    assert refusal(page_entries=32) is None
    assert refusal(jnp.zeros((1, 128), jnp.int32)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"listed": jnp.zeros((1, 100), jnp.int32)}, "a list of 100 entries for each row is no multiple of 64"),
        ({"queries": jnp.zeros((1, HEADS, WIDTH), jnp.float32)}, "queries are float32"),
        ({"queries": jnp.zeros((1, 4, WIDTH), jnp.bfloat16)}, "queries have 4 heads of 128, not 32 of 128"),
        (
            {"cache": quantize_main_kv(jnp.zeros((1, 1, 64, WIDTH), jnp.bfloat16))},
            "packed as fp4_e4m3 in blocks of (1, 16)",
        ),
        ({"page_entries": 16}, "pages of 16 entries are neither 32 nor a multiple of 64"),
    ],
    ids=["list", "dtype", "heads", "keys", "pages"],
)
def test_refusal_says_why(changes, reason):
    assert reason in refusal(**changes)


@functools.partial(jax.jit, static_argnames="count")
def chosen(scores: jax.Array, *, count: int) -> tuple[jax.Array, jax.Array]:
    places = topk.best_places(scores, count=count, interpret=INTERPRET)
    return places, topk.gap_behind(scores, places)


def scores_of_kind(kind: str, width: int) -> np.ndarray:
    """Three rows of scores on the grid of bfloat16."""
    scores = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
    if kind == "many ties":
        scores = np.round(scores)
    if kind == "all equal":
        scores[:] = 0.5
    if kind == "few visible":
        scores[0, 7:] = scores[1] = scores[2, 1:] = -np.inf
    if kind == "both zeros":
        scores = np.where(scores > 0, np.float32(0.0), np.float32(-0.0))
        scores[:, ::2] *= -1
    if kind == "positive infinity":
        scores[:, ::5] = np.inf
    if kind == "least numbers":  # of either sign; those of a bfloat16 are smallest at 2^-133
        scores = np.sign(scores) * np.where(np.abs(scores) > 1, np.float32(2.0**-133), np.float32(3e38))
    return np.array(jnp.asarray(scores, jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["normal", "many ties", "all equal", "few visible"])
@pytest.mark.parametrize(("width", "count"), [(300, 512), (1000, 64), (40_000, 512)], ids=["all", "one choice", "runs"])
def test_best_places_are_the_top_entries(kind, width, count, dtype):
    scores = scores_of_kind(kind, width)
    everything = every_entry(len(scores), width)
    want = indexer.top_entries(jnp.asarray(scores), everything, count=min(count, width))
    compare.assert_bitwise(chosen(jnp.asarray(scores, dtype), count=count), want)


def test_zeros_of_both_signs_are_equal():
    scores = jnp.asarray(scores_of_kind("both zeros", 500))
    places, _ = chosen(scores, count=20)
    assert places.tolist() == [list(range(20))] * 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["normal", "many ties", "few visible"])
@pytest.mark.parametrize(("width", "count"), [(200, 64), (1003, 16)], ids=["all", "some"])
def test_candidate_blocks_are_those_of_the_reference(kind, width, count, dtype):
    scores = jnp.asarray(scores_of_kind(kind, width))
    num_visible = jnp.asarray([width, 1, 0], jnp.int32)
    scores = jnp.where(jnp.arange(width, dtype=jnp.int32)[None, :] < num_visible[:, None], scores, -jnp.inf)
    given = {"block_size": 8, "count": count, "interpret": INTERPRET}
    found = topk.candidate_blocks(scores.astype(dtype), num_visible, **given)
    want = indexer.candidate_blocks(scores, num_visible, block_size=8, count=count)
    compare.assert_bitwise(found, want)


def ordered_keys(scores: np.ndarray) -> np.ndarray:
    """As the kernel makes them, from two scores in a word."""
    words = (scores + np.float32(0.0)).astype(jnp.bfloat16).view(np.uint16).astype(np.uint32)
    words = words[0::2] | words[1::2] << 16
    words ^= ((words >> 15) & 0x00010001) * 0x7FFF | 0x80008000
    return np.stack([words & 0xFFFF, words >> 16], axis=1).reshape(-1)


def last_bin(counts: np.ndarray, wanted: int) -> tuple[int, int]:
    """By 32 threads with eight bins each, the last bin of a thread first."""
    own = counts.reshape(32, 8).sum(axis=1)
    until = np.cumsum(own[::-1])[::-1]
    owner = np.count_nonzero(until >= wanted) - 1
    thread = owner % 32
    above = until[thread] - own[thread]
    reached = above + np.cumsum(counts[8 * thread : 8 * thread + 8][::-1])
    left = wanted - max([above, *reached[reached < wanted]])
    return (8 * owner + np.count_nonzero(reached >= wanted) - 1 if owner >= 0 else -1), left


def emulated(scores: np.ndarray, visible: int, count: int, listed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row of `choice`, in its steps: warps, runs, pieces of eight, histograms, ranks."""
    warps, step, piece = choice._WARPS, choice._STEP, choice.PIECE
    visible = min(max(visible, 0), len(scores))
    steps = -(-visible // (warps * step))
    row = np.full(warps * steps * step, -np.inf, np.float32)
    read = min(-(-visible // piece) * piece, len(scores))  # whole pieces
    for run in range(0, read, steps * step or 1):  # of a warp
        end = run + min(-(-(visible - run) // step), steps) * step
        row[run:end][: read - run] = scores[run : min(end, read)]
    keys = ordered_keys(row)
    counted = keys[keys > choice._LOWEST]
    upper, wanted = last_bin(np.bincount(counted >> 8, minlength=256), count)
    in_bin = counted[counted >> 8 == upper] & 0xFF if upper >= 0 else counted[:0]
    lower, allowed = last_bin(np.bincount(in_bin, minlength=256), wanted)
    last, allowed = (upper << 8 | lower, allowed) if lower >= 0 else (choice._LOWEST, 0)
    pieces = keys.reshape(warps, -1, piece)
    better, equal = pieces > last, pieces == last
    found = np.full((2, count), -1, np.int32)
    better_sums, equal_sums = (x.sum(axis=(1, 2)) for x in (better, equal))
    assert max(*better_sums, *equal_sums) < 1 << 16
    for warp in range(warps):
        fronts = [sums[:warp].sum() for sums in (better_sums, equal_sums)]
        for i in range(pieces.shape[1]):
            is_better, is_equal = better[warp, i], equal[warp, i] & (fronts[1] < allowed)
            for bit in np.flatnonzero(is_better | is_equal):
                same = fronts[1] + is_equal[:bit].sum()
                rank = fronts[0] + is_better[:bit].sum() + min(same, allowed)
                if is_better[bit] or same < allowed:
                    place = warp * steps * step + i * piece + bit
                    assert found[0, rank] == -1
                    found[:, rank] = place, listed[place]
            fronts = [fronts[0] + better[warp, i].sum(), fronts[1] + equal[warp, i].sum()]
    num_kept = better_sums.sum() + min(equal_sums.sum(), allowed)
    assert (found[0, :num_kept] >= 0).all()
    return found[0], found[1]


KINDS = ["normal", "many ties", "all equal", "few visible", "both zeros", "positive infinity", "least numbers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "count"), [(8, 8), (300, 300), (1003, 64), (8192, 512), (20_000, 2048)], ids=lambda x: str(x)
)
def test_steps_of_the_kernel_give_the_top_entries(kind, width, count):
    scores = scores_of_kind(kind, width)
    num_visible = np.array([width, width // 3, 1], np.int32)
    scores[np.arange(width)[None, :] >= num_visible[:, None]] = -np.inf
    listed = np.arange(width, dtype=np.int32) * 3 + np.arange(3, dtype=np.int32)[:, None]
    rows = [emulated(*row, count, entries) for *row, entries in zip(scores, num_visible, listed, strict=True)]
    places, entries = (jnp.asarray(np.stack(found)) for found in zip(*rows, strict=True))
    positive_zeros = jnp.asarray(np.where(scores == 0, np.float32(0.0), scores))
    compare.assert_bitwise(entries, indexer.top_entries(positive_zeros, jnp.asarray(listed), count=count)[0])
    plain = topk.best_listed(
        jnp.asarray(scores, jnp.bfloat16),
        jnp.asarray(num_visible),
        jnp.asarray(listed),
        count=count,
        interpret=INTERPRET,
    )
    compare.assert_bitwise((places, entries), plain)


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (jnp.zeros((1, 256)), "scores are float32"),
        (jnp.zeros((1, choice.MAX_WIDTH + 1), jnp.bfloat16), "a row has 98305 scores; 98304 fit"),
    ],
    ids=["dtype", "width"],
)
def test_choice_refuses_what_does_not_fit(scores, reason):
    assert reason in choice.refuses(scores)
    assert choice.refuses(jnp.zeros((1, choice.MAX_WIDTH), jnp.bfloat16)) is None
