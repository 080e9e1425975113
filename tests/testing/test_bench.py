"""`deepinfer-jax bench` runs what it says, and draws it."""

import json

import pytest

from deepinfer_jax import cli
from deepinfer_jax.testing import bench
from deepinfer_jax.testing.agreeing import write_agreeing_model

SMALL = ("--batch", "1", "2", "--tokens", "12", "--prompt-len", "9", "--turns", "1", "--eager")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_agreeing_model(tmp_path_factory.mktemp("agreeing"), seed=1)


@pytest.mark.parametrize("modes", [("off", "fixed"), pytest.param(("off", "rejection"), marks=pytest.mark.slow)])
def test_each_batch_and_mode_has_a_line_and_the_plot_is_a_picture(model, tmp_path, capsys, modes):
    plot = tmp_path / "curve.png"
    assert cli.main(["bench", "--model", str(model), *SMALL, "--modes", *modes, "--plot", str(plot)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch"], row["mode"]) for row in rows] == [(n, mode) for n in (1, 2) for mode in modes]
    for row in rows:
        assert row["tokens_per_s"] > 0 and {"device", "commit", "jax"} <= row.keys()
        assert ("acceptance" in row) == (row["mode"] != "off")
        assert row["mode"] != "off" or row["speed_up"] == 1.0
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_prompts_come_from_a_file(model, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("abc\n\nde\n")
    args = cli._make_parser("bench").parse_args(["bench", "--model", str(model), *SMALL, "--prompts", str(path)])
    tokenizer = bench.make_engine(args, "off").tokenizer
    assert [len(prompt) for prompt in bench.make_prompts(args, 3, tokenizer)] == [4, 3, 4]
    with pytest.raises(ValueError, match="needs a model with a tokenizer"):
        bench.make_prompts(args, 3, None)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no lines with text"):
        bench.make_prompts(args, 3, tokenizer)
