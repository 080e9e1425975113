import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import draw, filters, logits
from deepinfer_jax.sampling.params import SamplingParams
from tests.sampling.build import mixed_requests, random_logits, rows_of, take

FLOOR = np.float32(-9999.0)
LOG = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
# Distance and log of the mass each within 2^-23, then float32 rounding of a value below 16.
LOGPROB_ERROR = 1.5e-6

process = jax.jit(logits.process)
sample = jax.jit(logits.sample)


def logprobs_of(row, **options) -> np.ndarray:
    """The processed row of one request, jitted."""
    array = jnp.asarray([row], jnp.float32)
    return np.asarray(process(array, rows_of([SamplingParams(**options)])).logprobs[0])


# The host mirror: the same integers through 64-bit numpy arithmetic and a stable sort.


def oracle_weights(distances: np.ndarray) -> np.ndarray:
    """exp(-distance) in units of 2^-41."""
    u64 = np.uint64
    product = distances.astype(u64) * u64(0xB8AA3B29)
    rise = (-(product >> u64(23)).astype(np.int64) % 2**32).astype(u64)
    halvings = (product + u64(2**55 - 2**23)) >> u64(55)
    ratio = np.full_like(rise, 447061)
    for coefficient in (2725622, 20727931, 119176803, 515883993, 1488522215):
        ratio = u64(coefficient) + ((rise * ratio) >> u64(32))
    power = u64(2**30) + ((rise * ratio) >> u64(33))
    return np.where(halvings < 64, (power << u64(11)) >> np.minimum(halvings, u64(63)), u64(0))


def oracle_row(row: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, float]:
    """Distances, survivors and the exact mass of the survivors of one row."""
    is_possible = row > -np.inf
    inverse = np.float32(params.inverse_temperature)
    scaled = np.where(is_possible, (row.max() - np.where(is_possible, row, 0)) * inverse, np.inf)
    scaled = scaled.astype(np.float32)
    distances = (np.minimum(scaled, 64) * np.float32(2.0**24)).astype(np.int64)
    weights = np.where(is_possible, oracle_weights(distances), np.uint64(0))
    order = np.argsort(scaled, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    p = int(np.float32(params.top_p) * np.float32(2.0**30))
    in_top_p = np.array([int(b) * 2**30 <= p * int(weights.sum()) for b in before])
    top_k = len(row) if params.top_k == -1 else params.top_k
    survivors = np.zeros(len(row), bool)
    survivors[order[in_top_p & (np.arange(len(row)) < top_k)]] = True
    survivors &= is_possible
    return distances, survivors, float(weights[survivors].sum()) / 2.0**41


def test_k10_top_p_comes_before_top_k():
    got = logprobs_of(LOG, top_p=0.5, top_k=2)
    np.testing.assert_allclose(got[:2], [-0.559616, -0.847298], atol=1e-6)
    np.testing.assert_array_equal(got[2:], FLOOR)


def test_k10_a_token_above_the_border_stands_alone():
    np.testing.assert_array_equal(logprobs_of(LOG, top_p=0.39), [0.0, FLOOR, FLOOR, FLOOR])


def test_k10_mass_before_equal_to_p_keeps_the_token():
    row = [0.0, 0.0, -np.inf, -np.inf]
    got = logprobs_of(row, top_p=0.5)
    np.testing.assert_allclose(got[:2], [-0.693147] * 2, atol=1e-6)
    np.testing.assert_array_equal(got[2:], FLOOR)
    np.testing.assert_array_equal(logprobs_of(row, top_p=0.499), [0.0, FLOOR, FLOOR, FLOOR])


def test_k10_top_k_keeps_exactly_k_and_the_lower_id_of_a_tie():
    row = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)
    assert row[2] == row[3]
    np.testing.assert_array_equal(logprobs_of(row, top_k=1), [0.0, FLOOR, FLOOR, FLOOR])
    got = logprobs_of(row, top_k=3)
    np.testing.assert_allclose(got[:3], np.log([4 / 7, 2 / 7, 1 / 7]), atol=1e-6)
    assert got[3] == FLOOR


