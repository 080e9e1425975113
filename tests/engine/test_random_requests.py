"""Many requests at once, with arrivals, aborts, forks and too little memory: each gets what it would get alone."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest

from deepinfer_jax import LLMEngine, SamplingParams
from deepinfer_jax.testing import tiny

FORK_STEPS = 4  # a fork leaves its parent so many tokens after the first


@dataclasses.dataclass
class Case:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int  # in steps of the engine
    abort_after: int = 0  # tokens, 0: never
    fork: SamplingParams | None = None


def make_cases(rng: np.random.Generator, number: int, *, max_len: int, max_tokens: int) -> list[Case]:
    """Lengths of every order of magnitude; two of three share their beginning, so that prefixes are found."""
    beginnings = [rng.integers(3, 299, max_len // 3).tolist() for _ in range(2)]
    cases = []
    for index in range(number):
        own = rng.integers(3, 299, round(max_len ** rng.random())).tolist()
        shared = beginnings[index % 3] if index % 3 < 2 else []
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 20])),
            max_tokens=int(rng.integers(1, max_tokens + 1)),
            seq_seed=index,
            ignore_eos=bool(rng.integers(2)),
        )
        case = Case(f"r{index}", (shared + own)[:max_len], params, int(rng.integers(0, number)))
        case.abort_after = int(rng.integers(1, 6)) if index % 10 == 7 else 0
        if index % 8 == 5:
            case.fork = dataclasses.replace(params, seq_seed=1000 + index, max_tokens=max_tokens)
        cases.append(case)
    return cases


def key(outputs):
    return [(output.token_id, output.token_logprobs) for output in outputs if output.token_id >= 0]


def run_together(engine: LLMEngine, cases: list[Case]):
    """The outputs by request, forks included, and the largest number of rows that decoded together."""
    waiting = sorted(cases, key=lambda case: case.arrival)
    by_id = {case.request_id: case for case in cases}
    outputs, forked = defaultdict(list), {}
    step, most_rows = 0, 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].arrival <= step:
            case = waiting.pop(0)
            engine.add_request("u", case.request_id, case.params, case.prompt)
        for output in engine.step():
            outputs[output.request_id].append(output)
            case = by_id.get(output.request_id)
            if case is None or output.finished:
                continue
            if output.num_output_tokens == case.abort_after:
                engine.abort_request(case.request_id)
            elif case.fork is not None and output.num_output_tokens == FORK_STEPS:
                sequence = engine.scheduler.get(case.request_id)
                if sequence is not None:
                    name = f"{case.request_id}-fork"
                    forked[name] = len(sequence.output)
                    engine.fork_request(case.request_id, name, sampling_params=case.fork)
        running = engine.scheduler.ranks[0].running
        most_rows = max(most_rows, sum(not sequence.is_in_prefill for sequence in running))
        step += 1
    return outputs, forked, most_rows


def run_alone(engine: LLMEngine, prompt: list[int], params: SamplingParams):
    engine.scheduler.clear_prefix_cache()
    engine.add_request("u", "alone", params, prompt)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def check(engine: LLMEngine, cases: list[Case], *, min_rows: int):
    outputs, forked, most_rows = run_together(engine, cases)
    stats = engine.stats()
    assert most_rows >= min_rows
    assert stats["recompilations"] == 0
    assert stats["preemptions"] > 0
    assert stats["prefix_hits"] > 0
    assert forked
    check_all_free(engine)
    for case in cases:
        got = outputs[case.request_id]
        assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
        alone = run_alone(engine, case.prompt, case.params)
        if got[-1].finish_reason == "abort":
            assert key(got) == key(alone)[: len(key(got))], case.request_id
            continue
        assert key(got) == key(alone), case.request_id
        assert got[-1].finish_reason == alone[-1].finish_reason
        if (name := f"{case.request_id}-fork") in forked:
            taken = forked[name]
            forced = dataclasses.replace(case.fork, golden_token_ids=[o.token_id for o in alone[:taken]])
            assert key(outputs[name]) == key(run_alone(engine, case.prompt, forced))[taken:], name


def check_all_free(engine: LLMEngine):
    engine.scheduler.clear_prefix_cache()
    [rank] = engine.scheduler.ranks
    assert rank.pages.num_used == 0
    assert rank.states.num_used == 0
    assert not rank.running
    assert not rank.waiting


@pytest.fixture(scope="module")
def engine(tiny_model) -> LLMEngine:
    return tiny.tiny_engine(tiny_model, **tiny.SCARCE)


def test_requests_in_company_get_what_they_get_alone(engine):
    check(engine, make_cases(np.random.default_rng(1), 16, max_len=250, max_tokens=160), min_rows=4)


@pytest.mark.slow
def test_requests_in_company_get_what_they_get_alone_with_drafts(agreeing_model):
    engine = tiny.tiny_engine(agreeing_model, **tiny.SCARCE, num_draft_tokens=5)
    check(engine, make_cases(np.random.default_rng(1), 16, max_len=250, max_tokens=160), min_rows=3)
    assert engine.stats()["drafts"]["drafts_accepted"] > 0


def test_nothing_is_compiled_after_the_warm_up(engine):
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 60, 500)
    for index, length in enumerate(lengths):
        params = SamplingParams(max_tokens=int(rng.integers(1, 5)), top_logprobs=0, seq_seed=index)
        engine.add_request("u", f"many-{index}", params, rng.integers(3, 299, int(length)).tolist())
    ended = 0
    while engine.has_unfinished_requests():
        ended += sum(output.finished for output in engine.step())
    assert ended == 500
    assert engine.stats()["recompilations"] == 0
    check_all_free(engine)


@pytest.mark.slow
def test_200_requests_of_up_to_1500_tokens(tiny_model):
    engine = tiny.tiny_engine(tiny_model, max_model_len=1600, max_num_seqs=40, num_kv_tokens=2048)
    check(engine, make_cases(np.random.default_rng(3), 200, max_len=1500, max_tokens=150), min_rows=5)
