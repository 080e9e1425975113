"""Edits, masks, min-p, preselection and the smaller mass on the device, and the order of all of them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import filters, logits
from deepinfer_jax.sampling.logits import Edits, SampleSettings
from deepinfer_jax.sampling.params import SamplingParams
from tests.sampling.build import mixed_requests, random_edits, random_logits, rows_of, take
from tests.sampling.test_logits import LOG, LOGPROB_ERROR, oracle_row, oracle_weights

FLOOR = np.float32(-9999.0)
INF = np.inf

sample = jax.jit(logits.sample, static_argnames="settings")
edit = jax.jit(logits.apply_edits)


def edits_of(*changes: tuple[int, float, float, float], rows: int = 1) -> Edits:
    """(token id, up, down, add) of one row, the same in all rows."""
    columns = [np.array(column)[None].repeat(rows, 0) for column in zip(*changes, strict=True)]
    floats = [jnp.asarray(column.astype(np.float32)) for column in columns[1:]]
    return Edits(token_ids=jnp.asarray(columns[0].astype(np.int32)), up=floats[0], down=floats[1], add=floats[2])


def one(row, params: SamplingParams | None = None, *, suppressed=-1, forced=-1, allowed=None, edits=None, **settings):
    """The sampled row of one request."""
    return sample(
        jnp.asarray([row], jnp.float32),
        rows_of([params or SamplingParams(seq_seed=1)], None, suppressed, forced),
        edits=edits,
        allowed=None if allowed is None else jnp.asarray([allowed]),
        settings=SampleSettings(**settings),
    )


def survivors(got) -> list[int]:
    return np.flatnonzero(np.asarray(got.logprobs[0]) > FLOOR).tolist()


# Edits.


def test_edits_are_a_rounded_product_and_a_rounded_sum():
    rng = np.random.default_rng(0)
    count, vocab_size, width = 200, 300, 250
    values = (rng.normal(size=(count, vocab_size)) * 5).astype(np.float32)
    edits = random_edits(count, vocab_size, width, seed=1)
    got = np.asarray(edit(jnp.asarray(values), edits))
    ids, up, down, add = (np.asarray(a) for a in (edits.token_ids, edits.up, edits.down, edits.add))
    row, place = np.nonzero(ids >= 0)
    old, factor = (
        values[row, ids[row, place]],
        np.where(values[row, ids[row, place]] > 0, up[row, place], down[row, place]),
    )
    expected = values.copy()
    expected[row, ids[row, place]] = old * factor + add[row, place]
    np.testing.assert_array_equal(got, expected)
    exact = old.astype(float) * factor + add[row, place]
    np.testing.assert_allclose(got[row, ids[row, place]], exact, rtol=1e-6, atol=1e-6)
    # A fused multiply-add would have given other bits in many places, so the first equality means something.
    assert np.count_nonzero(exact.astype(np.float32) != old * factor + add[row, place]) > 1000


def test_edited_bits_do_not_depend_on_rows_width_or_program():
    rng = np.random.default_rng(3)
    factor = jnp.asarray(rng.normal(size=(33, 97)) * 5, jnp.float32)
    edits = random_edits(33, 97, 40, seed=4)

    @jax.jit
    def larger(factor, edits):
        edited = logits.apply_edits(factor * np.float32(1.1) + np.float32(0.3), edits)
        return edited, (edited * np.float32(1.7) - np.float32(0.1)).sum()

    values = jnp.asarray(np.asarray(factor) * np.float32(1.1)) + np.float32(0.3)
    whole = np.asarray(edit(values, edits))
    wide = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 23)), constant_values=-1), edits)
    np.testing.assert_array_equal(edit(values, wide), whole)
    np.testing.assert_array_equal(logits.apply_edits(values, edits), whole)
    for row in (0, 17, 32):
        at = slice(row, row + 1)
        np.testing.assert_array_equal(edit(values[at], take(edits, at))[0], whole[row])
    fused = jax.jit(lambda f: f * np.float32(1.1) + np.float32(0.3))(factor)
    np.testing.assert_array_equal(larger(factor, edits)[0], edit(fused, edits))


def test_the_sign_of_the_logit_chooses_the_factor_and_unused_places_change_nothing():
    row = jnp.asarray([[2.0, -2.0, 0.0, 1.0, 5.0]], jnp.float32)
    edits = edits_of((0, 0.5, 2.0, 0.0), (1, 0.5, 2.0, 0.0), (2, 0.5, 2.0, 1.0), (-1, 9.0, 9.0, 9.0), (-1, 0, 0, 0))
    np.testing.assert_array_equal(edit(row, edits), [[1.0, -4.0, 1.0, 1.0, 5.0]])
    empty = Edits(token_ids=jnp.zeros((1, 0), jnp.int32), **dict.fromkeys(("up", "down", "add"), jnp.zeros((1, 0))))
    np.testing.assert_array_equal(edit(row, empty), row)


def test_an_edit_makes_no_infinity_and_frees_no_forbidden_token():
    row = jnp.asarray([[3e38, -3e38, -INF, INF, np.nan, 1.0]], jnp.float32)
    changes = [(i, 1e30, 1e30, sign * 3.4e38) for i, sign in enumerate((1, -1, 1, -1, 1, 1))]
    largest, high = np.finfo(np.float32).max, np.float32(3.4e38)
    np.testing.assert_array_equal(edit(row, edits_of(*changes)), [[largest, -largest, -INF, INF, np.nan, high]])
    got = one([1.0, 0.0, -INF, 2.0], edits=edits_of((0, 1, 1, 3.4e38), (1, 1, 1, -3.4e38)))
    assert survivors(got) == [0] and int(got.token_ids[0]) == 0 and float(got.token_logprobs[0]) == 0.0
    last = one([-INF, 0.0, -1.0], SamplingParams(top_k=2), edits=edits_of((1, 1, 1, 3.4e38), (2, 1, 1, -3.4e38)))
    assert np.isfinite(np.asarray(last.logprobs)).all()


# Order.


def test_no_edit_brings_back_what_is_forbidden_and_a_forced_token_overrides_all():
    raise_all = edits_of(*[(i, 1.0, 1.0, 50.0) for i in range(4)])
    options = {"suppressed": 1, "allowed": [True, True, False, True], "edits": raise_all, "blacklist": ((0, 0),)}
    got = one(LOG, SamplingParams(seq_seed=3), **options)
    assert survivors(got) == [3] and int(got.token_ids[0]) == 3 and float(got.token_logprobs[0]) == 0.0
    forced = one(LOG, SamplingParams(seq_seed=3), forced=0, **options)
    assert int(forced.token_ids[0]) == 0 and forced.token_logprobs[0] == FLOOR
    np.testing.assert_array_equal(forced.logprobs, got.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_forbidden_is_recognisable_and_spoils_no_other(temperature):
    values = jnp.asarray(np.tile(LOG, (2, 1)), jnp.float32)
    rows = rows_of([SamplingParams(temperature=temperature, seq_seed=1)] * 2)
    allowed = jnp.asarray([[True, False, False, False], [True] * 4])
    settings = SampleSettings(blacklist=((0, 0),), computes_smaller=True)
    got = sample(values, rows, allowed=allowed, edits=edits_of((0, 1, 1, 9), rows=2), settings=settings)
    assert np.isnan(got.token_logprobs[0]) and np.isnan(got.logprobs[0]).all() and got.smaller_mass[0] == -1
    assert got.token_logprobs[1] > FLOOR and got.smaller_mass[1] >= 0


def test_edits_come_before_the_preselection():
    got = one(LOG, force_top_k=2, edits=edits_of((3, 1.0, 1.0, 5.0)))
    assert survivors(got) == [0, 3]


def test_the_preselection_comes_before_top_p():
    # Of all four the mass before token 1 is 0.4; of the best two it is 4/7.
    assert survivors(one(LOG, SamplingParams(top_p=0.5))) == [0, 1]
    assert survivors(one(LOG, SamplingParams(top_p=0.5), force_top_k=2)) == [0]
    np.testing.assert_allclose(one(LOG, force_top_k=2).logprobs[0, :2], np.log([4 / 7, 3 / 7]), atol=1e-6)


def test_edits_come_before_the_temperature():
    got = one([1.0, 1.0], SamplingParams(temperature=0.5), edits=edits_of((0, 1.0, 1.0, 1.0)))
    np.testing.assert_allclose(got.logprobs[0, 1] - got.logprobs[0, 0], -2.0, atol=LOGPROB_ERROR)


def test_top_p_comes_before_min_p_and_min_p_after_the_temperature():
    # Without tokens 2 and 3 the mass before token 1 would be 4/7.
    assert survivors(one(LOG, SamplingParams(top_p=0.5, min_p=0.6))) == [0, 1]
    assert survivors(one(LOG, SamplingParams(min_p=0.6, temperature=0.5))) == [0]  # (3/4)^2 is below
    assert survivors(one(LOG, SamplingParams(min_p=0.6, top_k=1))) == [0]


def test_min_p_keeps_its_border_and_the_log_probabilities_are_those_of_what_is_left():
    row = [0.0, -1.0, -1.0 - 2**-20, 0.0]
    got = one(row, SamplingParams(min_p=float(np.exp(-1.0))))
    assert survivors(got) == [0, 1, 3]
    exact = np.exp(np.array(row)[[0, 1, 3]])
    np.testing.assert_allclose(got.logprobs[0, [0, 1, 3]], np.log(exact / exact.sum()), atol=1e-6)
    assert survivors(one(row, SamplingParams(min_p=1.0))) == [0, 3]
    assert survivors(one([*row, -INF], SamplingParams(min_p=0.0))) == [0, 1, 2, 3]


def test_without_min_p_in_the_rows_nothing_is_dropped():
    values = jnp.asarray(random_logits(9, 50, seed=2))
    rows = rows_of(mixed_requests(9))
    bare = type(rows)(**{**rows.__dict__, "min_p_distance": None})
    for got, expected in zip(*(jax.tree.leaves(sample(values, r)) for r in (bare, rows)), strict=True):
        np.testing.assert_array_equal(got, expected)


# Preselection and blacklist.


@pytest.mark.parametrize("count", [1, 2, 7, 49, 50, 51, 1000])
def test_the_preselection_keeps_the_best_with_low_ids_first(count):
    values = random_logits(40, 50, seed=count)
    values[0, :3] = [0.0, -0.0, 0.0]
    order = np.argsort(-values, axis=1, kind="stable")
    expected = np.full_like(values, -INF)
    kept = order[:, :count]
    np.put_along_axis(expected, kept, np.take_along_axis(values, kept, 1), axis=1)
    got = jax.jit(filters.preselect, static_argnums=1)(jnp.asarray(values), count)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("nan", [np.float32(np.nan), -np.float32(np.nan)], ids=["plus", "minus"])
def test_the_preselection_hides_no_unsound_row(nan):
    got = one([0.0, nan, 1.0, 2.0], force_top_k=1)
    assert np.isnan(got.token_logprobs[0])


def test_the_blacklist_holds_for_every_row_and_ends_with_the_vocabulary():
    values = jnp.asarray(random_logits(64, 40, seed=5))
    settings = SampleSettings(blacklist=((0, 4), (9, 9), (35, 99)))
    got = sample(values, rows_of(mixed_requests(64)), settings=settings)
    forbidden = [*range(5), 9, *range(35, 40)]
    assert not np.isin(got.token_ids, forbidden).any()
    np.testing.assert_array_equal(got.logprobs[:, forbidden], FLOOR)


def test_settings_are_checked_and_hashable():
    assert hash(SampleSettings(blacklist=((1, 2),))) == hash(SampleSettings(blacklist=((1, 2),)))
    with pytest.raises(ValueError, match=r"blacklist has \(3, 2\)"):
        SampleSettings(blacklist=((3, 2),))
    with pytest.raises(ValueError, match="force_top_k=-1 must be >= 0"):
        SampleSettings(force_top_k=-1)


# The mass of what is less likely.


def to_float32(value: Fraction) -> float:
    """The nearest float32, the even one on ties, of a number whose float32 is normal."""
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - 24
    while value / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while value / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    return float(round(value / Fraction(2) ** exponent)) * 2.0**exponent


def words_of(values: list[int]):
    return tuple(
        jnp.asarray(np.array(w, np.uint32)[:, None])
        for w in zip(*[(v >> 32, v & (2**32 - 1)) for v in values], strict=True)
    )


def test_the_ratio_of_two_masses_is_rounded_once():
    rng = np.random.default_rng(9)
    wholes = [2**41, 2**41, 2**41 + 1, 2**59 - 1, 2**59 - 1, 2**50, 3 * 2**40, 2**58 + 2**34, 2**41]
    parts = [0, 1, 2**41, 2**59 - 2, 1, 2**49 + 2**25, 2**40, 2**58, 2**41 - 1]
    for _ in range(4000):
        wholes.append(int(rng.integers(2**41, 2**59)) >> int(rng.integers(0, 17)) | 2**41)
        parts.append(int(rng.integers(0, wholes[-1])) >> int(rng.integers(0, 59)))
    got = jax.jit(filters.ratio)(words_of(parts), words_of(wholes))
    expected = [to_float32(Fraction(part, whole)) for part, whole in zip(parts, wholes, strict=True)]
    np.testing.assert_array_equal(np.asarray(got)[:, 0], np.array(expected, np.float32))


def test_smaller_mass_is_the_exact_mass_below_the_token():
    requests, values = mixed_requests(60), random_logits(60, 90, seed=6)
    settings = SampleSettings(computes_smaller=True)
    got = sample(jnp.asarray(values), rows_of(requests), settings=settings)
    for index, params in enumerate(requests):
        distances, kept, _ = oracle_row(values[index], params)
        weights = oracle_weights(distances)
        below = kept & (distances > distances[int(got.token_ids[index])])
        part, whole = (sum(int(w) for w in weights[which]) for which in (below, kept))
        assert float(got.smaller_mass[index]) == to_float32(Fraction(part, whole))


def test_smaller_mass_at_its_ends():
    def smaller(row, **options) -> float:
        return float(one(row, computes_smaller=True, **options).smaller_mass[0])

    assert smaller(LOG, forced=3) == 0.0
    np.testing.assert_allclose([smaller(LOG, forced=i) for i in range(3)], [0.6, 0.3, 0.1], rtol=1e-6)
    assert smaller([0.0, 0.0, 0.0, 0.0], forced=1) == 0.0  # equally likely is not less likely
    assert smaller(LOG, params=SamplingParams(top_k=2), forced=3) == 0.0  # filtered out
    assert smaller([0.0, np.nan], forced=0) == -1.0
    assert float(one(LOG).smaller_mass[0]) == -1.0


# Batch independence with everything on.


def test_a_row_with_all_options_does_not_depend_on_its_batch():
    count, vocab_size = 256, 150
    rng = np.random.default_rng(12)
    requests = mixed_requests(count, min_p=(0.0, 0.05, 0.4))
    forced = np.where(rng.random(count) < 0.1, rng.integers(0, vocab_size, count), -1)
    suppressed = np.where(rng.random(count) < 0.2, rng.integers(0, vocab_size, count), -1)
    allowed = rng.random((count, vocab_size)) < rng.choice([1.0, 0.5], (count, 1))
    whole = {
        "logits": jnp.asarray(random_logits(count, vocab_size, seed=13)),
        "rows": rows_of(requests, rng.integers(0, 2**30, count), suppressed, forced),
        "edits": random_edits(count, vocab_size, 17, seed=14),
        "allowed": jnp.asarray(allowed),
    }
    settings = SampleSettings(blacklist=((0, 2), (77, 80)), force_top_k=60, computes_smaller=True)
    batch = sample(**whole, settings=settings)
    order = rng.permutation(count)
    permuted = sample(**take(whole, order), settings=settings)
    for got, expected in zip(jax.tree.leaves(permuted), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(got, np.asarray(expected)[order])
    for start, size in ((0, 1), (100, 1), (255, 1), (31, 7), (120, 33)):
        some = sample(**take(whole, slice(start, start + size)), settings=settings)
        for got, expected in zip(jax.tree.leaves(some), jax.tree.leaves(batch), strict=True):
            np.testing.assert_array_equal(got, np.asarray(expected)[start : start + size])
