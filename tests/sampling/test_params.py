import copy
import dataclasses
import math
import pickle
import random
import warnings

import numpy as np
import pytest

from deepinfer_jax.sampling import params as P
from deepinfer_jax.sampling.params import SamplingParams

INT32_MAX = 2**31 - 1


def test_fields_and_defaults_are_those_of_the_interface():
    got = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert got == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "ignore_eos": False,
        "max_tokens": 16,
        "logprobs": False,
        "prompt_logprobs": False,
        "top_logprobs": 0,
        "first_n_token_no_eos": 0,
        "eos_id": 0,
        "so_args": None,
        "golden_token_ids": None,
        "seq_seed": None,
    }
    assert list(got)[:5] == ["temperature", "top_p", "top_k", "ignore_eos", "max_tokens"]
    assert SamplingParams(0.5, 0.9, 7, True, 3) == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, ignore_eos=True, max_tokens=3
    )


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_p", math.inf),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -math.inf),
        ("top_logprobs", 1001),
        ("top_logprobs", -1),
        ("first_n_token_no_eos", 2),
        ("first_n_token_no_eos", -1),
        ("eos_id", -1),
    ],
)
def test_a_value_out_of_range_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("seq_seed", True),
        ("seq_seed", 1.0),
        ("seq_seed", "7"),
        ("top_k", True),
        ("top_k", 1.0),
        ("max_tokens", None),
        ("max_tokens", 1.5),
        ("temperature", True),
        ("temperature", "1"),
        ("ignore_eos", 1),
        ("logprobs", 1),
        ("golden_token_ids", 5),
        ("golden_token_ids", "12"),
        ("golden_token_ids", [1, 2.0]),
        ("golden_token_ids", [True]),
        ("so_args", "json"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_it(name, value):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "stop", "logit_bias", "frequency_penalty", "min_p"])
def test_an_option_that_does_not_exist_is_named_with_those_that_do(name):
    with pytest.raises(TypeError, match=f"does not implement '{name}'.*temperature, top_p.*seq_seed"):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match=f"does not implement '{name}'"):
        SamplingParams.from_dict({name: 1})


def test_the_other_name_of_the_seed_is_explained():
    with pytest.raises(TypeError, match="the name here is 'seq_seed'"):
        SamplingParams(**{"seed": 1})


@pytest.mark.parametrize("value", [1, INT32_MAX, -1, 10**6])
def test_top_k_allows(value):
    assert SamplingParams(top_k=value).top_k == value


def test_zero_tokens_become_one_with_one_warning():
    with pytest.warns(UserWarning, match="max_tokens=0") as caught:
        params = SamplingParams(max_tokens=0)
    assert len(caught) == 1
    assert params.max_tokens == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataclasses.replace(params, top_k=3)


def test_logprobs_is_dropped_with_one_warning_that_names_top_logprobs():
    with pytest.warns(UserWarning, match="top_logprobs") as caught:
        params = SamplingParams(logprobs=True)
    assert len(caught) == 1
    assert params.logprobs is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataclasses.replace(params, top_k=3)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6, 9.9e-6])
def test_a_small_temperature_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k) == (1e-5, 1.0, -1)
    assert np.float32(params.inverse_temperature) == np.float32(1e5)
    assert dataclasses.replace(params, max_tokens=2).is_greedy


def test_a_greedy_request_still_refuses_bad_filters():
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(temperature=0, top_p=0)


def test_temperature_and_its_inverse():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=4)
    assert not params.is_greedy
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 4)
    assert params.inverse_temperature == 1 / 0.7
    assert SamplingParams(temperature=1e300).inverse_temperature == 2.0**-64
    assert isinstance(SamplingParams(temperature=2).temperature, float)


@pytest.mark.parametrize("given, stored", [(-1, 2**64 - 1), (2**64, 0), (7, 7), (None, None)])
def test_seed_is_reduced_modulo_2_64(given, stored):
    assert SamplingParams(seq_seed=given).seq_seed == stored


def test_parameters_are_frozen_and_can_be_copied():
    params = SamplingParams(golden_token_ids=[3, -1], seq_seed=2, so_args={"schema": "x"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 2  # type: ignore[misc]
    for other in (copy.deepcopy(params), copy.copy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
    assert isinstance(hash(SamplingParams(golden_token_ids=[1])), int)


def test_from_dict_drops_none():
    got = SamplingParams.from_dict({"temperature": None, "top_k": 5, "seq_seed": None})
    assert got == SamplingParams(top_k=5)


def test_repr_shows_what_the_interface_says():
    assert repr(SamplingParams(top_k=4, seq_seed=9)) == (
        "SamplingParams(temperature=1.0, top_p=1.0, top_k=4, ignore_eos=False, max_tokens=16, "
        "prompt_logprobs=False, top_logprobs=0, so_args=None, seq_seed=9)"
    )


def test_features_that_have_not_landed_are_refused():
    P.refuse_unsupported(SamplingParams(golden_token_ids=[1], first_n_token_no_eos=1))
    with pytest.raises(NotImplementedError, match="so_args"):
        P.refuse_unsupported(SamplingParams(so_args={"schema_type": "json", "schema": "{}"}))
    with pytest.raises(NotImplementedError, match="prompt_logprobs"):
        P.refuse_unsupported(SamplingParams(prompt_logprobs=True))


def test_golden_tokens_by_output_position():
    params = SamplingParams(golden_token_ids=[10, -1, 12])
    assert [P.forced_token(params, i) for i in range(5)] == [10, -1, 12, -1, -1]
    assert P.forced_token(SamplingParams(), 0) == -1
    with pytest.raises(ValueError, match=r"golden_token_ids\[1\]=-2"):
        SamplingParams(golden_token_ids=[1, -2])


def test_only_the_first_output_token_is_kept_from_being_eos():
    params = SamplingParams(first_n_token_no_eos=1, eos_id=5)
    assert [P.suppressed_token(params, i) for i in range(3)] == [5, -1, -1]
    assert P.suppressed_token(SamplingParams(eos_id=5), 0) == -1


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
