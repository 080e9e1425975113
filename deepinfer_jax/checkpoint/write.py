"""Parameters -> a checkpoint in the released format: tiny, random and embedded models, and tests.

A `Params` tree holds the text backbone, and the draft stages and the vision encoder if they were asked for. A released
checkpoint has all three; `extras` says what the written one has in place of what the tree lacks.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.names import (
    DERIVED_LEAVES,
    TensorSpec,
    expected_tensors,
    num_lead_axes,
    payload_name,
    scale_name,
)
from deepinfer_jax.checkpoint.shards import DTYPES, INDEX_NAME
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, leaf_at
from deepinfer_jax.model.parts import schema_of
from deepinfer_jax.ops.quant import ScaledArray

# "random": seeded values under every released name, so that the inventory is complete. "none": the parameters only,
# which `load_params` refuses; for tests of that refusal.
type Extras = Literal["random", "none"]

_DTYPE_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8
_OUTSIDE_TEXT = (
    "vision",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "expert_dtype",
    "tokenizer_compatibility",
)


def write_released(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    num_shards: int = 1,
    extras: Extras = "random",
    seed: int = 0,
    tokenizer: str | Path | None = None,
) -> None:
    """Writes config.json, the safetensors files and their index; copies `tokenizer` to tokenizer.json if given.

    extras: what to write for the tensors that `params` lacks: draft stages and vision where it has none; random ones
    come from `seed`.
    Tensors are dealt to the files in order, in runs of about equal bytes. Rows that a mesh added to Engram tables are
    not written. The parameters must be in their packed form and fit on this host.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(_own_tensors(params, config))
    if extras == "random":
        missing = {n: s for n, s in expected_tensors(config).items() if n not in tensors}
        tensors |= _random_tensors(missing, seed)
    _write_files(tensors, directory, num_shards)
    text = json.dumps(released_config(config), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")


def released_config(config: ModelConfig) -> dict[str, Any]:
    """The nested config.json of a model; `parse_config` gives the same config back."""
    values = dataclasses.asdict(config)
    text = {k: v for k, v in values.items() if k not in _OUTSIDE_TEXT}
    text["rope_scaling"] = {"rope_type": "yarn", **text["rope_scaling"]}
    raw: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **{name: values[name] for name in _OUTSIDE_TEXT if name.endswith("_token_id")},
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": config.expert_dtype,
        },
        "text_config": {
            "model_type": "deepseek_v41_text",
            "num_key_value_heads": 1,
            "hidden_act": "silu",
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            **text,
        },
        "vision_config": values["vision"],
    }
    if config.tokenizer_compatibility != "release":
        raw["tokenizer_compatibility"] = config.tokenizer_compatibility
    return raw


def write_file(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    """One safetensors file, tensors in the given order."""
    header: dict[str, Any] = {}
    position = 0
    for name, values in tensors.items():
        end = position + values.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            out.write(np.ascontiguousarray(values).tobytes())


def _write_files(tensors: dict[str, np.ndarray], directory: Path, num_shards: int) -> None:
    if not 1 <= num_shards <= len(tensors):
        raise ValueError(f"num_shards={num_shards} must be in 1..{len(tensors)}, the number of tensors")
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_runs(tensors, num_shards), start=1):
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        # Wide dtypes first, as safetensors writers do: every tensor is then aligned to its own items.
        chosen = sorted(names, key=lambda name: -tensors[name].itemsize)
        write_file({name: tensors[name] for name in chosen}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _runs(tensors: Mapping[str, np.ndarray], num_runs: int) -> list[list[str]]:
    """The names in order, cut into non-empty runs of about equal bytes."""
    names = list(tensors)
    ends = np.cumsum([tensors[name].nbytes for name in names])
    runs: list[list[str]] = [[] for _ in range(num_runs)]
    run = 0
    for position, name in enumerate(names):
        left = len(names) - position
        is_due = runs[run] and ends[position] > ends[-1] * (run + 1) / num_runs
        if run + 1 < num_runs and (is_due or left == num_runs - run - 1):
            run += 1
        runs[run].append(name)
    return runs


def _own_tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    expected = expected_tensors(config)
    for spec in schema_of(params, config):
        if spec.path in DERIVED_LEAVES:
            continue
        leaf = leaf_at(params, spec.path)
        payload = leaf.payload if isinstance(leaf, ScaledArray) else leaf
        accepted = expected[payload_name(spec, config, (0,) * num_lead_axes(spec))].dtypes
        if payload.dtype != spec.dtype and _DTYPE_NAMES[payload.dtype] not in accepted:
            raise ValueError(
                f"leaf {spec.path} is {payload.dtype}, the released form is {spec.dtype}; "
                "only packed parameters can be written"
            )
        for name, values in _split(spec, config, np.asarray(payload)):
            yield name, _as_stored(values, expected[name])
        if isinstance(leaf, ScaledArray) and leaf.scale is not None:
            for name, values in _split(spec, config, np.asarray(leaf.scale)):
                scales = scale_name(name)
                yield scales, _as_stored(values, expected[scales])


def _as_stored(values: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The rows that the file holds, raw bytes in the dtype that they stand for."""
    dtype = DTYPES[spec.dtypes[0]]
    return (values.view(dtype) if values.dtype == np.uint8 else values)[: spec.shape[0]]


def _split(spec: LeafSpec, config: ModelConfig, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The separate tensors that a leaf's array stacks, under the names of their weights."""
    for lead in itertools.product(*map(range, spec.shape[: num_lead_axes(spec)])):
        yield payload_name(spec, config, lead), values[lead]


def _random_tensors(specs: Mapping[str, TensorSpec], seed: int) -> dict[str, np.ndarray]:
    """Seeded values in the released dtypes: weights near 1/sqrt(width) in size, norms near 1."""
    return {
        name: _random_tensor(np.random.default_rng([seed, number]), name, spec)
        for number, (name, spec) in enumerate(specs.items())
    }


def _random_tensor(rng: np.random.Generator, name: str, spec: TensorSpec) -> np.ndarray:
    dtype = DTYPES[spec.dtypes[0]]
    shape: Sequence[int] = spec.shape
    if dtype == np.int8:
        return rng.integers(-128, 128, shape, dtype=np.int8)
    if dtype == ml_dtypes.float8_e8m0fnu:
        return np.full(shape, 2.0**-4, dtype)
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        values = 1 + 0.1 * values
    elif dtype != ml_dtypes.float8_e4m3fn:
        values = values / np.float32(np.sqrt(shape[-1]))
    return values.astype(dtype)
