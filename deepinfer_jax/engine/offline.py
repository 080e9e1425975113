"""Offline runs: a file of prompts through an engine, one line of output for each line of input.

Lines are started in their order and finish in any; their answers are written in order again, each as soon as those in
front of it are there. Only the lines in between are in memory. A run that was killed goes on behind its last whole
line: what was under way is computed again.
"""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.offline_files import (
    WHOLE,
    OutputFile,
    Record,
    Shard,
    count_lines,
    line_id,
    parse_line,
    read_lines,
)
from deepinfer_jax.engine.outputs import CompletionOutput, RequestOutput, fold_end
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.scheduler.sequence import Sequence

WAITING = 2  # requests in the engine for each one that it runs at a time, so that none of its places stays empty
WINDOW = 16  # lines in memory for each request that the engine runs at a time
_GOOD_ENDS = ("stop", "length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run did."""

    num_lines: int  # of the shard; all of them have an output line now
    num_resumed: int  # of them, those that had one before
    num_errors: int  # of the new output lines, those that tell an error


@dataclasses.dataclass(kw_only=True)
class _Answer:
    """A line under way: its record once it has ended, and until then its outputs."""

    index: int
    id: str | int
    sequence: Sequence | None = None  # None: the line was refused
    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    record: Record | None = None


def run_offline(
    engine: LLMEngine,
    source: str | Path,
    target: str | Path,
    *,
    shard: Shard = WHOLE,
    defaults: Mapping[str, Any] | None = None,
    has_bar: bool = True,
) -> Summary:
    """Appends to `target` what is missing of the answers to the shard's lines of `source`.

    A line is an object with `prompt` or `prompt_token_ids`, and, if it likes, `id` and `sampling_params`, which go
    over `defaults`. Draws depend on the engine's seed and the line's number where no `seq_seed` is given, so that with
    a seed the output is the same however often the run was interrupted. A line that cannot be answered has the key
    `error`. Raises ValueError for defaults that no line could use, for a target that belongs to another source, and for
    one that another process writes.
    """
    defaults = dict(defaults or {})
    SamplingParams.from_dict(defaults)
    if engine.has_unfinished_requests():
        raise ValueError("the engine has unfinished requests; give an engine of its own to an offline run")
    if Path(target).exists() and Path(target).samefile(source):
        raise ValueError(f"{target} is the input itself; give another output")
    total, num_errors = count_lines(source, shard), 0
    with OutputFile(target, shard) as output:
        lines = read_lines(source, shard)
        _skip_done(lines, output, target=target, total=total)
        hides_bar = None if has_bar else True  # None: hidden unless standard error is a terminal
        with (
            contextlib.closing(_Run(engine, lines, defaults).records()) as records,
            tqdm(total=total, initial=output.num_done, desc="lines", unit="line", disable=hides_bar) as bar,
        ):
            for record in records:
                output.append(record)
                num_errors += "error" in record
                bar.update()
    return Summary(num_lines=total, num_resumed=output.num_done, num_errors=num_errors)


def _skip_done(lines: Iterator[tuple[int, bytes]], output: OutputFile, *, target: str | Path, total: int) -> None:
    """Moves on behind the lines that have an output."""
    if output.num_done > total:
        raise ValueError(
            f"{target} has {output.num_done} lines and the input only {total}; give the input that belongs to it, or "
            "another output"
        )
    for index, raw in itertools.islice(lines, max(0, output.num_done - 1), output.num_done):
        if line_id(index, raw) != output.last_id:
            raise ValueError(
                f"{target} ends with id {output.last_id!r} where the input has {line_id(index, raw)!r}; give the input "
                "that belongs to it, or another output"
            )


class _Run:
    """Lines on their way through an engine."""

    def __init__(self, engine: LLMEngine, lines: Iterator[tuple[int, bytes]], defaults: Mapping[str, Any]) -> None:
        self._engine, self._lines, self._defaults = engine, lines, defaults
        self._window: deque[_Answer] = deque()  # in the order of their lines
        self._by_request: dict[str, _Answer] = {}
        self._outbox: list[RequestOutput] = []
        self._num_waiting = WAITING * engine.config.max_num_seqs
        self._window_len = WINDOW * engine.config.max_num_seqs
        self._has_lines = True

    def records(self) -> Generator[Record]:
        """The records of all lines, in order. Closing the iterator aborts what runs."""
        try:
            while self._has_lines or self._window:
                self._fill()
                if self._by_request:
                    self._engine.advance()
                    self._collect()
                while self._window and (record := self._window[0].record) is not None:
                    self._window.popleft()
                    yield record
        finally:
            self._engine.abort_request(list(self._by_request))
            self._engine.settle()

    def _fill(self) -> None:
        """Starts lines until the engine has enough to do, or too many wait for one in front of them."""
        while self._has_lines and len(self._by_request) < self._num_waiting and len(self._window) < self._window_len:
            line = next(self._lines, None)
            if line is None:
                self._has_lines = False
            else:
                self._window.append(self._start(*line))

    def _start(self, index: int, raw: bytes) -> _Answer:
        answer = _Answer(index=index, id=line_id(index, raw))
        try:
            line = parse_line(index, raw, self._defaults)
            if line.params.n != 1:
                raise ValueError(f"n={line.params.n}: a line has one answer; give as many lines")
            texts, ids = (line.prompt, None) if isinstance(line.prompt, str) else (None, [line.prompt])
            [task] = self._engine.intake.read_tasks(texts, ids, line.params, None)
            ticket = self._engine.compile_grammar(task.params)
            answer.sequence = self._engine.add_task(
                f"line-{index}", task, index=index, sample=0, ticket=ticket, outbox=self._outbox
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            answer.record = _refusal(answer, error)
        else:
            self._by_request[answer.sequence.request_id] = answer
        return answer

    def _collect(self) -> None:
        """Sorts what a step gave into its answers."""
        for output in self._outbox:
            answer = self._by_request[output.request_id]
            answer.outputs.append(output)
            if output.finished:
                del self._by_request[output.request_id]
                answer.record = _record_of(answer)
                answer.outputs.clear()
        self._outbox.clear()


def _refusal(answer: _Answer, error: Exception) -> Record:
    """The record of a line that was not started. The intake counts prompts of a call, of which there is one."""
    return {"index": answer.index, "id": answer.id, "error": str(error).replace("prompt 0", "the prompt", 1)}


def _record_of(answer: _Answer) -> Record:
    """The record of a line that has run, with whatever log-probabilities it asked for."""
    assert answer.sequence is not None
    outputs = fold_end(answer.outputs)
    result, params = CompletionOutput.from_outputs(outputs), answer.sequence.options.params
    prompt_len, num_tokens = outputs[0].prompt_len, len(result.token_ids)
    record: Record = {
        "index": answer.index,
        "id": answer.id,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "num_tokens": num_tokens,
        "usage": {
            "prompt_tokens": prompt_len,
            "completion_tokens": num_tokens,
            "total_tokens": prompt_len + num_tokens,
        },
    }
    if params.prompt_logprobs:
        record["prompt_logprobs"] = outputs[0].prompt_logprobs
    if params.top_logprobs:
        record["token_logprobs"] = [output.token_logprobs for output in outputs]
        record["top_logprobs"] = [
            list(zip(output.top_token_ids, output.top_logprobs, strict=True)) for output in outputs
        ]
    if result.finish_reason not in _GOOD_ENDS:
        cause = answer.sequence.error
        record["error"] = f"the request ended with {result.finish_reason}" + (f": {cause}" if cause else "")
    return record
