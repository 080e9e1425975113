import random

import pytest

from deepinfer_jax.sampling import params as P
from deepinfer_jax.sampling.params import SamplingParams


def test_samples_of_one_request_have_seeds_of_their_own():
    assert P.derived_seed(7, 0) == 7 and P.derived_seed(-1, 0) == 2**64 - 1
    seeds = [P.derived_seed(seed, i) for seed in (0, 1, 7, 2**64 - 1) for i in range(100)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**64 for seed in seeds)
    # An engine seed of the same value gives requests other seeds.
    requests = {P.request_seed(SamplingParams(), seed, i, random) for seed in (0, 1, 7) for i in range(100)}
    assert not requests & set(seeds)
    assert P.derived_seed(7, 1) == 0x2D9CF2B33C82FD8F  # an answer stays what it is
    with pytest.raises(ValueError, match="sample -1"):
        P.derived_seed(7, -1)


def test_explicit_seed_is_shared_by_all_requests():
    params = SamplingParams(seq_seed=7)
    assert {P.request_seed(params, engine, i, random) for engine in (None, 3) for i in range(4)} == {7}


def test_engine_seed_gives_each_request_its_own_repeatable_seed():
    params = SamplingParams()
    seeds = [P.request_seed(params, engine, i, random) for engine in (0, 1, -1) for i in range(50)]
    assert len(set(seeds)) == 150
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[:50] == [P.request_seed(params, 0, i, random.Random(1)) for i in range(50)]


def test_without_any_seed_each_request_draws_from_the_python_generator():
    params = SamplingParams()
    drawn = [P.request_seed(params, None, 0, random.Random(5)) for _ in range(2)]
    assert drawn[0] == drawn[1] == random.Random(5).getrandbits(64)
    rng = random.Random(5)
    assert len({P.request_seed(params, None, 0, rng) for _ in range(8)}) == 8


def test_mix64_is_splitmix64():
    # The first three outputs of SplitMix64 from state 0.
    gamma = 0x9E3779B97F4A7C15
    assert [P.mix64((i + 1) * gamma) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_seed_words_are_low_then_high():
    assert P.seed_words(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
