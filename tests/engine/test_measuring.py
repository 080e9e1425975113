"""The cost curve of an engine: measured, kept, and used."""

import pytest

from deepinfer_jax.engine import measuring
from deepinfer_jax.scheduler.budget import CostCurve
from deepinfer_jax.scheduler.verification import BudgetPolicy, PaperPolicy
from deepinfer_jax.testing import tiny
from tests.engine import driving


@pytest.fixture
def environ(tmp_path):
    return {"DEEPINFER_DECODE_PERF_CACHE_DIR": str(tmp_path)}


def engine_of(model, environ, **options):
    return tiny.tiny_engine(model, environ, num_draft_tokens=5, varlen_verification=True, **options)


def test_a_curve_is_measured_once_and_kept(agreeing_model, environ, tmp_path, monkeypatch):
    foreign = tmp_path / "notes.json"
    foreign.write_text("mine")
    engine = engine_of(agreeing_model, environ)
    curve = engine.scheduler.verification.curve
    rows = [size for size, _ in curve.points]
    assert rows == list(measuring.measured_rows(engine.sizes)) and rows[-1] == engine.sizes.buckets.decode_rows[-1]
    assert all(ms > 0 for _, ms in curve.points)
    assert [count for count, _ in curve.draft_points] == [1, 2, 4] and curve.draft_cost(4) > 0
    driving.add(engine, "r", driving.prompt_of(20), driving.params_of(1))
    assert len(driving.drain(engine)["r"]) == 20, "measuring leaves a working engine"

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "measure", never)
    assert engine_of(agreeing_model, environ).scheduler.verification.curve == curve
    with pytest.raises(AssertionError, match="measured again"):
        engine_of(agreeing_model, environ | {"DEEPINFER_DECODE_PERF_CACHE_TTL_SEC": "0"})
    assert foreign.read_text() == "mine"


def test_drafts_of_more_requests_cost_no_less(agreeing_model, environ, monkeypatch):
    noisy = {1: 1.5, 2: 2.25, 4: 0.0}
    monkeypatch.setattr(measuring, "draft_ms", lambda _pipeline, _sizes, count: noisy[count])
    curve = engine_of(agreeing_model, environ).scheduler.verification.curve
    assert curve.draft_points == ((1, 1.5), (2, 2.25), (4, 2.25)) and curve.draft_cost(4) == 2.25


def test_a_given_policy_is_not_measured(agreeing_model, environ, monkeypatch):
    monkeypatch.setattr(measuring, "measure", None)
    policy = BudgetPolicy(CostCurve(points=((8, 1.0),)))
    assert engine_of(agreeing_model, environ, verification=policy).scheduler.verification is policy


def test_the_early_stop_needs_a_synchronous_engine(agreeing_model, environ):
    policy = PaperPolicy(CostCurve(points=((8, 1.0), (64, 9.0))))
    with pytest.raises(ValueError, match="DEEPINFER_ZERO_OVERHEAD_SCHEDULING=0"):
        tiny.tiny_engine(agreeing_model, environ, num_draft_tokens=5, verification=policy)
    sync = environ | {"DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "0"}
    engine = tiny.tiny_engine(agreeing_model, sync, num_draft_tokens=5, verification=policy)
    plain = tiny.tiny_engine(agreeing_model)
    for each in (engine, plain):
        driving.add_many(each)
    assert driving.facts(driving.drain(engine)) == driving.facts(driving.drain(plain))
    assert len(engine.stats()["drafts"]["verified_lens"]) > 1
