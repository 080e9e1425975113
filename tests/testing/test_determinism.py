"""`deepinfer-jax determinism`: equal rows pass, a planted fault is found with its layer, finished rows are kept."""

import contextlib
import dataclasses
import json
import os

import jax
import pytest

from deepinfer_jax import SamplingParams, cli
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.testing import tiny
from deepinfer_jax.testing.agreeing import write_agreeing_model
from deepinfer_jax.testing.determinism import command, matrix, processes
from deepinfer_jax.testing.determinism.driving import Arrival, Model, RowCounter, Run, run_requests
from deepinfer_jax.testing.determinism.perturbations import PERTURBATIONS, Perturbation
from deepinfer_jax.testing.determinism.session import Session
from deepinfer_jax.testing.determinism.workload import SPARE, Request, Texts
from tests.testing import faults

pytestmark = pytest.mark.compiles_much
FAULTY_LAYER = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Its drafts are kept in part."""
    return str(write_agreeing_model(tmp_path_factory.mktemp("agreeing"), seed=1))


def run(model: str, *options: str) -> int:
    return cli.main(["determinism", "--model", model, "--quick", *options])


@pytest.fixture
def fault(monkeypatch):
    yield from faults.plant(monkeypatch, faulty_layer=FAULTY_LAYER)


@pytest.mark.slow
def test_rows_of_one_axis_are_equal_and_a_second_run_keeps_them(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "run_facts", lambda: {"commit": "of this test"})
    path = tmp_path / "report.json"
    options = ("--only", "position in the batch", "--json", str(path))
    assert run(model, *options) == 0
    printed = capsys.readouterr().out
    assert "other places" in printed and "equal (9/9)" in printed and "all 1 rows are equal" in printed
    report = json.loads(path.read_text())
    assert report["is_ok"] and len(report["fingerprints"]) == 9
    [row] = report["rows"]
    assert row["notes"]["rows"] > 9 and set(row["equal"]) == {"tokens", "log-probabilities", "state"}

    def never(*_):
        raise AssertionError("a finished row was run again")

    monkeypatch.setattr(matrix, "run_row", never)
    assert run(model, *options) == 0
    assert capsys.readouterr().out == printed
    report["fingerprints"]["greedy"] = "0" * 32
    path.write_text(json.dumps(report))
    assert run(model, *options) == 1
    assert "in greedy: two processes with the same facts gave other bits" in capsys.readouterr().err


@pytest.mark.slow
def test_a_planted_fault_ends_with_1_and_names_the_layer(model, tmp_path, capsys, fault):
    path = tmp_path / "report.json"
    assert run(model, "--only", "other places", "--json", str(path)) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS" in printed and "1 of 1 rows FAILED" in printed
    [row] = json.loads(path.read_text())["rows"]
    assert not row["equal"]["log-probabilities"] and row["difference"]["request"] in printed
    assert f"layer {FAULTY_LAYER}, layers.{FAULTY_LAYER}.ffn_out[" in row["microscope"]


@pytest.mark.slow
def test_every_quick_row_is_equal(model, capsys):
    assert run(model) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_rows_that_need_more_processes_are_equal(model, capsys):
    for name in ("restarted process", "cold cache"):
        options = ("--tokens", "24", "--only", name)
        assert cli.main(["determinism", "--model", model, *options]) == 0, capsys.readouterr().out


@pytest.fixture
def task(model, tmp_path) -> processes.Task:
    return processes.Task(model=Model(path=model, numerics="q"), num_tokens=24, folder=str(tmp_path), rows=("forked",))


@pytest.mark.parametrize("row", ["forked", None], ids=["row", "part"])
def test_a_process_that_is_killed_is_an_error(task, row):
    with contextlib.closing(processes.Worker(task)) as worker:
        worker._process.kill()
        with pytest.raises(RuntimeError, match="for the part 'whole' failed: it ended with status -9 and said nothing"):
            worker.run(row)


def test_a_process_that_fails_is_an_error_with_its_last_words(task):
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, path="/nowhere"))
    with (
        contextlib.closing(processes.Worker(task)) as worker,
        pytest.raises(RuntimeError, match=r"failed: (.|\n)*/nowhere"),
    ):
        worker.run("forked")


def test_a_process_that_hangs_is_an_error_and_is_ended(task, monkeypatch):
    monkeypatch.setattr(processes, "TIMEOUT_S", 0)
    with contextlib.closing(processes.Worker(task)) as worker:
        with pytest.raises(RuntimeError, match="took more than 0 s"):
            worker.run("forked")
        assert worker._process.poll() is None
    assert worker._process.poll() is not None


class Finished:
    """A worker that has the results of some rows, and of the base set."""

    def __init__(self, results: dict[str, Run]) -> None:
        self._results, self.rows = results, tuple(name for name in results if name != "second process")
        self.asked: list[str | None] = []

    def run(self, row: str | None = None) -> tuple[Run, float]:
        self.asked.append(row)
        return self._results[row or "second process"], 1.5


def test_two_processes_have_processors_of_their_own():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one processor")
    with processes.half_of_the_cores(True) as spare:
        assert set(spare) | os.sched_getaffinity(0) == before
        assert spare and not set(spare) & os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) == before
    with processes.half_of_the_cores(False) as spare:
        assert spare == () and os.sched_getaffinity(0) == before


def test_only_a_matrix_with_a_second_process_is_split():
    quick = [each for each in PERTURBATIONS if each.is_quick]
    assert matrix.can_split(quick)
    assert not matrix.can_split([each for each in quick if each.name != "second process"])
    assert not matrix.can_split([each for each in quick if not each.is_apart])


def test_rows_of_another_process_are_compared_in_this_one(model, monkeypatch):
    session = Session(Model(path=model, numerics="q"), num_tokens=24)
    try:
        base = session.base("plain")
        wrong = {**base.results, "greedy": base.results["sampled"]}
        worker = Finished(
            {
                "few pages": Run(results=base.results, notes={"preemptions": 1}),
                "1 drafts": Run(results=wrong, notes={"accepted": 1}),
                "second process": base,
            }
        )
        monkeypatch.setattr(processes, "beside", lambda session, rows: contextlib.nullcontext(worker))
        monkeypatch.setattr(matrix, "_look", lambda *_: "looked")
        todo = [each for each in PERTURBATIONS if each.name in ("other places", *worker.rows, "second process")]
        report = matrix.run_matrix(session, todo, {}, is_split=True)
    finally:
        session.close()
    assert worker.asked == ["few pages", "1 drafts", None]
    rows = {row.name: row for row in report.rows}
    assert list(rows) == ["other places", "few pages", "1 drafts", "second process"]
    assert not rows["1 drafts"].is_ok and rows["1 drafts"].microscope == "looked"
    assert rows["few pages"].is_ok and rows["second process"].is_ok and rows["second process"].seconds == 1.5


def test_a_perturbation_that_did_not_happen_fails(model):
    session = Session(Model(path=model, numerics="q"), num_tokens=24)
    try:
        row = matrix.run_row(
            session,
            Perturbation(
                name="nothing", axis="none", run=lambda each: each.base("plain"), least={"rows": 2, "preemptions": 1}
            ),
        )
    finally:
        session.close()
    assert all(row.equal.values()) and row.states == row.requests == 9
    assert row.missing == "preemptions 0, expected 1" and not row.is_ok


def test_rows_have_names_of_their_own_and_are_chosen_by_pattern():
    names = [each.name for each in PERTURBATIONS]
    assert len(set(names)) == len(names) >= 25
    assert [each.name for each in matrix.choose("among *", is_quick=True)] == ["among 7", "among 40", "among 200"]
    assert [each.name for each in matrix.choose("fork", is_quick=True)] == ["forked"]
    assert {each.name for each in matrix.choose("*", is_quick=False)} == set(names)
    assert sum(each.axis.startswith("process") for each in matrix.choose("*", is_quick=True)) == 1
    with pytest.raises(ValueError, match="--only='cold cache' fits no row; rows are alone, among 7"):
        matrix.choose("cold cache", is_quick=True)


def test_a_row_that_needs_more_devices_or_vision_is_left_out():
    rows = [
        Perturbation(name="mesh", axis="mesh", run=Session.each_alone, devices=10_000),
        Perturbation(name="images", axis="images", run=Session.each_alone, needs_vision=True),
        Perturbation(name="drafts", axis="drafts", run=Session.each_alone, drafts=3),
        Perturbation(name="plain", axis="none", run=Session.each_alone, drafts=2),
    ]
    assert matrix.left_out(rows, has_vision=False, max_drafts=2) == {
        "mesh": f"needs 10000 devices, here are {len(jax.devices())}",
        "images": "the model has no vision weights",
        "drafts": "needs 3 drafts, the model makes 2",
    }


@pytest.mark.parametrize(
    "options, message",
    [
        (("--tokens", "23"), "--tokens=23 is below 24"),
        (("--json", "/nowhere/report.json"), "in a folder that does not exist"),
        (("--only", "nothing"), "fits no row"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(options, message, capsys):
    assert run("absent", *options) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(capsys):
    assert run(str(shipped_config(tiny.CONFIG_NAME)), "--only", "alone") == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_run_lasts_until_all_watched_requests_have_ended(model):
    counter = RowCounter()
    engine = tiny.tiny_engine(model, hooks=counter)
    texts = Texts(tokenizer=engine.tokenizer, image_token=0, num_tokens=2 * SPARE)

    def arrival(name: str, max_tokens: int, *, is_watched: bool) -> Arrival:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seq_seed=max_tokens)
        return Arrival(Request(name=name, prompt=(5, 6, 7), params=params), is_watched=is_watched)

    others = [arrival("neighbour", 60, is_watched=False), arrival("late", 5, is_watched=False)]
    others[1] = dataclasses.replace(others[1], step=50)
    watched = [arrival("short", 3, is_watched=True), arrival("long", 2 * SPARE, is_watched=True)]
    found = run_requests(engine, counter, texts, [*others, *watched])
    assert {name: len(result.token_ids) for name, result in found.results.items()} == {"short": 3, "long": 2 * SPARE}
    assert 2 * SPARE <= found.notes["steps"] < 40
    assert not engine.has_unfinished_requests()


def test_a_run_ends_where_no_interrupted_request_goes_on(model):
    counter = RowCounter()
    engine = tiny.tiny_engine(model, hooks=counter)
    texts = Texts(tokenizer=engine.tokenizer, image_token=0, num_tokens=2 * SPARE)
    params = SamplingParams(max_tokens=2 * SPARE, ignore_eos=True)
    arrivals = [Arrival(Request(name=name, prompt=(5, 6, 7), params=params)) for name in ("one", "other")]
    found = run_requests(
        engine, counter, texts, arrivals, interrupt=lambda engine, request_id, _: engine.abort_request(request_id)
    )
    assert {
        name: texts.state_at // 2 <= len(result.token_ids) < 2 * SPARE for name, result in found.results.items()
    } == {
        "one": True,
        "other": True,
    }
