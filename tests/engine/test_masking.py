"""Masks along drafts, and masks that are late."""

import threading
import time

import numpy as np
import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.masking import DraftPath
from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.grammar.errors import GrammarError
from deepinfer_jax.testing import tiny
from tests.engine import driving

VOCAB = 70
ALL = np.full(3, 0xFFFFFFFF, np.uint32)
REGEX = {"schema_type": "regex", "schema": "[a-f]{30}"}


def state_of(**options) -> DrawState:
    return DrawState(SamplingParams(**options), prompt=[3], eos_id=1, vocab_size=VOCAB)


def allowed(words: np.ndarray) -> set[int]:
    return {i for i in range(VOCAB) if words[i // 32] >> np.uint32(i % 32) & 1}


def test_each_draft_has_the_mask_and_edits_behind_those_in_front():
    state = state_of(min_tokens=2, presence_penalty=0.5)
    rows = np.zeros((4, 3), np.uint32)
    path = DraftPath(state, [5, 6, 7])
    path.fill_mask(rows)
    assert [1 in allowed(row) for row in rows] == [False, False, True, True]
    assert [sorted(edits[0].tolist()) for edits in path.edits] == [[], [5], [5, 6], [5, 6, 7]]
    assert state.num_output == 0, "nothing was taken"


def test_behind_a_draft_that_is_not_allowed_nothing_is_asked():
    state = state_of(allowed_token_ids=[5, 6])
    rows = np.zeros((4, 3), np.uint32)
    path = DraftPath(state, [5, 9, 6])
    path.fill_mask(rows)
    assert [allowed(row) for row in rows[:2]] == [{5, 6}, {5, 6}]
    np.testing.assert_array_equal(rows[2:], [ALL, ALL])
    assert len(path.edits) == 2 and state.num_output == 0


@pytest.fixture(scope="module", params=[0, 5], ids=["plain", "drafts"])
def engine(agreeing_model, request):
    return tiny.tiny_engine(agreeing_model, num_draft_tokens=request.param)


def add_both(engine) -> None:
    driving.add(engine, "masked", driving.prompt_of(9), SamplingParams(seq_seed=1, max_tokens=40, so_args=REGEX))
    driving.add(engine, "free", driving.prompt_of(9), driving.params_of(2, 30))


@pytest.fixture(scope="module")
def want(engine):
    add_both(engine)
    found = driving.drain(engine)
    assert len(found["masked"]) == 31 and driving.reasons(found)["masked"] == "stop"
    engine.flush_inflight_reqs()
    return driving.facts(found)


@pytest.fixture
def slow(monkeypatch):
    """Every mask of a grammar waits for this event."""
    gate, fill = threading.Event(), DrawState.fill_mask

    def wait_and_fill(state, row):
        if state.has_grammar:
            gate.wait(20)
        fill(state, row)

    monkeypatch.setattr(DrawState, "may_be_slow", property(lambda state: state.has_grammar))
    monkeypatch.setattr(DrawState, "fill_mask", wait_and_fill)
    yield gate
    gate.set()


def test_a_slow_mask_holds_up_its_own_request_only(engine, want, slow):
    add_both(engine)
    found: dict = {}
    while len(found.get("free", ())) < 30:
        driving.collect(found, engine.step())
    assert len(found.get("masked", ())) == 0, "its masks were never ready"
    slow.set()
    driving.collect(found, [output for outputs in driving.drain(engine).values() for output in outputs])
    engine.flush_inflight_reqs()
    driving.check_free(engine)
    assert driving.facts(found) == want


def test_masks_that_take_turns_in_being_late_change_nothing(engine, want, monkeypatch):
    fill, calls = DrawState.fill_mask, []

    def sometimes(state, row):
        calls.append(None)
        if state.has_grammar and len(calls) % 3 == 0:
            time.sleep(0.03)
        fill(state, row)

    monkeypatch.setattr(DrawState, "may_be_slow", property(lambda state: state.has_grammar))
    monkeypatch.setattr(DrawState, "fill_mask", sometimes)
    add_both(engine)
    assert driving.facts(driving.drain(engine)) == want
    engine.flush_inflight_reqs()
    driving.check_free(engine)


def test_a_request_that_ends_while_its_mask_is_made_leaves_nothing(engine, want, slow):
    add_both(engine)
    for _ in range(3):
        engine.step()
    engine.abort_request("masked")
    found = driving.drain(engine)
    slow.set()
    engine.flush_inflight_reqs()
    engine.step()
    driving.check_free(engine)
    assert driving.reasons(found)["masked"] == "abort"
    assert engine._loop._masks.waiting == ()


def test_a_mask_that_fails_ends_its_request_only(engine, want, monkeypatch):
    def fail(state, row):
        raise GrammarError("no mask today")

    add_both(engine)
    found: dict = {}
    while len(found.get("masked", ())) < 2:
        driving.collect(found, engine.step())
    monkeypatch.setattr(DrawState, "fill_mask", fail)
    driving.collect(found, [output for outputs in driving.drain(engine).values() for output in outputs])
    engine.flush_inflight_reqs()
    driving.check_free(engine)
    assert found["masked"][-1].finish_reason == "xgrammar runtime errors or timeout"
    assert driving.facts_of(found["free"]) == want["free"]
