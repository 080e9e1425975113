"""Parameters in an orbax checkpoint: saved from one mesh, restored on another with the same bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from deepinfer_jax.checkpoint.write import released_config
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.leaves import LeafSpec
from deepinfer_jax.model.params import DRAFT_PREFIX, Params, build_params, leaf_at
from deepinfer_jax.model.parts import schema_of, wanted_schema
from deepinfer_jax.model.shardings import part_sharding, placed_spec
from deepinfer_jax.model.vision_params import VISION_PREFIX
from deepinfer_jax.ops.quant import ScaledArray
from deepinfer_jax.parallel.mesh import PADDED_AXES, Rules

_CONFIG_KEY = "config"


def save_params(params: Params, config: ModelConfig, directory: str | Path) -> None:
    """Writes the parameters, one entry for each array, and the config they belong to.

    Draft stages and the vision encoder are written where `params` has them.
    Every process of a multi-process run calls it and writes what its devices hold. The directory must not exist.
    """
    import orbax.checkpoint as ocp

    target = Path(directory).absolute()
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or save to another directory")
    tree = {spec.path: _parts(leaf_at(params, spec.path)) for spec in schema_of(params, config)}
    args = ocp.args.PyTreeSave(tree, custom_metadata={_CONFIG_KEY: released_config(config)})
    # Cutting replicated arrays into one piece for each device would compile a program for each of them.
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(target, args=args)


def restore_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Params:
    """The saved parameters on `mesh` (None: the default device), whatever mesh they were saved from.

    Draft stages and the vision encoder are there if they were saved. Each device reads its own shard. Zero rows that a
    mesh needs at the end of Engram tables are added or dropped; all other bits are those that were saved.
    Raises ValueError when the config or a shape differs.
    """
    import orbax.checkpoint as ocp

    source = Path(directory).absolute()
    if not source.is_dir():
        raise ValueError(f"{source} is no directory; give one that save_params wrote")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(source).item_metadata
        if metadata is None or _CONFIG_KEY not in (metadata.custom_metadata or {}):
            raise ValueError(f"{source} holds no parameters that save_params wrote")
        _check_config(source, metadata.custom_metadata[_CONFIG_KEY], config)
        saved = metadata.tree
        specs = wanted_schema(
            config,
            with_draft=any(path.startswith(DRAFT_PREFIX) for path in saved),
            with_vision=any(path.startswith(VISION_PREFIX) for path in saved),
        )
        wanted: dict[str, Any] = {}
        for spec in specs:
            placed = placed_spec(spec, mesh, rules)
            wanted[spec.path] = {
                part: _restore_args(placed, part, array, mesh, rules) for part, array in saved[spec.path].items()
            }
        args = ocp.args.PyTreeRestore(
            item=jax.tree.map(lambda _: 0, wanted, is_leaf=lambda a: isinstance(a, ocp.RestoreArgs)),
            restore_args=wanted,
        )
        arrays = checkpointer.restore(source, args=args)
    return build_params({spec.path: _leaf(spec, arrays[spec.path]) for spec in specs}, config)


def _parts(leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, ScaledArray):
        return {"payload": leaf}
    return {"payload": leaf.payload, **({} if leaf.scale is None else {"scale": leaf.scale})}


def _leaf(spec: LeafSpec, parts: Mapping[str, Any]) -> Any:
    if spec.scale_shape is None:
        return parts["payload"]
    if "scale" not in parts:
        return ScaledArray(payload=parts["payload"], scale=None)
    return spec.leaf(lambda part, *_: parts[part])


def _restore_args(placed: LeafSpec, part: str, saved: Any, mesh: Mesh | None, rules: Rules | None) -> Any:
    """How one saved array is restored: the padded axes take the size that this mesh needs."""
    import orbax.checkpoint as ocp

    shape = tuple(
        needed if axis in PADDED_AXES else size
        for axis, size, needed in zip(placed.axes, saved.shape, placed.shape, strict=True)
    )
    return ocp.ArrayRestoreArgs(
        dtype=saved.dtype,
        sharding=part_sharding(placed, part, shape, mesh, rules),
        global_shape=shape,
        strict=False,
    )


def _check_config(source: Path, saved: Mapping[str, Any], config: ModelConfig) -> None:
    given = released_config(config)
    differing = sorted(_differences(saved, given))
    if differing:
        raise ValueError(
            f"{source} was saved with another config: {', '.join(differing)} differ; restore it with its own config"
        )


def _differences(saved: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in {*saved, *given}:
        old, new = saved.get(key), given.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            names += _differences(old, new, f"{prefix}{key}.")
        elif _listed(old) != _listed(new):
            names.append(f"{prefix}{key}")
    return names


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
