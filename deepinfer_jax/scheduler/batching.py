"""A plan as one int32 array, padded to a compiled size: what a step is told in a single transfer.

Layout, for T rows, N logit rows, U tail rows, S slots and M page columns: the arrays of `ROW_FIELDS`, T numbers each,
then those of `LOGIT_FIELDS`, N numbers each, then `tail_rows`, U numbers, then the page table, S * M numbers, back to
back. U is 0 where every row runs every layer. Fields of `FLOAT_FIELDS` hold the bits of a float32, seed words those of
a uint32. Padding rows have slot -1, padding logit rows -1; they sample greedily, so that they cause no work. A token
of -1 is the last one drawn for its slot, which is still on the device.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.params import NO_TOKEN, SamplingParams, forced_token, seed_words, suppressed_token
from deepinfer_jax.scheduler.plan import Chunk, RankPlan
from deepinfer_jax.scheduler.sequence import Copy

ROW_FIELDS = ("tokens", "positions", "slots", "tail_starts", "window_starts")
# What a request's options fix for all its steps, and all that is told for each logit row.
OPTION_FIELDS = ("seed_lo", "seed_hi", "inverse_temperature", "top_p", "min_p_distance", "top_k", "is_greedy")
LOGIT_FIELDS = ("logit_rows", "draw_slots", "draw_positions", "suppressed_ids", "forced_ids", *OPTION_FIELDS)
FLOAT_FIELDS = frozenset({"inverse_temperature", "top_p", "min_p_distance"})
COPY_FIELDS = ("source_slot", "target_slot", "source_page", "target_page")
LAST_DRAWN = -1  # as a token: the last one drawn for the slot
_PADDING: dict[str, float] = {
    "slots": -1,
    "tail_rows": -1,
    "logit_rows": -1,
    "draw_slots": -1,
    "inverse_temperature": 1.0,
    "top_p": 1.0,
    "min_p_distance": np.inf,
    "top_k": -1,
    "is_greedy": 1,
    "suppressed_ids": NO_TOKEN,
    "forced_ids": NO_TOKEN,
}


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """What a request asks for beside its tokens: carried by the scheduler as `Sequence.options`."""

    params: SamplingParams  # with the model's EOS as eos_id
    seed: int  # 64 bits
    user_id: str = ""
    extra: Any = None  # the caller's own
    arrival_time: float | None = None  # of the engine's clock
    constraint: DrawState | None = None  # what its tokens so far say about the next one; moves on with them

    @functools.cached_property
    def packed(self) -> Int32[np.ndarray, " O"]:
        """The numbers of `OPTION_FIELDS`."""
        params = self.params
        words = np.array(seed_words(self.seed), np.uint32).view(np.int32)
        floats = np.array([params.inverse_temperature, params.top_p, params.min_p_distance], np.float32).view(np.int32)
        return np.array([*words, *floats, params.top_k, params.is_greedy], np.int32)


def fields_of(packed: Any, *, num_rows: int, num_logits: int, num_tail: int, num_pages: int) -> dict[str, Any]:
    """The part of each field in a packed array, host or device, still int32."""
    ends = np.cumsum([len(ROW_FIELDS) * num_rows, len(LOGIT_FIELDS) * num_logits, num_tail])
    rows = packed[: ends[0]].reshape(len(ROW_FIELDS), num_rows)
    logits = packed[ends[0] : ends[1]].reshape(len(LOGIT_FIELDS), num_logits)
    parts = {name: rows[i] for i, name in enumerate(ROW_FIELDS)}
    parts |= {name: logits[i] for i, name in enumerate(LOGIT_FIELDS)}
    return parts | {
        "tail_rows": packed[ends[1] : ends[2]],
        "page_table": packed[ends[2] :].reshape(-1, num_pages),
    }


def pack_step(
    plan: RankPlan,
    page_table: Int32[np.ndarray, "S Q"],
    *,
    num_rows: int,
    num_logits: int,
    num_pages: int,
    num_tail: int = 0,
) -> Int32[np.ndarray, " L"]:
    """The packed array of one rank's part of a plan; an empty part gives a step of padding rows only."""
    num_slots = page_table.shape[0]
    length = len(ROW_FIELDS) * num_rows + len(LOGIT_FIELDS) * num_logits + num_tail + num_slots * num_pages
    packed = np.zeros(length, np.int32)
    fields = fields_of(packed, num_rows=num_rows, num_logits=num_logits, num_tail=num_tail, num_pages=num_pages)
    views = {name: part.view(np.float32) if name in FLOAT_FIELDS else part for name, part in fields.items()}
    for name, value in _PADDING.items():
        views[name][:] = value
    views["page_table"][:] = page_table[:, :num_pages]
    if num_tail:
        kept = tail_rows(plan)
        views["tail_rows"][: len(kept)] = kept
    row = logit_row = 0
    for chunk in plan.chunks:
        end = row + chunk.length
        sequence = chunk.sequence
        views["tokens"][row:end] = _tokens_of(chunk)
        views["positions"][row:end] = np.arange(chunk.start, chunk.end)
        views["slots"][row:end] = sequence.slot
        views["tail_starts"][row:end] = sequence.tail_start
        views["window_starts"][row:end] = sequence.window_start
        row = end
        for back in range(chunk.num_logits - 1, -1, -1):
            first = len(ROW_FIELDS) * num_rows + logit_row
            packed[first : first + len(LOGIT_FIELDS) * num_logits : num_logits] = (
                row - 1 - back,
                *(_scoring(chunk, chunk.end - back) if back or not chunk.draws else _drawing(chunk)),
                *sequence.options.packed,
            )
            logit_row += 1
    return packed


def pack_copies(copies: Iterable[Copy], *, num_copies: int) -> Int32[np.ndarray, "C F"]:
    """One row for each copy, the fields of `COPY_FIELDS`; padding is -1."""
    packed = np.full((num_copies, len(COPY_FIELDS)), -1, np.int32)
    for row, copy in zip(packed, copies, strict=False):
        row[:] = [getattr(copy, name) for name in COPY_FIELDS]
    return packed


def tail_rows(plan: RankPlan) -> list[int]:
    """The rows of a step that run the decoder layers under compact replay."""
    kept: list[int] = []
    row = 0
    for chunk in plan.chunks:
        kept += range(row + chunk.length - chunk.num_tail_rows, row + chunk.length)
        row += chunk.length
    return kept


def _tokens_of(chunk: Chunk) -> Any:
    """The chunk's tokens; the first is on the device where the step that draws it is unread."""
    if chunk.draw_source < 0:
        return chunk.sequence.tokens_from(chunk.start, chunk.length)
    return [LAST_DRAWN, *chunk.sequence.tokens_from(chunk.start + 1, chunk.length - 1)]


def _drawing(chunk: Chunk) -> tuple[int, int, int, int]:
    """Slot, position, suppressed and forced token of a chunk's next token."""
    params, index = chunk.sequence.options.params, chunk.output_index
    return chunk.sequence.slot, chunk.draw_position, suppressed_token(params, index), forced_token(params, index)


def _scoring(chunk: Chunk, position: int) -> tuple[int, int, int, int]:
    """The same for a known prompt token, which is forced so that its log-probability comes out."""
    return -1, position, NO_TOKEN, chunk.sequence.prompt[position]
