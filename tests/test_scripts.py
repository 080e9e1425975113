"""The scripts that measure the embedded model and show it, on tiny models."""

import argparse
import functools
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import LLM, LLMEngine, forward, init_state, load_model
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.sampling.calibration import survival_of
from deepinfer_jax.testing.agreeing import write_agreeing_model
from deepinfer_jax.testing.tiny import tiny_byte_model, tiny_engine, tiny_llm
from deepinfer_jax.training.tokenizer import encode_files

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a script in this process and returns what it printed; `patches` are set in its module first."""

    def run(name: str, *arguments: object, **patches: object) -> str:
        module = load_script(name)
        for attribute, value in patches.items():
            monkeypatch.setattr(module, attribute, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    return run


class OneText:
    """In the place of `training.corpus`: a held-out text that no Python release has to bring."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read_sources(self, place: object) -> dict[str, str]:
        return {"held_out.py": self.text}

    def read_manifest(self, file: object) -> dict[str, str]:
        return {}

    def pinned_texts(self, manifest: object, texts: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        return {}, texts


def bits_of(model: Path, rows: list[list[int]]) -> float:
    """The bits of every token behind the first of each row, by the network without the engine."""
    params, config = load_model(model, progress=False)
    runtime = RuntimeConfig(model=config, numerics="q")
    step = jax.jit(functools.partial(forward, config=runtime))
    bits = 0.0
    for row in rows:
        batch = make_batch([row], starts=[0], slots=[0], page_table=np.array([[0]]), logits="all")
        output, _ = step(params, init_state(runtime, num_slots=1, num_pages=1), batch)
        logprobs = np.asarray(jax.nn.log_softmax(output.logits), np.float64)
        bits -= logprobs[np.arange(len(row) - 1), row[1:]].sum() / math.log(2)
    return bits


@pytest.mark.slow
def test_bits_per_byte_are_those_of_the_network(call, tmp_path):
    model = tiny_byte_model(tmp_path / "model", seed=1)
    texts = ["def f(a, b):\n    return é\n", "x = 1\n" * 5]
    for place, text in enumerate(texts):
        (tmp_path / f"{place}.py").write_text(text, encoding="utf-8")
    report = json.loads(call("eval_ppl", tmp_path / "0.py", tmp_path / "1.py", "--model", model, "--row-len", 24))
    stream = [i for ids in encode_files(model / "tokenizer.json", texts) for i in (*ids, 1)]
    rows = [[0, *stream[start : start + 24]] for start in range(0, len(stream), 24)]
    num_bytes = len("".join(texts).encode())
    assert (report["tokens"], report["bytes"], report["files"]) == (len(stream), num_bytes, 2)
    assert report["bits_per_byte"] == pytest.approx(bits_of(model, rows) / num_bytes, abs=1e-4)


def test_files_and_held_out_exclude_each_other(call):
    for arguments in ((), ("a.py", "--held-out")):
        with pytest.raises(SystemExit, match="either files or --held-out"):
            call("eval_ppl", *arguments)


@pytest.mark.slow
def test_accepted_length_is_that_of_the_statistics(call, tmp_path):
    engines = []

    def load(args: argparse.Namespace, **options: Any) -> LLM:
        options = {"num_draft_tokens": 5, "numerics": "fp32", **options}  # as training computes
        engines.append(tiny_llm(args.model, max_num_seqs=1, **options))
        return engines[-1]

    model = write_agreeing_model(tmp_path, seed=1)
    patches = {"corpus": OneText("def first(argument):\n    return 1\n"), "MAX_REPEATED": 1.0, "_load": load}
    printed = call("measure_drafts", "--model", model, "--prompt-len", 12, "--tokens", 20, "--training", **patches)
    report = json.loads(printed)
    assert (report["texts"], report["texts_kept"]) == (1, 1)
    want = engines[1].stats()["drafts"]["accepted_len_mean"]  # of this text twice, once to warm up
    assert report["accepted_length"] == pytest.approx(want, abs=1e-4) != 1
    assert report["accepted_length"] == report["accepted_length_all_texts"]
    assert report["accepted_length"] == pytest.approx(1 + sum(report["accepted_by_place"]), abs=1e-3)
    num_same, num_rounds = report["same_rounds"]
    assert num_same == num_rounds > 3


def test_temperatures_are_judged_by_rounds_that_they_were_not_fitted_to():
    rng = np.random.default_rng(0)
    confidence = rng.normal(0.0, 4.0, (2000, 2))
    chances = survival_of(confidence, np.full(2, 4.0))  # the head is four times too sure
    accepted = (rng.random(2000)[:, None] < chances).sum(axis=1)
    errors = load_script("fit_confidence")._errors_of_halves(confidence, accepted)
    assert len(errors["before"]) == len(errors["after"]) == 2
    assert max(errors["after"]) < 0.06 < 0.1 < min(errors["before"])


def test_offline_inference_continues_a_shard_and_says_what_it_did(call, tmp_path):
    model = tiny_byte_model(tmp_path / "model", seed=1)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b", "id": "x"}\n{"prompt": 3}\n{"prompt": "d"}\n', encoding="utf-8")
    options = (source, target, "--shard", "1/2", "--sampling-params", '{"max_tokens": 3, "ignore_eos": true}')

    def engine(args: argparse.Namespace) -> LLMEngine:
        return tiny_engine(model, seed=args.seed)

    report = json.loads(call("offline_inference", *options, _engine=engine))
    assert (report["num_lines"], report["num_resumed"], report["num_errors"]) == (2, 0, 0)
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [(r["index"], r["id"], r["num_tokens"]) for r in records] == [(1, "x", 3), (3, 3, 3)]
    assert json.loads(call("offline_inference", *options, _engine=engine))["num_resumed"] == 2
    with pytest.raises(SystemExit, match="offline_inference: --sampling-params='3' is no object"):
        call("offline_inference", source, target, "--sampling-params", "3", _engine=engine)


def test_a_sweep_has_a_line_for_each_point_of_both_curves(call, tmp_path):
    model = tiny_byte_model(tmp_path / "model", seed=1)
    picture = tmp_path / "sweep.png"
    options = ("--batch", 1, 3, "--prompt-len", 9, "--tokens", 6, "--turns", 1)
    printed = call(
        "sweep", "--model", model, *options, "--plot", picture, make_engine=lambda args, mode: tiny_engine(model)
    )
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [(row["curve"], row["batch"]) for row in rows] == [(c, n) for n in (1, 3) for c in ("prefill", "decode")]
    for row in rows:
        assert row["mode"] == "off" and {"device", "commit", "jax"} <= row.keys()
        if row["curve"] == "prefill":  # the median prompt has its first token before the last one at the latest
            assert 0 < row["ttft_s"] <= row["batch"] * 9 / row["input_tokens_per_s"] * 1.01
        else:
            assert row["tokens_per_s_per_user"] == pytest.approx(row["output_tokens_per_s"] / row["batch"], abs=0.01)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_sweep_refuses_answers_that_never_decode_together(call, tmp_path):
    model = tiny_byte_model(tmp_path / "model", seed=1)
    options = ("--batch", 4, "--prompt-len", 400, "--tokens", 2, "--turns", 1)
    with pytest.raises(ValueError, match="with 4 requests the first one ended .*; raise --tokens=2"):
        call("sweep", "--model", model, *options, make_engine=lambda args, mode: tiny_engine(model))


def test_the_front_leaves_out_what_another_point_beats():
    front = load_script("sweep").pareto_front
    points = [(1.0, 5.0), (2.0, 4.0), (3.0, 9.0), (3.0, 2.0), (4.0, 1.0)]
    assert front(points, larger_x_is_better=True) == [(3.0, 9.0), (4.0, 1.0)]
    assert front(points, larger_x_is_better=False) == [(1.0, 5.0), (3.0, 9.0)]


@pytest.mark.slow
def test_demo_shows_code_its_speed_and_an_answer_of_the_schema(call):
    printed = call("demo", "--max-tokens", 12)
    assert ">>>    pass\n" in printed
    assert "tokens/s" in printed and "accepted length: " in printed
    answer = json.loads(printed.splitlines()[-1])
    assert set(answer) == {"function", "returns", "num_arguments"}


@pytest.mark.slow
def test_a_decode_step_of_a_rank_has_a_line_for_each_cell(call):
    printed = call(
        "bench_steps",
        *(
            "--model",
            SCRIPTS.parent / "configs/model/tiny.json",
            "--kernels",
            "reference",
            "--layers",
            5,
            "--experts",
            4,
        ),
        *("--rows", 2, "--contexts", 40, "--turns", 1, "--tables", "device", "host"),
    )
    cell, on_host = [json.loads(line) for line in printed.splitlines()]
    assert (cell["tables"], on_host["tables"]) == ("device", "host") and "error" not in on_host
    assert (cell["op"], cell["impl"], cell["layers"]) == ("step_decode", "reference", 5)
    assert cell["case"] == "2 rows, context 40"
    assert cell["kernels_from"] == "program text" and cell["kernels_per_step"] > 100
    assert cell["bytes"] > 0 and cell["fraction"] is None  # bandwidth is measured on GPUs only


def test_floors_of_absent_gpus_are_told_without_running_a_step(call):
    tiny = ("--model", SCRIPTS.parent / "configs/model/tiny.json", "--experts", 4)
    printed = call("bench_steps", *tiny, "--predict", "h200", "b200", "--rows", 2, "--prefill", 64, "--contexts", 64)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["op"], line["prediction"]) for line in lines] == [
        (op, gpu) for gpu in ("h200", "b200") for op in ("step_decode", "step_prefill")
    ]
    for line in lines:
        moving = 1e6 * line["bytes"] / line["rates"]["bytes_per_s"]
        computing = sum(1e6 * line["flops"][rate] / line["rates"]["flops_per_s"][rate] for rate in ("fp8", "bf16"))
        assert line["floor_us"] == pytest.approx(max(moving, computing), abs=0.1) and "median_us" not in line


