"""The three rules of verification: which tokens they emit, and with what probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import draw, filters, verify
from deepinfer_jax.sampling.draw import Purpose
from deepinfer_jax.sampling.logits import LOGPROB_FLOOR, process
from deepinfer_jax.testing.compare import assert_bitwise
from tests.sampling.build import mixed_requests, random_logits, rows_of, take
from tests.sampling.toys import (
    DRAW,
    KINDS,
    PAIRS,
    Toy,
    V,
    chi_square,
    dirichlet,
    draw_all,
    expected_chances,
    logs,
    make_toy,
    requests_of,
    stop_probabilities,
)

RULES = {"rejection": jax.jit(verify.verify_rejection), "block": jax.jit(verify.verify_block)}
CHANCES = {"rejection": jax.jit(verify.rejection_chances), "block": jax.jit(verify.block_chances)}
RESIDUAL = jax.jit(verify.residual_weights)
PROCESS = jax.jit(process)
# Weights are within 2^-22 relative; the law of two drafts is a product of a few of them.
LAW_ERROR = 2e-6
# E / (E + 1 - P) is a quotient of differences: what is left of 2^-22 when 1 - P + E is about 1/50.
QUOTIENT_ERROR = 2e-5
CHI2_26, CHI2_80 = 54.05, 124.84  # 99.9 % quantiles


def as_floats(limbs, is_positive) -> np.ndarray:
    low, mid, high = (np.asarray(limb).astype(np.float64) for limb in limbs)
    return np.where(is_positive, low + mid * 2.0**14 + high * 2.0**28, 0.0)


def last_token(toy: Toy, rule: str, requests: verify.VerifyRequests, stop: int, length: int) -> np.ndarray:
    """Distribution of the token behind `stop` accepted drafts [R, V]."""
    p, q = toy.rows(PAIRS)
    if stop == length:
        return p[:, stop]
    prefix = jnp.zeros(len(PAIRS), jnp.int32)
    if rule == "block" and stop == 1:
        weight = np.minimum(1, p[np.arange(9), 0, PAIRS[:, 0]] / np.maximum(q[np.arange(9), 0, PAIRS[:, 0]], 1e-30))
        prefix = jnp.asarray(np.minimum(-np.log(np.maximum(weight, 1e-30)), 32) * 2**24, jnp.int32)
    row = jnp.full(len(PAIRS), stop, jnp.int32)
    weights = as_floats(*RESIDUAL(logs(p), logs(q), requests, row, prefix))
    total = weights.sum(axis=1, keepdims=True)
    return np.where(total > 0, weights / np.maximum(total, 1), p[:, stop])


def emitted_law(toy: Toy, rule: str, length: int) -> tuple[np.ndarray, float]:
    """Law of three tokens, of which the target itself adds those that are missing; mean number of drafts accepted."""
    p, q = toy.rows(PAIRS)
    requests = requests_of(PAIRS, length)
    chances = np.asarray(CHANCES[rule](logs(p), logs(q), requests)).astype(np.float64)[:, :length]
    assert (chances >= 0).all() and (chances <= 1).all()
    stops = stop_probabilities(rule, chances, length)
    drafted = q[:, 0][np.arange(9), PAIRS[:, 0]] * q[:, 1][np.arange(9), PAIRS[:, 1]]
    law = np.zeros((V, V, V))
    for stop in range(length + 1):
        last = last_token(toy, rule, requests, stop, length)
        for pair, (first, second) in enumerate(PAIRS):
            weight = drafted[pair] * stops[pair, stop]
            if stop == 0:
                law += weight * last[pair][:, None, None] * toy.p[1][:, :, None] * toy.p[2]
            elif stop == 1:
                law[first] += weight * last[pair][:, None] * toy.p[2][first]
            else:
                law[first, second] += weight * last[pair]
    return law, float(drafted @ (stops @ np.arange(length + 1)))


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_emitted_tokens_have_exactly_the_law_of_the_target(rule, kind, length):
    for seed in range(4):
        toy = make_toy(kind, seed)
        law, _ = emitted_law(toy, rule, length)
        assert np.abs(law - toy.law).max() < LAW_ERROR


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_chances_are_those_of_the_specification(rule, length):
    drafts = np.tile(PAIRS, (20, 1))
    toys = [make_toy("plain" if seed % 2 else "filtered", seed) for seed in range(20)]
    rows = [toy.rows(PAIRS) for toy in toys]
    p, q = (np.concatenate([row[i] for row in rows]) for i in range(2))
    got = np.asarray(CHANCES[rule](logs(p), logs(q), requests_of(drafts, length)))[:, :length]
    want = expected_chances(rule, p, q, drafts, length)
    is_drawn = (np.take_along_axis(q, drafts[:, :, None], axis=2)[:, :length, 0] > 0).all(axis=1)
    assert is_drawn.sum() > 100
    np.testing.assert_allclose(got[is_drawn], want[is_drawn], atol=QUOTIENT_ERROR)


def test_block_accepts_at_least_as_many_drafts_as_rejection():
    gains = []
    for seed in range(30):
        toy = make_toy("good drafter" if seed % 2 else "plain", seed)
        (_, rejection), (_, block) = emitted_law(toy, "rejection", 2), emitted_law(toy, "block", 2)
        gains.append(block - rejection)
    assert min(gains) > -LAW_ERROR
    assert np.mean(gains) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_million_draws_have_the_law_of_the_target(rule):
    toy, count = make_toy("plain", 5), 1_000_000
    lengths = np.arange(count) % 3

    def behind(tables):
        return lambda drafts: np.broadcast_to(tables[drafts.shape[1]][tuple(drafts.T)], (count, V))

    requests, p, q = draw_all(requests_of(np.zeros((count, 2)), lengths), behind(toy.p), behind(toy.q))
    verified = RULES[rule](logs(p), logs(q), requests)
    tokens, num_kept = np.array(verified.token_ids), np.asarray(verified.num_kept)
    rng = np.random.default_rng(0)
    for place in (1, 2):  # the target goes on where fewer than three tokens were kept
        probs = toy.p[place][tuple(tokens[:, :place].T)]
        added = (rng.random((count, 1)) > probs.cumsum(axis=1)).sum(axis=1).clip(max=V - 1)
        tokens[:, place] = np.where(num_kept > place, tokens[:, place], added)
    for length in range(3):
        own = lengths == length
        counts = np.bincount(tokens[own] @ np.array([9, 3, 1]), minlength=27)
        assert chi_square(counts, own.sum() * toy.law.ravel()) < CHI2_26
        assert set(np.unique(num_kept[own])) == set(range(1, length + 2))


@pytest.mark.parametrize("rule", RULES)
def test_round_after_round_has_the_law_of_the_target(rule):
    """Rounds see positions again whose drafts were left behind: these must not tell anything about the next ones."""
    rng, count, num_tokens = np.random.default_rng(2), 250_000, 4
    p, q = rng.dirichlet(np.ones(V), V), rng.dirichlet(np.ones(V), V)  # by the token before
    tokens, ends = np.zeros((count, num_tokens + 4), np.int32), np.ones(count, np.int32)  # all begin with token 0
    each = np.arange(count)
    while (ends <= num_tokens).any():
        newest = tokens[each, ends - 1]

        def behind(table, newest=newest):
            return lambda drafts: table[drafts[:, -1] if drafts.shape[1] else newest]

        requests = dataclasses.replace(requests_of(np.zeros((count, 2)), 2), positions=jnp.asarray(ends))
        requests, target, drafter = draw_all(requests, behind(p), behind(q))
        verified = RULES[rule](logs(target), logs(drafter), requests)
        is_open, num_kept = ends <= num_tokens, np.asarray(verified.num_kept)
        for place in range(3):
            here = is_open & (num_kept > place)
            tokens[each[here], ends[here] + place] = np.asarray(verified.token_ids)[here, place]
        ends = np.where(is_open, ends + num_kept, ends)
    law = p[0][:, None, None, None] * p[:, :, None, None] * p[:, :, None] * p
    counts = np.bincount(tokens[:, 1 : num_tokens + 1] @ np.array([27, 9, 3, 1]), minlength=81)
    assert chi_square(counts, count * law.ravel()) < CHI2_80


def test_matching_keeps_the_leading_drafts_that_equal_the_draw():
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2, (200, 6))
    drafts, lengths = np.where(rng.random((200, 5)) < 0.8, drawn[:, :5], 2), rng.integers(0, 6, 200)
    got = verify.accept_matching(*(jnp.asarray(x, jnp.int32) for x in (drawn, drafts, lengths)))
    want = []
    for row, length in enumerate(lengths):
        differing = np.flatnonzero(drafts[row, :length] != drawn[row, :length])
        want.append(1 + int(differing[0] if len(differing) else length))
    assert np.asarray(got).tolist() == want
    assert set(want) == set(range(1, 7))


@dataclasses.dataclass(frozen=True)
class Step:
    """A verify step of requests with options of all kinds, made as an engine would."""

    logprobs: jax.Array
    draft_logprobs: jax.Array
    requests: verify.VerifyRequests


def make_step(count: int = 40, vocab_size: int = 37, num_drafts: int = 4) -> Step:
    options = mixed_requests(count)
    rng = np.random.default_rng(count)
    rows = rows_of(options, positions=rng.integers(0, 1000, count))
    logits = random_logits(count * (num_drafts + 1), vocab_size, 3).reshape(count, num_drafts + 1, vocab_size)
    near = np.where(rng.random(logits.shape) < 0.2, logits + rng.normal(size=logits.shape), logits).astype(np.float32)
    own, drafted, drawn, drafts = [], [], [], []
    for place in range(num_drafts + 1):
        at = dataclasses.replace(rows, positions=rows.positions + place)
        for values, kept, tokens, purpose in (
            (logits, own, drawn, Purpose.FRESH),
            (near, drafted, drafts, Purpose.DRAFT),
        ):
            processed = PROCESS(jnp.asarray(values[:, place]), at)
            words = at.seed_lo, at.seed_hi, at.positions
            token_ids = DRAW(processed.distances, processed.survivors, *words, purpose=purpose)
            best = jnp.argmax(jnp.asarray(values[:, place]), axis=1).astype(jnp.int32)
            kept.append(processed.logprobs)
            tokens.append(jnp.where(at.is_greedy, best, token_ids))
    return Step(
        logprobs=jnp.stack(own, axis=1),
        draft_logprobs=jnp.stack(drafted[:-1], axis=1),
        requests=verify.VerifyRequests(
            drawn=jnp.stack(drawn, axis=1),
            is_fixed=jnp.tile(rows.is_greedy[:, None], (1, num_drafts + 1)),
            drafts=jnp.stack(drafts[:-1], axis=1),
            lengths=jnp.asarray(rng.integers(0, num_drafts + 1, count), jnp.int32),
            seed_lo=rows.seed_lo,
            seed_hi=rows.seed_hi,
            positions=rows.positions,
        ),
    )


@pytest.fixture(scope="module")
def step() -> Step:
    return make_step()


def verified(rule: str, step: Step) -> verify.Verified:
    return RULES[rule](step.logprobs, step.draft_logprobs, step.requests)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_its_company(rule, step):
    whole = verified(rule, step)
    assert len(np.unique(whole.num_kept)) > 3
    order = np.random.default_rng(0).permutation(40)
    for index in (order, order[:7], order[:1]):
        part = Step(step.logprobs[index], step.draft_logprobs[index], take(step.requests, index))
        assert_bitwise(verified(rule, part), take(whole, index))


@pytest.mark.parametrize("rule", RULES)
def test_rows_behind_the_last_draft_are_not_looked_at(rule, step):
    lengths = np.asarray(step.requests.lengths)[:, None]
    rows, drafts = np.arange(5)[None, :], np.arange(4)[None, :]
    spoilt = Step(
        jnp.where((rows > lengths)[:, :, None], jnp.nan, step.logprobs),
        jnp.where((drafts >= lengths)[:, :, None], jnp.nan, step.draft_logprobs),
        dataclasses.replace(
            step.requests,
            drafts=jnp.where(drafts < lengths, step.requests.drafts, -1),
            drawn=jnp.where(rows <= lengths, step.requests.drawn, -1),
        ),
    )
    assert_bitwise(verified(rule, spoilt), verified(rule, step))


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_the_accepted_drafts_and_one_more(rule, step):
    got = verified(rule, step)
    tokens, kept, lengths = (np.asarray(x) for x in (got.token_ids, got.num_kept, step.requests.lengths))
    drafts, drawn = np.asarray(step.requests.drafts), np.asarray(step.requests.drawn)
    for row in range(len(kept)):
        accepted = kept[row] - 1
        assert 0 <= accepted <= lengths[row]
        assert (tokens[row, :accepted] == drafts[row, :accepted]).all()
        assert tokens[row, accepted] >= 0 and (tokens[row, kept[row] :] == verify.NO_TOKEN).all()
        if accepted == lengths[row]:
            assert tokens[row, accepted] == drawn[row, accepted]
        logprobs = np.asarray(step.logprobs)[row, np.arange(kept[row]), tokens[row, : kept[row]]]
        assert (logprobs > LOGPROB_FLOOR).all()


@pytest.mark.parametrize("rule", RULES)
def test_fixed_rows_emit_their_own_tokens(rule, step):
    """Greedy requests, requests with a forced token, and sampled ones in one step."""
    rng = np.random.default_rng(1)
    is_forced = rng.random((40, 5)) < 0.3
    drawn = np.where(is_forced, rng.integers(0, 37, (40, 5)), step.requests.drawn)
    drafts = np.where(rng.random((40, 4)) < 0.7, drawn[:, :4], step.requests.drafts)
    is_greedy = np.asarray(step.requests.is_fixed)
    # A drafter that always proposes these: one-hot, so that any draft may be had.
    ones = jnp.where(jnp.arange(37)[None, None, :] == drafts[:, :, None], 0.0, LOGPROB_FLOOR).astype(jnp.float32)
    changed = dataclasses.replace(
        step.requests,
        drawn=jnp.asarray(drawn, jnp.int32),
        drafts=jnp.asarray(drafts, jnp.int32),
        is_fixed=jnp.asarray(is_greedy | is_forced),
    )
    got = verified(rule, Step(step.logprobs, ones, changed))
    tokens, kept = np.asarray(got.token_ids), np.asarray(got.num_kept)
    checked = (np.arange(5)[None, :] < kept[:, None]) & (is_greedy | is_forced)
    assert checked.sum() > 20
    assert (tokens[checked] == drawn[checked]).all()
    matching = np.asarray(verify.accept_matching(changed.drawn, changed.drafts, changed.lengths))
    assert (kept == matching)[is_greedy[:, 0]].all()


@pytest.mark.parametrize("rule", RULES)
def test_a_greedy_step_is_the_one_of_matching(rule, step):
    fixed = dataclasses.replace(step.requests, is_fixed=jnp.ones((40, 5), bool))
    mixed = dataclasses.replace(fixed, is_fixed=fixed.is_fixed.at[:20].set(False))
    got = verified(rule, Step(step.logprobs, step.draft_logprobs, fixed))
    assert_bitwise(got.num_kept, verify.accept_matching(fixed.drawn, fixed.drafts, fixed.lengths))
    tested = verified(rule, Step(step.logprobs, step.draft_logprobs, mixed))  # through the accept tests
    assert_bitwise(take(got, slice(20, None)), take(tested, slice(20, None)))


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_residual_gives_the_own_token(rule):
    # Half of q is no distribution, but what rounding can do in the small: rejected, and nothing is left.
    q = np.tile(dirichlet(np.random.default_rng(0)), (400, 2, 1))
    p = np.concatenate([q / 2, q[:, :1]], axis=1)
    requests = requests_of(np.zeros((400, 2)), 2, drawn=np.full((400, 3), 2))
    got = RULES[rule](logs(p), logs(q), requests)
    is_rejected = np.asarray(got.num_kept) == 1
    assert is_rejected.sum() > 100
    assert (np.asarray(got.token_ids)[is_rejected, 0] == 2).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_not_sound_accepts_nothing(rule):
    toy = make_toy("perfect drafter", 0)
    p, q = toy.rows(PAIRS)
    requests = requests_of(PAIRS, 2)
    broken = logs(p).at[4, 1].set(jnp.nan)
    got, sound = RULES[rule](broken, logs(q), requests), RULES[rule](logs(p), logs(q), requests)
    assert int(got.num_kept[4]) <= 2 and int(sound.num_kept[4]) == 3
    others = np.arange(9) != 4
    assert_bitwise(take(got, others), take(sound, others))


def test_small_chances_are_not_lost():
    """A draft that the target gives 1e-6 is accepted about that often; one that it never gives, never."""
    p = np.array([[[1e-6, 1 - 1e-6], [1e-6, 1 - 1e-6]], [[0.0, 1.0], [0.0, 1.0]]])
    q = np.full((2, 1, 2), 0.5)
    got = np.asarray(CHANCES["rejection"](logs(p), logs(q), requests_of([[0], [0]], 1)))
    assert got[0, 0] == pytest.approx(2e-6, abs=2.0**-23)
    assert got[1, 0] == 0.0


def test_behind_an_impossible_draft_no_prefix_is_accepted():
    """Whatever the next drafts are: one that the target finds e^20 times likelier than the drafter included."""
    p = np.array([[[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]])
    q = np.array([[[0.5, 0.5], [np.exp(-20.0), 1 - np.exp(-20.0)]]])
    assert not np.asarray(CHANCES["block"](logs(p), logs(q), requests_of([[0, 0]], 2))).any()


def test_residual_is_the_exact_difference_of_the_weights(step):
    row, prefix = jnp.full((40,), 1, jnp.int32), jnp.arange(40, dtype=jnp.int32) << 18
    requests = dataclasses.replace(step.requests, is_fixed=jnp.zeros((40, 5), bool))
    limbs, is_positive = RESIDUAL(step.logprobs, step.draft_logprobs, requests, row, prefix)
    masses = []
    for logprobs, added in ((step.logprobs[:, 1], prefix[:, None]), (step.draft_logprobs[:, 1], 0)):
        distances = jnp.asarray(np.minimum(-np.asarray(logprobs), 64.0) * 2.0**24, jnp.int32) + added
        weights = filters.weight_limbs(distances, logprobs > LOGPROB_FLOOR)
        masses.append(sum(np.asarray(limb).astype(np.int64) << (14 * i) for i, limb in enumerate(weights)))
    difference = np.maximum(masses[0] - masses[1], 0)
    got = sum(np.asarray(limb).astype(np.int64) << (14 * i) for i, limb in enumerate(limbs))
    np.testing.assert_array_equal(np.where(is_positive, got, 0), difference)
    np.testing.assert_array_equal(is_positive, difference > 0)
    assert (difference > 0).any(axis=1).sum() > 10


def test_noise_is_keyed_by_position_and_purpose(step):
    """The accept tests and the last token, from the noise that the documentation names."""
    requests = dataclasses.replace(step.requests, is_fixed=jnp.zeros((40, 5), bool))
    got = RULES["rejection"](step.logprobs, step.draft_logprobs, requests)
    chances = np.asarray(CHANCES["rejection"](step.logprobs, step.draft_logprobs, requests))
    words = requests.seed_lo, requests.seed_hi
    no_token = jnp.array([-1], jnp.int32)
    own = [w[:, 0] for w in draw.random_words(*words, requests.positions, no_token, purpose=Purpose.DRAFT)]
    uniforms = np.stack([draw.accept_uniforms(*own, requests.positions + place) for place in range(4)], axis=1)
    is_accepted = (uniforms < chances) & (np.arange(4)[None, :] < np.asarray(requests.lengths)[:, None])
    stop = np.cumprod(is_accepted, axis=1).sum(axis=1)
    np.testing.assert_array_equal(got.num_kept, stop + 1)
    ids = jnp.arange(37, dtype=jnp.int32)
    noise = draw.gumbel_noise(*words, requests.positions + jnp.asarray(stop, jnp.int32), ids, purpose=Purpose.RESIDUAL)
    num_checked = 0
    for row in np.flatnonzero(stop < np.asarray(requests.lengths)):
        p, q = (np.exp(np.asarray(x)[row, stop[row]].astype(np.float64)) for x in (step.logprobs, step.draft_logprobs))
        with np.errstate(divide="ignore"):
            scores = np.log(np.maximum(p - q, 0)) + np.asarray(noise)[row] / 2.0**24
        best, second = np.sort(scores)[[-1, -2]]
        if best - second > 1e-3:  # beyond what rounding can turn
            assert int(got.token_ids[row, stop[row]]) == scores.argmax()
            num_checked += 1
    assert num_checked > 5


@pytest.mark.parametrize("rule", RULES)
def test_no_second_copy_of_the_distributions_is_made(rule):
    count, num_drafts, vocab_size = 8, 5, 129_280
    shapes = (
        jax.ShapeDtypeStruct((count, num_drafts + 1, vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((count, num_drafts, vocab_size), jnp.float32),
        jax.eval_shape(lambda: requests_of(np.zeros((count, num_drafts)), 0)),
    )
    memory = RULES[rule].lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < (num_drafts + 1) * count * vocab_size * 4
