import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from deepinfer_jax.sampling import draw
from deepinfer_jax.sampling.draw import Purpose

ONE = 1 << draw.SCORE_BITS
# Two logarithms from a polynomial of relative error 2^-27.8, each rounded to 2^-24; measured 2^-23.88.
NOISE_ERROR = 2.0**-23
# 99.9 % quantiles of chi-square.
CHI2_7 = 24.32
CHI2_49 = 85.35

EDGE_WORDS = np.array(
    [0, 1, 2, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 3 << 62, 2**64 - 2**32]
    + [2**64 - 2, 2**64 - 1]
    + [1 << k for k in range(64)]
    + [2**64 - 1 - (1 << k) for k in range(64)],
    dtype=np.uint64,
)


def split(words: np.ndarray) -> tuple[jax.Array, jax.Array]:
    high, low = (words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32)
    return jnp.asarray(high), jnp.asarray(low)


def sampled_words(count: int) -> np.ndarray:
    """Words of every magnitude on both sides, then plain ones, after the edges."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**64, count, dtype=np.uint64)
    small = words >> rng.integers(0, 64, count).astype(np.uint64)
    return np.concatenate([EDGE_WORDS, words, small, ~small])


def rows_of(count: int, seed: int = 3) -> dict[str, jax.Array]:
    return {
        "seed_lo": jnp.full((count,), seed, jnp.uint32),
        "seed_hi": jnp.full((count,), 0x9ABC, jnp.uint32),
        "positions": jnp.arange(count, dtype=jnp.int32),
    }


# The host mirror: the same integers through 64-bit numpy arithmetic.


def oracle_threefry(k0, k1, c0, c1):
    mask = np.uint64(0xFFFFFFFF)
    keys = [np.uint64(k) for k in (k0, k1, int(k0) ^ int(k1) ^ 0x1BD11BDA)]
    x0, x1 = (c0.astype(np.uint64) + keys[0]) & mask, (c1.astype(np.uint64) + keys[1]) & mask
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = (x0 + x1) & mask
            rotated = (x1 << np.uint64(distance)) | (x1 >> np.uint64(32 - distance))
            x1 = (rotated & mask) ^ x0
        x0 = (x0 + keys[(group + 1) % 3]) & mask
        x1 = (x1 + keys[(group + 2) % 3] + np.uint64(group + 1)) & mask
    return x0, x1


def oracle_log_ratio(rest: np.ndarray) -> np.ndarray:
    centred = rest.astype(np.int64) - (1 << 30)
    total = np.full_like(centred, 1861451667)
    for coefficient in (1547976020, 1012080800, 871735761, 783417101, 709650002, 671078502) + (
        680614586,
        784282695,
        1235585097,
    ):
        high, low = centred >> 16, centred & 0xFFFF
        total_high, total_low = total >> 16, total & 0xFFFF
        total = coefficient + (high * total_high + ((high * total_low) >> 16) + ((low * total_high) >> 16))
    assert (total > 0).all() and (total < 2**31).all()
    return total.astype(np.uint64) << np.uint64(1)


def oracle_normalize(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    zeros = np.array([64 - int(v).bit_length() for v in value], np.uint64)
    return (value << zeros) >> np.uint64(32), zeros


def oracle_gumbel(words: np.ndarray) -> np.ndarray:
    u64 = np.uint64
    odd = words | u64(1)
    is_low = odd >= u64(2**63)
    small = np.where(is_low, ~odd + u64(1), odd)
    mantissa, zeros = oracle_normalize(small)
    rest = np.where(is_low, u64(2**32) - mantissa, small >> u64(32))
    product = (np.where(is_low, rest, mantissa) * oracle_log_ratio(rest)) >> u64(32)
    exponential = np.where(is_low, zeros * u64(46516320) + (product >> u64(5)), product)
    fraction_bits = np.where(is_low, u64(26), u64(31) + zeros)
    top, zeros = oracle_normalize(exponential << u64(32))
    rest = u64(2**32) - top
    log = ((rest * oracle_log_ratio(rest)) >> u64(32)).astype(np.int64)
    exponent = (zeros + fraction_bits).astype(np.int64) - 32
    ln2 = exponent * 11629080 - ((exponent * 2094 + 2**15) >> 16)
    return ln2 + ((log + 64) >> 7)


@pytest.mark.parametrize(
    "key, counter, expected",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_generator_gives_the_published_answers(key, counter, expected):
    words = [jnp.array([w], jnp.uint32) for w in (*key, *counter)]
    got = draw.threefry2x32((words[0], words[1]), (words[2], words[3]))
    assert tuple(int(w[0]) for w in got) == expected


def test_generator_is_the_one_of_jax():
    rng = np.random.default_rng(0)
    key = jnp.asarray(rng.integers(0, 2**32, 2, dtype=np.uint32))
    count = jnp.asarray(rng.integers(0, 2**32, 64, dtype=np.uint32))
    got = draw.threefry2x32((key[:1], key[1:]), (count[:32], count[32:]))
    np.testing.assert_array_equal(np.concatenate(got), threefry_2x32(key, count))


def test_counter_holds_token_position_and_purpose():
    seed_lo, seed_hi, position, ids = 0xDEADBEEF, 0x12345678, 2**30 - 1, np.array([0, 7, 129279])
    for purpose in Purpose:
        got = draw.random_words(
            jnp.array([seed_lo], jnp.uint32),
            jnp.array([seed_hi], jnp.uint32),
            jnp.array([position], jnp.int32),
            jnp.asarray(ids, jnp.int32),
            purpose=purpose,
        )
        slot = np.full(3, 4 * position + int(purpose))
        for word, expected in zip(got, oracle_threefry(seed_lo, seed_hi, ids, slot), strict=True):
            np.testing.assert_array_equal(word[0], expected)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_noise_equals_the_host_mirror_exactly(jit):
    words = sampled_words(50_000)
    noise = jax.jit(draw.gumbel_of_words) if jit else draw.gumbel_of_words
    np.testing.assert_array_equal(noise(*split(words)), oracle_gumbel(words))


def test_noise_is_within_its_error_bound():
    words = sampled_words(300_000)
    got = np.asarray(draw.gumbel_of_words(*split(words))).astype(np.float64) / ONE
    odd = words | np.uint64(1)
    upper, lower = odd / 2.0**64, (~odd + np.uint64(1)) / 2.0**64  # 1 - U and U
    is_tail = upper < 0.5
    exponential = np.where(is_tail, -np.log1p(-np.where(is_tail, upper, 0.5)), -np.log(lower))
    error = got + np.log(exponential)
    assert np.abs(error).max() < NOISE_ERROR
    assert abs(error.mean()) < NOISE_ERROR / 8
    assert got.min() == pytest.approx(-np.log(64 * np.log(2)), abs=NOISE_ERROR)
    assert got.max() == pytest.approx(64 * np.log(2), abs=NOISE_ERROR)


def test_noise_rises_with_the_uniform_number():
    # 1 - U falls through every magnitude. The slack is the error of two values.
    words = np.sort(sampled_words(100_000))[::-1]
    noise = np.asarray(draw.gumbel_of_words(*split(words))).astype(np.int64)
    assert np.diff(noise).min() >= -2 * NOISE_ERROR * ONE
    tail = np.asarray(draw.gumbel_of_words(*split(np.arange(2**20, 2**20 + 4096, 2, dtype=np.uint64))))
    assert len(np.unique(tail)) == 2048  # near 2^-44 every value of U has a noise of its own


def test_wide_product_is_exact():
    rng = np.random.default_rng(2)
    edges = np.array([0, 1, 0xFFFF, 0x10000, 0x1FFFF, 2**31, 2**32 - 1], np.uint64)
    a = np.concatenate([np.repeat(edges, 7), rng.integers(0, 2**32, 1000, dtype=np.uint64)])
    b = np.concatenate([np.tile(edges, 7), rng.integers(0, 2**32, 1000, dtype=np.uint64)])
    high, low = draw.mul_wide(jnp.asarray(a.astype(np.uint32)), jnp.asarray(b.astype(np.uint32)))
    np.testing.assert_array_equal(high, (a * b) >> np.uint64(32))
    np.testing.assert_array_equal(low, (a * b) & np.uint64(0xFFFFFFFF))


def test_moments_and_tail_are_those_of_a_gumbel():
    ids = jnp.arange(1 << 14, dtype=jnp.int32)
    noise = draw.gumbel_noise(**rows_of(64), token_ids=ids, purpose=Purpose.FRESH)
    values = np.asarray(noise).astype(np.float64).ravel() / ONE
    count = values.size
    # Five standard errors: the variance of a Gumbel is pi^2 / 6, its excess kurtosis 12 / 5.
    assert abs(values.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / count)
    assert abs(values.var() - np.pi**2 / 6) < 5 * np.pi**2 / 6 * np.sqrt(4.4 / count)
    for threshold in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0, 11.0):
        expected = count * -np.expm1(-np.exp(-threshold))
        spread = np.sqrt(expected * (1 - expected / count))
        assert abs((values > threshold).sum() - expected) < 5 * spread, threshold


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def draw_tokens(probs: np.ndarray, rows: dict[str, jax.Array], purpose: Purpose) -> np.ndarray:
    count = rows["positions"].shape[0]
    distances = np.round((np.log(probs.max()) - np.log(probs)) * ONE).astype(np.int32)
    tiled = jnp.broadcast_to(jnp.asarray(distances), (count, len(probs)))
    survivors = jnp.ones(tiled.shape, bool)
    return np.asarray(jax.jit(draw.draw, static_argnames="purpose")(tiled, survivors, **rows, purpose=purpose))


PROBS = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02])


@pytest.mark.parametrize("purpose", list(Purpose))
def test_draws_follow_softmax(purpose):
    tokens = draw_tokens(PROBS, rows_of(100_000), purpose)
    assert chi_square(np.bincount(tokens, minlength=8), 100_000 * PROBS) < CHI2_7


def test_draws_over_seeds_follow_softmax():
    rows = rows_of(100_000)
    rows |= {"seed_lo": jnp.arange(100_000, dtype=jnp.uint32)}
    rows |= {"positions": jnp.full((100_000,), 91, jnp.int32)}
    tokens = draw_tokens(PROBS, rows, Purpose.FRESH)
    assert chi_square(np.bincount(tokens, minlength=8), 100_000 * PROBS) < CHI2_7


@pytest.mark.parametrize("pair", ["next position", "next seed", "other purpose"])
def test_neighbouring_draws_are_independent(pair):
    rows, purpose = rows_of(100_000), Purpose.FRESH
    first = draw_tokens(PROBS, rows, purpose)
    if pair == "next position":
        rows |= {"positions": rows["positions"] + 1}
    elif pair == "next seed":
        rows |= {"seed_lo": rows["seed_lo"] + jnp.uint32(1)}
    else:
        purpose = Purpose.RESIDUAL
    second = draw_tokens(PROBS, rows, purpose)
    table = np.bincount(first * 8 + second, minlength=64).reshape(8, 8)
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    assert chi_square(table, expected) < CHI2_49


def test_a_large_vocabulary_is_drawn_correctly():
    # Half of the mass on one token, the rest spread over 129,279: the maximum of many noises decides.
    vocab_size, count = 129_280, 600
    probs = np.full(vocab_size, 0.5 / (vocab_size - 1))
    probs[1234] = 0.5
    tokens = np.concatenate(
        [
            draw_tokens(probs, {k: v[i : i + 50] for k, v in rows_of(count).items()}, Purpose.FRESH)
            for i in range(0, count, 50)
        ]
    )
    hits = (tokens == 1234).sum()
    assert abs(hits - count / 2) < 4 * np.sqrt(count / 4)
    others = tokens[tokens != 1234]
    eighths = np.bincount(others * 8 // vocab_size, minlength=8)
    assert chi_square(eighths, np.full(8, len(others) / 8)) < CHI2_7


def test_shards_of_the_vocabulary_make_the_same_noise():
    rows = rows_of(5)
    ids = jnp.arange(1000, dtype=jnp.int32)
    whole = draw.gumbel_noise(**rows, token_ids=ids, purpose=Purpose.FRESH)
    parts = [
        draw.gumbel_noise(**rows, token_ids=ids[a:b], purpose=Purpose.FRESH) for a, b in ((0, 1), (1, 130), (130, 1000))
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 33])
def test_a_row_does_not_depend_on_its_batch(count):
    rng = np.random.default_rng(count)
    rows = {
        "seed_lo": jnp.asarray(rng.integers(0, 2**32, count, dtype=np.uint32)),
        "seed_hi": jnp.asarray(rng.integers(0, 2**32, count, dtype=np.uint32)),
        "positions": jnp.asarray(rng.integers(0, 2**30, count, dtype=np.int32)),
    }
    ids = jnp.arange(77, dtype=jnp.int32)
    noise = jax.jit(draw.gumbel_noise, static_argnames="purpose")
    batch = noise(**rows, token_ids=ids, purpose=Purpose.FRESH)
    order = rng.permutation(count)
    permuted = noise(**{k: v[order] for k, v in rows.items()}, token_ids=ids, purpose=Purpose.FRESH)
    np.testing.assert_array_equal(permuted, batch[order])
    for row in (0, count // 2, count - 1):
        alone = noise(**{k: v[row : row + 1] for k, v in rows.items()}, token_ids=ids, purpose=Purpose.FRESH)
        np.testing.assert_array_equal(alone[0], batch[row])


def test_ties_go_to_the_lowest_survivor():
    noise = jnp.zeros((1, 5), jnp.int32)
    distances = jnp.array([[0, 9, 4, 4, 4]], jnp.int32)
    survivors = jnp.array([[False, True, False, True, True]])
    scores = draw.draw_scores(distances, survivors, noise)
    assert int(jnp.argmax(scores)) == 3
    assert scores[0, 0] == draw.NOT_DRAWABLE


def test_filtered_tokens_are_never_drawn():
    rows = rows_of(5000)
    survivors = jnp.broadcast_to(jnp.array([False, True, False, True]), (5000, 4))
    tokens = draw.draw(
        jnp.broadcast_to(jnp.array([0, 64 * ONE, 0, 64 * ONE], jnp.int32), (5000, 4)),
        survivors,
        **rows,
        purpose=Purpose.FRESH,
    )
    assert set(np.unique(tokens)) == {1, 3}


def test_accept_uniforms_are_uniform_and_exact():
    values = np.asarray(draw.accept_uniforms(**rows_of(80_000)))
    assert values.dtype == np.float32
    assert values.min() >= 0 and values.max() < 1
    np.testing.assert_array_equal(values * 2**24, np.floor(values * 2.0**24))
    counts = np.bincount((values * 8).astype(int), minlength=8)
    assert chi_square(counts, np.full(8, 10_000.0)) < CHI2_7
