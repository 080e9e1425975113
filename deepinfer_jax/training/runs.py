"""The two runs that make a model: what their steps, batches and held-out losses are. Nothing here is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from deepinfer_jax.model.params import Params
from deepinfer_jax.training import acceptance
from deepinfer_jax.training.backbone import backbone_loss, row_losses
from deepinfer_jax.training.data import TrainingData, draw_rows, whole_rows
from deepinfer_jax.training.draft import draft_loss
from deepinfer_jax.training.init import initial_fixed, initial_masters
from deepinfer_jax.training.loop import Report
from deepinfer_jax.training.loss import bits_per_byte
from deepinfer_jax.training.numerics import TrainingConfig
from deepinfer_jax.training.optimise import (
    Schedule,
    TrainState,
    make_optimizer,
    new_state,
    quantiser_strength,
    train_step,
)
from deepinfer_jax.training.weights import Fixed, Masters, trained_specs

ANCHORS_PER_ROW = 64  # blocks that the drafter learns from in each row of a batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One run, but for its state."""

    config: TrainingConfig
    schedule: Schedule
    num_rows: int  # of a batch; each has config.page_tokens tokens behind BOS
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that the loss of one step is a mean over."""
        return self.num_rows * self.config.page_tokens


def first_state(plan: Plan, token_map: np.ndarray | None) -> TrainState:
    """The state in front of the first step: of the backbone with its token map, else of the draft stages."""
    model, with_draft = plan.config.model, token_map is None
    specs = trained_specs(model, with_draft=with_draft)
    optimizer = make_optimizer(plan.schedule, specs)
    masters = initial_masters(model, seed=plan.seed, with_draft=with_draft)
    return new_state(masters, initial_fixed(model, token_map), optimizer)


def batch_of_step(data: TrainingData, plan: Plan, step: int) -> Int[np.ndarray, "B R1"]:
    """The rows of one step: a function of the plan's seed and the step."""
    return draw_rows(
        data.train,
        step=step,
        seed=plan.seed,
        num_rows=plan.num_rows,
        row_len=plan.config.page_tokens,
        bos_id=plan.config.model.bos_token_id,
    )


def anchors_of_step(plan: Plan, step: int, *, first: int = 1) -> Int[np.ndarray, "B A"]:
    """Where the blocks of one step stand in its rows, from `first` on."""
    return _draw_anchors(plan, np.random.default_rng([plan.seed, step, 1]), first=first, num_rows=plan.num_rows)


def backbone_step(state: TrainState, rows: Int[Array, "B R1"], *, plan: Plan) -> tuple[TrainState, dict[str, Array]]:
    """One step of the backbone."""
    strength = quantiser_strength(state.step, plan.schedule)
    loss = functools.partial(backbone_loss, rows=rows, config=plan.config, strength=strength)
    return _step(state, loss, plan, with_draft=False)


def draft_step(
    state: TrainState, batch: tuple[Int[Array, "B R1"], Int[Array, "B A"]], frozen: Params, *, plan: Plan
) -> tuple[TrainState, dict[str, Array]]:
    """One step of the draft stages, on rows and anchors."""
    rows, anchors = batch
    loss = functools.partial(draft_loss, rows=rows, anchors=anchors, frozen=frozen, config=plan.config)
    return _step(state, loss, plan, with_draft=True)


def held_out_losses(
    masters: Masters, fixed: Fixed, rows: Int[Array, "B R1"], strength: Float32[Array, ""], *, plan: Plan
) -> Float32[Array, "B R"]:
    """Losses of every position of held-out rows, in nats; strength: how far weights and caches are quantised."""
    return row_losses(masters, fixed, rows, config=plan.config, strength=strength)


