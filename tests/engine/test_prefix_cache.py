"""Known prefixes: found, and the result is that of a cold engine (mode replay: nearly)."""

import pytest

from deepinfer_jax.testing import tiny
from tests.engine.driving import add, check_free, drain, facts_of, params_of, prompt_of, reasons

SYSTEM = prompt_of(130)


def engine_of(model, mode: str, **environ: str):
    return tiny.tiny_engine(model, {"DEEPINFER_JAX_PREFIX_CACHE": mode, **environ})


def run(engine, *prompts: list[int], max_tokens: int = 12) -> list:
    """Results of prompts that run one after the other."""
    results = []
    for prompt in prompts:
        name = str(engine.stats()["requests"])
        add(engine, name, prompt, params_of(3, max_tokens))
        found = drain(engine)
        assert reasons(found) == {name: "length"}
        results.append(facts_of(found[name]))
    return results


def cold(model, *prompts: list[int], **environ: str) -> list:
    return [run(engine_of(model, "off", **environ), prompt)[0] for prompt in prompts]


def hits(engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats["prefix_hits"], stats["prefix_hit_tokens"]


@pytest.mark.parametrize("length", [pytest.param(2, marks=pytest.mark.slow), 63, 64, 65, 150, 400])
def test_the_same_prompt_again_computes_one_row(tiny_model, length):
    prompt = prompt_of(length)
    engine = engine_of(tiny_model, "exact")
    assert run(engine, prompt, prompt) == cold(tiny_model, prompt) * 2
    assert hits(engine) == (1, length - 1)
    check_free(engine)


def test_without_a_cache_everything_is_computed_again(tiny_model):
    prompt = prompt_of(150)
    engine = engine_of(tiny_model, "off")
    first, second = run(engine, prompt, prompt)
    assert first == second
    stats = engine.stats()
    assert [stats[name] for name in ("prefix_lookups", "prefix_hits", "snapshots", "kv_cached", "copies")] == [0] * 5
    assert engine.scheduler.counters.prefill_rows == 300


def test_the_next_turn_goes_on_where_the_last_one_ended(tiny_model):
    engine = engine_of(tiny_model, "exact")
    prompt = prompt_of(100)
    for turn in range(3):
        [answer] = run(engine, prompt)
        assert [answer] == cold(tiny_model, prompt)
        before = hits(engine)[1]
        prompt = [*prompt, *(token for token, _ in answer), *prompt_of(20, seed=turn)]
    run(engine, prompt)
    # The last token of an answer has no row yet.
    assert hits(engine) == (3, before + len(prompt) - 20 - 1)
    check_free(engine)


def test_a_shared_beginning_is_found_from_the_third_request_on(tiny_model):
    prompts = [[*SYSTEM, *prompt_of(40, seed=seed)] for seed in range(4)]
    engine = engine_of(tiny_model, "exact")
    assert run(engine, *prompts) == cold(tiny_model, *prompts)
    assert hits(engine) == (2, 2 * 128), "whole pages of what they share"
    check_free(engine)


def test_requests_at_the_same_time_give_the_same(tiny_model):
    prompts = [[*SYSTEM, *prompt_of(40, seed=seed % 3)] for seed in range(8)]
    want = cold(tiny_model, *prompts[:3])
    engine = engine_of(tiny_model, "exact")
    for index, prompt in enumerate(prompts):
        add(engine, str(index), prompt, params_of(3, 12))
    found = drain(engine)
    assert [facts_of(found[str(index)]) for index in range(8)] == [want[index % 3] for index in range(8)]
    assert hits(engine)[0] > 0
    check_free(engine)


def test_what_is_forgotten_gives_the_same(tiny_model):
    """More prefixes than there are slots to keep them."""
    prompts = [[*SYSTEM, *prompt_of(60, seed=seed)] for seed in range(10)]
    want = cold(tiny_model, *prompts)
    engine = engine_of(tiny_model, "exact")
    assert run(engine, *prompts, *prompts[::-1]) == want + want[::-1]
    assert engine.stats()["snapshots_evicted"] > 0
    assert hits(engine)[0] >= 10
    check_free(engine)


def test_replay_finds_pages_and_is_approximate(tiny_model):
    prompt = prompt_of(400)
    engine = engine_of(tiny_model, "replay")
    first, second = run(engine, prompt, prompt)
    assert [first] == cold(tiny_model, prompt)
    assert len(second) == len(first)
    # 6 whole pages are known, of which 128 rows fill the windows again.
    assert hits(engine) == (1, 256)
    assert engine.stats()["snapshots"] == 0 and engine.stats()["kv_cached"] > 0
    check_free(engine)


BOUNDED = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "mask", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}


def test_with_bounded_replay_hits_lie_in_front_of_the_tail(tiny_model):
    prompt = prompt_of(300)
    engine = engine_of(tiny_model, "exact", **BOUNDED)
    # What is asked -> the positions that are taken over. The tail of 300 tokens begins at 160, that of 500 at 360.
    asked = {
        "first": (prompt, 0),
        "same": (prompt, 160),
        "longer": ([*prompt, *prompt_of(200)], 300),
        "tail only": (prompt[:140], 0),
        "one more": (prompt[:141], 0),
        "tail behind the checkpoint, within reach of its rings": (prompt[:299], 159),
        "tail behind the prompt of one more": (prompt[:290], 141),
        "tail out of reach": (prompt[1:290], 0),
        "end in another place": (prompt[:303], 160),
    }
    results, found = {}, {}
    for name, (given, _) in asked.items():
        before = hits(engine)[1]
        checkpoints = [160] if name == "first" else None
        add(engine, name, given, params_of(3, 12), chunk_checkpoints=checkpoints)
        results[name] = facts_of(drain(engine)[name])
        found[name] = hits(engine)[1] - before
    assert found == {name: position for name, (_, position) in asked.items()}
    want = cold(tiny_model, *(given for given, _ in asked.values()), **BOUNDED)
    assert list(results.values()) == want
    check_free(engine)


def test_a_shared_beginning_is_found_under_bounded_replay(tiny_model):
    prompts = [[*SYSTEM, *prompt_of(200, seed=seed)] for seed in range(4)]
    engine = engine_of(tiny_model, "exact", **BOUNDED)
    assert run(engine, *prompts) == cold(tiny_model, *prompts, **BOUNDED)
    assert hits(engine) == (2, 2 * 128)
    check_free(engine)
