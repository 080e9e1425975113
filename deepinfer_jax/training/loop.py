"""A training run that ends in time: steps, reports, held-out losses, checkpoints."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from deepinfer_jax.training.optimise import TrainState
from deepinfer_jax.training.store import has_state, restore_state, save_state

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Array]]]
Report = dict[str, float | int | str | bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """When a run reports and ends. Seconds count from `started`, a reading of `time.monotonic`."""

    started: float
    limit_s: float  # the run ends after the first step behind it, and saves
    report_every: int = 50  # steps
    evaluate_every: int = 500  # steps
    save_every_s: float = 240.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started."""
        return time.monotonic() - self.started


def run_steps(
    state: TrainState,
    step: Step,
    draw: Callable[[int], Any],
    evaluate: Callable[[TrainState], Report],
    report: Callable[[Report], None],
    *,
    num_steps: int,
    tokens_per_step: int,
    directory: str | Path,
    pace: Pace,
) -> tuple[TrainState, bool]:
    """The state after `num_steps` steps in all, or when time is up, and whether all were done; saved in `directory`.

    Continues from a checkpoint in `directory` if there is one. `draw(i)` gives the batch of step i, which depends on i
    alone, so that an interrupted run makes the same steps as one that was not. The state is donated to `step`.
    """
    if has_state(directory):
        state = restore_state(directory, state)
    first = done = int(state.step)
    saved_at, window_start, window_step = pace.elapsed_s, time.monotonic(), done
    values: dict[str, Array] = {}
    while done < num_steps and (done == first or pace.elapsed_s < pace.limit_s):
        state, values = step(state, draw(done))
        done += 1
        if done == first + 1 or done % pace.report_every == 0 or done == num_steps:
            numbers: Report = {name: float(np.asarray(value)) for name, value in values.items()}
            now = time.monotonic()
            speed = (done - window_step) * tokens_per_step / (now - window_start)
            window_start, window_step = now, done
            report({"kind": "step", "step": done, "elapsed_s": pace.elapsed_s, "tokens_per_s": speed, **numbers})
            _refuse_broken(numbers, done)
        if done % pace.evaluate_every == 0 and done < num_steps:
            report({"kind": "held_out", "step": done, **evaluate(state)})
            window_start, window_step = time.monotonic(), done
        if pace.elapsed_s - saved_at > pace.save_every_s:
            save_state(state, directory)
            saved_at, window_start, window_step = pace.elapsed_s, time.monotonic(), done
    save_state(state, directory)
    report({"kind": "held_out", "step": done, **evaluate(state)})
    return state, done == num_steps


def _refuse_broken(numbers: Report, step: int) -> None:
    """Ends a run whose loss is no number, before it overwrites its checkpoint."""
    if not np.isfinite(float(numbers["loss"])):
        raise RuntimeError(
            f"the loss at step {step} is {numbers['loss']}; lower the learning rate and start again from the last "
            "checkpoint"
        )
