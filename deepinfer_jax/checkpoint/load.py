"""A checkpoint as parameters on devices: each device's shard is read, and moved, on its own."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from tqdm import tqdm

from deepinfer_jax.checkpoint.locate import locate_model
from deepinfer_jax.checkpoint.names import DERIVED_LEAVES, expected_tensors
from deepinfer_jax.checkpoint.shards import Shards, check_coverage, open_shards
from deepinfer_jax.checkpoint.transform import leaf_sources, read_slice, zero_padded
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.model.draft_params import with_random_draft
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, build_params, init_params, leaf_at
from deepinfer_jax.model.parts import schema_of, wanted_schema, with_random_vision
from deepinfer_jax.model.shardings import part_sharding, placed_spec
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.parallel.mesh import Rules
from deepinfer_jax.text.engram_vocab import token_map

type LoadFormat = Literal["auto", "dummy"]
type ReadSlice = Callable[[tuple[slice, ...]], np.ndarray]

TOKENIZER_NAME = "tokenizer.json"


def load_model(
    path_or_id: str | Path,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    revision: str | None = None,
    progress: bool = True,
    with_draft: bool = False,
    with_vision: bool = False,
    spare_experts: int = 0,
    engram_on_host: bool = False,
) -> tuple[Params, ModelConfig]:
    """Parameters and config of a checkpoint directory or a Hugging Face id.

    A config file in place of a directory, or load_format="dummy", gives random parameters of that shape, drawn
    from `seed`. revision: of a Hugging Face id; None is the newest one, or the cached one without a network.
    with_draft, with_vision, spare_experts, engram_on_host: see `load_params`.
    """
    needs_weights = load_format != "dummy"
    location = locate_model(path_or_id, revision=revision, needs_weights=needs_weights)
    config = load_config(location)
    if location.is_file() or not needs_weights:
        params = init_params(config, seed=seed)
        params = with_random_draft(params, config, seed=seed) if with_draft else params
        params = with_random_vision(params, config, seed=seed) if with_vision else params
        return place_params(
            params, config, mesh=mesh, rules=rules, spare_experts=spare_experts, engram_on_host=engram_on_host
        ), config
    params = load_params(
        location,
        config,
        mesh=mesh,
        rules=rules,
        progress=progress,
        with_draft=with_draft,
        with_vision=with_vision,
        spare_experts=spare_experts,
        engram_on_host=engram_on_host,
    )
    return params, config


def load_params(
    path: str | Path,
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    progress: bool = True,
    weights_file: str | Path | None = None,
    with_draft: bool = False,
    with_vision: bool = False,
    spare_experts: int = 0,
    engram_on_host: bool = False,
) -> Params:
    """The text network of a checkpoint directory, in its stored form, on the devices of `mesh`.

    Every tensor of the checkpoint is checked against the config before the first one is read. Draft tensors are left
    out without `with_draft`, and `Params.draft` is None then, and for a model that has no draft stages; vision tensors
    and `Params.vision` in the same way without `with_vision`. Without a mesh, arrays are on the default device,
    uncommitted. On a mesh, Engram tables and experts get zeros up to a multiple of the devices that share them; no
    other size is changed. spare_experts: places of each layer beyond its experts, at least (see `Params.moe`).
    engram_on_host: Engram tables go to the memory of the hosts (`RuntimeConfig.engram_on_host` must say so too).
    weights_file: one safetensors file instead of the files of the directory. Weights without scales (BF16 or F32)
    become a `ScaledArray` with scale None. Raises ValueError, naming tensor and file, for whatever does not fit.
    """
    directory = Path(path)
    file = None if weights_file is None else Path(weights_file)
    shards = open_shards(directory, weights_file=file)
    check_coverage(shards, expected_tensors(config, is_quantized=shards.is_quantized))
    compressed = _token_map(directory, config)
    wanted = wanted_schema(config, with_draft=with_draft, with_vision=with_vision)
    place = functools.partial(placed_spec, spare_experts=spare_experts, engram_on_host=engram_on_host)
    specs = {spec.path: place(spec, mesh, rules) for spec in wanted}
    for spec in specs.values():
        _check_shardings(spec, mesh, rules)
    total_bytes = sum(spec.num_bytes for spec in specs.values())
    leaves: dict[str, Any] = {}
    bar = tqdm(
        total=total_bytes,
        desc="loading",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: shown on a terminal only
    )
    with bar:
        for spec, placed in zip(wanted, specs.values(), strict=True):
            if spec.path in DERIVED_LEAVES:
                leaves[spec.path] = _place(placed, "payload", compressed, mesh, rules)
            else:
                leaves[spec.path] = _load_leaf(shards, spec, placed, config, mesh, rules)
            bar.update(spec.num_bytes)
    return build_params(leaves, config)


def place_params(
    params: Params,
    config: ModelConfig,
    *,
    mesh: Mesh | None,
    rules: Rules | None = None,
    spare_experts: int = 0,
    engram_on_host: bool = False,
) -> Params:
    """Parameters that fit on one device, laid out on a mesh and in memories as loading does it."""
    if mesh is None and not engram_on_host:
        return params
    leaves: dict[str, Any] = {}
    for spec in schema_of(params, config):
        placed = placed_spec(spec, mesh, rules, spare_experts=spare_experts, engram_on_host=engram_on_host)
        leaf = leaf_at(params, spec.path)
        if not isinstance(leaf, ScaledArray):
            leaves[spec.path] = _place(placed, "payload", np.asarray(leaf), mesh, rules)
            continue
        payload_rows = placed.payload_shape[:-1] + leaf.payload.shape[-1:]
        payload = zero_padded(np.asarray(leaf.payload), payload_rows)
        scale = None
        if leaf.scale is not None and placed.scale_shape is not None:
            rows = zero_padded(np.asarray(leaf.scale), placed.scale_shape)
            scale = _place(placed, "scale", rows, mesh, rules)
        placed_payload = _place(placed, "payload", payload, mesh, rules)
        leaves[spec.path] = dataclasses.replace(leaf, payload=placed_payload, scale=scale)
    return build_params(leaves, config)


def _token_map(directory: Path, config: ModelConfig) -> np.ndarray:
    """Compressed id of each token id, from the tokenizer beside the weights."""
    if not config.engram_layer_ids:
        return np.zeros(config.vocab_size, np.int32)
    file = directory / TOKENIZER_NAME
    if not file.exists():
        raise ValueError(
            f"{file} is absent; the Engram token map is built from it, so copy the tokenizer of the checkpoint there"
        )
    return token_map(
        file,
        compressed_vocab_size=config.engram_compressed_vocab_size,
        vocab_size=config.vocab_size,
    )


def _check_shardings(spec: LeafSpec, mesh: Mesh | None, rules: Rules | None) -> None:
    """Finds a size that the mesh does not divide before anything is read."""
    part_sharding(spec, "payload", spec.payload_shape, mesh, rules)
    if spec.scale_shape is not None:
        part_sharding(spec, "scale", spec.scale_shape, mesh, rules)


def _load_leaf(
    shards: Shards,
    spec: LeafSpec,
    placed: LeafSpec,
    config: ModelConfig,
    mesh: Mesh | None,
    rules: Rules | None,
) -> Any:
    sources = leaf_sources(shards, spec, config, shape=placed.shape)
    arrays = {
        part: _assemble(source.shape, lambda index, s=source: read_slice(s, index), placed, part, mesh, rules)
        for part, source in sources.items()
    }
    if placed.scale_shape is None:
        return arrays["payload"]
    if "scale" not in arrays:
        return ScaledArray(payload=arrays["payload"], scale=None)
    return placed.leaf(lambda part, *_: arrays[part])


def _place(spec: LeafSpec, part: str, values: np.ndarray, mesh: Mesh | None, rules: Rules | None) -> jax.Array:
    return _assemble(values.shape, lambda index: values[index], spec, part, mesh, rules)


def _assemble(
    shape: tuple[int, ...],
    read: ReadSlice,
    spec: LeafSpec,
    part: str,
    mesh: Mesh | None,
    rules: Rules | None,
) -> jax.Array:
    """The array whose shards `read` gives; at most one shard is on the host at a time, and each is read once."""
    everything = tuple(slice(0, size) for size in shape)
    if mesh is None and spec.memory_kind is None:
        return _to_device(read(everything), None)
    sharding = part_sharding(spec, part, shape, mesh, rules)
    if isinstance(sharding, SingleDeviceSharding):
        return _to_device(read(everything), sharding)
    pieces: dict[Any, jax.Array] = {}
    for index, devices in _holders(sharding.addressable_devices_indices_map(shape)):
        values = read(index)
        places = [SingleDeviceSharding(device, memory_kind=spec.memory_kind) for device in devices]
        pieces |= {device: _to_device(values, place) for device, place in zip(devices, places, strict=True)}
        del values
    in_order = [pieces[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, in_order)


def _holders(
    index_map: Any,
) -> Iterator[tuple[tuple[slice, ...], list[Any]]]:
    """Each distinct slice with the devices that hold it."""
    groups: dict[tuple[tuple[int | None, int | None], ...], list[Any]] = {}
    for device, index in index_map.items():
        groups.setdefault(tuple((part.start, part.stop) for part in index), []).append(device)
    for bounds, devices in groups.items():
        yield tuple(slice(*bound) for bound in bounds), devices


def _to_device(values: np.ndarray, place: SingleDeviceSharding | None) -> jax.Array:
    """A copy at a place, the default device if None.

    Waits for it, so that the host copy can be freed, and never aliases a mapped file.
    """
    return jax.block_until_ready(jax.device_put(values, place, may_alias=False))
