"""The TinyByte model on which the cases run, and engines over it that compile few steps."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.checkpoint.write import write_released
from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.engine.engine import EngineHooks, LLMEngine
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.model.params import Params, init_params
from deepinfer_jax.scheduler.verification import VerificationPolicy
from deepinfer_jax.text.tiny_tokenizer import write_tiny_byte

CONFIG_NAME = "model/tiny.json"
# Behind the TinyByte ids: what the config names as image token and as the drafter's noise token.
EXTRA_TOKENS = ("<｜image｜>", "<｜draft｜>")
CASE_SEEDS = (1, 2)  # weight seeds: every case runs on two models
# Engines of these sizes share their one compiled step, of up to 64 rows, within a process.
MAX_MODEL_LEN = 512  # tokens
MAX_NUM_SEQS = 4
# Engines of these sizes share another one. They run out of pages, and so preempt, with three long requests.
SCARCE: dict[str, Any] = {"max_num_seqs": 8, "num_kv_tokens": 900}
# Engines of these sizes share a third one: room for many requests at once.
CROWDED: dict[str, Any] = {"max_num_seqs": 33}


def tiny_byte_model(directory: str | Path, seed: int) -> Path:
    """Writes a complete checkpoint of `configs/model/tiny.json` with random weights from this seed and the TinyByte
    tokenizer, and returns its directory.
    """
    config = load_config(shipped_config(CONFIG_NAME))
    write_tiny_byte(directory, extra_tokens=EXTRA_TOKENS)
    write_released(init_params(config, seed=seed), config, directory, seed=seed)
    return Path(directory)


def tiny_llm(model: str | os.PathLike[str], **options: Any) -> LLM:
    """An engine of the shared sizes for a TinyByte model; it returns token objects unless told otherwise."""
    return LLM(model, **_sized({"decode_sequence": False, **options}))


def tiny_engine(
    model: str | os.PathLike[str],
    environ: Mapping[str, str] | None = None,
    *,
    hooks: EngineHooks | None = None,
    verification: VerificationPolicy | None = None,
    params: Params | None = None,
    **options: Any,
) -> LLMEngine:
    """The same as `LLMEngine`, under these variables and no others; requests that give way are computed again."""
    args = EngineArgs(model, **_sized({"stop_preempted_request": False, **options}))
    return LLMEngine(resolve(args, environ or {}), hooks=hooks, verification=verification, params=params)


def _sized(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the shared sizes, and no drafts, where they say nothing else."""
    return {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "num_draft_tokens": 0, **options}
