"""A trained model as a checkpoint in the released format (spec: checkpoint 2 to 5)."""

import shutil
from pathlib import Path

from deepinfer_jax.checkpoint.write import write_released
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import Params, leaf_at, schema
from deepinfer_jax.training.data import TrainingData
from deepinfer_jax.training.weights import Fixed, Masters, packed_params

NUM_SHARDS = 2  # each below 16 MB at the sizes that this package trains


def export_backbone(
    masters: Masters, fixed: Fixed, config: ModelConfig, data: TrainingData, directory: str | Path, *, seed: int = 0
) -> None:
    """Writes the packed backbone with its tokenizer; draft stages and vision encoder get random values from `seed`."""
    _write(packed_params(masters, fixed, config), config, data, Path(directory), seed=seed)


def export_with_draft(
    backbone: Params,
    masters: Masters,
    fixed: Fixed,
    config: ModelConfig,
    data: TrainingData,
    directory: str | Path,
    *,
    seed: int = 0,
) -> None:
    """Writes a packed backbone, unchanged, with trained draft stages; the vision encoder gets random values."""
    own = {spec.path: leaf_at(backbone, spec.path) for spec in schema(config)}
    params = packed_params(masters, {**own, **fixed}, config, with_draft=True)
    _write(params, config, data, Path(directory), seed=seed)


def _write(params: Params, config: ModelConfig, data: TrainingData, directory: Path, *, seed: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_released(params, config, directory, num_shards=NUM_SHARDS, seed=seed)
    (directory / "tokenizer.json").write_text(data.tokenizer, encoding="utf-8")
