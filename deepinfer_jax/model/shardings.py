"""Where parameters and device state lie on a mesh: the schema's logical axes through the rules table."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import Params, build_params
from deepinfer_jax.model.parts import wanted_schema
from deepinfer_jax.model.state import State
from deepinfer_jax.parallel.mesh import AnyMesh, Rules, merged_rules, padded_shape, sharding_for

_PAGED = ("source", "page", "entry", "latent")
_STATE_AXES: dict[str, tuple[str, ...]] = {
    "window": ("layer", "slot", "ring", "latent"),
    "main_kv": _PAGED,
    "index_k": _PAGED,
    "tails": ("source", "slot", "tail", "latent"),
    "history": ("slot", "history"),
    "draft": ("layer", "slot", "ring", "latent"),
}


def placed_spec(
    spec: LeafSpec, mesh: AnyMesh | None, rules: Rules | None = None, *, spare_experts: int = 0
) -> LeafSpec:
    """The spec with padded axes grown to what the mesh needs: rows of Engram tables, and places for experts.

    spare_experts: places that each layer of the backbone has beyond its experts, at least.
    """
    shape = spec.shape
    if spare_experts and spec.path.startswith("moe.experts."):
        shape = tuple(n + spare_experts if a == "expert" else n for n, a in zip(shape, spec.axes, strict=True))
    return dataclasses.replace(spec, shape=padded_shape(shape, spec.axes, mesh, rules))


def part_sharding(
    spec: LeafSpec, part: str, shape: tuple[int, ...], mesh: AnyMesh | None, rules: Rules | None = None
) -> Sharding:
    """The sharding of one array of a leaf; the default device when there is no mesh."""
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return sharding_for(mesh, spec.axes, shape, rules=rules, name=f"{spec.path} ({part})")


def param_shardings(
    config: ModelConfig,
    mesh: AnyMesh | None,
    rules: Rules | None = None,
    *,
    with_draft: bool = False,
    with_vision: bool = False,
) -> Params:
    """A tree of shardings in place of the arrays of `Params`."""

    def make(spec: LeafSpec) -> Callable[[str, tuple[int, ...], np.dtype], Sharding]:
        return lambda part, shape, _: part_sharding(spec, part, shape, mesh, rules)

    wanted = wanted_schema(config, with_draft=with_draft, with_vision=with_vision)
    placed = (placed_spec(spec, mesh, rules) for spec in wanted)
    return build_params({spec.path: spec.leaf(make(spec)) for spec in placed}, config)


def placed_params(
    config: ModelConfig,
    mesh: AnyMesh | None,
    rules: Rules | None = None,
    *,
    with_draft: bool = False,
    with_vision: bool = False,
) -> Params:
    """A tree of shape structs with the shardings and padded shapes that loading gives."""

    def make(spec: LeafSpec) -> Callable[[str, tuple[int, ...], np.dtype], jax.ShapeDtypeStruct]:
        return lambda part, shape, dtype: jax.ShapeDtypeStruct(
            shape, dtype, sharding=part_sharding(spec, part, shape, mesh, rules)
        )

    wanted = wanted_schema(config, with_draft=with_draft, with_vision=with_vision)
    placed = (placed_spec(spec, mesh, rules) for spec in wanted)
    return build_params({spec.path: spec.leaf(make(spec)) for spec in placed}, config)


def state_shardings(state: State, mesh: AnyMesh | None, rules: Rules | None = None) -> State:
    """A tree of shardings in place of the arrays of `state` (arrays or shape structs): slots and pages over dp."""

    def shard(path: tuple[Any, ...], array: Any) -> Sharding:
        if mesh is None:
            return SingleDeviceSharding(jax.local_devices()[0])
        field = path[0].name
        name = f"state{jax.tree_util.keystr(path)}"
        return sharding_for(mesh, _STATE_AXES[field], array.shape, rules=rules, name=name)

    return jax.tree_util.tree_map_with_path(shard, state)


def step_specs(params: Params, config: RuntimeConfig) -> Params:
    """How a step on a mesh takes parameters in (`jax.shard_map`): experts and Engram rows in pieces, all else whole."""

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = [str(getattr(key, "name", "")) for key in path]
        if "experts" in names:
            return PartitionSpec(None, config.expert_axes)
        if names[:2] == ["engram", "embed"]:
            return PartitionSpec(config.engram_axes)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


def spread_axes(rules: Rules | None, name: str) -> tuple[str, ...]:
    """The mesh axes of "expert" or "engram_row" under a rules table; with none, every device has all of them."""
    rule = merged_rules(rules)[name]
    return (rule,) if isinstance(rule, str) else tuple(rule or ())
