"""From the chunks that a step is told to its rows, on the device (packed form: `scheduler/batching.py`).

Only the device knows how many drafts of an unread step stayed, so where a chunk starts, and how many of its drafts are
verified, is worked out here; rows follow each other without gaps whatever comes out.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from deepinfer_jax.engine.buckets import StepShape
from deepinfer_jax.model.batch import ImageRows, StepBatch
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling.logits import SampleRows
from deepinfer_jax.scheduler import batching


@pytree_dataclass
class Newest:
    """What each slot's last draw left on the device, for the next step.

    Under match nothing but ids and survivals is needed; the other rules keep the distributions that drafts came from.
    """

    tokens: Int32[Array, "S G1"]  # the newest token, then its drafts
    positions: Int32[Array, " S"]  # of the newest token
    survival: Float32[Array, "S G"] | None = None  # estimated chance that a draft and all before it are accepted
    draft_logprobs: Float32[Array, "S G V"] | None = None  # processed log-probabilities that drafts were drawn from


@pytree_dataclass
class Chunks:
    """The chunks of a step: C of them, those without rows last."""

    fields: dict[str, Int32[Array, " C"]]
    starts: Int32[Array, " C"]  # position of the first row
    lengths: Int32[Array, " C"]  # rows
    verified: Int32[Array, " C"]  # rows at the end that hold drafts
    tokens: Int32[Array, "C G1"]  # the newest token of each slot, and its drafts
    row_ends: Int32[Array, " C"]  # rows of the step up to the chunk's last
    logit_counts: Int32[Array, " C"]
    logit_ends: Int32[Array, " C"]

    @property
    def first_draws(self) -> Int32[Array, " C"]:
        """Logit row of each chunk's first draw, where it draws; the draws behind its drafts follow."""
        return self.logit_ends - 1 - self.verified

    @property
    def draw_positions(self) -> Int32[Array, " C"]:
        """Position of each chunk's first draw."""
        return self.starts + self.lengths - self.verified


@pytree_dataclass
class LogitRows:
    """The logit rows of a step; those without a chunk stand last."""

    chunks: Int32[Array, " N"]
    places: Int32[Array, " N"]  # of a draw: how many drafts stand before it
    is_draw: Bool[Array, " N"]
    rows: Int32[Array, " N"]  # of the step, -1 for none
    next_tokens: Int32[Array, " N"]  # the known token behind the row, -1 for a draw


def unpack(packed: Int32[Array, " L"], shape: StepShape, *, max_drafts: int) -> dict[str, Any]:
    """The fields of a packed array."""
    return batching.fields_of(
        packed,
        num_chunks=shape.num_chunks,
        num_tokens=shape.num_rows,
        num_pages=shape.num_pages,
        max_drafts=max_drafts,
        has_images=shape.has_images,
    )


def place_chunks(fields: dict[str, Array], newest: Newest, allocate: Any = None) -> Chunks:
    """Where the chunks of a step stand. allocate: from survivals [C, G], drafts and budget to drafts to verify."""
    slots = fields["slots"]
    at = jnp.maximum(slots, 0)
    tokens = newest.tokens[at]
    starts = jnp.where(fields["follows"] != 0, newest.positions[at], fields["starts"])
    offered = fields["num_drafts"]
    verified = offered
    if allocate is not None:
        assert newest.survival is not None
        verified = allocate(newest.survival[at], offered, fields["budget"][0])
    lengths = fields["lengths"] - offered + verified
    logit_counts = jnp.where(fields["scores"] != 0, lengths, fields["draws"] + verified)
    return Chunks(
        fields=fields,
        starts=starts,
        lengths=lengths,
        verified=verified,
        tokens=tokens,
        row_ends=jnp.cumsum(lengths, dtype=jnp.int32),
        logit_counts=logit_counts,
        logit_ends=jnp.cumsum(logit_counts, dtype=jnp.int32),
    )


def step_batch(chunks: Chunks, shape: StepShape, image_table: Float[Array, "table D"] | None = None) -> StepBatch:
    """The rows of a step. image_table: encoded images, for a shape that has some."""
    fields = chunks.fields
    row = jnp.arange(shape.num_rows, dtype=jnp.int32)
    chunk, is_row = _owner(row, chunks.row_ends)
    offset = row - (chunks.row_ends - chunks.lengths)[chunk]
    positions = jnp.where(is_row, chunks.starts[chunk] + offset, 0)
    draft = offset - (chunks.lengths - chunks.verified)[chunk] + 1  # 0 at the last row that is none
    is_newest = (draft > 0) | ((fields["follows"] != 0)[chunk] & (offset == 0))
    place = fields["token_starts"][chunk] + offset
    known = fields["tokens"].at[place].get(mode="clip")
    tokens = jnp.where(is_newest, chunks.tokens[chunk, jnp.maximum(draft, 0)], known)
    tail_starts = fields["tail_starts"][chunk]
    tail_rows = None
    if shape.num_tail is not None:
        is_tail = is_row & (positions >= tail_starts)
        tail_rows = jnp.nonzero(is_tail, size=shape.num_tail, fill_value=-1)[0].astype(jnp.int32)
    images = None
    if image_table is not None:
        image_row = fields["image_rows"].at[place].get(mode="clip")
        images = ImageRows(features=image_table, index=jnp.where(is_row & ~is_newest, image_row, -1))
    return StepBatch(
        tokens=jnp.where(is_row, tokens, 0),
        positions=positions,
        slots=jnp.where(is_row, fields["slots"][chunk], -1),
        page_table=fields["page_table"],
        logit_rows=logit_rows(chunks, shape).rows,
        tail_starts=jnp.where(is_row, tail_starts, 0),
        tail_rows=tail_rows,
        window_starts=jnp.where(is_row, fields["window_starts"][chunk], 0),
        images=images,
    )


