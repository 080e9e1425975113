"""DeepSeek-V4.1-Flash in JAX: load a checkpoint, run the network, generate text.

Public names load on first use, so that `import deepinfer_jax` is cheap and needs no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_jax.checkpoint.load import load_model as load_model
    from deepinfer_jax.config.args import EngineArgs as EngineArgs
    from deepinfer_jax.config.args import EngineType as EngineType
    from deepinfer_jax.config.environ import envs as envs
    from deepinfer_jax.engine.engine import LLMEngine as LLMEngine
    from deepinfer_jax.engine.fingerprint import bit_fingerprint as bit_fingerprint
    from deepinfer_jax.engine.llm import LLM as LLM
    from deepinfer_jax.model.backbone import decode_step as decode_step
    from deepinfer_jax.model.backbone import forward as forward
    from deepinfer_jax.model.backbone import prefill as prefill
    from deepinfer_jax.model.params import init_params as init_params
    from deepinfer_jax.model.state import init_state as init_state
    from deepinfer_jax.sampling.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_EXPORTS = {
    "checkpoint.load": ("load_model",),
    "config.args": ("EngineArgs", "EngineType"),
    "config.environ": ("envs",),
    "engine.engine": ("LLMEngine",),
    "engine.fingerprint": ("bit_fingerprint",),
    "engine.llm": ("LLM",),
    "model.backbone": ("decode_step", "forward", "prefill"),
    "model.params": ("init_params",),
    "model.state": ("init_state",),
    "sampling.params": ("SamplingParams",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """The public name, from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """Every public name, loaded or not."""
    return sorted([*globals(), *_MODULE_OF])
