"""What a request leaves on the device with drafts is what it leaves without, whatever was accepted."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.snapshot import RequestSnapshot, load_snapshot, save_snapshot
from deepinfer_jax.testing import tiny
from tests.engine import driving

PROMPT_LEN, NUM_TOKENS, DRAFTS = 150, 30, 5
SYNC = {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0"}
PARAMS = SamplingParams(temperature=1.0, seq_seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(agreeing_model) -> LLMEngine:
    return tiny.tiny_engine(agreeing_model, SYNC, num_draft_tokens=DRAFTS)


@pytest.fixture(scope="module")
def answer(engine) -> list[int]:
    driving.add(engine, "whole", driving.prompt_of(PROMPT_LEN), PARAMS)
    return [token for token, _ in driving.facts(driving.drain(engine))["whole"]]


def propose(engine: LLMEngine, slot: int, drafts: list[int]) -> None:
    """Puts other drafts in the place of those that the drafter made."""
    carried = engine.pipeline._carried
    tokens = carried.newest.tokens.at[slot, 1:].set(np.asarray(drafts, np.int32))
    engine.pipeline._carried = dataclasses.replace(carried, newest=dataclasses.replace(carried.newest, tokens=tokens))


def run_steps(engine: LLMEngine, answer: list[int], lengths: list[int]) -> RequestSnapshot:
    """A request of which each decode step accepts so many drafts; its state behind the last step."""
    engine.scheduler.clear_prefix_cache()
    driving.add(engine, "one", driving.prompt_of(PROMPT_LEN), PARAMS)
    known: list[int] = []
    while not known:
        known += [output.token_id for output in engine.step()]
    [sequence] = engine.scheduler.ranks[0].running
    for accepted in lengths:
        right = answer[len(known) : len(known) + DRAFTS]
        wrong = [(token + 1) % engine.model.vocab_size for token in right]
        propose(engine, sequence.slot, right[:accepted] + wrong[accepted:])
        outputs = engine.step()
        assert [output.token_id for output in outputs] == answer[len(known) : len(known) + accepted + 1]
        known += [output.token_id for output in outputs]
    saved = engine.save_request("one")
    engine.abort_request("one")
    engine.step()
    return saved


def valid(saved: RequestSnapshot, runtime) -> dict[str, np.ndarray]:
    """The parts of a saved state that later rows may look at: everything in front of its next position."""
    end, state = saved.num_written, saved.state
    assert state is not None

    def last(count: int, ring_len: int) -> np.ndarray:
        return np.arange(max(0, end - count), end) % ring_len

    window = last(runtime.model.sliding_window, runtime.ring_len)
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if "window" in name:
            found[name] = leaf[:, 0, window]
        elif "tails" in name:  # a row that waits for its pair
            found[name] = leaf[:, 0, last(end % 2, runtime.tail_len)]
        elif "history" in name:
            found[name] = leaf[0, last(runtime.model.engram_max_ngram_size - 1, runtime.history_len)]
        else:
            ratio = 2 if "[0]" in name else 1
            entries = leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])
            found[name] = entries[:, : end // ratio]
    return found


@functools.cache
def compared(engine: LLMEngine, answer: tuple[int, ...], num_tokens: int) -> dict[str, np.ndarray]:
    """The state behind so many tokens when no draft is ever accepted."""
    return valid(run_steps(engine, list(answer), [0] * num_tokens), engine.runtime)


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_rings_and_caches_are_those_of_plain_decoding(engine, answer, accepted):
    lengths = [2, accepted, 1]
    got = valid(run_steps(engine, answer, lengths), engine.runtime)
    want = compared(engine, tuple(answer), sum(lengths) + len(lengths))
    assert set(got) == set(want) and any("draft" in name for name in got)
    for name, leaf in want.items():
        np.testing.assert_array_equal(got[name], leaf, err_msg=name)


def test_without_drafts_the_backbone_leaves_the_same(agreeing_model, engine, answer):
    plain = tiny.tiny_engine(agreeing_model, SYNC)
    driving.add(plain, "one", driving.prompt_of(PROMPT_LEN), PARAMS)
    known = 0
    while known < 1 + 6:
        known += len(plain.step())
    got = valid(plain.save_request("one"), plain.runtime)
    want = compared(engine, tuple(answer), 6)
    assert got.keys() < want.keys()
    for name, leaf in got.items():
        np.testing.assert_array_equal(leaf, want[name], err_msg=name)


def test_a_saved_request_goes_on_elsewhere(agreeing_model, engine, answer, tmp_path):
    save_snapshot(run_steps(engine, answer, [1, 3]), tmp_path / "one.safetensors")
    saved = load_snapshot(tmp_path / "one.safetensors", engine.runtime)
    assert saved.state is not None and saved.state.draft is not None
    other = tiny.tiny_engine(agreeing_model, SYNC, num_draft_tokens=DRAFTS)
    other.restore_request(saved, "again")
    found = driving.facts(driving.drain(other))["again"]
    assert [token for token, _ in found] == answer[1 + 2 + 4 :]


def test_an_engine_without_drafts_refuses_its_state(agreeing_model, engine, answer):
    saved = run_steps(engine, answer, [0])
    with pytest.raises(ValueError, match="the same weights"):
        tiny.tiny_engine(agreeing_model).restore_request(saved, "again")
