import copy
import dataclasses
import json
import math
import pickle
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
        "n": 1,
        "stop": None,
        "include_stop_str_in_output": False,
        "stop_token_ids": None,
        "min_tokens": 0,
        "min_p": 0.0,
        "logit_bias": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "allowed_token_ids": None,
        "bad_words": None,
    }
    kinds = [field.kw_only for field in dataclasses.fields(SamplingParams)]
    assert kinds == [False] * 13 + [True] * 12
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
        ("n", 0),
        ("n", -1),
        ("n", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("presence_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("presence_penalty", math.inf),
        ("frequency_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-31),
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
        ("n", 1.0),
        ("n", True),
        ("n", None),
        ("stop", 5),
        ("stop", b"a"),
        ("stop", ["a", 5]),
        ("include_stop_str_in_output", 1),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("min_tokens", 1.0),
        ("min_p", "0.1"),
        ("min_p", True),
        ("logit_bias", [5]),
        ("logit_bias", "ab"),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: None}),
        ("presence_penalty", "1"),
        ("frequency_penalty", None),
        ("repetition_penalty", "1"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", ["a"]),
        ("bad_words", "word"),
        ("bad_words", [5]),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_it(name, value):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "skip_special_tokens", "stop_regex"])
def test_an_option_that_does_not_exist_is_named_with_those_that_do(name):
    with pytest.raises(TypeError, match=f"does not implement '{name}'.*temperature, top_p.*seq_seed"):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match=f"does not implement '{name}'"):
        SamplingParams.from_dict({name: 1})


def test_the_other_name_of_the_seed_is_explained():
    with pytest.raises(TypeError, match="the name here is 'seq_seed'"):
        SamplingParams(**{"seed": 1})


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("stop", "", r"stop\[0\]='' must not be empty"),
        ("stop", ["a", ""], r"stop\[1\]='' must not be empty"),
        ("bad_words", [""], r"bad_words\[0\]='' must not be empty"),
        ("stop_token_ids", [3, -1], r"stop_token_ids\[1\]=-1 must be a token id"),
        ("stop_token_ids", [2**31], r"stop_token_ids\[0\]=2147483648 must be a token id, 0..2147483647"),
        ("allowed_token_ids", [], r"allowed_token_ids=\[\] allows no token"),
        ("allowed_token_ids", [-1], r"allowed_token_ids\[0\]=-1 must be a token id"),
        ("logit_bias", {-1: 0.5}, r"the key -1; its keys are token ids"),
        ("logit_bias", {3: math.inf}, r"logit_bias\[3\]=inf must be finite"),
        ("logit_bias", {3: math.nan}, r"logit_bias\[3\]=nan must be finite"),
        ("logit_bias", {3: 1e39}, r"logit_bias\[3\]=1e\+39 must be in -3.4e\+38..3.4e\+38"),
        ("logit_bias", [(3, 1.0), (3, 2.0)], r"the key 3 twice"),
        ("repetition_penalty", 0, r"repetition_penalty=0.0 must be > 0"),
        ("min_p", 2, r"min_p=2.0 must be in 0..1; 0 is off"),
        ("presence_penalty", 3, r"presence_penalty=3.0 must be in -2..2"),
        ("n", 0, r"n=0 must be in 1..2147483647"),
        ("min_tokens", 20, r"min_tokens=20 must be at most max_tokens=16; raise max_tokens or lower min_tokens"),
    ],
)
def test_an_error_says_what_is_allowed(name, value, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(**{name: value})


def test_lists_are_stored_as_tuples_and_empty_ones_as_none():
    params = SamplingParams(
        stop="ab",
        stop_token_ids=[5, 3, 5],
        allowed_token_ids=np.array([7, 2]).tolist(),
        bad_words=["x", "y"],
        logit_bias={9: 1, 2: -0.5},
    )
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("ab",), (5, 3), (7, 2))
    assert (params.bad_words, params.logit_bias) == (("x", "y"), ((2, -0.5), (9, 1.0)))
    assert SamplingParams(stop=[], stop_token_ids=[], bad_words=[], logit_bias={}) == SamplingParams()
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")


def every_option() -> SamplingParams:
    return SamplingParams(
        temperature=0.7,
        top_k=5,
        max_tokens=9,
        golden_token_ids=[3, -1],
        seq_seed=2**63 + 1,
        so_args={"schema": "x"},
        n=3,
        stop=["ab", "c"],
        include_stop_str_in_output=True,
        stop_token_ids=[4],
        min_tokens=2,
        min_p=0.125,
        logit_bias={5: 1.5, 2: -100},
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.1,
        allowed_token_ids=[2, 5, 7],
        bad_words=["no"],
    )


def test_all_options_pass_through_json_copies_and_replace():
    params = every_option()
    assert SamplingParams.from_dict(json.loads(json.dumps(dataclasses.asdict(params)))) == params
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert other == params
    assert dataclasses.replace(params, n=1).logit_bias == params.logit_bias


def test_repr_shows_a_later_option_only_where_it_is_set():
    assert repr(SamplingParams(min_p=0.5, stop="a")).endswith("seq_seed=None, stop=('a',), min_p=0.5)")


def test_min_p_is_a_distance_on_the_device_and_off_for_greedy():
    assert SamplingParams().min_p_distance == math.inf
    assert SamplingParams(min_p=0.1).min_p_distance == -math.log(0.1)
    assert math.copysign(1, SamplingParams(min_p=1).min_p_distance) == 1
    assert SamplingParams(min_p=0.3, temperature=0).min_p == 0.0
    with pytest.raises(ValueError, match="min_p"):
        SamplingParams(min_p=3, temperature=0)


def test_min_tokens_may_equal_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    with pytest.warns(UserWarning, match="max_tokens=0"):
        assert SamplingParams(min_tokens=1, max_tokens=0).max_tokens == 1


def test_ids_are_checked_against_the_vocabulary():
    P.check_vocabulary(every_option(), 8)
    for name, value in (("stop_token_ids", [8]), ("allowed_token_ids", [1, 8]), ("logit_bias", {8: 0})):
        with pytest.raises(ValueError, match=f"{name} has token id 8, outside the vocabulary 0..7"):
            P.check_vocabulary(SamplingParams(**{name: value}), 8)


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
