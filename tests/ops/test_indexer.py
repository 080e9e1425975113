"""Index scores, candidate blocks and top entries: recorded choices, brute force, ties, pins and missing entries."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops import indexer, paged
from deepinfer_jax.testing import compare

# Sums of float32 products over 16 channels and 8 heads in another order.
SCORE_REL_L2 = 3e-7
# The fixtures README: the gap at a boundary that the pin moves up by one rank is still above this.
SMALLEST_MARGIN = 1e-4
TOP = jax.jit(indexer.top_entries, static_argnames="count")
BLOCKS = jax.jit(indexer.candidate_blocks, static_argnames=("block_size", "count"))


def listed(rows: int, width: int) -> np.ndarray:
    return np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))


def mask_of(blocks: jax.Array, *, block_size: int, width: int) -> np.ndarray:
    """Entries inside the listed blocks, as recorded masks have them."""
    entries = np.asarray(indexer.block_entries(blocks, block_size=block_size))
    mask = np.zeros((len(entries), width + block_size), bool)
    for row, own in enumerate(entries):
        mask[row, own[own >= 0]] = True
    return mask[:, :width]


def best_entries(scores: np.ndarray, count: int) -> np.ndarray:
    """By (score descending, place ascending), then ascending and filled with -1: a plain sort."""
    rows = []
    for row in scores:
        order = sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))
        rows.append(sorted(order[:count]) + [-1] * (count - len(order[:count])))
    return np.asarray(rows, np.int32)


def best_blocks(scores: np.ndarray, visible: np.ndarray, block_size: int, count: int) -> np.ndarray:
    num_blocks = -(-scores.shape[1] // block_size)
    worth = np.full((len(scores), num_blocks), -np.inf)
    for block in range(num_blocks):
        worth[:, block] = scores[:, block * block_size : (block + 1) * block_size].max(axis=1)
    for row, seen in enumerate(visible):
        if seen:
            worth[row, (seen - 1) // block_size] = np.inf
    return best_entries(worth, min(count, num_blocks))


@pytest.mark.parametrize("block_size, count", [(8, 2), (4, 3), (3, 5)])
def test_recorded_candidate_masks_are_met(component, block_size: int, count: int):
    fixture = component("candidate_blocks")
    visible = jnp.asarray(fixture["lens"], jnp.int32)
    for request in range(2):
        blocks, _ = BLOCKS(fixture["scores"][request], visible, block_size=block_size, count=count)
        want = fixture[f"mask_top{count}_block{block_size}"][request].astype(bool)
        compare.assert_bitwise(mask_of(blocks, block_size=block_size, width=30), want)


def test_recorded_candidate_masks_of_ratio_2_and_decode_are_met(component):
    fixture = component("candidate_blocks")
    blocks, _ = BLOCKS(
        fixture["ratio2.scores"][0], jnp.asarray(fixture["ratio2.lens"], jnp.int32), block_size=4, count=2
    )
    want = fixture["ratio2.mask_top2_block4"][0].astype(bool)
    compare.assert_bitwise(mask_of(blocks, block_size=4, width=12), want)
    everything = jnp.full(2, 29, jnp.int32)
    blocks, _ = BLOCKS(fixture["decode.scores"][:, 0], everything, block_size=4, count=3)
    want = fixture["decode.mask_top3_block4"][:, 0].astype(bool)
    compare.assert_bitwise(mask_of(blocks, block_size=4, width=29), want)


def test_recorded_choice_of_the_released_size_is_met(component):
    """20,003 positions: the source's own top 512, its 2048 blocks of 8, and the consumer's top 512 inside them."""
    fixture = component("selection_real")
    scores, width = fixture["source_scores"], fixture["source_scores"].shape[1]
    own, margin = TOP(scores, listed(3, width), count=512)
    compare.assert_bitwise(own, fixture["source_top512"])
    assert np.all(np.asarray(margin) > 0)

    blocks, gap = BLOCKS(scores, jnp.full(3, width, jnp.int32), block_size=8, count=2048)
    mask = fixture["candidate_mask"].astype(bool)
    compare.assert_bitwise(mask_of(blocks, block_size=8, width=width), mask)
    padded = np.pad(scores, ((0, 0), (0, -width % 8)), constant_values=-np.inf).reshape(3, -1, 8).max(axis=-1)
    is_natural = (padded > padded[:, -1:]).sum(axis=1) < 2048
    margins = fixture["candidate_margin"]
    compare.assert_bitwise(np.asarray(gap)[is_natural], margins[is_natural])
    assert np.all(np.asarray(gap) > SMALLEST_MARGIN)

    entries = np.asarray(indexer.block_entries(blocks, block_size=8))
    is_there = (entries >= 0) & (entries < width)
    inside = np.take_along_axis(fixture["consumer_scores"], np.clip(entries, 0, width - 1), axis=1)
    chosen, _ = TOP(np.where(is_there, inside, -np.inf).astype(np.float32), entries, count=512)
    compare.assert_bitwise(chosen, fixture["consumer_top512"])


@pytest.mark.parametrize("ratio", [1, 2])
def test_newest_block_is_always_kept_at_every_position(ratio: int):
    """All positions 0..300 against a loop, with the newest entries scored worst."""
    positions = jnp.arange(301, dtype=jnp.int32)
    visible = np.asarray(paged.num_visible(positions, ratio=ratio))
    width = 301 // ratio
    noise = np.random.default_rng(ratio).standard_normal((301, width), np.float32)
    scores = np.where(np.arange(width) < visible[:, None], noise - np.arange(width), -np.inf).astype(np.float32)
    made, _ = BLOCKS(scores, jnp.asarray(visible), block_size=8, count=4)
    compare.assert_bitwise(made, best_blocks(scores, visible, 8, 4))
    newest = (visible - 1) // 8
    assert all(newest[row] in np.asarray(made)[row] for row in range(301) if visible[row])
    assert not np.any(np.asarray(made)[visible == 0] >= 0)


@pytest.mark.parametrize("seed", range(4))
def test_choice_equals_a_sort_by_score_then_place(seed: int):
    """Scores of a few values only, so that most boundaries are ties; some rows have less than they may take."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-2, 3, (40, 37)).astype(np.float32)
    visible = rng.integers(0, 38, 40)
    scores[np.arange(37) >= visible[:, None]] = -np.inf
    for count in (1, 5, 36, 37, 50):
        made, _ = TOP(scores, listed(40, 37), count=count)
        compare.assert_bitwise(made, best_entries(scores, min(count, 37)))
    for block_size, count in ((4, 3), (8, 2), (5, 8), (1, 20)):
        made, _ = BLOCKS(scores, jnp.asarray(visible, jnp.int32), block_size=block_size, count=count)
        compare.assert_bitwise(made, best_blocks(scores, visible, block_size, count))


