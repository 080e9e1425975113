"""What a step does behind its draws where tokens are drafted: which drafts stay, and the next (spec: dspark 3 to 6).

Under the rule match the draws of a step's rows are the tokens, whatever the drafts were: drafts decide only how many
of them one step gives.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import layout
from deepinfer_jax.engine.layout import Chunks, Newest
from deepinfer_jax.model.backbone import Features
from deepinfer_jax.model.draft import DraftOutput, draft_block, write_context
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import State
from deepinfer_jax.model.variants import Index
from deepinfer_jax.ops.invariant import map_rows
from deepinfer_jax.ops.paged import num_leading
from deepinfer_jax.ops.scatter import put_where
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.sampling import logits as sampling
from deepinfer_jax.sampling import verify
from deepinfer_jax.sampling.draw import Purpose
from deepinfer_jax.sampling.schedule import allocate_lengths

SpecMode = Literal["match", "rejection", "block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an engine drafts and verifies; part of the compiled program."""

    max_drafts: int = 0  # drafts of a request that one step verifies, 0 for off
    rule: SpecMode = "match"
    is_scheduled: bool = False  # the device spreads a budget by confidence; else every draft is verified
    temperatures: tuple[float, ...] = ()  # of the confidence head, one for each draft

    @property
    def keeps_distributions(self) -> bool:
        """Whether the distributions that drafts came from are needed to verify them."""
        return self.max_drafts > 0 and self.rule != "match"


@pytree_dataclass
class Draws:
    """The draws of a step's logit rows."""

    token_ids: Int32[Array, " N"]
    token_logprobs: Float32[Array, " N"]
    smaller_mass: Float32[Array, " N"]
    logprobs: Float32[Array, "N V"]


def blank_newest(speculation: Speculation, *, num_slots: int, vocab_size: int) -> Newest:
    """Nothing was drawn yet."""
    drafts = (num_slots, speculation.max_drafts)
    return Newest(
        tokens=jnp.zeros((num_slots, 1 + speculation.max_drafts), jnp.int32),
        positions=jnp.zeros((num_slots,), jnp.int32),
        survival=jnp.zeros(drafts, jnp.float32) if speculation.max_drafts else None,
        draft_logprobs=jnp.zeros((*drafts, vocab_size), jnp.float32) if speculation.keeps_distributions else None,
    )


def place_chunks(fields: dict[str, Array], newest: Newest, speculation: Speculation) -> Chunks:
    """Where a step's chunks stand, and how many of their drafts are verified."""
    return layout.place_chunks(fields, newest, allocate_lengths if speculation.is_scheduled else None)


def accept(
    draws: Draws, chunks: Chunks, newest: Newest, speculation: Speculation
) -> tuple[Draws, Int32[Array, "C G1"], Int32[Array, " C"]]:
    """The draws as they are emitted, the tokens of each drawing chunk, and how many of them stay (0 without a draw)."""
    is_drawing = chunks.fields["draws"] != 0
    count = speculation.max_drafts + 1
    at = jnp.minimum(
        chunks.first_draws[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :], draws.token_ids.shape[0] - 1
    )
    at = jnp.maximum(at, 0)
    drawn, drafts = draws.token_ids[at], chunks.tokens[:, 1:]
    if not speculation.max_drafts or speculation.rule == "match":
        num_kept = verify.accept_matching(drawn, drafts, chunks.verified)
        return draws, drawn, jnp.where(is_drawing, num_kept, 0)
    requests = _verify_requests(chunks, drawn, is_drawing)
    rule = verify.verify_rejection if speculation.rule == "rejection" else verify.verify_block
    assert newest.draft_logprobs is not None
    logprobs, draft_logprobs = draws.logprobs[at], newest.draft_logprobs[jnp.maximum(chunks.fields["slots"], 0)]
    verified = rule(logprobs, draft_logprobs, requests)
    tokens = jnp.maximum(verified.token_ids, 0)
    is_emitted = is_drawing[:, None] & (verified.token_ids >= 0)
    changed = jnp.take_along_axis(logprobs, tokens[:, :, None], axis=2)[:, :, 0]
    draws = dataclasses.replace(
        draws,
        token_ids=put_where(draws.token_ids, (at,), tokens, is_emitted),
        token_logprobs=put_where(draws.token_logprobs, (at,), changed, is_emitted),
    )
    return draws, tokens, jnp.where(is_drawing, verified.num_kept, 0)


def _verify_requests(
    chunks: Chunks, drawn: Int32[Array, "C G1"], is_drawing: Bool[Array, " C"]
) -> verify.VerifyRequests:
    fields = chunks.fields
    each = jnp.arange(drawn.shape[0], dtype=jnp.int32)[:, None]
    positions = chunks.draw_positions[:, None] + jnp.arange(drawn.shape[1], dtype=jnp.int32)[None, :]
    forced = layout.forced_tokens(fields, jnp.broadcast_to(each, positions.shape), positions)
    return verify.VerifyRequests(
        drawn=drawn,
        is_fixed=~is_drawing[:, None] | (fields["is_greedy"] != 0)[:, None] | (forced >= 0),
        drafts=chunks.tokens[:, 1:],
        lengths=jnp.where(is_drawing, chunks.verified, 0),
        seed_lo=lax.bitcast_convert_type(fields["seed_lo"], jnp.uint32),
        seed_hi=lax.bitcast_convert_type(fields["seed_hi"], jnp.uint32),
        positions=chunks.draw_positions,
    )