def held_out_report(data: TrainingData, losses: Callable[[Array], Array], *, plan: Plan) -> float:
    """Bits per byte of the held-out texts, each row of which starts without a past."""
    model = plan.config.model
    rows, counts = whole_rows(
        data.held_out, row_len=plan.config.page_tokens, bos_id=model.bos_token_id, eos_id=model.eos_token_id
    )
    nats = 0.0
    for start in range(0, len(rows), plan.num_rows):
        own, lengths = rows[start : start + plan.num_rows], counts[start : start + plan.num_rows]
        missing = plan.num_rows - len(own)  # every batch has one shape
        own = np.pad(own, ((0, missing), (0, 0)))
        values = np.asarray(losses(jnp.asarray(own)), np.float64)[: len(lengths)]
        nats += float(np.sum(np.where(np.arange(values.shape[1])[None, :] < lengths[:, None], values, 0.0)))
    return bits_per_byte(nats, data.held_out_bytes)


def acceptance_report(
    data: TrainingData,
    plan: Plan,
    write: Callable[[Array], Array],
    record: Callable[[Array, Array], acceptance.Records],
    *,
    prompt_len: int,
    max_repeated: float = 0.3,
) -> tuple[acceptance.Records, Report]:
    """Records of the rounds that decode greedy continuations of held-out rows, and their mean accepted length.

    write: continues rows behind their first `prompt_len` tokens. Continuations of which more than `max_repeated`
    repeats itself are left out: the longer they are, the more of them. Where none is left, there are no records and no
    lengths.
    """
    model, row_len = plan.config.model, plan.config.page_tokens
    rows, _ = whole_rows(data.held_out, row_len=row_len, bos_id=model.bos_token_id, eos_id=model.eos_token_id)
    rng = np.random.default_rng([plan.seed, 2])
    chosen = np.resize(rng.permutation(len(rows)), plan.num_rows)
    texts = np.asarray(write(jnp.asarray(rows[chosen, :-1])))
    first, last = prompt_len, _last_anchor(plan, prompt_len)
    anchors = np.broadcast_to(np.arange(first, last + 1, dtype=np.int32), (plan.num_rows, last + 1 - first))
    records = record(jnp.asarray(texts), jnp.asarray(anchors))
    is_kept = np.asarray([acceptance.repeated_share(text[prompt_len:]) <= max_repeated for text in texts])
    starts = acceptance.round_starts(np.asarray(records.accepted).reshape(anchors.shape))
    kept = (starts & is_kept[:, None]).reshape(-1)
    records = acceptance.Records(confidence=records.confidence[kept], accepted=records.accepted[kept])
    report: Report = {"texts": int(is_kept.sum())}
    if is_kept.any():
        accepted = np.asarray(records.accepted)
        report["accepted_length"] = 1.0 + float(accepted.mean())
        report |= {f"accepted_{i + 1}": float(np.mean(accepted > i)) for i in range(model.dspark_block_size)}
    return records, report


def _draw_anchors(plan: Plan, rng: np.random.Generator, *, first: int, num_rows: int) -> Int[np.ndarray, "B A"]:
    """Distinct places in each row, rising, with room for a block and the token behind it."""
    last = _last_anchor(plan, first)
    count = min(ANCHORS_PER_ROW, last - first + 1)
    order = np.argsort(rng.random((num_rows, last - first + 1)), axis=1)[:, :count]
    return (np.sort(order, axis=1) + first).astype(np.int32)


def _last_anchor(plan: Plan, first: int) -> int:
    """The last place of a row with room for a block and the token behind it; it is not in front of `first`."""
    last = plan.config.page_tokens - plan.config.model.dspark_block_size - 1
    if last < first:
        raise ValueError(
            f"sequences of {plan.config.page_tokens} tokens have no room for a block of drafts behind position "
            f"{first}; train with longer ones"
        )
    return last


def _step(state: TrainState, loss: Any, plan: Plan, *, with_draft: bool) -> tuple[TrainState, dict[str, Array]]:
    specs = trained_specs(plan.config.model, with_draft=with_draft)
    optimizer = make_optimizer(plan.schedule, specs)
    return train_step(state, loss, optimizer=optimizer, schedule=plan.schedule)
