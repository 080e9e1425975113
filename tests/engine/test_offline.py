"""Offline runs: one output line for each input line, whatever happens in between."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax.engine import offline
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.offline import run_offline
from deepinfer_jax.engine.offline_files import OutputFile, Shard, count_lines, parse_line, parse_shard, read_lines
from deepinfer_jax.testing import tiny
from tests.engine import driving

ROOT = Path(__file__).parents[2]
DEFAULTS = {"max_tokens": 4}
CHILD = """
import sys
from deepinfer_jax.testing import tiny
from tests.engine.test_offline import DEFAULTS, make_engine, run_offline
run_offline(make_engine(sys.argv[1]), sys.argv[2], sys.argv[3], defaults=DEFAULTS)
"""


def make_engine(model: str | Path) -> LLMEngine:
    return tiny.tiny_engine(model, seed=5, **tiny.CROWDED)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> LLMEngine:
    return make_engine(tiny_model)


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines))
    return path


def many_lines(count: int) -> list[dict[str, Any]]:
    """Short prompts, some with parameters and an id of their own, and now and then one that is refused."""
    lines: list[dict[str, Any]] = [{"prompt": f"line {index}"} for index in range(count)]
    for index in range(0, count, 7):
        lines[index] |= {"id": f"seven-{index}", "sampling_params": {"max_tokens": 1 + index % 9, "temperature": 0}}
    for index in range(3, count, 20):
        lines[index]["sampling_params"] = {"top_p": 2}
    return lines


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kill_at_random(model: Path, source: Path, target: Path, rng: random.Random, *, most: int) -> None:
    """Starts a run in another process and kills it once it has written up to `most` lines more."""
    size = target.stat().st_size if target.exists() else 0
    wanted = size + rng.randrange(1, most) * 100  # bytes; a record has at least as many
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(model), str(source), str(target)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 300
        while not (target.exists() and target.stat().st_size >= wanted) and time.monotonic() < deadline:
            assert child.poll() is None, "the run ended by itself"
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
    finally:
        child.kill()
        child.wait()


def check_kills(engine: LLMEngine, model: Path, folder: Path, *, num_lines: int, num_kills: int, most: int) -> None:
    source = write_lines(folder / "in.jsonl", many_lines(num_lines))
    rng = random.Random(num_lines)
    for _ in range(num_kills):
        kill_at_random(model, source, folder / "killed.jsonl", rng, most=most)
    found = len((folder / "killed.jsonl").read_bytes().splitlines())
    assert 0 < found < num_lines
    summary = run_offline(engine, source, folder / "killed.jsonl", defaults=DEFAULTS, has_bar=False)
    assert summary.num_lines == num_lines and 0 < summary.num_resumed <= found
    whole = run_offline(engine, source, folder / "whole.jsonl", defaults=DEFAULTS, has_bar=False)
    assert (folder / "killed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    records = records_of(folder / "whole.jsonl")
    assert [record["index"] for record in records] == list(range(num_lines))
    assert whole.num_errors == sum("error" in record for record in records) == len(range(3, num_lines, 20))
    assert all(0 < record["num_tokens"] <= 9 for record in records if "error" not in record)


@pytest.mark.slow
def test_a_run_that_was_killed_twice_has_every_line_once(engine, tiny_model, tmp_path):
    check_kills(engine, tiny_model, tmp_path, num_lines=60, num_kills=2, most=15)


@pytest.mark.slow
def test_two_thousand_lines_survive_ten_kills(engine, tiny_model, tmp_path):
    check_kills(engine, tiny_model, tmp_path, num_lines=2000, num_kills=10, most=180)


def test_records_tell_what_the_engine_gave(engine, tiny_model, tmp_path):
    ids = driving.prompt_of(9)
    options = {"max_tokens": 6, "seq_seed": 3, "top_logprobs": 2, "prompt_logprobs": True}
    source = write_lines(tmp_path / "in.jsonl", [{"id": "a", "prompt_token_ids": ids, "sampling_params": options}])
    run_offline(engine, source, tmp_path / "out.jsonl", has_bar=False)
    [record] = records_of(tmp_path / "out.jsonl")
    driving.add(engine, "same", ids, driving.params_of(3, 6, ignore_eos=False, top_logprobs=2, prompt_logprobs=True))
    outputs = driving.drain(engine)["same"]
    assert record["token_ids"] == [output.token_id for output in outputs]
    assert record["text"] == "".join(output.text for output in outputs)
    assert (record["index"], record["id"], record["finish_reason"]) == (0, "a", outputs[-1].finish_reason)
    assert record["num_tokens"] == len(outputs)
    assert record["usage"] == {"prompt_tokens": 9, "completion_tokens": len(outputs), "total_tokens": 9 + len(outputs)}
    assert record["token_logprobs"] == [output.token_logprobs for output in outputs]
    assert [[i for i, _ in best] for best in record["top_logprobs"]] == [output.top_token_ids for output in outputs]
    assert record["prompt_logprobs"] == outputs[0].prompt_logprobs != []


BAD_LINES: list[tuple[Any, str]] = [
    (b"\n", "the line is not JSON in UTF-8"),
    (b'{"prompt": "\xff"}\n', "the line is not JSON in UTF-8"),
    (b"[" * 100_000 + b"\n", "nested too deeply"),
    ([1], "the line is a JSON list"),
    ({}, "either prompt, a string, or prompt_token_ids"),
    ({"prompt": "a", "prompt_token_ids": [3]}, "either prompt, a string, or prompt_token_ids"),
    ({"prompt": 5}, "prompt is a JSON int"),
    ({"prompt": "a", "images": []}, "unknown key 'images'; its keys are id, prompt"),
    ({"prompt": "a", "id": [1]}, r"id=[1] is neither a string nor an integer"),
    ({"prompt": "a", "sampling_params": 3}, "sampling_params=3 is no object"),
    ({"prompt": "a", "sampling_params": {"max_token": 3}}, "does not implement 'max_token'"),
    ({"prompt": "a", "sampling_params": {"top_p": 2}}, "top_p"),
    ({"prompt": "a", "sampling_params": {"n": 2}}, "n=2: a line has one answer"),
    ({"prompt": "a", "sampling_params": {"so_args": {"schema_type": "regex", "schema": "("}}}, ""),
    ({"prompt": "\ud800"}, "the prompt"),
    ({"prompt_token_ids": []}, "the prompt: prompt must not be empty"),
    ({"prompt_token_ids": [10**9]}, "outside the vocabulary"),
    ({"prompt_token_ids": [5] * 600}, "has 600 tokens, more than the"),
]


def test_a_bad_line_gives_an_error_and_the_others_go_on(engine, tmp_path):
    good = {"prompt": "fine", "id": 7}
    lines = [line for bad, _ in BAD_LINES for line in (bad, good)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    summary = run_offline(engine, source, tmp_path / "out.jsonl", defaults=DEFAULTS, has_bar=False)
    records = records_of(tmp_path / "out.jsonl")
    assert [record["index"] for record in records] == list(range(len(lines)))
    assert summary.num_errors == len(BAD_LINES)
    for record, (_, message) in zip(records[::2], BAD_LINES, strict=True):
        assert message in record["error"], record
    assert all(record["id"] == 7 and record["num_tokens"] and "error" not in record for record in records[1::2])


def test_shards_share_the_lines_and_answer_as_one_run_does(engine, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", many_lines(11))
    run_offline(engine, source, tmp_path / "whole.jsonl", defaults=DEFAULTS, has_bar=False)
    found = []
    for index in range(3):
        own = tmp_path / f"{index}.jsonl"
        run_offline(engine, source, own, shard=Shard(index, 3), defaults=DEFAULTS, has_bar=False)
        found += records_of(own)
    assert sorted(found, key=lambda record: record["index"]) == records_of(tmp_path / "whole.jsonl")
    with pytest.raises(ValueError, match="answers input line 0 where shard 1/3 has line 1"):
        run_offline(engine, source, tmp_path / "0.jsonl", shard=Shard(1, 3), has_bar=False)


def test_few_lines_are_read_ahead(engine, tmp_path, monkeypatch):
    count, read, at_append = 200, [], []

    def counted(path: Path, shard: Shard):
        for line in read_lines(path, shard):
            read.append(line)
            yield line

    append = OutputFile.append
    monkeypatch.setattr(offline, "read_lines", counted)
    monkeypatch.setattr(offline, "WAITING", 1)
    monkeypatch.setattr(OutputFile, "append", lambda file, record: (at_append.append(len(read)), append(file, record)))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}] * count)
    run_offline(engine, source, tmp_path / "out.jsonl", defaults={"max_tokens": 1}, has_bar=False)
    assert at_append[0] <= engine.config.max_num_seqs and len(at_append) == len(read) == count


def test_a_last_line_that_was_cut_anywhere_is_written_again(tmp_path):
    records = [{"index": index, "id": index, "text": "é"} for index in range(3)]
    path = tmp_path / "out.jsonl"
    with OutputFile(path) as output:
        for record in records:
            output.append(record)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        with OutputFile(path) as output:
            assert (output.num_done, output.last_id) == (2, 1)
            output.append(records[2])
        assert path.read_bytes() == whole
    with OutputFile(path) as output:
        assert (output.num_done, output.last_id) == (3, 2)


def test_an_output_has_one_writer(tmp_path):
    with (
        OutputFile(tmp_path / "out.jsonl"),
        pytest.raises(ValueError, match="another process writes .*; give every shard its own output"),
    ):
        OutputFile(tmp_path / "out.jsonl")
    OutputFile(tmp_path / "out.jsonl").__exit__(None, None, None)


def test_an_output_of_something_else_is_left_alone(engine, tmp_path):
    source, target = write_lines(tmp_path / "in.jsonl", many_lines(3)), tmp_path / "out.jsonl"
    for content, message in (
        (b"text\n", "line 1 of .* is no output of this program"),
        (b'{"index": 0, "id": "other"}\n', "ends with id 'other' where the input has 'seven-0'"),
        (b"".join(b'{"index": %d, "id": 0}\n' % i for i in range(4)), "has 4 lines and the input only 3"),
    ):
        target.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            run_offline(engine, source, target, has_bar=False)
        assert target.read_bytes() == content
    with pytest.raises(ValueError, match="is the input itself; give another output"):
        run_offline(engine, source, source, has_bar=False)


def test_defaults_and_a_busy_engine_are_refused(engine, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", many_lines(1))
    with pytest.raises(ValueError, match="top_p"):
        run_offline(engine, source, tmp_path / "out.jsonl", defaults={"top_p": 2}, has_bar=False)
    driving.add(engine, "busy", driving.prompt_of(3), driving.params_of(1, 2))
    with pytest.raises(ValueError, match="an engine of its own"):
        run_offline(engine, source, tmp_path / "out.jsonl", has_bar=False)
    driving.drain(engine)
    assert not (tmp_path / "out.jsonl").exists()


def test_lines_are_counted_as_they_are_read(tmp_path):
    for content in (b"", b"a", b"a\n", b"a\n\nb", b"\n\n"):
        (tmp_path / "in").write_bytes(content)
        for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2)):
            assert count_lines(tmp_path / "in", shard) == len(list(read_lines(tmp_path / "in", shard)))


def test_shards_are_read(tmp_path):
    assert parse_shard("3/4") == Shard(3, 4)
    for text in ("4", "a/b", "1/", "-1/2", "1/2/3"):
        with pytest.raises(ValueError, match="not of the form i/n"):
            parse_shard(text)
    with pytest.raises(ValueError, match="shard 4/4 does not exist; give one of 0/N to N-1/N"):
        parse_shard("4/4")


def test_parameters_of_a_line_go_over_the_defaults():
    line = parse_line(4, b'{"prompt": "a", "sampling_params": {"top_k": 3}}', {"top_k": 5, "max_tokens": 2})
    assert (line.id, line.params.top_k, line.params.max_tokens) == (4, 3, 2)
