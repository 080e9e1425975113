import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import logits
from deepinfer_jax.sampling.logits import SampleSettings
from deepinfer_jax.sampling.params import SamplingParams
from tests.sampling import reference
from tests.sampling.build import mixed_requests, random_edits, rows_of

# A row that the reference decides by less may come out otherwise: float32 logits and 2^-24 noise.
MARGIN = 1e-6
# Distances of float32: half a unit in the last place of up to 100, twice, and the integers' own error.
LOGPROB_ERROR = 3e-5

sample = jax.jit(logits.sample, static_argnames="settings")

CASES = [
    (64, 3000, SampleSettings(computes_smaller=True)),
    (131, 3000, SampleSettings(blacklist=((0, 2), (50, 60)), force_top_k=40)),
    (200, 2000, SampleSettings(blacklist=((7, 7), (190, 400)), computes_smaller=True)),
    (320, 2000, SampleSettings(force_top_k=25, computes_smaller=True)),
]


@pytest.mark.parametrize("vocab_size, count, settings", CASES, ids=[f"V{case[0]}" for case in CASES])
def test_10_000_random_rows_agree_token_for_token(vocab_size, count, settings):
    rng = np.random.default_rng(vocab_size)
    values = (rng.normal(size=(count, vocab_size)) * rng.choice([0.5, 2.0, 4.0], (count, 1))).astype(np.float32)
    requests = mixed_requests(count, min_p=(0.0, 0.0, 0.05, 0.3, 1.0))
    positions = rng.integers(0, 2**20, count)
    allowed = rng.random(values.shape) < rng.choice([1.0, 0.9, 0.2], (count, 1))
    allowed[:, 30:34] = True  # outside the blacklists
    suppressed = np.where(rng.random(count) < 0.2, values.argmax(1), -1)
    suppressed = np.where((suppressed >= 30) & (suppressed < 34), -1, suppressed)
    forced = np.where(rng.random(count) < 0.1, rng.integers(0, vocab_size, count), -1)
    edits = random_edits(count, vocab_size, 12, seed=vocab_size)
    expected = reference.sample(
        values,
        requests,
        positions,
        suppressed=suppressed,
        forced=forced,
        edits=(edits.token_ids, edits.up, edits.down, edits.add),
        allowed=allowed,
        blacklist=settings.blacklist,
        force_top_k=settings.force_top_k,
    )
    rows = rows_of(requests, positions, suppressed, forced)
    got = sample(jnp.asarray(values), rows, edits=edits, allowed=jnp.asarray(allowed), settings=settings)
    is_sure = expected.margins >= MARGIN
    assert np.count_nonzero(~is_sure) < count / 1000
    np.testing.assert_array_equal(np.asarray(got.token_ids)[is_sure], expected.token_ids[is_sure])
    values = np.asarray(got.logprobs)[is_sure]
    np.testing.assert_array_equal(values > -9999, expected.logprobs[is_sure] > -9999)
    near = expected.logprobs[is_sure] > -64
    np.testing.assert_allclose(values[near], expected.logprobs[is_sure][near], atol=LOGPROB_ERROR)
    np.testing.assert_allclose(values[~near], expected.logprobs[is_sure][~near], rtol=1e-6, atol=0.1)
    emitted = np.take_along_axis(values, expected.token_ids[is_sure][:, None], 1)[:, 0]
    np.testing.assert_array_equal(np.asarray(got.token_logprobs)[is_sure], emitted)
    if settings.computes_smaller:
        mass = np.asarray(got.smaller_mass)[is_sure]
        np.testing.assert_allclose(mass, expected.smaller_mass[is_sure], atol=LOGPROB_ERROR)
    else:
        np.testing.assert_array_equal(got.smaller_mass, np.float32(-1))


@pytest.mark.parametrize("case", range(4))
def test_frequencies_are_the_reported_probabilities(case):
    count, vocab_size = 20_000, 48
    options = [
        {"temperature": 1.3},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "top_k": 12},
        {"temperature": 2.0, "top_p": 0.95, "top_k": 30, "min_p": 0.01},
    ][case]
    rng = np.random.default_rng(case)
    row = rng.normal(size=(1, vocab_size)).astype(np.float32)
    edits = random_edits(1, vocab_size, 9, seed=case)
    edits, values, allowed = jax.tree.map(
        lambda a: jnp.broadcast_to(jnp.asarray(a), (count, *a.shape[1:])), (edits, row, rng.random(row.shape) < 0.9)
    )
    rows = rows_of([SamplingParams(seq_seed=77 + case, **options)] * count)
    settings = SampleSettings(blacklist=((3, 5),), force_top_k=40)
    got = sample(values, rows, edits=edits, allowed=allowed, settings=settings)
    probs = np.exp(np.asarray(got.logprobs[0], np.float64))
    assert abs(probs.sum() - 1) < 1e-5
    observed = np.bincount(got.token_ids, minlength=vocab_size)
    is_drawn = probs > 0
    assert not observed[~is_drawn].any()
    assert (count * probs[is_drawn]).min() > 1
    chi_square = ((observed - count * probs)[is_drawn] ** 2 / (count * probs[is_drawn])).sum()
    freedom = is_drawn.sum() - 1
    # 99.9 % quantile by the approximation of Wilson and Hilferty.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