def test_k10_temperature():
    got = logprobs_of(LOG, temperature=0.5)
    np.testing.assert_allclose(got, np.log(np.array([16, 9, 4, 1]) / 30), atol=1e-6)


def test_k05_top_k_above_the_vocabulary_is_off():
    row = random_logits(1, 320, seed=1)[0]
    np.testing.assert_array_equal(logprobs_of(row, top_k=10**6), logprobs_of(row))


@pytest.mark.parametrize("vocab_size", [1, 2, 33, 320, 5000])
def test_filters_and_masses_equal_the_host_mirror_exactly(vocab_size):
    requests = mixed_requests(24)
    rows = random_logits(24, vocab_size, seed=vocab_size)
    got = process(jnp.asarray(rows), rows_of(requests))
    for index, params in enumerate(requests):
        distances, survivors, mass = oracle_row(rows[index], params)
        np.testing.assert_array_equal(got.distances[index], distances)
        np.testing.assert_array_equal(got.survivors[index], survivors)
        values = np.asarray(got.logprobs[index])
        expected = -distances[survivors] / 2.0**24 - np.log(mass)
        near = expected > -64
        np.testing.assert_allclose(values[survivors][near], expected[near], atol=4e-6, rtol=1e-7)
        np.testing.assert_array_equal(values[~survivors], FLOOR)


def test_weights_are_within_their_error_bound():
    rng = np.random.default_rng(0)
    distances = np.concatenate([[0, 1, 2**30, 2**30 - 1], rng.integers(0, 2**30, 20_000)])
    distances = np.concatenate([distances, rng.integers(0, 2**25, 20_000)]).astype(np.int32)[None]
    limbs = filters.weight_limbs(jnp.asarray(distances), jnp.ones(distances.shape, bool))
    low, mid, high = (np.asarray(limb).astype(np.uint64) for limb in limbs)
    weights = low | (mid << np.uint64(14)) | (high << np.uint64(28))
    np.testing.assert_array_equal(weights, oracle_weights(distances))
    exact = np.exp(-distances / 2.0**24)
    assert weights[0, 0] == 2**41
    assert np.abs(weights / 2.0**41 - exact - 0.5 * 2.0**-41).max() < 2.0**-25
    assert (np.abs(weights / 2.0**41 - exact) <= exact * 2.0**-25 + 2.0**-41).all()


def test_log_probabilities_are_those_of_log_softmax():
    rng = np.random.default_rng(5)
    rows = (rng.normal(size=(3, 129_280)) * np.array([[0.0], [1.0], [4.0]])).astype(np.float32)
    got = process(jnp.asarray(rows), rows_of([SamplingParams()] * 3))
    exact = rows.astype(np.float64)
    exact = exact - exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    assert np.abs(np.asarray(got.logprobs) - exact).max() < 4e-6
    assert np.abs(np.asarray(got.logprobs) - exact)[exact > -16].max() < LOGPROB_ERROR


def test_log_probabilities_are_never_above_zero_and_one_token_has_exactly_zero():
    rows = np.zeros((64, 3), np.float32)
    rows[:, 1] = -np.linspace(0.0, 30.0, 64)  # the mass goes from two tokens to just above one
    rows[:, 2] = -np.inf
    got = np.asarray(process(jnp.asarray(rows), rows_of([SamplingParams()] * 64)).logprobs)
    assert (got <= 0).all()
    assert logprobs_of([-3.5, -np.inf], temperature=1.0)[0] == 0.0
    assert not np.signbit(logprobs_of([-3.5, -np.inf], temperature=1.0)[0])


def test_values_far_below_the_best_keep_float32_precision_down_to_the_floor():
    row = -np.array([0.0, 1e-4, 0.00064, 0.005, 0.09, 0.0999, 0.1, 7.0], np.float32)
    got = logprobs_of(row, temperature=0)
    exact = (row.astype(np.float64) - row[0]) * 1e5
    exact = np.maximum(exact - np.log(np.exp(exact).sum()), -9999.0)
    np.testing.assert_allclose(got, exact, rtol=2e-7, atol=1e-6)
    assert (got[-2:] == FLOOR).all()