def settle(newest: Newest, chunks: Chunks, tokens: Int32[Array, "C G1"], num_kept: Int32[Array, " C"]) -> Newest:
    """The newest token of each slot that drew one, without drafts yet."""
    slots, is_drawing = chunks.fields["slots"], (num_kept > 0) & (chunks.fields["slots"] >= 0)
    last = jnp.take_along_axis(tokens, jnp.maximum(num_kept - 1, 0)[:, None], axis=1)[:, 0]
    return dataclasses.replace(
        newest,
        tokens=put_where(newest.tokens, (slots, 0), last, is_drawing),
        positions=put_where(newest.positions, (slots,), chunks.draw_positions + num_kept - 1, is_drawing),
    )


def propose(
    params: Params,
    state: State,
    newest: Newest,
    chunks: Chunks,
    features: Features,
    num_kept: Int32[Array, " C"],
    *,
    config: RuntimeConfig,
    settings: sampling.SampleSettings,
    speculation: Speculation,
) -> tuple[State, Newest, Int32[Array, "F C"]]:
    """Drafts behind the newest token of each chunk that drew one and is to have drafts; all committed rows become
    context.

    Also returns what the host is told of them: for each of the G drafts its id, the bits of its raw confidence, and
    the bits of its processed log-probability, one field after the other (F = 3 G).
    """
    assert state.draft is not None and newest.survival is not None
    fields, is_drawing = chunks.fields, num_kept > 0
    is_proposing = is_drawing & (fields["proposes"] != 0)
    slots = jnp.where(is_proposing, fields["slots"], -1)
    ends = jnp.full(newest.positions.shape, jnp.iinfo(jnp.int32).max, jnp.int32)
    is_last = (fields["draws"] != 0) & (fields["slots"] >= 0)
    ends = put_where(ends, (fields["slots"],), chunks.draw_positions + num_kept - 1, is_last)
    is_committed = features.positions < ends[jnp.maximum(features.slots, 0)]
    rings = write_context(
        params,
        state.draft,
        features.main_hidden,
        features.positions,
        jnp.where(is_committed, features.slots, -1),
        config=config,
    )
    at = jnp.maximum(slots, 0)
    anchors, positions = newest.tokens[at, 0], newest.positions[at]
    noise = _noise(fields, positions + 1, speculation)
    purpose = Purpose.FRESH if speculation.rule == "match" else Purpose.DRAFT

    def on_tile(logits: Array, rows: sampling.SampleRows) -> tuple[Array, tuple[Array, ...]]:
        sampled = sampling.sample(logits, rows, settings=settings, purpose=purpose)
        distributions = (sampled.logprobs,) if speculation.keeps_distributions else ()
        return sampled.token_ids, (sampled.token_logprobs, *distributions)

    def draw(place: Index, logits: Float32[Array, "C V"]) -> tuple[Int32[Array, " C"], tuple[Array, ...]]:
        rows = layout.draft_rows(fields, positions + 1 + place, is_proposing)
        return map_rows(
            on_tile,
            logits,
            dataclasses.replace(rows, seed_lo=noise[0], seed_hi=noise[1]),
            num_live=num_leading(is_proposing),
            **config.tiles,
        )

    def make_drafts() -> DraftOutput:
        starts = fields["window_starts"]
        return draft_block(params, rings, anchors, positions, slots, config=config, draw=draw, context_starts=starts)

    def make_none() -> DraftOutput:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(make_drafts))

    if config.has_fixed_trips and config.dp * config.cp == 1:
        drafted = lax.cond(jnp.any(is_proposing), make_drafts, make_none)
    else:  # without live rows its loops make no trips; devices of a mesh must meet in its collectives
        drafted = make_drafts()
    ids, confidence, logprobs = jax.tree.map(
        lambda a: a[:, : speculation.max_drafts], (drafted.ids, drafted.confidence, drafted.extras[0])
    )
    is_placed = slots >= 0
    temperatures = np.asarray(speculation.temperatures, np.float32)
    survival = jnp.cumprod(jax.nn.sigmoid(confidence / temperatures[None, :]), axis=1)
    newest = dataclasses.replace(
        newest,
        tokens=put_where(newest.tokens, (slots, slice(1, None)), ids, is_placed),
        survival=put_where(newest.survival, (slots,), survival, is_placed),
    )
    if newest.draft_logprobs is not None:
        distributions = drafted.extras[1][:, : speculation.max_drafts]
        newest = dataclasses.replace(
            newest, draft_logprobs=put_where(newest.draft_logprobs, (slots,), distributions, is_placed)
        )
    told = jnp.concatenate([ids, *(lax.bitcast_convert_type(a, jnp.int32) for a in (confidence, logprobs))], axis=1)
    return dataclasses.replace(state, draft=rings), newest, told.T


def _noise(
    fields: dict[str, Array], positions: Int32[Array, " C"], speculation: Speculation
) -> tuple[UInt32[Array, " C"], UInt32[Array, " C"]]:
    """The seeds of a round's drafts, the first of which is for these positions: the request's own under match."""
    low, high = (lax.bitcast_convert_type(fields[name], jnp.uint32) for name in ("seed_lo", "seed_hi"))
    return (low, high) if speculation.rule == "match" else verify.round_seeds(low, high, positions)
