"""K01: a row alone against the same row in company."""

import itertools

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny

NUM_TOKENS = 300
LENGTHS = (1, 5, 128, 129, 300)  # of the neighbours' prompts
SIZES = (2, 3, 7, 8, 9, 16, 33)
QUICK_SIZES = (2, 8, 33)
PLACES = ("first", "middle", "last")
TEMPERATURES = (1.0, 0.0)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 299, length).tolist()


PROMPT = prompt_of(37, seed=0)


def run(llm, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[tuple[int, float]]]:
    """Results of a batch, nothing of which is known from an earlier one."""
    llm.engine.scheduler.clear_prefix_cache()
    results = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [[(one.token_id, one.token_logprobs) for one in outputs] for outputs in results]


def own_params(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seq_seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(crowded_llm) -> dict[float, list[tuple[int, float]]]:
    results = {each: run(crowded_llm, [PROMPT], [own_params(each)])[0] for each in TEMPERATURES}
    assert {len(result) for result in results.values()} == {NUM_TOKENS}
    assert len({token for token, _ in results[1.0]}) > 50
    return results


def in_company(llm, size: int, place: str, temperature: float) -> list[tuple[int, float]]:
    """The result of the prompt among neighbours, who end at unlike times."""
    index = {"first": 0, "middle": size // 2, "last": size - 1}[place]
    prompts = [prompt_of(LENGTHS[i % len(LENGTHS)], seed=i) for i in range(1, size)]
    params = [
        SamplingParams(temperature=i % 3 / 2, seq_seed=i, max_tokens=40 + 37 * i % 171, ignore_eos=True)
        for i in range(1, size)
    ]
    prompts.insert(index, PROMPT)
    params.insert(index, own_params(temperature))
    return run(llm, prompts, params)[index]


def runs() -> list:
    """Every run; without --all three batch sizes with one place each, and one temperature by turns."""
    all_runs = itertools.product(enumerate(SIZES), PLACES, TEMPERATURES)
    return [
        pytest.param(
            *(size, place, temperature),
            marks=[] if is_quick(number, size, place, temperature) else [pytest.mark.slow],
            id=f"{size}-{place}-T{temperature:.0f}",
        )
        for (number, size), place, temperature in all_runs
    ]


def is_quick(number: int, size: int, place: str, temperature: float) -> bool:
    return size in QUICK_SIZES and (PLACES[number % 3], TEMPERATURES[number % 2]) == (place, temperature)


@pytest.mark.parametrize("size, place, temperature", runs())
def test_company_changes_nothing(crowded_llm, alone, size, place, temperature):
    assert in_company(crowded_llm, size, place, temperature) == alone[temperature]


def test_a_small_engine_and_a_large_one_agree(llm, alone):
    assert run(llm, [PROMPT], [own_params(1.0)]) == [alone[1.0]]
    assert llm.engine.sizes.scheduler.max_num_seqs == tiny.MAX_NUM_SEQS