@pytest.mark.slow
def test_a_chunk_of_a_prompt_has_a_line_and_is_compared_with_a_moved_reference(call):
    printed = call(
        "bench_steps",
        *("--model", SCRIPTS.parent / "configs/model/tiny.json", "--kernels", "reference", "--layers", 3),
        *("--experts", 4, "--rows", "--prefill", 8, "--contexts", 40, "--turns", 1, "--check"),
        *("--batch-invariant", "on", "off"),
    )
    cell, fast, check = [json.loads(line) for line in printed.splitlines()]
    assert (cell["batch_invariant"], fast["batch_invariant"]) == (True, False) and fast["case"] == cell["case"]
    assert (cell["op"], cell["case"]) == ("step_prefill", "8 rows of one prompt, context 40")
    assert cell["flops"]["fp8"] > 0 and cell["flops"]["bf16"] > 0 and cell["bound"] is None
    assert check["op"] == "step_check" and check["rel_err"] == 0.0
    few, many = check["moved_rel_err"]
    assert check["moved_shares"] == [0.001, 0.1] and 0.0 <= few <= many and many > 0.0


@pytest.mark.slow
def test_the_mode_is_timed_against_steps_without_it(call):
    printed = call("bench_invariance", "experts", "--rows", 4, "--turns", 1)
    [line] = [json.loads(each) for each in printed.splitlines()]
    assert (line["component"], line["rows"], line["row_tile"], line["kernels"]) == ("experts", 4, 8, "auto")
    assert line["ratio"] == pytest.approx(line["on_ms"] / line["off_ms"], rel=1e-2) and line["on_ms"] > 0


