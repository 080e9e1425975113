"""The verification kit: its report on the simulator, and that a wrong operator fails it."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cli
from deepinfer_jax.testing import ascend_verify
from deepinfer_jax.testing.ascend_cases import CASES


def test_the_command_writes_a_report(simulator, monkeypatch, tmp_path, capsys):
    options = ascend_verify.ascend.options_from_environ({"DEEPINFER_JAX_ASCEND_SIM": "1"})
    monkeypatch.setattr("deepinfer_jax.kernels.ascend.options_from_environ", lambda: options)
    out = tmp_path / "report.json"
    assert cli.main(["ascend-verify", "--out", str(out), "--only", "rms_norm-*"]) == 0
    report = json.loads(out.read_text())
    assert (report["kind"], report["soc"], report["passed"]) == ("simulator", "SIM_Ascend950", True)
    assert {entry["library"] for entry in report["symbols"]} == {simulator.library._name}
    assert len(report["operators"]) == 2 * sum(case.name.startswith("rms_norm-") for case in CASES)
    assert report["collectives"] == {"passed": True, "size": 8}
    assert not any("time_us" in entry for entry in report["operators"])
    assert "says nothing about Ascend hardware" in capsys.readouterr().out


def test_a_wrong_result_fails_the_report(bridge, monkeypatch):
    wrong = dataclasses.replace(CASES[0], reference=lambda x, w: x)
    monkeypatch.setattr(ascend_verify, "CASES", (wrong,))
    report = ascend_verify.verify(bridge)
    assert not report["passed"]
    assert "FAIL rms_norm" in ascend_verify.to_text(report)


def test_a_failing_operator_is_in_the_report(bridge, simulator):
    simulator.plan({"call": "aclnnRmsNorm", "code": 561103, "message": "no kernel", "nth": 2})
    report = ascend_verify.verify(bridge, only="rms_norm-one_row")
    failed = [entry for entry in report["operators"] if not entry["passed"]]
    assert len(failed) == 1
    assert "no kernel" in failed[0]["error"]


def test_results_that_do_not_repeat_fail(bridge, monkeypatch):
    rng = np.random.default_rng(0)
    noisy = dataclasses.replace(CASES[0], call=lambda x, w: x, reference=lambda x, w: x)
    monkeypatch.setattr(ascend_verify, "CASES", (noisy,))
    monkeypatch.setattr(ascend_verify, "run_staged", lambda *_: jnp.asarray(rng.standard_normal(4)))
    report = ascend_verify.verify(bridge)
    assert [entry["repeats"] for entry in report["operators"]] == [False, True]


def test_a_pattern_without_cases_is_refused(bridge):
    with pytest.raises(ValueError, match="only='x' matches none of the cases rms_norm"):
        ascend_verify.verify(bridge, only="x")