def test_margin_is_the_gap_at_the_boundary():
    inf = np.inf
    scores = np.float32([[5, 3, 1, 0], [5, 3, 3, 0], [5, 3, -inf, -inf], [5, -inf, -inf, -inf], [-inf] * 4])
    _, gap = TOP(scores, listed(5, 4), count=2)
    compare.assert_bitwise(gap, np.float32([2, 0, inf, inf, inf]))
    _, gap = TOP(scores, listed(5, 4), count=4)
    compare.assert_bitwise(gap, np.full(5, inf, np.float32))


def test_nothing_visible_gives_minus_ones():
    scores = np.full((2, 16), -np.inf, np.float32)
    made, _ = TOP(scores, listed(2, 16), count=3)
    compare.assert_bitwise(made, np.full((2, 3), -1, np.int32))
    made, _ = BLOCKS(scores, jnp.zeros(2, jnp.int32), block_size=4, count=3)
    compare.assert_bitwise(made, np.full((2, 3), -1, np.int32))


def index_inputs(dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((6, 8, 16), (6, 8), (6, 256, 16))
    return tuple(rng.standard_normal(s, np.float32).astype(dtype) for s in shapes)


def test_float32_scores_are_weighted_sums_of_relu(exact_jit):
    queries, weights, keys = index_inputs(np.float32)
    dots = np.einsum("bik,bmk->bim", queries.astype(np.float64), keys)
    want = np.einsum("bim,bi->bm", np.maximum(dots, 0), weights.astype(np.float64))
    compare.assert_close(exact_jit(indexer.score_block)(queries, weights, keys), want, rel_l2=SCORE_REL_L2)


def test_bf16_scores_are_rounded_at_the_three_marked_places(exact_jit):
    """Dot product, weighted term and sum over heads; inputs on a coarse grid, so that no sum has an order."""
    bf16 = ml_dtypes.bfloat16
    queries, weights, keys = (np.round(a.astype(np.float32) * 8) / 8 for a in index_inputs(np.float32))
    dots = np.maximum(np.einsum("bik,bmk->bim", queries, keys).astype(bf16).astype(np.float32), 0)
    terms = (dots * weights[..., None]).astype(bf16).astype(np.float32)
    want = terms.sum(axis=1, dtype=np.float64).astype(np.float32).astype(bf16).astype(np.float32)
    made = exact_jit(indexer.score_block)(queries.astype(bf16), weights.astype(bf16), keys.astype(bf16))
    compare.assert_bitwise(np.asarray(made) + 0, want + 0)
    unrounded = np.einsum("bim,bi->bm", np.maximum(np.einsum("bik,bmk->bim", queries, keys), 0), weights)
    assert np.any(want != unrounded.astype(bf16).astype(np.float32))


@pytest.mark.parametrize("width", [0, 128, 384])
def test_scores_of_missing_and_invisible_entries_are_minus_infinity(exact_jit, width: int):
    queries, weights, keys = (jnp.asarray(a) for a in index_inputs(np.float32))
    rng = np.random.default_rng(1)
    entries = np.sort(rng.integers(-1, 256, (6, width)).astype(np.int32), axis=1)
    visible = np.asarray([0, 1, 100, 256, 255, 3], np.int32)

    def load_keys(wanted: jax.Array) -> jax.Array:
        return jnp.take_along_axis(keys, jnp.maximum(wanted, 0)[..., None], axis=1)

    made = np.asarray(
        exact_jit(lambda q, w, e, v: indexer.score_entries(q, w, e, load_keys, v))(queries, weights, entries, visible)
    )
    is_seen = (entries >= 0) & (entries < visible[:, None])
    compare.assert_bitwise(made > -np.inf, is_seen)
    every = np.asarray(exact_jit(indexer.score_block)(queries, weights, keys))
    want = np.where(is_seen, np.take_along_axis(every, np.maximum(entries, 0), axis=1), -np.inf)
    compare.assert_close(made, want, rel_l2=SCORE_REL_L2)


def test_score_does_not_depend_on_the_number_of_entries(exact_jit):
    queries, weights, keys = (jnp.asarray(a) for a in index_inputs(np.float32))

    def score(width: int) -> np.ndarray:
        def load_keys(wanted: jax.Array) -> jax.Array:
            return jnp.take_along_axis(keys, wanted[..., None] % 256, axis=1)

        entries, visible = listed(6, width), np.full(6, width, np.int32)
        run = exact_jit(lambda e, v: indexer.score_entries(queries, weights, e, load_keys, v))
        return np.asarray(run(entries, visible))

    short = score(128)
    for width in (256, 512, 1280):
        compare.assert_bitwise(score(width)[:, :128], short)


def test_entries_of_blocks_are_padded_to_whole_score_blocks():
    made = np.asarray(indexer.block_entries(jnp.asarray([[0, 3, -1]], jnp.int32), block_size=4))
    assert made.shape == (1, indexer.SCORE_BLOCK)
    compare.assert_bitwise(made[0, :12], np.int32([0, 1, 2, 3, 12, 13, 14, 15, -1, -1, -1, -1]))
    assert np.all(made[0, 12:] == -1)
    assert indexer.pad_entries(jnp.zeros((2, 128), jnp.int32)).shape == (2, 128)
    assert indexer.pad_entries(jnp.zeros((2, 129), jnp.int32)).shape == (2, 256)


def test_spread_puts_values_back_in_place():
    made = indexer.spread(jnp.asarray([[1.0, 2.0, 3.0]]), jnp.asarray([[4, -1, 0]], jnp.int32), width=6)
    compare.assert_bitwise(made, np.float32([[3, -np.inf, -np.inf, -np.inf, 1, -np.inf]]))


@pytest.mark.parametrize("width, block_size", [(30, 8), (30, 3), (16, 4)])
def test_blocks_come_back_from_their_mask(width: int, block_size: int):
    rng = np.random.default_rng(width + block_size)
    num_blocks = -(-width // block_size)
    chosen = np.sort(np.stack([rng.permutation(num_blocks)[:3] for _ in range(5)]), axis=1).astype(np.int32)
    chosen[0, 1:] = -1
    mask = mask_of(jnp.asarray(chosen), block_size=block_size, width=width)
    made = indexer.blocks_of_mask(jnp.asarray(mask), block_size=block_size, count=3)
    compare.assert_bitwise(made, chosen)


def test_no_rows_give_no_rows():
    made, gap = TOP(jnp.zeros((0, 16)), jnp.zeros((0, 16), jnp.int32), count=3)
    assert made.shape == (0, 3) and gap.shape == (0,)
    made, _ = BLOCKS(jnp.zeros((0, 16)), jnp.zeros(0, jnp.int32), block_size=4, count=3)
    assert made.shape == (0, 3)
