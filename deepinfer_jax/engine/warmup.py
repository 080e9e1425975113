"""What an engine does before its first request: compile its steps, and measure them where drafts are scheduled."""

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from deepinfer_jax.config.args import EngineConfig
from deepinfer_jax.engine.measuring import cost_curve
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.engine.sizes import EngineSizes
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.scheduler.scheduler import Scheduler
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
    if not (config.enforce_eager or (config.draft_enforce_eager and speculation.max_drafts)):
        pipeline.warm_up(lambda shapes: _bar(shapes, "compiling steps", "step"), stats.compiled)
        stats.warm_up_done()
    if speculation.is_scheduled and scheduler.verification is None:
        curve = cost_curve(config, model, sizes, pipeline, lambda rows: _bar(rows, "timing steps", "size"))
        scheduler.verification = BudgetPolicy(curve)


def check_policy(policy: VerificationPolicy | None, *, is_async: bool) -> None:
    """Raises ValueError for a policy that needs what an asynchronous engine has not read."""
    if policy is not None and policy.reads_newest and is_async:
        raise ValueError(
            f"verification={type(policy).__name__} needs the estimates of the step just in front; set "
            "DEEPINFER_ZERO_OVERHEAD_SCHEDULING=0, or give a BudgetPolicy"
        )


def _bar(items: Sequence[Any], name: str, unit: str) -> Any:
    return tqdm(items, desc=name, unit=unit, disable=None, leave=False)
