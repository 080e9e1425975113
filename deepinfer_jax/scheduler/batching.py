"""A plan as one int32 array, padded to a compiled size: what a step is told in a single transfer.

A step is told chunks; the device makes rows of them (`engine/layout.py`), since only it knows how many drafts of an
unread step stay. Layout, for C chunks, W forced tokens of each, P tokens, S slots and M page columns: the arrays of
`CHUNK_FIELDS`, C numbers each, then `forced`, C * W numbers, then `tokens`, P numbers, then `image_rows`, P numbers, in
steps with images only, then `budget`, one number, then the page table, S * M numbers, back to back. `image_rows` has
the row in the table of encoded images for each place in `tokens`, -1 for text. Fields of `FLOAT_FIELDS` hold the bits
of a float32, seed words those of a uint32. Padding chunks have slot -1 and no rows.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from deepinfer_jax.sampling.constraints import DrawState
from deepinfer_jax.sampling.params import NO_TOKEN, SamplingParams, forced_token, seed_words, suppressed_token
from deepinfer_jax.scheduler.plan import Chunk, RankPlan
from deepinfer_jax.scheduler.sequence import Copy

# What a request's options fix for all its steps.
OPTION_FIELDS = ("seed_lo", "seed_hi", "inverse_temperature", "top_p", "min_p_distance", "top_k", "is_greedy")
CHUNK_FIELDS = (
    "slots",
    "starts",  # position of the first row, unless `follows`
    "follows",  # 1: the chunk begins with the newest token of its slot, whose step is unread
    "lengths",  # rows, all drafts included
    "num_drafts",  # rows at the end that hold drafts of the slot; the device may verify fewer
    "token_starts",  # place of the first token in `tokens`; drafts, and a first token that follows, are not there
    "draws",  # 1: the last row, and every draft, draws a token
    "proposes",  # 1: drafts are made behind its draw
    "scores",  # 1: every row has a logit row
    "next_tokens",  # the known token behind the chunk, -1 if there is none
    "tail_starts",
    "window_starts",
    "suppressed_ids",  # may not be drawn
    "forced_starts",  # position of the first of the chunk's forced tokens
    *OPTION_FIELDS,
)
FLOAT_FIELDS = frozenset({"inverse_temperature", "top_p", "min_p_distance"})
COPY_FIELDS = ("source_slot", "target_slot", "source_page", "target_page")
_PADDING: dict[str, float] = {
    "slots": -1,
    "next_tokens": NO_TOKEN,
    "suppressed_ids": NO_TOKEN,
    "forced": NO_TOKEN,
    "image_rows": -1,
    "inverse_temperature": 1.0,
    "top_p": 1.0,
    "min_p_distance": np.inf,
    "top_k": -1,
    "is_greedy": 1,
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


def num_forced(max_drafts: int) -> int:
    """Forced tokens that a chunk is told: for its draws and the drafts behind them, wherever it starts."""
    return 3 * max_drafts + 1


def packed_len(
    *, num_chunks: int, num_tokens: int, num_slots: int, num_pages: int, max_drafts: int, has_images: bool = False
) -> int:
    """Numbers in a packed array."""
    num_places = num_tokens * (2 if has_images else 1)
    return num_chunks * (len(CHUNK_FIELDS) + num_forced(max_drafts)) + num_places + 1 + num_slots * num_pages


def fields_of(
    packed: Any, *, num_chunks: int, num_tokens: int, num_pages: int, max_drafts: int, has_images: bool = False
) -> dict[str, Any]:
    """The part of each field in a packed array, host or device, still int32; no `image_rows` without images."""
    sizes = {
        "chunks": len(CHUNK_FIELDS) * num_chunks,
        "forced": num_chunks * num_forced(max_drafts),
        "tokens": num_tokens,
        **({"image_rows": num_tokens} if has_images else {}),
        "budget": 1,
    }
    ends = dict(zip(sizes, np.cumsum(list(sizes.values())), strict=True))
    fields = {name: packed[ends[name] - size : ends[name]] for name, size in sizes.items()}
    chunks = fields.pop("chunks").reshape(len(CHUNK_FIELDS), num_chunks)
    return {name: chunks[i] for i, name in enumerate(CHUNK_FIELDS)} | {
        **fields,
        "forced": fields["forced"].reshape(num_chunks, -1),
        "page_table": packed[ends["budget"] :].reshape(-1, num_pages),
    }


def without_images(
    packed: Int32[np.ndarray, " L"], *, num_chunks: int, num_tokens: int, max_drafts: int
) -> Int32[np.ndarray, " K"]:
    """The packed array of a step with images without its `image_rows`."""
    start = num_chunks * (len(CHUNK_FIELDS) + num_forced(max_drafts)) + num_tokens
    return np.concatenate([packed[:start], packed[start + num_tokens :]])


def pack_step(
    plan: RankPlan,
    page_table: Int32[np.ndarray, "S Q"],
    *,
    num_chunks: int,
    num_tokens: int,
    num_pages: int,
    max_drafts: int,
    image_rows: Mapping[str, int] | None = None,
) -> Int32[np.ndarray, " L"]:
    """The packed array of one rank's part of a plan; an empty part gives a step without rows.

    image_rows: the first row of each image, by digest, in the table of encoded images; None for a step without images.
    """
    sizes = {"num_chunks": num_chunks, "num_tokens": num_tokens, "num_pages": num_pages, "max_drafts": max_drafts}
    has_images, rows = image_rows is not None, image_rows or {}
    packed = np.zeros(packed_len(num_slots=page_table.shape[0], has_images=has_images, **sizes), np.int32)
    fields = fields_of(packed, has_images=has_images, **sizes)
    views = {name: part.view(np.float32) if name in FLOAT_FIELDS else part for name, part in fields.items()}
    for name, value in _PADDING.items():
        if name in views:
            views[name][:] = value
    views["page_table"][:] = page_table[:, :num_pages]
    views["budget"][:] = plan.num_drafts if plan.budget is None else plan.budget
    facts: list[tuple[int, ...]] = []
    asked: list[Int32[np.ndarray, " O"]] = []
    token_end = 0
    for index, chunk in enumerate(plan.chunks):
        known, options = chunk.known_tokens, chunk.sequence.options
        facts.append(_facts(chunk, token_end))
        asked.append(options.packed)
        if known:
            views["tokens"][token_end : token_end + len(known)] = known
        for image in chunk.images if has_images else ():
            place, row = token_end + image.start - chunk.start, rows[image.digest]
            views["image_rows"][place : place + image.length] = np.arange(row, row + image.length)
        token_end += len(known)
        if chunk.draws and options.params.golden_token_ids is not None:
            first = chunk.first_unknown - len(chunk.sequence.prompt)
            views["forced"][index] = [forced_token(options.params, first + i) for i in range(num_forced(max_drafts))]
    if facts:
        own = packed[: len(CHUNK_FIELDS) * num_chunks].reshape(len(CHUNK_FIELDS), num_chunks)[:, : len(facts)]
        own[: -len(OPTION_FIELDS)] = np.array(facts, np.int32).T
        own[-len(OPTION_FIELDS) :] = np.concatenate(asked).reshape(len(asked), -1).T
    return packed


def _facts(chunk: Chunk, token_start: int) -> tuple[int, ...]:
    """The numbers of `CHUNK_FIELDS` that are not options."""
    sequence = chunk.sequence
    is_first = chunk.draws and chunk.output_index == 0
    return (
        sequence.slot,
        chunk.start,
        chunk.follows,
        chunk.length,
        chunk.num_drafts,
        token_start,
        chunk.draws,
        chunk.proposes,
        chunk.scores,
        NO_TOKEN if chunk.draws or chunk.end >= sequence.num_tokens else sequence.tokens_from(chunk.end, 1)[0],
        sequence.tail_start,
        sequence.window_start,
        suppressed_token(sequence.options.params, 0) if is_first else NO_TOKEN,
        chunk.first_unknown,
    )


def pack_copies(copies: Iterable[Copy], *, num_copies: int) -> Int32[np.ndarray, "C F"]:
    """One row for each copy, the fields of `COPY_FIELDS`; padding is -1."""
    packed = np.full((num_copies, len(COPY_FIELDS)), -1, np.int32)
    for row, copy in zip(packed, copies, strict=False):
        row[:] = [getattr(copy, name) for name in COPY_FIELDS]
    return packed
