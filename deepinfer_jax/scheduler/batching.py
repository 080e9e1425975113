"""A plan as one int32 array, padded to a compiled size: what a step is told in a single transfer.

Layout, for T rows and N logit rows: the arrays of `ROW_FIELDS`, T numbers each, then those of `LOGIT_FIELDS`, N
numbers each, back to back. Fields of `FLOAT_FIELDS` hold the bits of a float32, seed words those of a uint32.
Padding rows have slot -1, padding logit rows -1; they sample greedily, so that they cause no work.
"""

from typing import Any

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.sampling.params import NO_TOKEN, forced_token, seed_words, suppressed_token
from deepinfer_jax.scheduler.request import Request
from deepinfer_jax.scheduler.slots import Plan

ROW_FIELDS = ("tokens", "positions", "slots")
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
    "logit_rows": -1,
    "inverse_temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "is_greedy": 1,
    "suppressed_ids": NO_TOKEN,
    "forced_ids": NO_TOKEN,
}


def packed_len(num_rows: int, num_logits: int) -> int:
    """Numbers in the array of a step."""
    return len(ROW_FIELDS) * num_rows + len(LOGIT_FIELDS) * num_logits


def fields_of(packed: Any, *, num_rows: int, num_logits: int) -> dict[str, Any]:
    """The part of each field in a packed array, host or device, still int32."""
    split = len(ROW_FIELDS) * num_rows
    rows = packed[:split].reshape(len(ROW_FIELDS), num_rows)
    logits = packed[split:].reshape(len(LOGIT_FIELDS), num_logits)
    parts = {name: rows[i] for i, name in enumerate(ROW_FIELDS)}
    return parts | {name: logits[i] for i, name in enumerate(LOGIT_FIELDS)}


def pack_step(plan: Plan | None, *, num_rows: int, num_logits: int) -> Int32[np.ndarray, " L"]:
    """The packed array of a plan; None gives a step of padding rows only."""
    packed = np.zeros(packed_len(num_rows, num_logits), np.int32)
    fields = fields_of(packed, num_rows=num_rows, num_logits=num_logits)
    views = {name: part.view(np.float32) if name in FLOAT_FIELDS else part for name, part in fields.items()}
    for name, value in _PADDING.items():
        views[name][:] = value
    if plan is None:
        return packed
    row = logit_row = 0
    for chunk in plan.chunks:
        end = row + chunk.length
        views["tokens"][row:end] = chunk.request.tokens_from(chunk.start, chunk.length)
        views["positions"][row:end] = np.arange(chunk.start, chunk.start + chunk.length)
        views["slots"][row:end] = chunk.request.slot
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