def test_greedy_takes_the_lowest_id_of_a_tie_and_reports_the_small_temperature():
    row = jnp.asarray([[1.0, 2.0, 2.0, 2.0 - 1e-5, -np.inf]], jnp.float32)
    for seed in range(20):
        got = sample(row, rows_of([SamplingParams(temperature=0, seq_seed=seed)]))
        assert int(got.token_ids[0]) == 1
    tail = np.exp(-(2.0 - np.asarray(row)[0, 3].astype(np.float64)) * 1e5)
    np.testing.assert_allclose(got.token_logprobs[0], -np.log(2 + tail), atol=1e-6)


def test_sampled_rows_follow_their_filtered_distribution():
    count = 40_000
    params = SamplingParams(temperature=0.5, top_p=0.9, seq_seed=11)
    rows = jnp.broadcast_to(jnp.asarray(LOG, jnp.float32), (count, 4))
    got = sample(rows, rows_of([params] * count))
    probs = np.array([16, 9, 4]) / 29  # the mass before token 3 is 29/30
    observed = np.bincount(np.asarray(got.token_ids), minlength=4)
    assert observed[3] == 0
    chi_square = ((observed[:3] - count * probs) ** 2 / (count * probs)).sum()
    assert chi_square < 13.82  # 99.9 % quantile, two degrees of freedom
    np.testing.assert_allclose(got.token_logprobs, np.log(probs)[np.asarray(got.token_ids)], atol=1e-6)


def test_a_shift_of_all_logits_changes_nothing():
    # On a grid of 1/8 the shift is exact.
    rows = random_logits(6, 50, seed=8)
    rows[:, 0] = 0.5
    requests = rows_of(mixed_requests(6))
    first, second = sample(jnp.asarray(rows), requests), sample(jnp.asarray(rows + 24), requests)
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_array_equal(first.logprobs, second.logprobs)


@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 33])
def test_a_row_does_not_depend_on_its_batch(count):
    requests = mixed_requests(33)[:count]
    rows, values = rows_of(requests), jnp.asarray(random_logits(33, 320, seed=4)[:count])
    batch = sample(values, rows)
    order = np.random.default_rng(count).permutation(count)
    permuted = sample(values[order], take(rows, order))
    for index in range(count):
        at = slice(index, index + 1)
        alone = sample(values[at], take(rows, at))
        place = int(np.flatnonzero(order == index)[0])
        for name in ("token_ids", "token_logprobs", "logprobs"):
            expected = np.asarray(getattr(alone, name))[0]
            np.testing.assert_array_equal(getattr(batch, name)[index], expected)
            np.testing.assert_array_equal(getattr(permuted, name)[place], expected)


def test_bits_do_not_depend_on_the_program():
    # Eager, jitted, and inside a larger program that makes the logits by a product with an inexact result
    # (which must not be fused with the subtraction that follows) and uses what comes out.
    rows = rows_of(mixed_requests(9))
    factor = jnp.asarray(np.random.default_rng(6).normal(size=(9, 130)) * 3, jnp.float32)
    values = factor * np.float32(1.1)

    @jax.jit
    def larger(factor, rows):
        out = logits.sample(factor * np.float32(1.1), rows)
        return out, jnp.exp(out.logprobs).sum(), logits.process(factor * np.float32(1.1), rows)

    sampled, _, processed = larger(factor, rows)
    for function, other in ((logits.sample, sampled), (logits.process, processed)):
        eager, jitted = function(values, rows), jax.jit(function)(values, rows)
        for a, b, c in zip(*map(jax.tree.leaves, (eager, jitted, other)), strict=True):
            np.testing.assert_array_equal(b, a)
            np.testing.assert_array_equal(c, a)


