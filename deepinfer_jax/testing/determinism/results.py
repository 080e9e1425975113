"""What a request leaves behind, and where two such results first differ."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config.roles import replay_boundary
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.fingerprint import fingerprint_of
from deepinfer_jax.engine.outputs import RequestOutput
from deepinfer_jax.engine.snapshot import RequestSnapshot
from deepinfer_jax.model.state import PAGED_LEAVES

COLUMNS = ("tokens", "log-probabilities", "state")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Consecutive rows of one cache or ring: `values[i]` is the row of position (or entry) first + i."""

    first: int
    values: np.ndarray  # leading axis: rows


type StateRows = dict[str, Rows]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One request: its tokens, the bits of its log-probabilities, how it ended, and its state near the end."""

    token_ids: np.ndarray  # int64 [tokens]
    logprobs: np.ndarray  # float32 [tokens, 1 + alternatives]: the token's own first
    top_ids: np.ndarray  # int64 [tokens, alternatives]
    finish_reason: str
    state: StateRows | None  # None: it ended before its state was read

    @property
    def fingerprint(self) -> str:
        """The bit fingerprint (`engine/fingerprint.py`)."""
        return fingerprint_of(self.token_ids.tolist(), self.logprobs[:, 0].tolist(), self.finish_reason)

    def followed_by(self, rest: "Result") -> "Result":
        """The result of a request that gave this and then, in another process, the rest."""
        return Result(
            token_ids=np.concatenate([self.token_ids, rest.token_ids]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            top_ids=np.concatenate([self.top_ids, rest.top_ids]),
            finish_reason=rest.finish_reason,
            state=rest.state,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where a request is not the same."""

    request: str
    column: str  # of `COLUMNS`
    position: int  # output index of a token, position or entry of a state row
    detail: str


def result_of(outputs: Sequence[RequestOutput], state: StateRows | None) -> Result:
    """The result of a request whose outputs were folded by `fold_end`."""
    kept = [output for output in outputs if output.token_id >= 0]
    num_top = max((len(output.top_token_ids) for output in kept), default=0)
    logprobs = [[output.token_logprobs, *output.top_logprobs] for output in kept]
    return Result(
        token_ids=np.asarray([output.token_id for output in kept], np.int64),
        logprobs=np.asarray(logprobs, np.float32).reshape(len(kept), 1 + num_top),
        top_ids=np.asarray([output.top_token_ids for output in kept], np.int64).reshape(len(kept), num_top),
        finish_reason=outputs[-1].finish_reason if outputs else "",
        state=state,
    )


