"""The files of an offline run: JSON lines in, JSON lines out, one for one and in the same order.

An output line is appended whole, so that a process which is killed leaves whole lines and at most one beginning of a
line. The number of whole lines is then all that has to be known to go on.
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from deepinfer_jax.sampling.params import SamplingParams

type Record = dict[str, Any]

LINE_KEYS = ("id", "prompt", "prompt_token_ids", "sampling_params")
_BUFFER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shard:
    """Lines index, index + count, index + 2 count, ... of a file."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"shard {self.index}/{self.count} does not exist; give one of 0/N to N-1/N")


WHOLE = Shard(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the input, its parameters not yet checked against a model."""

    id: str | int
    prompt: str | list[int]  # a text, or token ids
    params: SamplingParams


def parse_shard(text: str) -> Shard:
    """The shard "i/n", i from 0. Raises ValueError for anything else."""
    index, slash, count = text.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal():
        raise ValueError(f"shard {text!r} is not of the form i/n; give two integers such as 0/4")
    return Shard(int(index), int(count))


def read_lines(path: str | Path, shard: Shard = WHOLE) -> Iterator[tuple[int, bytes]]:
    """Number, from 0, and bytes of each line of the shard; one line is in memory at a time."""
    with Path(path).open("rb") as file:
        for index, line in enumerate(file):
            if index % shard.count == shard.index:
                yield index, line


def count_lines(path: str | Path, shard: Shard = WHOLE) -> int:
    """How many lines of the file are in the shard; a last line needs no line break."""
    num_lines, last = 0, b"\n"
    with Path(path).open("rb") as file:
        while block := file.read(_BUFFER_BYTES):
            num_lines += block.count(b"\n")
            last = block[-1:]
    num_lines += last != b"\n"
    return len(range(shard.index, num_lines, shard.count))


def line_id(index: int, raw: bytes) -> str | int:
    """The id of a line: what it says under "id", or else its number."""
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return index
    return _id_of(given, index)


def parse_line(index: int, raw: bytes, defaults: Mapping[str, Any]) -> Line:
    """What a line asks for; defaults: sampling parameters for what it leaves open.

    Raises ValueError or TypeError where the line is at fault.
    """
    try:
        given = json.loads(raw)
    except RecursionError as error:
        raise ValueError("the line is nested too deeply; give an object with a prompt") from error
    except ValueError as error:
        raise ValueError(f"the line is not JSON in UTF-8 ({error}); give an object with a prompt") from error
    if not isinstance(given, dict):
        raise ValueError(f"the line is a JSON {type(given).__name__}; give an object with a prompt")
    for name in given:
        if name not in LINE_KEYS:
            raise ValueError(f"the line has an unknown key {name!r}; its keys are {', '.join(LINE_KEYS)}")
    if "id" in given and _id_of(given, None) is None:
        raise ValueError(f"id={given['id']!r} is neither a string nor an integer; give one, or leave it out")
    own = given.get("sampling_params") or {}
    if not isinstance(own, dict):
        raise ValueError(f"sampling_params={own!r} is no object; give the names and values of sampling parameters")
    return Line(id=_id_of(given, index), prompt=_prompt_of(given), params=SamplingParams.from_dict({**defaults, **own}))


def _id_of(given: Any, default: Any) -> Any:
    own = given.get("id") if isinstance(given, dict) else None
    return own if isinstance(own, str | int) and not isinstance(own, bool) else default


def _prompt_of(given: dict[str, Any]) -> str | list[int]:
    prompts = {name: given[name] for name in ("prompt", "prompt_token_ids") if given.get(name) is not None}
    if len(prompts) != 1:
        raise ValueError("the line needs either prompt, a string, or prompt_token_ids, a list of integers; give one")
    [(name, prompt)] = prompts.items()
    if not isinstance(prompt, str if name == "prompt" else list):
        raise ValueError(
            f"{name} is a JSON {type(prompt).__name__}; give a string as prompt, or a list of integers as "
            "prompt_token_ids"
        )
    return prompt


class OutputFile:
    """The output of one shard, opened to go on behind the whole lines that it has.

    num_done: lines that were there; last_id: the id of the last of them. Use it as a context manager. Raises
    ValueError for lines that are not this shard's, and while another process writes the file.
    """

    def __init__(self, path: str | Path, shard: Shard = WHOLE) -> None:
        self._path, self._shard = Path(path), shard
        self.num_done, self.last_id = 0, None
        self._file: BinaryIO = self._path.open("ab+")
        try:
            self._lock()
            self._take_up()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def append(self, record: Record) -> None:
        """Hands one more line to the operating system: it outlives this process."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process writes {self._path}; give every shard its own output, or wait for that process"
            ) from error

    def _take_up(self) -> None:
        """Counts the whole lines and cuts off the beginning of one more."""
        self._file.seek(0)
        num_bytes = 0
        for place, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            self.last_id = self._checked_id(place, line)
            num_bytes += len(line)
            self.num_done += 1
        self._file.truncate(num_bytes)

    def _checked_id(self, place: int, line: bytes) -> str | int:
        expected = self._shard.index + place * self._shard.count
        try:
            record = json.loads(line)
            found, own_id = record["index"], record["id"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"line {place + 1} of {self._path} is no output of this program; give another output, or delete it"
            ) from error
        if found != expected:
            raise ValueError(
                f"line {place + 1} of {self._path} answers input line {found} where shard {self._shard.index}/"
                f"{self._shard.count} has line {expected}; give the shard that began this output, or another output"
            )
        return own_id