@pytest.mark.slow
def test_an_engine_runs_weights_that_its_benchmark_has_drawn(call):
    sizes = ("--batch", 4, "--tokens", 4, "--turns", 1, "--max-model-len", 256, "--eager")
    printed = call("bench_engine", "batch", "--layers", 3, "--drawn-on-device", *sizes)
    [line] = [json.loads(each) for each in printed.splitlines()]
    assert (line["scenario"], line["layers"]) == ("batch", 3) and line["tokens_per_s_4"] > 0


@pytest.mark.slow
def test_steps_on_meshes_are_timed(call):
    sizes = ("--experts", 4, "--rows", 8, "--chunk", 64, "--context", 256, "--turns", 1)
    printed = call("bench_mesh", "--model", SCRIPTS.parent / "configs/model/tiny.json", "--mesh", "1x1", "2x1", *sizes)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(line["op"], line.get("mesh")) for line in lines] == [
        ("link", None),
        ("step_decode", "1x1"),
        ("step_prefill", "1x1"),
        ("step_decode", "2x1"),
    ]
    assert lines[0]["sent_bytes_per_s"] > 0
    assert all(line["finite"] and line["step_us"] > 0 for line in lines[1:])
    assert [line["experts"] for line in lines[1:]] == [4, 4, 8]  # as many for each device
    # In each of 6 layers half of 8 rows' pairs travel, three words there and an output back, and each row once.
    model = json.loads((SCRIPTS.parent / "configs/model/tiny.json").read_text())["text_config"]
    width, num_pairs = model["hidden_size"], 8 * model["num_experts_per_tok"] // 2
    assert lines[3]["exchange_sent_bytes"] == 6 * (8 * (width + width // 32) + num_pairs * (12 + 2 * width))


def test_numpy_selects_by_score_and_then_by_place():
    module = load_script("long_selection")
    scores = np.array([1, 3, -np.inf, 3, 2, 3], np.float32)
    assert module.best_entries(scores, 2).tolist() == [1, 3]
    assert module.best_entries(scores, 9).tolist() == [0, 1, 3, 4, 5]
    queries = np.array([[1, 0], [0, 1]], np.float32)
    keys = np.array([[257, -1], [2, 3]], np.float32)  # 257 rounds to 256, and a negative product counts as 0
    found = module.numpy_scores(queries, np.array([1, 0.5], np.float32), keys)
    assert found.tolist() == [256, 3.5]


@pytest.mark.slow
def test_a_long_prompt_selects_what_numpy_selects(call):
    sizes = ("--layers", 6, "--context", 512, "--chunk", 256, "--decode", 1, "--rows", 2)
    given = ("long_selection", "--model", SCRIPTS.parent / "configs/model/tiny.json", *sizes)
    found = json.loads(call(*given))
    assert found["sets"] == found["sets_equal"] > 8 and found["finite"]
    assert found["paged_bytes"] == found["paged_bytes_formula"] and found["slot_bytes"] == found["slot_bytes_formula"]
    other = json.loads(call(*given, best_entries=lambda scores, count: np.argsort(scores)[:count]))
    assert other["sets_equal"] < other["sets"] and other["differing"][0]["missing"] > 0
