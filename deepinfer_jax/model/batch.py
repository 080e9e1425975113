"""What one step computes: rows at positions of slots."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.ops import paged
from deepinfer_jax.parallel import context
from deepinfer_jax.pytree import pytree_dataclass


@pytree_dataclass
class ImageRows:
    """Rows of a step that take their embedding from encoded images (`model/vision.py`) and not from their token."""

    features: Float[Array, "table D"]  # rows of spans, delimiters included; a size that steps share
    index: Int[Array, " T"]  # row of `features` for each row of the step, -1 for a text row


@pytree_dataclass
class StepBatch:
    """Rows of one step; prefill chunks, decode rows and verify rows differ in these numbers only.

    Rows of one request are adjacent and at consecutive positions. -1 means padding in every index array.
    """

    tokens: Int[Array, " T"]  # token ids
    positions: Int[Array, " T"]  # absolute, 0 is the first token of the request
    slots: Int[Array, " T"]  # the request's state row; -1 for a padding row
    page_table: Int[Array, "S M"]  # page of each request's tokens m * page_tokens and following
    logit_rows: Int[Array, " N"]  # rows of this batch whose logits are wanted; -1 for a padding row
    tail_starts: Int[Array, " T"] | None = None  # bounded replay: first position that decoder layers may look at
    # compact replay: rows that run the decoder layers, rising, then -1; may be none
    tail_rows: Int[Array, " U"] | None = None
    # first position that any window may look at; 0 unless a prefix was taken over without its rings
    window_starts: Int[Array, " T"] | None = None
    images: ImageRows | None = None  # None where every row is text


@pytree_dataclass
class Rows:
    """Facts about the rows of a step that every layer needs, derived once from the batch."""

    index: Int[Array, " T"]  # of each row in the step; a device may have a part of the rows (`parallel/context.py`)
    positions: Int[Array, " T"]
    slots: Int[Array, " T"]
    is_live: Bool[Array, " T"]
    num_live: Int[Array, ""]  # rows up to the last live one; padding stands behind them
    first_row: Int[Array, " T"]  # index of the first row of the same request in this step
    first_position: Int[Array, " T"]  # its position
    num_after: Int[Array, " T"]  # rows of the same request that follow in this step
    tail_start: Int[Array, " T"]  # first position whose window row the decoder layers may look at
    window_start: Int[Array, " T"]  # first position whose window row any layer may look at
    page_table: Int[Array, "S M"]


def make_batch(
    tokens: list[list[int]],
    starts: list[int],
    slots: list[int],
    page_table: Int[np.ndarray | Array, "S M"],
    *,
    logits: str = "last",
) -> StepBatch:
    """A batch of one chunk for each request: its tokens, from its start position on, in its slot.

    logits: "last" for the last row of each chunk, "all" for every row. A notebook's way to build a step.
    """
    if logits not in ("last", "all"):
        raise ValueError(f"logits={logits!r} is unknown; choose 'last' or 'all'")
    if not len(tokens) == len(starts) == len(slots):
        raise ValueError(f"{len(tokens)} chunks, {len(starts)} starts and {len(slots)} slots must be equally many")
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots={slots} names one slot twice; a step holds one chunk for each request")
    lengths = [len(chunk) for chunk in tokens]
    if min(lengths, default=0) == 0:
        raise ValueError("every chunk needs at least one token")
    ends = np.cumsum(lengths)
    return StepBatch(
        tokens=jnp.asarray(np.concatenate([np.asarray(c, np.int32) for c in tokens])),
        positions=jnp.asarray(
            np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)])
        ),
        slots=jnp.asarray(np.repeat(np.asarray(slots, np.int32), lengths)),
        page_table=jnp.asarray(page_table, jnp.int32),
        logit_rows=jnp.arange(ends[-1], dtype=jnp.int32) if logits == "all" else jnp.asarray(ends - 1, jnp.int32),
    )


def with_images(batch: StepBatch, spans: Sequence[Float[Array, "_ D"]], first_rows: Sequence[int]) -> StepBatch:
    """The batch with encoded images in it: `spans[i]`, without padding, begins at the row `first_rows[i]` of the step.

    Tokens of these rows count for nothing; by convention they are the model's image token.
    Raises ValueError for no span at all, and for spans that overlap or leave the batch.
    """
    if not spans or len(spans) != len(first_rows):
        raise ValueError(f"{len(spans)} spans and {len(first_rows)} first rows must be equally many, and one at least")
    index = np.full(batch.tokens.shape[0], -1, np.int32)
    start = 0
    for span, row in zip(spans, first_rows, strict=True):
        end = row + span.shape[0]
        if row < 0 or end > len(index) or (index[row:end] >= 0).any():
            raise ValueError(
                f"a span of {span.shape[0]} rows at row {row} overlaps another one or leaves the {len(index)} rows of "
                "the batch; correct first_rows, or give the batch a row for each row of the span"
            )
        index[row:end] = np.arange(start, start + span.shape[0])
        start += span.shape[0]
    images = ImageRows(features=jnp.concatenate(list(spans)), index=jnp.asarray(index))
    return dataclasses.replace(batch, images=images)


def pad_rows(batch: StepBatch, *, multiple: int) -> StepBatch:
    """The batch with padding rows up to a multiple of `multiple`."""
    missing = -batch.tokens.shape[0] % multiple

    def pad(array: Int[Array, " T"], value: int) -> Int[Array, " U"]:
        return jnp.pad(array, (0, missing), constant_values=value)

    images = batch.images
    return dataclasses.replace(
        batch,
        tokens=pad(batch.tokens, 0),
        positions=pad(batch.positions, 0),
        slots=pad(batch.slots, -1),
        tail_starts=None if batch.tail_starts is None else pad(batch.tail_starts, 0),
        window_starts=None if batch.window_starts is None else pad(batch.window_starts, 0),
        images=None if images is None else dataclasses.replace(images, index=pad(images.index, -1)),
    )


def derive_rows(batch: StepBatch) -> Rows:
    """The row facts of a batch."""
    zeros = jnp.zeros_like(batch.positions)
    return rows_at(
        batch.positions,
        batch.slots,
        zeros if batch.tail_starts is None else batch.tail_starts,
        zeros if batch.window_starts is None else batch.window_starts,
        batch.page_table,
    )


def rows_at(
    positions: Int[Array, " T"],
    slots: Int[Array, " T"],
    tail_start: Int[Array, " T"],
    window_start: Int[Array, " T"],
    page_table: Int[Array, "S M"],
) -> Rows:
    """The row facts of rows at positions of slots."""
    first_row = paged.first_rows(slots)
    return Rows(
        index=jnp.arange(slots.shape[0], dtype=jnp.int32),
        positions=positions,
        slots=slots,
        is_live=slots >= 0,
        num_live=paged.num_leading(slots >= 0),
        first_row=first_row,
        first_position=positions[first_row],
        num_after=paged.rows_after(slots),
        tail_start=tail_start,
        window_start=window_start,
        page_table=page_table,
    )


def own_part(rows: Rows, *, config: RuntimeConfig) -> Rows:
    """The facts about this device's part of all rows of a step; indices of rows stay those of the step."""
    if not context.is_split(config):
        return rows
    per_row = {
        field.name: getattr(rows, field.name)
        for field in dataclasses.fields(Rows)
        if field.name not in ("num_live", "page_table")
    }
    own = context.own_rows(per_row, config=config)
    return Rows(**own, num_live=paged.num_leading(own["is_live"]), page_table=rows.page_table)
