"""The mesh: its two axes, and the one table that says which logical axis lies along which of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

DP, CP = "dp", "cp"  # attention data parallel; context parallel in prefill

type AxisRule = str | tuple[str, ...] | None
type Rules = Mapping[str, AxisRule]
type AnyMesh = Mesh | AbstractMesh

# Logical axis -> mesh axes; None: every device holds the whole axis. The axis "token" is for activations of
# prefill; in decode a caller overrides it with None.
RULES: dict[str, AxisRule] = {
    "request": DP,
    "slot": DP,
    "page": DP,
    "token": CP,
    "expert": (DP, CP),  # expert parallelism spans the whole mesh
    "engram_row": (DP, CP),
    "engram_width": None,
    "entry": None,
    "head": None,
    "hidden": None,
    "history": None,
    "inner": None,
    "latent": None,
    "layer": None,
    "mix": None,
    "ring": None,
    "router": None,
    "source": None,
    "stream": None,
    "tail": None,
    "vocab": None,
}

# Axes that may grow to a multiple of the devices that share them. Added rows are zero and not addressed, until spare
# expert places get replicas (`replicas.py`).
PADDED_AXES = frozenset({"engram_row", "expert"})


def make_mesh(dp: int, cp: int, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of dp x cp devices with automatic axes, from `devices` or the first attached ones."""
    if dp < 1 or cp < 1:
        raise ValueError(f"dp={dp} and cp={cp} must both be at least 1")
    available = jax.devices() if devices is None else list(devices)
    if dp * cp > len(available):
        raise ValueError(
            f"a mesh of dp={dp} x cp={cp} needs {dp * cp} devices, {len(available)} are available; "
            "make dp or cp smaller"
        )
    return jax.make_mesh((dp, cp), (DP, CP), axis_types=(AxisType.Auto, AxisType.Auto), devices=available[: dp * cp])


def merged_rules(rules: Rules | None) -> Rules:
    """The rules table with the caller's entries in place of its own."""
    if rules is None:
        return RULES
    unknown = sorted(set(rules) - set(RULES))
    if unknown:
        raise ValueError(f"rules name unknown logical axes {unknown}; known ones are {sorted(RULES)}")
    return {**RULES, **rules}


def shard_count(axis: str, mesh: AnyMesh | None, rules: Rules | None = None) -> int:
    """Number of pieces that a logical axis is cut into."""
    return math.prod(mesh.shape[name] for name in _mesh_axes(axis, mesh, rules)) if mesh else 1


def padded_shape(
    shape: Sequence[int], axes: Sequence[str], mesh: AnyMesh | None, rules: Rules | None = None
) -> tuple[int, ...]:
    """The shape with axes of `PADDED_AXES` rounded up to a multiple of their pieces."""
    pieces = [shard_count(a, mesh, rules) if a in PADDED_AXES else 1 for a in axes]
    return tuple(-(-size // n) * n for size, n in zip(shape, pieces, strict=True))


def sharding_for(
    mesh: AnyMesh,
    axes: Sequence[str],
    shape: Sequence[int],
    *,
    rules: Rules | None = None,
    name: str = "array",
) -> NamedSharding:
    """The sharding of an array whose axes have these logical names, one for each entry of `shape`.

    `shape` is the padded one where an axis is padded. Raises ValueError, naming the array, for a size that the
    mesh does not divide and for a mesh axis that two axes of the array claim.
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name} has shape {tuple(shape)} but {len(axes)} axis names {tuple(axes)}")
    claimed: set[str] = set()
    entries: list[AxisRule] = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axes = _mesh_axes(axis, mesh, rules)
        pieces = math.prod(mesh.shape[a] for a in mesh_axes)
        if size % pieces:
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} cannot be cut into {pieces} equal pieces "
                f"(mesh {dict(mesh.shape)}); choose a mesh that divides it or another rule for {axis!r}"
            )
        if claimed & set(mesh_axes):
            raise ValueError(
                f"{name}: two of its axes {tuple(axes)} are cut along mesh axis "
                f"{sorted(claimed & set(mesh_axes))}; set the rule of one of them to None"
            )
        claimed |= set(mesh_axes)
        entries.append(mesh_axes or None)
    return NamedSharding(mesh, PartitionSpec(*entries))


def _mesh_axes(axis: str, mesh: AnyMesh | None, rules: Rules | None) -> tuple[str, ...]:
    table = merged_rules(rules)
    if axis not in table:
        raise ValueError(f"logical axis {axis!r} has no rule; known ones are {sorted(table)}")
    rule = table[axis]
    mesh_axes = (rule,) if isinstance(rule, str) else tuple(rule or ())
    unknown = [name for name in mesh_axes if mesh is not None and name not in mesh.shape]
    if unknown:
        raise ValueError(
            f"the rule of {axis!r} names mesh axes {unknown}, the mesh has {sorted(mesh.shape) if mesh else []}"
        )
    return mesh_axes
