"""`deepinfer-jax determinism --device ascend`: on the simulator no bit depends on anything but the request."""

import argparse
import json

import pytest

from deepinfer_jax import cli
from deepinfer_jax.testing.determinism import command, matrix
from deepinfer_jax.testing.determinism.perturbations import PERTURBATIONS
from deepinfer_jax.testing.determinism.session import Session

SHORT = ("greedy", "alternatives")  # of the base set, which is too much work for a simulator in every run


@pytest.fixture
def asked(monkeypatch) -> None:
    """The simulator is never chosen by itself."""
    monkeypatch.setenv("DEEPINFER_JAX_ASCEND_SIM", "1")


def parsed(*options: str) -> argparse.Namespace:
    return cli._make_parser("determinism").parse_args(["determinism", "--device", "ascend", *options])


@pytest.mark.slow
def test_rows_are_equal(bridge, asked):
    session = Session(command.model_of(parsed()), num_tokens=24)
    session.requests = tuple(request for request in session.requests if request.name in SHORT)
    try:
        for name in ("other places", "forked"):
            [perturbation] = matrix.choose(name, is_quick=True)
            row = matrix.run_row(session, perturbation)
            assert row.is_ok and row.states == row.requests == len(SHORT), row
    finally:
        session.close()


@pytest.mark.slow
def test_every_quick_row_is_equal(bridge, asked, capsys, tmp_path):
    path = tmp_path / "report.json"
    assert cli.main(["determinism", "--device", "ascend", "--quick", "--json", str(path)]) == 0, capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["facts"]["device"] == "SIM_Ascend950" and report["facts"]["model"] == "model/tiny-ascend.json"
    drafts = {f"{number} drafts" for number in (1, 3, 5)} | {"5 drafts by confidence"}
    assert set(report["left_out"]) == drafts | {"beside images"}
    assert {row["name"] for row in report["rows"]} == {
        each.name for each in PERTURBATIONS if each.is_quick and each.name not in report["left_out"]
    }
    assert "left out: 1 drafts: draft stages do not run on an Ascend device" in capsys.readouterr().out


def test_what_cannot_run_is_left_out_with_its_reason():
    left_out = matrix.left_out(PERTURBATIONS, has_vision=False, max_drafts=0, device="ascend")
    assert {name: why for name, why in left_out.items() if "devices" not in name} == {
        "beside images": "an Ascend device takes no images",
        **{f"{number} drafts": "draft stages do not run on an Ascend device" for number in (1, 3, 5)},
        "5 drafts by confidence": "draft stages do not run on an Ascend device",
        "experts on the move": "a model runs on one Ascend device",
    }
    assert left_out["2 x 1 devices"] == "a model runs on one Ascend device"


def test_the_simulator_has_to_be_asked_for(native, monkeypatch, capsys):
    for name in ("DEEPINFER_JAX_ASCEND_SIM", "ASCEND_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="DEEPINFER_JAX_ASCEND_SIM=1"):
        cli.main(["determinism", "--device", "ascend", "--quick"])


def test_a_named_model_and_variables_are_taken(asked, monkeypatch):
    monkeypatch.setenv("DEEPINFER_JAX_ASCEND_MODE", "staged")
    model = command.model_of(parsed("--model", "m", "--tokenizer", "t", "--numerics", "bf16"))
    assert (model.path, model.tokenizer, model.numerics, model.device) == ("m", "t", "bf16", "ascend")
    assert model.variables == {
        "DEEPINFER_JAX_ASCEND_SIM": "1",
        "DEEPINFER_JAX_ASCEND_MODE": "staged",
        "DEEPINFER_JAX_ASCEND_HOST_OPS": "missing",
    }
    assert command.model_of(parsed()).path.endswith("configs/model/tiny-ascend.json")
