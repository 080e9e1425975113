"""Drafts where room ends: the model's length, few pages, prefixes without rings."""

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny
from tests.engine import driving


def run(engine, lengths, max_tokens=300, repeats=1):
    found = {}
    for turn in range(repeats):
        for index, length in enumerate(lengths):
            params = SamplingParams(seq_seed=index, max_tokens=max_tokens, ignore_eos=True)
            driving.add(engine, f"{turn}-{index}", driving.prompt_of(length), params)
        found |= driving.drain(engine)
        engine.flush_inflight_reqs()
    driving.check_free(engine)
    return driving.facts(found), driving.reasons(found)


@pytest.mark.parametrize("is_async", ["0", "1"], ids=["sync", "async"])
def test_requests_end_at_the_length_of_the_model(agreeing_model, is_async):
    lengths = (500, 505, 506, 507, 509, 510, 511, 512)
    environ = {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": is_async}
    plain = run(tiny.tiny_engine(agreeing_model, environ), lengths)
    assert run(tiny.tiny_engine(agreeing_model, environ, num_draft_tokens=5), lengths) == plain
    assert set(plain[1].values()) == {"length"}
    assert [len(plain[0][f"0-{index}"]) for index in range(len(lengths))] == [513 - length for length in lengths]


@pytest.mark.slow
def test_requests_that_lack_pages_are_computed_again(agreeing_model):
    lengths = (60, 63, 64, 65, 120, 10)
    plain = run(tiny.tiny_engine(agreeing_model, **tiny.SCARCE), lengths, 200)
    engine = tiny.tiny_engine(agreeing_model, **tiny.SCARCE, num_draft_tokens=5)
    assert run(engine, lengths, 200) == plain
    assert engine.stats()["preemptions"] > 0 < engine.stats()["drafts"]["drafts_accepted"]


@pytest.mark.parametrize("mode", ["exact", pytest.param("replay", marks=pytest.mark.slow)])
def test_known_prefixes_change_nothing(agreeing_model, mode):
    environ = {"DEEPINFER_JAX_PREFIX_CACHE": mode}
    lengths = (300, 64, 129)
    plain = run(tiny.tiny_engine(agreeing_model, environ), lengths, 40, repeats=2)
    engine = tiny.tiny_engine(agreeing_model, environ, num_draft_tokens=5)
    assert run(engine, lengths, 40, repeats=2) == plain
    assert engine.stats()["prefix_hits"] > 0
