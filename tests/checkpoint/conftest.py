"""A released-format checkpoint of the tiny model in several files, and a way to damage a copy of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.checkpoint.shards import INDEX_NAME, read_file
from deepinfer_jax.checkpoint.write import write_file, write_released
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.model.params import Params

TINY = Path(__file__).parent.parent / "data" / "tiny_a"
NUM_FILES = 4


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    return TINY


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return load_config(TINY)


@pytest.fixture(scope="session")
def params(config: ModelConfig) -> Params:
    return load_params(TINY, config, weights_file=TINY / "weights_released.safetensors")


@pytest.fixture(scope="session")
def written(params: Params, config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint: four files, index, config and tokenizer."""
    directory = tmp_path_factory.mktemp("released")
    write_released(params, config, directory, num_shards=NUM_FILES, tokenizer=TINY / "tokenizer.json")
    return directory


class Checkpoint:
    """A copy of the checkpoint that a test may damage."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.directory / INDEX_NAME).read_text())["weight_map"]

    def file_of(self, name: str) -> Path:
        return self.directory / self.weight_map[name]

    def edit(self, file: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
        tensors = {t.name: np.array(t.data) for t in read_file(file)}
        change(tensors)
        write_file(tensors, file)

    def edit_header(self, file: Path, change: Callable[[dict], None]) -> None:
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:end])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    def edit_index(self, change: Callable[[dict[str, str]], None]) -> None:
        weight_map = self.weight_map
        change(weight_map)
        (self.directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Checkpoint:
    directory = tmp_path / "copy"
    shutil.copytree(written, directory)
    return Checkpoint(directory)
