"""The command `generate`: prompts from three places, texts or JSON lines, errors in one line."""

import io
import json

import pytest

from deepinfer_jax import cli
from deepinfer_jax.engine import generate
from deepinfer_jax.testing import tiny


@pytest.fixture
def run(tiny_model, monkeypatch, capsys):
    """Runs the command on the tiny model; returns exit status, standard output and standard error."""
    monkeypatch.setattr(generate, "LLM", lambda model, **options: tiny.tiny_llm(model or tiny_model, **options))

    def command(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""))
        monkeypatch.setattr(stream, "isatty", lambda: stdin is None)
        monkeypatch.setattr("sys.stdin", stream)
        status = cli.main(["generate", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_one_prompt_prints_its_text_alone(run, llm):
    status, out, err = run("The quick brown fox", "--max-tokens", "9", "--seed", "4", "--top-k", "60", "--top-p", "0.9")
    params = generate.SamplingParams(max_tokens=9, seq_seed=4, top_k=60, top_p=0.9)
    [outputs] = llm.generate("The quick brown fox", params)
    assert (status, out, err) == (0, generate.visible("".join(o.text for o in outputs)) + "\n", "")


def test_several_prompts_are_told_apart(run):
    status, out, _ = run("one", "two", "--max-tokens", "3", "--temperature", "0")
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("== ")] == ["== one", "== two"]


def test_prompts_come_from_arguments_file_and_standard_input(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("from a file\n\n", encoding="utf-8")
    options = ("--max-tokens", "2", "--json")
    _, both, _ = run("argument", "--file", str(tmp_path / "prompt.txt"), *options, stdin=b"unread")
    assert [json.loads(line)["prompt"] for line in both.splitlines()] == ["argument", "from a file\n"]
    _, piped, _ = run(*options, stdin="piped é\n".encode())
    assert json.loads(piped)["prompt"] == "piped é"


def test_json_lines_hold_the_result(run, llm):
    _, out, _ = run("a", "b", "--max-tokens", "4", "--seed", "1", "--json")
    results = llm.generate(["a", "b"], generate.SamplingParams(max_tokens=4, seq_seed=1))
    for number, (line, outputs) in enumerate(zip(out.splitlines(), results, strict=True)):
        assert json.loads(line) == {
            "index": number,
            "prompt": "ab"[number],
            "prompt_len": 2,
            "text": "".join(o.text for o in outputs),
            "token_ids": [o.token_id for o in outputs],
            "token_logprobs": [o.token_logprobs for o in outputs],
            "finish_reason": outputs[-1].finish_reason,
        }


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("a", "--top-k", "0"), "top_k=0"),
        (("a", "--max-tokens", "-1"), "max_tokens=-1"),
        (("a", "--model", "/absent/model"), "no existing directory"),
        (("--file", "/absent/prompt"), "No such file"),
        ((), "no prompt was given"),
        (("a" * 600,), "prompt 0 has 601 tokens"),
    ],
)
def test_errors_are_one_line_and_status_two(run, arguments, text):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_bytes_that_are_no_text_are_refused(run):
    status, _, err = run(stdin=b"\xff")
    assert status == 2
    assert "standard input is not UTF-8" in err


def test_control_characters_are_shown():
    assert generate.visible("a\tb\nc\x1b[2J\x7f\x85é") == "a\tb\nc\\x1b[2J\\x7f\\x85é"
