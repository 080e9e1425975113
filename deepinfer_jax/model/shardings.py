"""Where parameters and device state lie on a mesh: the schema's logical axes through the rules table."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.backbone import StepOutput, forward
from deepinfer_jax.model.batch import StepBatch
from deepinfer_jax.model.leaves import LeafSpec, unchecked
from deepinfer_jax.model.params import Params, build_params
from deepinfer_jax.model.parts import wanted_schema
from deepinfer_jax.model.state import State
from deepinfer_jax.parallel.mesh import CP, DP, RULES, AnyMesh, Rules, merged_rules, padded_shape, sharding_for

_PAGED = ("source", "page", "entry", "latent")
_STATE_AXES: dict[str, tuple[str, ...]] = {
    "window": ("layer", "slot", "ring", "latent"),
    "main_kv": _PAGED,
    "index_k": _PAGED,
    "tails": ("source", "slot", "tail", "latent"),
    "history": ("slot", "history"),
    "draft": ("layer", "slot", "ring", "latent"),
}


HOST_MEMORY = "pinned_host"  # JAX's name of host memory that a device can reach
_IN_PIECES = ("expert", "engram_row")  # logical axes of parameters that a step finds in pieces
# How a step on a mesh takes the state in and gives it back; a spec may stand for a whole subtree.
STATE_SPECS: State = unchecked(
    State,
    {
        **dict.fromkeys(("window", "main_kv", "index_k", "tails", "draft"), PartitionSpec(None, DP)),
        "history": PartitionSpec(DP),
    },
)


def placed_spec(
    spec: LeafSpec,
    mesh: AnyMesh | None,
    rules: Rules | None = None,
    *,
    spare_experts: int = 0,
    engram_on_host: bool = False,
) -> LeafSpec:
    """The spec with padded axes grown to what the mesh needs: rows of Engram tables, and places for experts.

    spare_experts: places that each layer of the backbone has beyond its experts, at least. engram_on_host: Engram
    tables are in the memory of the hosts.
    """
    shape = spec.shape
    if spare_experts and spec.path.startswith("moe.experts."):
        shape = tuple(n + spare_experts if a == "expert" else n for n, a in zip(shape, spec.axes, strict=True))
    kind = HOST_MEMORY if engram_on_host and "engram_row" in spec.axes else None
    return dataclasses.replace(spec, shape=padded_shape(shape, spec.axes, mesh, rules), memory_kind=kind)


def part_sharding(
    spec: LeafSpec, part: str, shape: tuple[int, ...], mesh: AnyMesh | None, rules: Rules | None = None
) -> Sharding:
    """The sharding of one array of a leaf; the default device when there is no mesh."""
    if mesh is None:
        chosen = jax.config.jax_default_device
        sharding = SingleDeviceSharding(chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0])
    else:
        sharding = sharding_for(mesh, spec.axes, shape, rules=rules, name=f"{spec.path} ({part})")
    return sharding if spec.memory_kind is None else sharding.with_memory_kind(spec.memory_kind)


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


def config_on_mesh(config: RuntimeConfig, mesh: AnyMesh, rules: Rules | None = None) -> RuntimeConfig:
    """The static configuration of steps on a mesh, for parameters that were loaded under these rules.

    Raises ValueError for rules that change anything but "expert" and "engram_row": a step knows no other pieces.
    """
    table = merged_rules(rules)
    others = sorted(name for name, rule in table.items() if rule != RULES[name] and name not in _IN_PIECES)
    if others:
        raise ValueError(f"rules change {others}, and a step on a mesh can only follow those of {_IN_PIECES}")

    def axes(name: str) -> tuple[str, ...]:
        rule = table[name]
        return (rule,) if isinstance(rule, str) else tuple(rule or ())

    return dataclasses.replace(
        config,
        dp=mesh.shape[DP],
        cp=mesh.shape[CP],
        expert_axes=axes("expert"),
        engram_axes=axes("engram_row"),
    )


def spread(specs: Any, tree: Any) -> Any:
    """A spec for each leaf, from a tree that may have one for a whole subtree."""
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec)


def forward_on_mesh(
    params: Params, state: State, batch: StepBatch, *, mesh: Mesh, config: RuntimeConfig
) -> tuple[Array, State]:
    """`forward` on every device of a mesh, for any jit: logits [dp, N, V] and the state.

    params: loaded on the mesh. config: of `config_on_mesh`, with the rules of that loading. state: of the
    slots and pages of all ranks. batch: arrays with a leading axis of ranks; slots and pages count within a rank.
    Raises ValueError for a mesh of another shape than the config's.
    """
    if (config.dp, config.cp) != (mesh.shape[DP], mesh.shape[CP]):
        raise ValueError(
            f"the config is for dp={config.dp}, cp={config.cp}, and the mesh is {dict(mesh.shape)}; make it with "
            "config_on_mesh"
        )

    def body(params: Params, state: State, batch: StepBatch) -> tuple[Array, State]:
        output: StepOutput
        output, state = forward(params, state, jax.tree.map(lambda leaf: leaf[0], batch), config=config)
        return output.logits[None], state

    ranks = PartitionSpec(DP)
    # What lies on all devices of a rank is computed by all of them alike; the checker cannot know that.
    step = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(step_specs(params, config), STATE_SPECS, ranks),
        out_specs=(ranks, STATE_SPECS),
        check_vma=False,
    )
    return step(params, state, batch)