def test_eos_can_be_kept_from_being_first():
    row = jnp.asarray([[0.0, 9.0, 1.0]] * 3, jnp.float32)
    params = [SamplingParams(temperature=0), SamplingParams(seq_seed=1), SamplingParams(seq_seed=1)]
    got = sample(row, rows_of(params, suppressed=[1, 1, -1]))
    assert int(got.token_ids[0]) == 2 and int(got.token_ids[1]) != 1
    np.testing.assert_array_equal(got.logprobs[:2, 1], FLOOR)
    expected = np.log(1 / (1 + np.exp(1.0)))
    np.testing.assert_allclose(got.logprobs[1, 0], expected, atol=1e-6)
    assert got.logprobs[2, 1] > -0.01


def test_a_forced_token_wins_and_reports_its_own_log_probability():
    values = jnp.asarray(np.tile(LOG, (4, 1)), jnp.float32)
    params = [SamplingParams(top_k=2), SamplingParams(top_k=2), SamplingParams(temperature=0)]
    params.append(SamplingParams(seq_seed=5))
    got = sample(values, rows_of(params, forced=[1, 3, 2, -1]))
    assert list(got.token_ids[:3]) == [1, 3, 2]
    np.testing.assert_allclose(got.token_logprobs[0], np.log(3 / 7), atol=1e-6)
    assert got.token_logprobs[1] == FLOOR
    free = sample(values, rows_of(params))
    assert got.token_ids[3] == free.token_ids[3]
    replay = sample(values, rows_of(params, forced=free.token_ids))
    np.testing.assert_array_equal(replay.token_logprobs, free.token_logprobs)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_best_logit_says_so_and_spoils_no_other(bad):
    values = np.tile(LOG, (3, 1)).astype(np.float32)
    values[1] = bad if bad == -np.inf else [0.0, bad, 0.0, 0.0]
    rows = rows_of([SamplingParams(top_p=0.8, seq_seed=3)] * 3)
    got = sample(jnp.asarray(values), rows)
    assert np.isnan(got.logprobs[1]).all() and np.isnan(got.token_logprobs[1])
    assert 0 <= int(got.token_ids[1]) < 4
    alone = sample(jnp.asarray(values[2:]), take(rows, slice(2, 3)))
    np.testing.assert_array_equal(got.logprobs[2], alone.logprobs[0])


def test_top_logprobs_are_sorted_with_low_ids_first_and_padded():
    row = jnp.asarray(logprobs_of([1.0, 2.0, 2.0, -np.inf, 0.0], top_k=3))[None]
    values, ids = logits.top_logprobs(row, 4)
    assert list(ids[0]) == [1, 2, 0, 3]
    np.testing.assert_array_equal(values[0], np.asarray(row)[0, [1, 2, 0, 3]])
    values, ids = logits.top_logprobs(row, 7)
    assert list(ids[0, 5:]) == [-1, -1]
    np.testing.assert_array_equal(values[0, 5:], FLOOR)
    assert logits.top_logprobs(row, 0)[0].shape == (1, 0)


def test_an_empty_step_is_allowed_and_a_vocabulary_too_large_is_not():
    got = sample(jnp.zeros((0, 8)), rows_of([]))
    assert got.token_ids.shape == (0,)
    spec = jax.ShapeDtypeStruct((1, logits.MAX_VOCAB + 1), jnp.float32)
    with pytest.raises(ValueError, match="262145 is above 262144"):
        jax.eval_shape(logits.process, spec, rows_of([SamplingParams()]))


def test_the_same_token_whatever_the_sharding_of_the_vocabulary():
    # What a shard computes: its part of the scores from the global best, then best of bests.
    values = jnp.asarray(random_logits(5, 96, seed=9))
    rows = rows_of([SamplingParams(seq_seed=i) for i in range(5)])
    processed = process(values, rows)
    scores = []
    for start in (0, 32, 64):
        ids = jnp.arange(start, start + 32, dtype=jnp.int32)
        noise = draw.gumbel_noise(rows.seed_lo, rows.seed_hi, rows.positions, ids, purpose=draw.Purpose.FRESH)
        part = slice(start, start + 32)
        scores.append(draw.draw_scores(processed.distances[:, part], processed.survivors[:, part], noise))
    tokens = np.argmax(np.concatenate(scores, axis=1), axis=1)
    np.testing.assert_array_equal(sample(values, rows).token_ids, tokens)
