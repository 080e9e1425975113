"""Statistics of the experts, and routing that a benchmark forces."""

import logging

import numpy as np
import pytest

from deepinfer_jax.engine.expert_loads import ExpertLoads, LoadWatch
from deepinfer_jax.testing import tiny
from tests.engine.driving import add, drain, params_of, prompt_of

EAGER = {"DEEPINFER_ENFORCE_EAGER": "1"}
FORCED = {**EAGER, "DEEPINFER_BATCH_INVARIANT": "0"}


def test_an_interval_is_told_when_it_ends():
    loads = ExpertLoads(LoadWatch(interval=2, num_shards=2, logs_table=False))
    even, skewed = np.array([[2, 2, 2, 2]]), np.array([[6, 0, 2, 0]])
    loads.note(even, None)
    assert loads.figures() == {}
    loads.note(skewed, None)
    assert loads.figures() == {
        "expert_rows": 16,
        "expert_imbalance_mean": pytest.approx(1.25),
        "expert_imbalance_max": pytest.approx(1.25),
    }
    loads.note(even, None)
    assert loads.figures()["expert_rows"] == 16, "an interval that has begun changes nothing"
    loads.note(even, None)
    assert loads.figures()["expert_imbalance_max"] == 1.0


def test_balance_is_that_of_the_places_that_experts_have_now():
    loads = ExpertLoads(LoadWatch(interval=1, num_shards=2, logs_table=False))
    loads.note(np.array([[4, 4, 0, 0]]), np.array([[0, 2, 1, 3]]))
    assert loads.figures()["expert_imbalance_max"] == 1.0


def test_the_table_names_the_fullest_experts_and_counts_the_unused():
    loads = ExpertLoads(LoadWatch(interval=1, num_shards=2, logs_table=False))
    loads.note(np.array([[0, 6, 2, 0]]), None)
    line = loads.table().splitlines()[1].split(None, 3)
    assert line[:3] == ["0", "1.50", "2"]
    assert line[3].startswith("1 (75.0%), 2 (25.0%)")


@pytest.mark.slow
def test_an_engine_tells_the_balance_and_logs_tables(tiny_model, caplog):
    environ = {**EAGER, "DEEPINFER_MOE_LB_STAT_INTERVAL": "3", "DEEPINFER_SHOW_EPLB_DETAIL": "1"}
    engine = tiny.tiny_engine(tiny_model, environ)
    add(engine, "a", prompt_of(5), params_of(1, 7))
    with caplog.at_level(logging.INFO, logger="deepinfer_jax"):
        drain(engine)
    stats = engine.stats()
    model = engine.runtime.model
    assert stats["expert_rows"] == 3 * model.num_hidden_layers * model.num_experts_per_tok
    assert stats["expert_imbalance_mean"] == 1.0, "one device has everything"
    tables = [record for record in caplog.records if "imbalance" in record.getMessage()]
    assert len(tables) == stats["steps"] // 3


def test_nothing_is_counted_unless_somebody_asks(tiny_model):
    engine = tiny.tiny_engine(tiny_model, EAGER)
    assert not engine.runtime.counts_experts
    assert "expert_rows" not in engine.stats()


def test_forced_routing_loads_all_experts_alike(tiny_model):
    environ = {**FORCED, "DEEPINFER_FORCE_LOAD_BALANCE": "1", "DEEPINFER_MOE_LB_STAT_INTERVAL": "1"}
    engine = tiny.tiny_engine(tiny_model, environ)
    add(engine, "a", prompt_of(64), params_of(1, 1))
    drain(engine)
    told = engine.pipeline._loads
    assert told is not None and told._told is not None
    assert np.ptp(told._told, axis=1).max() <= 1


def test_forced_routing_is_refused_where_it_would_break_a_promise(tiny_model):
    with pytest.raises(ValueError, match="DEEPINFER_BATCH_INVARIANT=0"):
        tiny.tiny_engine(tiny_model, {**EAGER, "DEEPINFER_FORCE_LOAD_BALANCE": "1"})
    both = {**FORCED, "DEEPINFER_FORCE_LOAD_BALANCE": "1", "DEEPINFER_FORCE_IMBALANCE_RATIO": "2"}
    with pytest.raises(ValueError, match="contradicts DEEPINFER_FORCE_IMBALANCE_RATIO"):
        tiny.tiny_engine(tiny_model, both)