def state_rows(saved: RequestSnapshot, runtime: RuntimeConfig) -> StateRows | None:
    """The rows of a saved request that later steps may read; None where it holds nothing on the device.

    Rings keep the last positions; rows that rejected drafts have overwritten, and in the decoder layers those in
    front of a replayed tail, are left out. Pages hold an entry for each token, or for each pair of tokens.
    """
    if saved.state is None:
        return None
    boundary = replay_boundary(runtime.model)
    found: StateRows = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved.state):
        name = jax.tree_util.keystr(path)
        if name.startswith(PAGED_LEAVES):
            entries = leaf.reshape(leaf.shape[0], -1, leaf.shape[-1])  # pages one after the other
            ratio = runtime.page_tokens // leaf.shape[2]
            for source in range(leaf.shape[0]):
                found[f"{name}[{source}]"] = Rows(first=0, values=entries[source, : saved.num_written // ratio])
        elif name == ".history":
            found[name] = _ring_rows(saved, leaf[0], first=0)
        else:
            is_decoder = [name.startswith(".window") and layer >= boundary for layer in range(leaf.shape[0])]
            for layer, starts_at_tail in enumerate(is_decoder):
                first = saved.tail_start if starts_at_tail else saved.window_start
                found[f"{name}[{layer}]"] = _ring_rows(saved, leaf[layer, 0], first=first)
    return found


def _ring_rows(saved: RequestSnapshot, ring: np.ndarray, *, first: int) -> Rows:
    """The rows of one ring by position."""
    begin = max(first, saved.state_end - len(ring))
    return Rows(first=begin, values=ring[np.arange(begin, saved.num_written) % len(ring)])


def compare_results(got: Mapping[str, Result], want: Mapping[str, Result]) -> tuple[Difference | None, dict[str, bool]]:
    """The first difference, and for each column whether all requests are equal.

    First is the difference in the earliest output token; one in the state alone comes after all others. A request
    that only one side has, or of other length, differs in its tokens.
    """
    found = [difference for name in want for difference in _differences(name, got.get(name), want[name])]
    found.sort(key=lambda each: (each.column == "state", each.position))
    is_equal = {column: not any(each.column == column for each in found) for column in COLUMNS}
    return (found[0] if found else None), is_equal


def num_states(got: Mapping[str, Result], want: Mapping[str, Result]) -> int:
    """Requests whose states are compared."""
    return sum(name in got and got[name].state is not None and want[name].state is not None for name in want)


def _differences(name: str, got: Result | None, want: Result) -> list[Difference]:
    if got is None:
        return [Difference(request=name, column="tokens", position=0, detail="the request gave nothing")]
    found = []
    if difference := _token_difference(name, got, want):
        found.append(difference)
    if difference := _logprob_difference(name, got, want):
        found.append(difference)
    if got.state is not None and want.state is not None and (difference := _state_difference(name, got, want)):
        found.append(difference)
    return found


def _token_difference(name: str, got: Result, want: Result) -> Difference | None:
    count = min(len(got.token_ids), len(want.token_ids))
    differs = np.flatnonzero(got.token_ids[:count] != want.token_ids[:count])
    if len(differs):
        at = int(differs[0])
        detail = f"token {got.token_ids[at]}; expected is {want.token_ids[at]}"
        return Difference(request=name, column="tokens", position=at, detail=detail)
    ends = [(len(each.token_ids), each.finish_reason) for each in (got, want)]
    if ends[0] == ends[1]:
        return None
    detail = "ends after {} tokens ({}); expected is {} ({})".format(*ends[0], *ends[1])
    return Difference(request=name, column="tokens", position=count, detail=detail)


def _logprob_difference(name: str, got: Result, want: Result) -> Difference | None:
    count = min(len(got.token_ids), len(want.token_ids))
    if not count:
        return None  # a request that gave nothing does not even tell how many alternatives it was asked for
    differs = got.logprobs[:count].view(np.uint32) != want.logprobs[:count].view(np.uint32)
    rows = np.flatnonzero(differs.any(axis=1) | (got.top_ids[:count] != want.top_ids[:count]).any(axis=1))
    if not len(rows):
        return None
    at = int(rows[0])
    column = int(np.argmax(differs[at]))
    shown = [float(each.logprobs[at, column]).hex() for each in (got, want)]
    what = "the token" if column == 0 else f"alternative {column}"
    detail = f"of {what}: {shown[0]}; expected is {shown[1]}"
    return Difference(request=name, column="log-probabilities", position=at, detail=detail)


def _state_difference(name: str, got: Result, want: Result) -> Difference | None:
    """The lowest position at which a tensor of both states differs, among the positions that both hold."""
    assert got.state is not None and want.state is not None
    found: list[tuple[int, str, int]] = []
    for tensor in sorted(got.state.keys() & want.state.keys()):
        mine, other = got.state[tensor], want.state[tensor]
        first = max(mine.first, other.first)
        end = max(first, min(mine.first + len(mine.values), other.first + len(other.values)))
        mine_rows = mine.values[first - mine.first : end - mine.first]
        other_rows = other.values[first - other.first : end - other.first]
        differs = _bytes_of(mine_rows) != _bytes_of(other_rows)
        rows = np.flatnonzero(differs.any(axis=1))
        if len(rows):
            found.append((first + int(rows[0]), tensor, len(rows)))
    if not found:
        return None
    position, tensor, count = min(found)
    detail = f"{tensor}: {count} rows differ, and {len(found) - 1} other tensors"
    return Difference(request=name, column="state", position=position, detail=detail)


def _bytes_of(rows: np.ndarray) -> np.ndarray:
    """The bytes of each row, uint8 [rows, bytes]."""
    width = math.prod(rows.shape[1:])
    return np.ascontiguousarray(rows).reshape(len(rows), width).view(np.uint8)


def save_results(results: Mapping[str, Result], path: Path) -> None:
    """Writes results for another process."""
    arrays: dict[str, Any] = {}
    for name, result in results.items():
        for field in ("token_ids", "logprobs", "top_ids"):
            arrays[f"{name}|{field}"] = getattr(result, field)
        arrays[f"{name}|end"] = np.asarray(result.finish_reason)
        for tensor, rows in (result.state or {}).items():
            arrays[f"{name}|state|{tensor}|{rows.first}"] = rows.values
    np.savez(path, allow_pickle=False, **arrays)


def load_results(path: Path) -> dict[str, Result]:
    """What `save_results` wrote."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    found: dict[str, Result] = {}
    for name in dict.fromkeys(key.split("|", 1)[0] for key in arrays):
        state: StateRows = {}
        for key in arrays:
            if key.startswith(f"{name}|state|"):
                _, _, tensor, first = key.split("|")
                state[tensor] = Rows(first=int(first), values=arrays[key])
        found[name] = Result(
            token_ids=arrays[f"{name}|token_ids"],
            logprobs=arrays[f"{name}|logprobs"],
            top_ids=arrays[f"{name}|top_ids"],
            finish_reason=str(arrays[f"{name}|end"]),
            state=state or None,
        )
    return found
