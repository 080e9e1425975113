"""The scripts that measure the embedded model and show it, on tiny models."""

import argparse
import functools
import importlib.util
import json
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax import LLM, forward, init_state, load_model
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import make_batch
from deepinfer_jax.testing.agreeing import write_agreeing_model
from deepinfer_jax.testing.tiny import tiny_byte_model, tiny_llm
from deepinfer_jax.training.tokenizer import encode_files

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a script in this process and returns what it printed; `patches` are set in its module first."""

    def run(name: str, *arguments: object, **patches: object) -> str:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
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

    def load(args: argparse.Namespace, **options: int) -> LLM:
        engines.append(tiny_llm(args.model, max_num_seqs=1, **{"num_draft_tokens": 5, **options}))
        return engines[-1]

    model = write_agreeing_model(tmp_path, seed=1)
    patches = {"corpus": OneText("def first(argument):\n    return 1\n"), "MAX_REPEATED": 1.0, "_load": load}
    printed = call("measure_drafts", "--model", model, "--prompt-len", 12, "--tokens", 20, **patches)
    report = json.loads(printed)
    assert (report["texts"], report["texts_kept"]) == (1, 1)
    want = engines[1].stats()["drafts"]["accepted_len_mean"]  # of this text twice, once to warm up
    assert report["accepted_length"] == pytest.approx(want, abs=1e-4) != 1


@pytest.mark.slow
def test_demo_shows_code_its_speed_and_an_answer_of_the_schema(call):
    printed = call("demo", "--max-tokens", 12)
    assert ">>>    pass\n" in printed
    assert "tokens/s" in printed and "accepted length: " in printed
    answer = json.loads(printed.splitlines()[-1])
    assert set(answer) == {"function", "returns", "num_arguments"}