def logit_rows(chunks: Chunks, shape: StepShape) -> LogitRows:
    """The logit rows of a step: the last ones of each chunk."""
    fields = chunks.fields
    index = jnp.arange(shape.num_logits, dtype=jnp.int32)
    chunk, is_row = _owner(index, chunks.logit_ends)
    from_end = chunks.logit_ends[chunk] - 1 - index
    place = chunks.verified[chunk] - from_end
    is_draw = is_row & (fields["draws"] != 0)[chunk] & (place >= 0)
    behind = chunks.lengths[chunk] - from_end  # rows of the chunk up to this one
    known = fields["tokens"].at[fields["token_starts"][chunk] + behind].get(mode="clip")
    next_tokens = jnp.where(from_end == 0, fields["next_tokens"][chunk], known)
    return LogitRows(
        chunks=chunk,
        places=jnp.where(is_draw, place, 0),
        is_draw=is_draw,
        rows=jnp.where(is_row, chunks.row_ends[chunk] - 1 - from_end, -1),
        next_tokens=jnp.where(is_draw, -1, next_tokens),
    )


def sample_rows(chunks: Chunks, rows: LogitRows) -> SampleRows:
    """What each logit row asks for; those without a chunk are greedy, so that they cause no work."""
    fields, at, is_row = chunks.fields, rows.chunks, rows.rows >= 0
    place = rows.rows - (chunks.row_ends - chunks.lengths)[at]
    positions = chunks.starts[at] + place + 1
    forced = forced_tokens(fields, at, positions)
    return _sample_rows(
        fields,
        at,
        is_row,
        positions=positions,
        forced_ids=jnp.where(rows.is_draw, forced, rows.next_tokens),
        suppressed_ids=jnp.where(rows.is_draw, fields["suppressed_ids"][at], -1),
    )


def draft_rows(fields: dict[str, Array], positions: Int32[Array, " C"], is_drawing: Bool[Array, " C"]) -> SampleRows:
    """What a draft of each chunk, at these positions, asks for: the request's own options."""
    at = jnp.arange(positions.shape[0], dtype=jnp.int32)
    forced = forced_tokens(fields, at, positions)
    nothing = jnp.full_like(positions, -1)
    return _sample_rows(fields, at, is_drawing, positions=positions, forced_ids=forced, suppressed_ids=nothing)


def forced_tokens(
    fields: dict[str, Array], chunks: Int32[Array, "*N"], positions: Int32[Array, "*N"]
) -> Int32[Array, "*N"]:
    """The token that a request forces at a position, -1 for none."""
    place = positions - fields["forced_starts"][chunks]
    is_told = (place >= 0) & (place < fields["forced"].shape[1])
    return jnp.where(is_told, fields["forced"].at[chunks, place].get(mode="clip"), -1)


def _sample_rows(
    fields: dict[str, Array],
    at: Int32[Array, " N"],
    is_live: Bool[Array, " N"],
    *,
    positions: Int32[Array, " N"],
    forced_ids: Int32[Array, " N"],
    suppressed_ids: Int32[Array, " N"],
) -> SampleRows:
    def own(name: str) -> Array:
        return fields[name][at]

    def floats(name: str) -> Float32[Array, " N"]:
        return lax.bitcast_convert_type(own(name), jnp.float32)

    return SampleRows(
        seed_lo=lax.bitcast_convert_type(own("seed_lo"), jnp.uint32),
        seed_hi=lax.bitcast_convert_type(own("seed_hi"), jnp.uint32),
        positions=positions,
        inverse_temperature=floats("inverse_temperature"),
        top_p=jnp.where(is_live, floats("top_p"), 1.0),
        top_k=jnp.where(is_live, own("top_k"), -1),
        is_greedy=~is_live | (own("is_greedy") != 0),
        suppressed_ids=suppressed_ids,
        forced_ids=forced_ids,
        min_p_distance=jnp.where(is_live, floats("min_p_distance"), jnp.inf),
    )


def _owner(index: Int32[Array, " N"], ends: Int32[Array, " C"]) -> tuple[Int32[Array, " N"], Bool[Array, " N"]]:
    """The chunk of each row, and whether it has one."""
    chunk = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    return jnp.minimum(chunk, ends.shape[0] - 1), chunk < ends.shape[0]
