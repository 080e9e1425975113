"""The optimiser: AdamW over float32 masters, and the router biases that it leaves to the loads."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import DRAFT_PREFIX
from deepinfer_jax.pytree import pytree_dataclass
from deepinfer_jax.training.weights import Fixed, Masters, decays

Loss = Callable[[Masters, Fixed], tuple[Float32[Array, ""], "Measured"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a run of `num_steps` steps proceeds; shares are shares of those steps."""

    num_steps: int
    peak_rate: float = 2e-3  # of learning
    warmup_share: float = 0.02
    decay_share: float = 0.4  # the last steps, in which the rate falls linearly
    final_rate: float = 2e-5
    weight_decay: float = 0.1
    quantised_from: float = 0.5  # from this share on, forwards see released weights and caches
    bias_rate: float = 1e-3  # by which a router bias moves in one step
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1; it sets the length of the schedule")
        if not 0 <= self.warmup_share + self.decay_share <= 1:
            raise ValueError(
                f"warmup_share={self.warmup_share} and decay_share={self.decay_share} must be shares of one run; "
                "lower one of them"
            )


@pytree_dataclass
class TrainState:
    """Everything that a training step changes."""

    masters: Masters
    fixed: Fixed
    optimizer: Any  # of optax
    step: Int[Array, ""]  # steps done


@pytree_dataclass
class Measured:
    """What one evaluation of a loss says beside its value."""

    loads: dict[str, Int[Array, "N E"]]  # path of a router bias -> rows that each expert was chosen for
    values: dict[str, Float32[Array, ""]]  # to report


def learning_rate(step: Int[Array, ""], schedule: Schedule) -> Float32[Array, ""]:
    """Warm-up, a plateau, and a linear fall to the final rate."""
    done = step.astype(jnp.float32) / schedule.num_steps
    rise = jnp.minimum(1.0, (step + 1).astype(jnp.float32) / max(1.0, schedule.warmup_share * schedule.num_steps))
    fall = jnp.clip((1.0 - done) / max(schedule.decay_share, 1e-6), 0.0, 1.0)
    return schedule.final_rate + (schedule.peak_rate - schedule.final_rate) * rise * fall


def quantiser_strength(step: Int[Array, ""], schedule: Schedule) -> Float32[Array, ""]:
    """0 in the steps that compute with plain weights, 1 in those that see what a checkpoint would hold."""
    return (step >= math.ceil(schedule.quantised_from * schedule.num_steps)).astype(jnp.float32)


def make_optimizer(schedule: Schedule, specs: Sequence[LeafSpec]) -> Any:
    """AdamW with clipped gradients for masters of these leaves; weight decay where `decays` says so."""
    import optax

    return optax.chain(
        optax.clip_by_global_norm(schedule.clip_norm),
        optax.adamw(
            lambda step: learning_rate(jnp.asarray(step), schedule),
            b1=0.9,
            b2=0.95,
            weight_decay=schedule.weight_decay,
            mask={spec.path: decays(spec) for spec in specs},
        ),
    )


def new_state(masters: Masters, fixed: Fixed, optimizer: Any) -> TrainState:
    """The state in front of the first step."""
    return TrainState(masters=masters, fixed=fixed, optimizer=optimizer.init(masters), step=jnp.int32(0))


def train_step(
    state: TrainState, loss: Loss, *, optimizer: Any, schedule: Schedule
) -> tuple[TrainState, dict[str, Float32[Array, ""]]]:
    """The state after one step on a loss, and what to report; a pure function for a jit.

    Router biases follow the loads of the step: up for experts below the mean of their layer, down for those above.
    """
    import optax

    (value, measured), gradients = jax.value_and_grad(loss, has_aux=True)(state.masters, state.fixed)
    # optax mixes Python scalars, int32 counts and float32 values.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, kept = optimizer.update(gradients, state.optimizer, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        norm = optax.tree.norm(gradients)
    fixed = balanced(state.fixed, measured.loads, rate=schedule.bias_rate)
    report = {"loss": value, "gradient_norm": norm, "learning_rate": learning_rate(state.step, schedule)}
    report |= {**measured.values, "overload": _overload(measured.loads)}
    return TrainState(masters=masters, fixed=fixed, optimizer=kept, step=state.step + 1), report  # type: ignore[arg-type]


def balanced(fixed: Fixed, loads: Mapping[str, Int[Array, "N E"]], *, rate: float) -> Fixed:
    """The router biases moved by `rate` against the loads; those of image tokens stay equal to those of text."""
    moved = dict(fixed)
    for path, counts in loads.items():
        values = counts.astype(jnp.float32)
        direction = jnp.sign(jnp.mean(values, axis=-1, keepdims=True) - values)
        moved[path] = moved[_for_images(path)] = fixed[path] + rate * direction
    return moved


def _for_images(path: str) -> str:
    prefix = DRAFT_PREFIX if path.startswith(DRAFT_PREFIX) else ""
    return f"{prefix}moe.bias_vl"


def _overload(loads: Mapping[str, Int[Array, "N E"]]) -> Float32[Array, ""]:
    """The load of the fullest expert against the mean of its layer, averaged over layers."""
    counts = [c.astype(jnp.float32) for c in loads.values()]
    return jnp.mean(jnp.concatenate([jnp.max(c, axis=-1) / jnp.mean(c, axis=-1) for c in counts]))
