"""Texts that the frozen network wrote itself: what a drafter meets in use, and so learns from beside the corpus."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from deepinfer_jax.training.acceptance import repeated_share
from deepinfer_jax.training.data import TrainingData, draw_rows
from deepinfer_jax.training.runs import Plan, anchors_of_step

MAX_REPEATED = 0.3  # of a continuation's runs of four tokens: any draft is right in a loop, nothing is learnt there
_SEED = 1 << 16  # added to a plan's seed: prompts are other rows than those of its steps


def write_own_texts(
    data: TrainingData, plan: Plan, write: Callable[[Array], Array], *, num_texts: int, prompt_len: int
) -> Int32[np.ndarray, "N R"]:
    """About `num_texts` greedy continuations of training rows, without those that run in circles.

    write: continues rows of BOS and tokens behind their first `prompt_len`. plan: rows of one call, and their length.
    Raises ValueError where every text runs in circles.
    """
    kept: list[np.ndarray] = []
    for call in range(-(-num_texts // plan.num_rows)):
        rows = draw_rows(
            data.train,
            step=call,
            seed=plan.seed + _SEED,
            num_rows=plan.num_rows,
            row_len=plan.config.page_tokens,
            bos_id=plan.config.model.bos_token_id,
        )
        texts = np.asarray(write(jnp.asarray(rows[:, :-1])), np.int32)
        kept += [text for text in texts if repeated_share(text[prompt_len:]) <= MAX_REPEATED]
    if not kept:
        raise ValueError(
            f"of {num_texts} texts of {plan.config.page_tokens} tokens none is free of loops; train the backbone "
            "longer, or do without own texts"
        )
    return np.stack(kept)


def own_batch_of_step(
    texts: Int32[np.ndarray, "N R"], plan: Plan, step: int, *, prompt_len: int
) -> tuple[Int32[np.ndarray, "B R1"], Int[np.ndarray, "B A"]]:
    """Rows of a step and where blocks stand in them, behind the prompts: a function of the plan's seed and the step."""
    chosen = np.random.default_rng([plan.seed, step, 3]).integers(0, len(texts), plan.num_rows)
    rows = np.pad(texts[chosen], ((0, 0), (0, 1)))  # no block reads the token behind the last one
    return rows, anchors_of_step(plan, step, first=prompt_len)


def is_own_step(step: int, share: float) -> bool:
    """Whether a step learns from own texts: such a share of all steps, evenly spread."""
    return int((step + 1) * share) > int(step * share)
