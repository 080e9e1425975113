"""What an engine does before its first request: compile its steps, and measure them where drafts are scheduled."""

import functools
from collections import abc
from typing import Any

from tqdm import tqdm

from deepinfer_jax.config.args import EngineConfig
from deepinfer_jax.engine.drafting import Speculation
from deepinfer_jax.engine.measuring import cost_curve
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.engine.sizes import EngineSizes
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.scheduler.verification import BudgetPolicy, VerificationPolicy


def warm_up(
    config: EngineConfig,
    model: LoadedModel,
    sizes: EngineSizes,
    pipeline: Pipeline,
    scheduler: Scheduler,
    stats: EngineStats,
) -> None:
    """Gets the steps ready, with progress bars, unless the configuration leaves compiling to the first use."""
    speculation = model.speculation
    if _compiles_ahead(config, speculation):
        pipeline.warm_up(lambda shapes: _bar(shapes, "compiling steps", "step"), stats.compiled)
        stats.warm_up_done()
    if speculation.is_scheduled and scheduler.verification is None:
        curve = cost_curve(config, model, sizes, pipeline, lambda rows: _bar(rows, "timing steps", "size"))
        scheduler.verification = BudgetPolicy(curve)


class ImageSteps:
    """The steps with images: those who only read text never wait for them."""

    def __init__(self, config: EngineConfig, speculation: Speculation, pipeline: Pipeline, stats: EngineStats) -> None:
        self._is_missing = _compiles_ahead(config, speculation)
        self._pipeline, self._stats = pipeline, stats

    def expect(self, sequence: Sequence) -> None:
        """Gets them ready if this is the first request with images, unless compiling is left to the first use."""
        if sequence.images and self._is_missing:
            self._is_missing = False
            self._pipeline.warm_up_images(functools.partial(self._stats.compiled, is_expected=True))


def check_policy(policy: VerificationPolicy | None, *, is_async: bool) -> None:
    """Raises ValueError for a policy that needs what an asynchronous engine has not read."""
    if policy is not None and policy.reads_newest and is_async:
        raise ValueError(
            f"verification={type(policy).__name__} needs the estimates of the step just in front; set "
            "DEEPINFER_ZERO_OVERHEAD_SCHEDULING=0, or give a BudgetPolicy"
        )


def _compiles_ahead(config: EngineConfig, speculation: Speculation) -> bool:
    return not (config.enforce_eager or (config.draft_enforce_eager and speculation.max_drafts))


def _bar(items: abc.Sequence[Any], name: str, unit: str) -> Any:
    return tqdm(items, desc=name, unit=unit, disable=None, leave=False)
