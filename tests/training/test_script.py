"""The command line: stages one after the other on a small corpus, and what it refuses."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

from deepinfer_jax.checkpoint.load import load_model
from deepinfer_jax.checkpoint.write import released_config
from deepinfer_jax.training.data import save_data

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_tiny.py"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["train_tiny.py", *map(str, arguments)])
        module.main()

    return run


@pytest.mark.slow
def test_stages_lead_to_a_model_with_a_drafter(call, shape, source, tmp_path: Path):
    save_data(source, tmp_path / "data.npz")
    (tmp_path / "config.json").write_text(json.dumps(released_config(shape)))
    common = ["--float32", "--config", tmp_path / "config.json", "--data", tmp_path / "data.npz", "--rows", 4]
    common += ["--seq-len", 32, "--steps", 4, "--report-every", 1]
    call("--stage", "backbone", "--out", tmp_path / "backbone", *common)
    common += ["--own-texts", 16, "--own-share", 0.5]
    call("--stage", "draft", "--out", tmp_path / "draft", "--model", tmp_path / "backbone/model", *common)
    for stage in ("backbone", "draft"):
        reports = [json.loads(line) for line in (tmp_path / stage / "log.jsonl").read_text().splitlines()]
        assert [r["step"] for r in reports if r["kind"] == "step"] == [1, 2, 3, 4]
        assert reports[-1]["kind"] == "end" and reports[-1]["done"]
    assert 0 < len(np.load(tmp_path / "draft" / "own_texts.npy")) <= 16
    with np.load(tmp_path / "draft" / "acceptance.npz") as records:
        assert records["confidence"].shape == (*records["accepted"].shape, shape.dspark_block_size)
    params, config = load_model(tmp_path / "draft" / "model", with_draft=True, progress=False)
    assert config == shape and params.draft is not None


def test_a_missing_option_is_named(call, tmp_path: Path):
    with pytest.raises(SystemExit, match="this stage needs --data"):
        call("--stage", "backbone", "--float32", "--out", tmp_path)


def test_bfloat16_is_refused_on_a_cpu(call, tmp_path: Path):
    with pytest.raises(SystemExit, match="give --float32"):
        call("--stage", "backbone", "--data", tmp_path / "data.npz", "--out", tmp_path)


def test_a_plot_without_matplotlib_says_what_to_install(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib: pip install 'deepinfer-jax\[train\]'"):
        call("--out", tmp_path, "--plot", tmp_path / "loss.png")


def test_a_plot_has_a_panel_for_each_unit(call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    reports = [
        {"kind": "step", "step": 1, "loss": 9.0, "nats_per_token": 8.0},
        {"kind": "held_out", "step": 1, "bits_per_byte": 3.0, "bits_per_byte_quantised": 3.1},
        {"kind": "end", "done": True},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    call("--out", tmp_path, "--plot", tmp_path / "loss.png")
    [figure] = figures
    found = {axes.get_ylabel(): [line.get_label() for line in axes.get_lines()] for axes in figure.axes}
    assert found == {
        "nats per token (training)": ["nats per token"],
        "bits per byte (held out)": ["bits per byte", "bits per byte quantised"],
    }
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "log.jsonl").write_text(json.dumps(reports[-1]))
    with pytest.raises(SystemExit, match="has no figures to draw"):
        call("--out", tmp_path, "--plot", tmp_path / "loss.png")
