"""Drafts change how many tokens a step gives, and nothing else (rule match)."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.scheduler.budget import CostCurve
from deepinfer_jax.scheduler.verification import BudgetPolicy
from deepinfer_jax.testing import tiny
from tests.engine import driving

pytestmark = pytest.mark.compiles_much  # an engine of its own for each combination
NUM_TOKENS = 40
KEEP = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 60}},
    "required": ["text"],
    "additionalProperties": False,
}
# Steps of more than 16 rows are dear, so that budgets are between none and all.
CURVE = CostCurve(points=((8, 1.0), (16, 1.2), (24, 2.0), (48, 5.0), (240, 40.0)))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to run the same requests."""

    drafts: int = 0
    varlen: bool = False
    is_async: bool = True
    batch: int = 5
    kind: str = "sampled"
    replay: str = "off"


def engine_of(model: Path, cell: Cell, **options: Any) -> LLMEngine:
    environ = {
        "DEEPINFER_ENFORCE_EAGER": "1",  # few cells use every step
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "1" if cell.is_async else "0",
        **(KEEP if cell.replay == "compact" else {}),
    }
    return tiny.tiny_engine(
        model,
        environ,
        max_num_seqs=40,
        num_draft_tokens=cell.drafts,
        varlen_verification=cell.varlen,
        **{"verification": BudgetPolicy(CURVE) if cell.varlen else None} | options,
    )


def params_of(kind: str, seed: int) -> SamplingParams:
    common: dict[str, Any] = {"seq_seed": seed, "max_tokens": NUM_TOKENS}
    if kind == "greedy":
        return SamplingParams(temperature=0.0, ignore_eos=True, **common)
    if kind == "sampled":
        return SamplingParams(temperature=1.0, ignore_eos=True, **common)
    return SamplingParams(temperature=1.0, so_args={"schema_type": "json", "schema": SCHEMA}, **common)


def prompt_of(index: int) -> list[int]:
    """Every fourth one is longer than the tail that bounded replay keeps."""
    return driving.prompt_of(1 + (23 * index + 5) % 90 + 160 * (index % 4 == 0), seed=index)


def run(engine: LLMEngine, cell: Cell) -> dict[str, driving.Facts]:
    for index in range(cell.batch):
        driving.add(engine, f"r{index}", prompt_of(index), params_of(cell.kind, seed=index))
    found = driving.facts(driving.drain(engine))
    engine.flush_inflight_reqs()
    driving.check_free(engine)
    return found


@functools.cache
def plain(model: Path, kind: str, replay: str) -> dict[str, driving.Facts]:
    """Every request without drafts, all in one engine."""
    return run(engine_of(model, Cell(replay=replay)), Cell(batch=40, kind=kind, replay=replay))


def all_cells() -> list[Cell]:
    sizes, kinds = (1, 5, 40), ("greedy", "sampled", "json")
    cells = itertools.product((0, 1, 3, 5), (False, True), (True, False), sizes, kinds, ("off", "compact"))
    # Without drafts there is nothing to schedule.
    return [Cell(*values) for values in cells if values[0] or not values[1]]


# One engine for the quick run, since each compiles steps of its own; --all has the others.
QUICK_ENGINES = {(5, True, "off")}


def values_of(cell: Cell) -> set[tuple[str, Any]]:
    return {(field.name, getattr(cell, field.name)) for field in dataclasses.fields(cell)}


def covering(cells: list[Cell]) -> set[Cell]:
    """Few cells of quick engines, of few requests, in which every value of any field occurs that these have."""
    candidates = [
        cell for cell in cells if (cell.drafts, cell.varlen, cell.replay) in QUICK_ENGINES and cell.batch <= 5
    ]
    missing, chosen = set().union(*map(values_of, candidates)), set()
    while missing:
        best = max(candidates, key=lambda cell: len(values_of(cell) & missing))
        chosen.add(best)
        missing -= values_of(best)
    return chosen


QUICK = covering(all_cells())


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell, marks=[] if cell in QUICK else [pytest.mark.slow], id="-".join(map(str, dataclasses.astuple(cell)))
        )
        for cell in sorted(all_cells(), key=dataclasses.astuple)
    ],
)
def test_tokens_and_logprobs_are_those_without_drafts(agreeing_model, cell):
    engine = engine_of(agreeing_model, cell)
    found = run(engine, cell)
    want = plain(agreeing_model, cell.kind, cell.replay)
    assert found == {name: want[name] for name in found} and len(found) == cell.batch
    if cell.drafts:
        drafts = engine.stats()["drafts"]
        assert drafts["drafts_accepted"] > 0 and drafts["wasted_rows"] > 0
        assert max(drafts["verified_lens"]) <= cell.drafts


class SometimesDrafting(BudgetPolicy):
    """Drafts in two of three decode steps."""

    def proposes(self, sequences: Any, most: int, step: int) -> bool:
        return step % 3 > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampled", "json"])
def test_steps_without_drafts_change_no_token(agreeing_model, kind):
    cell = Cell(drafts=3, varlen=True, kind=kind, is_async=kind == "sampled")
    engine = engine_of(agreeing_model, cell, verification=SometimesDrafting(None))
    found = run(engine, cell)
    want = plain(agreeing_model, kind, "off")
    assert found == {name: want[name] for name in found}
    drafts = engine.stats()["drafts"]
    steps = engine.stats()["decode_steps"]
    assert drafts["drafts_accepted"] > 0
    assert drafts["rounds"] < 0.9 * cell.batch * steps  # a round is a request in a step that verifies drafts


def test_dear_drafts_are_rarely_made(agreeing_model):
    cell = Cell(drafts=3, varlen=True)
    dear = dataclasses.replace(CURVE, draft_points=((1, 50.0),))
    engine = engine_of(agreeing_model, cell, verification=BudgetPolicy(dear))
    found = run(engine, cell)
    want = plain(agreeing_model, "sampled", "off")
    assert found == {name: want[name] for name in found}
    assert 0 < engine.stats()["drafts"]["rounds"] < 6 * cell.batch


@pytest.mark.slow
def test_a_step_whose_loops_have_fixed_trips_branches_around_drafts(agreeing_model):
    environ = {"DEEPINFER_BATCH_INVARIANT": "0", "DEEPINFER_ENFORCE_EAGER": "1"}
    found = {}
    for name, policy in (("all", BudgetPolicy(None)), ("some", SometimesDrafting(None))):
        engine = tiny.tiny_engine(
            agreeing_model, environ, num_draft_tokens=3, varlen_verification=True, verification=policy
        )
        assert engine.runtime.has_fixed_trips
        driving.add(engine, "r", prompt_of(1), params_of("greedy", seed=1))
        tokens = driving.facts(driving.drain(engine))
        found[name] = engine.stats()["drafts"]["rounds"] / engine.stats()["decode_steps"]
        assert len(tokens) == 1 and engine.stats()["drafts"]["drafts_accepted"] > 0
    assert found["some"] < found["all"]
