import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cli
from deepinfer_jax.checkpoint.write import write_file
from deepinfer_jax.model import attention, layer, moe
from deepinfer_jax.ops import hyper, indexer, paged
from deepinfer_jax.ops import moe as experts
from deepinfer_jax.testing import verify as verifying
from deepinfer_jax.testing.fixtures import read_arrays
from deepinfer_jax.testing.report import Line, Report
from deepinfer_jax.testing.verify import verify

TINY = Path(__file__).parents[1] / "data" / "tiny_a"
MODES = ("fp32_noqdq", "fp32", "bf16", "q")
# Where these recordings have ties and boundaries: one sequence of the batch of two, one tied decode step, and one value
# of a decoding.
TIED_PARTS = {"fp32_noqdq": {"prefill_light"}, "fp32": {"prefill_light", "decode"}, "bf16": {"decode"}, "q": set()}
# What every mode needs beside its own recordings.
SHARED = ("config.json", "tokenizer.json", "prompts.safetensors", "weights_released.safetensors")


@pytest.mark.parametrize(
    "mode", [mode if mode == "q" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_every_stage_of_a_prefill_agrees(mode: str):
    report = verify(TINY, mode, parts=("prefill_full",))
    assert report.is_ok, report.to_text()
    stages = {line.stage: line for line in report.lines}
    assert stages["topk_idxs"].is_equal and stages["router_ids"].is_equal and stages["candidate_mask"].is_equal
    if mode != "fp32_noqdq":
        assert stages["window_kv"].max_error < 1e-6
    assert report.rows_forced == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_everything_recorded_agrees(mode: str):
    report = verify(TINY, mode)
    assert report.is_ok, report.to_text()
    parts = {line.part for line in report.lines if line.rows_forced or line.rows_excused}
    assert parts <= TIED_PARTS[mode]


@pytest.mark.slow
def test_every_recorded_decode_step_agrees():
    """In fp32 too, where the recording may have one cached value on the other side of a rounding boundary."""
    report = verify(TINY, "fp32", parts=("decode",))
    assert report.is_ok, report.to_text()
    lines = {line.stage: line for line in report.lines if line.part == "decode"}
    assert (lines["logits"].rows, lines["logits"].tolerance) == (80, 2e-5)
    assert lines["greedy_tokens"].is_equal and lines["topk_idxs"].is_equal
    assert lines["final_cache.compress_kv"].is_equal and lines["final_cache.window_kv"].is_equal
    assert not any(line.rows_excused or (line.rows_forced and line.stage != "boundary") for line in lines.values())
    assert report.rows_forced == len(report.remarks) <= 1


@pytest.mark.slow
def test_a_value_that_a_fault_puts_over_a_boundary_is_not_turned(monkeypatch: pytest.MonkeyPatch):
    """Window rows that are too large by 32 ulp: within the tolerance of every stage, but some codes are others."""
    original = attention.window_rows
    monkeypatch.setattr(attention, "window_rows", lambda kv, *, config: original(kv * (1 + 2.0**-18), config=config))
    report = verify(TINY, "fp32", parts=("decode",))
    assert not report.is_ok
    assert "logits" in {line.stage for line in report.lines if not line.is_ok}, report.to_text()


def _transposed_comb(monkeypatch: pytest.MonkeyPatch) -> None:
    original = hyper.coefficients

    def coefficients(*args, **given):
        mix = original(*args, **given)
        return hyper.Mix(pre=mix.pre, post=mix.post, comb=jnp.swapaxes(mix.comb, 1, 2))

    monkeypatch.setattr(hyper, "coefficients", coefficients)


def _one_entry_less_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_visible(positions, *, ratio):
        return positions // ratio

    monkeypatch.setattr(paged, "num_visible", num_visible)


def _newest_block_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    original = indexer.candidate_blocks

    def candidate_blocks(scores, num_visible, *, block_size, count):
        return original(scores, jnp.zeros_like(num_visible), block_size=block_size, count=count)

    monkeypatch.setattr(indexer, "candidate_blocks", candidate_blocks)


def _rope_of_the_other_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = layer.rope_tables

    def rope_tables(positions, own, *, config):
        return original(positions, dataclasses.replace(own, ratio_kind=0), config=config)

    monkeypatch.setattr(layer, "rope_tables", rope_tables)


def _weight_behind_w2(monkeypatch: pytest.MonkeyPatch) -> None:
    original = experts.expert

    def expert(u, w1, w2, w3, weight, *, limit, quantizes):
        out = original(u, w1, w2, w3, None, limit=limit, quantizes=quantizes)
        return out if weight is None else (out.astype(jnp.float32) * weight[:, None]).astype(out.dtype)

    monkeypatch.setattr(moe.experts_math, "expert", expert)


@pytest.mark.parametrize(
    "plant, mode, stage",
    [
        pytest.param(_transposed_comb, "fp32_noqdq", "stream_mid", marks=pytest.mark.slow),
        pytest.param(_one_entry_less_visible, "fp32_noqdq", "topk_idxs", marks=pytest.mark.slow),
        pytest.param(_newest_block_not_pinned, "fp32_noqdq", "candidate_mask", marks=pytest.mark.slow),
        pytest.param(_rope_of_the_other_kind_of_layer, "fp32_noqdq", "attn_out", marks=pytest.mark.slow),
        (_weight_behind_w2, "q", "ffn_out"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else value,
)
def test_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], mode: str, stage: str, monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    report = verify(TINY, mode, parts=("prefill_full",))
    assert not report.is_ok
    assert stage in {line.stage for line in report.lines if not line.is_ok}, report.to_text()


def _renamed(target: Path, file: str, names: dict[str, str], *, edit: Callable[[dict], None] = lambda _: None) -> None:
    """A copy of a recording with its prompts renamed, and only those that have a new name."""
    found: dict[str, np.ndarray] = {}
    for key, value in read_arrays(TINY / file).items():
        prompt, _, rest = key.partition(".")
        if prompt in names:
            found[f"{names[prompt]}.{rest}"] = np.asarray(value)
    edit(found)
    write_file(found, target / file)


@pytest.fixture(params=["weights_released", "weights_bf16"], ids=["released", "unpacked"])
def other_directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory of the same layout without the file of prompts, to be given recordings under other names."""
    for name in ("config.json", "tokenizer.json", f"{request.param}.safetensors"):
        shutil.copy(TINY / name, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_other_prompt_names(other_directory: Path):
    _renamed(other_directory, "prefill_light_fp32_noqdq.safetensors", {"p05": "short", "p08": "a.b"})
    report = verify(other_directory, "fp32_noqdq")
    assert report.is_ok, report.to_text()
    assert {line.part for line in report.lines} == {"prefill_light"}
    assert sum(line.rows for line in report.lines if line.stage == "logits") == 13
    assert any("decode_fp32_noqdq.safetensors: absent" in text for text in report.not_covered)


@pytest.mark.slow
def test_one_wrong_value_is_found(other_directory: Path):
    """A single recorded expert id that is changed cannot be excused by anything."""

    def edit(found: dict[str, np.ndarray]) -> None:
        ids = found["x.layers.5.router_ids"] = found["x.layers.5.router_ids"].copy()
        ids[3, 0] = next(e for e in range(8) if e not in ids[3])

    _renamed(other_directory, "prefill_light_fp32_noqdq.safetensors", {"p05": "x"}, edit=edit)
    report = verify(other_directory, "fp32_noqdq")
    assert not report.is_ok
    assert [line.stage for line in report.lines if not line.is_ok] == ["router_weights", "router_ids"]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda d: shutil.rmtree(d), "is not a directory"),
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "weights_released.safetensors").unlink(), "holds neither weights_released.safetensors nor"),
        (lambda d: (d / "edge_q.safetensors").write_bytes(b"short"), "edge_q.safetensors is truncated"),
        (lambda d: (d / "edge_q.safetensors").unlink(), "recorded modes: none"),
    ],
    ids=["no directory", "no config", "no weights", "truncated", "no recordings"],
)
def test_bad_directory_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], message: str
):
    directory = tmp_path / "fixtures"
    directory.mkdir()
    for name in (*SHARED, "edge_q.safetensors"):
        shutil.copy(TINY / name, directory)
    spoil(directory)
    assert cli.main(["verify", str(directory), "--mode", "q"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    assert message in shown.err


def test_unknown_mode_names_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["verify", str(TINY), "--mode", "fp16"]) == 2
    assert "'fp16' is unknown; choose one of fp32_noqdq, fp32, bf16, q" in capsys.readouterr().err


def _report(*, is_ok: bool) -> Report:
    line = Line(
        part="decode",
        stage="attn_out",
        measure="relative",
        tolerance=1e-5,
        max_error=5e-7 if is_ok else float("inf"),
        num_values=64,
        num_different=60,
        is_equal=False,
        rows=1,
        rows_bad=0 if is_ok else 1,
        rows_forced=1,
        rows_turned=0,
        rows_excused=0,
        worst="" if is_ok else "p21 step00.layers.0.attn_out row 0",
        is_ok=is_ok,
    )
    return Report(directory="d", mode="q", lines=(line,), remarks=("r",), not_covered=("vision",))


@pytest.mark.parametrize("is_ok, status", [(True, 0), (False, 1)])
def test_cli_shows_a_table_or_json(
    is_ok: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(verifying, "verify", lambda *_, **__: _report(is_ok=is_ok))
    assert cli.main(["verify", "anywhere", "--mode", "q"]) == status
    text = capsys.readouterr().out
    assert "attn_out" in text and "1 rows forced" in text and "not covered: vision" in text
    assert ("FAILED" in text) == (not is_ok)
    assert cli.main(["verify", "anywhere", "--mode", "q", "--json"]) == status
    shown = json.loads(capsys.readouterr().out)
    assert shown["is_ok"] is is_ok and shown["rows_forced"] == 1 and shown["lines"][0]["stage"] == "attn_out"


@pytest.mark.parametrize("argv", [[], ["translate"], ["verify"], ["verify", "d", "--mode", "q", "--bogus"]])
def test_wrong_arguments_are_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
