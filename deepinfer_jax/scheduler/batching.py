"""A plan as one int32 array, padded to a compiled size: what a step is told in a single transfer.

Layout, for T rows, N logit rows and U tail rows: the arrays of `ROW_FIELDS`, T numbers each, then those of
`LOGIT_FIELDS`, N numbers each, then `tail_rows`, U numbers, back to back. U is 0 where every row runs every layer.
Fields of `FLOAT_FIELDS` hold the bits of a float32, seed words those of a uint32.
Padding rows have slot -1, padding logit rows -1; they sample greedily, so that they cause no work.
"""

from typing import Any

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.sampling.params import NO_TOKEN, forced_token, seed_words, suppressed_token
from deepinfer_jax.scheduler.request import Request
from deepinfer_jax.scheduler.slots import Plan

ROW_FIELDS = ("tokens", "positions", "slots", "tail_starts")
LOGIT_FIELDS = (
    "logit_rows",
    "seed_lo",
    "seed_hi",
    "draw_positions",
    "inverse_temperature",
    "top_p",
    "top_k",
    "is_greedy",
    "suppressed_ids",
    "forced_ids",
)
FLOAT_FIELDS = frozenset({"inverse_temperature", "top_p"})
_PADDING: dict[str, float] = {
    "slots": -1,
    "tail_rows": -1,
    "logit_rows": -1,
    "inverse_temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "is_greedy": 1,
    "suppressed_ids": NO_TOKEN,
    "forced_ids": NO_TOKEN,
}


def packed_len(num_rows: int, num_logits: int, num_tail: int = 0) -> int:
    """Numbers in the array of a step."""
    return len(ROW_FIELDS) * num_rows + len(LOGIT_FIELDS) * num_logits + num_tail


def fields_of(packed: Any, *, num_rows: int, num_logits: int) -> dict[str, Any]:
    """The part of each field in a packed array, host or device, still int32."""
    first = len(ROW_FIELDS) * num_rows
    second = first + len(LOGIT_FIELDS) * num_logits
    rows = packed[:first].reshape(len(ROW_FIELDS), num_rows)
    logits = packed[first:second].reshape(len(LOGIT_FIELDS), num_logits)
    parts = {name: rows[i] for i, name in enumerate(ROW_FIELDS)}
    parts |= {name: logits[i] for i, name in enumerate(LOGIT_FIELDS)}
    return parts | {"tail_rows": packed[second:]}


def tail_rows(plan: Plan) -> list[int]:
    """The rows of a step that run the decoder layers under compact replay."""
    kept: list[int] = []
    row = 0
    for chunk in plan.chunks:
        kept += range(row + max(chunk.request.tail_start - chunk.start, 0), row + chunk.length)
        row += chunk.length
    return kept


def pack_step(plan: Plan | None, *, num_rows: int, num_logits: int, num_tail: int = 0) -> Int32[np.ndarray, " L"]:
    """The packed array of a plan; None gives a step of padding rows only."""
    packed = np.zeros(packed_len(num_rows, num_logits, num_tail), np.int32)
    fields = fields_of(packed, num_rows=num_rows, num_logits=num_logits)
    views = {name: part.view(np.float32) if name in FLOAT_FIELDS else part for name, part in fields.items()}
    for name, value in _PADDING.items():
        views[name][:] = value
    if plan is None:
        return packed
    if num_tail:
        kept = tail_rows(plan)
        views["tail_rows"][: len(kept)] = kept
    row = logit_row = 0
    for chunk in plan.chunks:
        end = row + chunk.length
        views["tokens"][row:end] = chunk.request.tokens_from(chunk.start, chunk.length)
        views["positions"][row:end] = np.arange(chunk.start, chunk.start + chunk.length)
        views["slots"][row:end] = chunk.request.slot
        views["tail_starts"][row:end] = chunk.request.tail_start
        row = end
        if chunk.emits:
            views["logit_rows"][logit_row] = row - 1
            for name, value in _sampling_of(chunk.request).items():
                views[name][logit_row] = value
            logit_row += 1
    return packed


def _sampling_of(request: Request) -> dict[str, Any]:
    """The sampling fields of a request's next token."""
    params, output_index = request.params, len(request.output)
    low, high = seed_words(request.seed)
    return {
        "seed_lo": np.uint32(low).view(np.int32),
        "seed_hi": np.uint32(high).view(np.int32),
        "draw_positions": request.num_tokens,
        "inverse_temperature": params.inverse_temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "is_greedy": params.is_greedy,
        "suppressed_ids": suppressed_token(params, output_index),
        "forced_ids": forced_token(params, output_index),
    }
