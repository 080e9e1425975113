"""The `describe` command: parameters, bytes and arithmetic of a model, from its shape alone."""

import argparse
import collections
import dataclasses
import enum
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from deepinfer_jax.checkpoint.locate import locate_model
from deepinfer_jax.checkpoint.names import DERIVED_LEAVES, TensorSpec, expected_tensors, inventory, payload_name
from deepinfer_jax.config.args import EngineArgs, EngineConfig, resolve
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine.costs import (
    CacheFigures,
    DecodeCost,
    PrefillCost,
    WeightReads,
    cache_figures,
    decode_cost,
    prefill_cost,
    weight_reads,
)
from deepinfer_jax.engine.setup import locate_configured, make_runtime
from deepinfer_jax.kernels.catalog import OPS
from deepinfer_jax.kernels.registry import names
from deepinfer_jax.model.params import leaf_at
from deepinfer_jax.model.parts import schema_of
from deepinfer_jax.model.shardings import placed_params
from deepinfer_jax.parallel.mesh import CP, DP

CONTEXTS = (4096, 65536, 1048576)  # tokens
BATCHES = (1, 8, 64, 256)  # requests of a decode step
# Groups of the checkpoint that are no part of the backbone.
OUTSIDE_BACKBONE = frozenset({"Engram", "mtp", "vision", "aligner", "image span"})
# Where leaves that no checkpoint holds are counted.
DERIVED_GROUP = "derived tables"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """One group of tensors; bytes on devices are 0 for groups that are not loaded."""

    name: str
    num_tensors: int
    num_parameters: int  # logical values
    disk_bytes: int
    device_bytes: int  # on all devices together, a replicated array counted once
    bytes_per_device: int  # equal to device_bytes without a mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field or variable of the resolved configuration."""

    name: str
    value: bool | int | float | str | tuple[int, ...] | None
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """Every figure of one model."""

    groups: tuple[GroupFigures, ...]
    backbone_parameters: int
    total_parameters: int
    disk_bytes: int
    disk_bytes_by_dtype: dict[str, int]
    device_bytes: int
    bytes_per_device: int
    mesh: tuple[int, int] | None  # (dp, cp)
    numerics: str
    cache: CacheFigures
    decode: tuple[DecodeCost, ...]
    prefill: tuple[PrefillCost, ...]
    weight_reads: tuple[WeightReads, ...]
    kernels: dict[str, tuple[str, ...]]  # of each op with more than a reference, first choice first
    effective_config: tuple[Setting, ...]  # empty when no engine configuration was given


def abstract_mesh(dp: int, cp: int) -> AbstractMesh:
    """The description of a mesh of dp x cp devices; none needs to be attached."""
    return AbstractMesh((dp, cp), (DP, CP), axis_types=(AxisType.Auto, AxisType.Auto))


def describe(
    config: ModelConfig,
    *,
    runtime: RuntimeConfig | None = None,
    mesh: tuple[int, int] | None = None,
    engine: EngineConfig | None = None,
    with_vision: bool = False,
) -> Description:
    """The figures of a shape; nothing is allocated on a device.

    runtime: storage of the caches and lengths of the rings, the defaults if None. mesh: (dp, cp) for bytes of one
    device. with_vision: the vision encoder is on the devices too.
    """
    runtime = RuntimeConfig(model=config) if runtime is None else runtime
    tensors = expected_tensors(config)
    groups = _group_figures(config, mesh, tensors, with_vision)
    by_dtype: dict[str, int] = {}
    for spec, count in collections.Counter(tensors.values()).items():
        by_dtype[spec.dtypes[0]] = by_dtype.get(spec.dtypes[0], 0) + spec.num_bytes * count
    cache = cache_figures(runtime)
    return Description(
        groups=groups,
        backbone_parameters=sum(g.num_parameters for g in groups if g.name not in OUTSIDE_BACKBONE),
        total_parameters=sum(g.num_parameters for g in groups),
        disk_bytes=sum(g.disk_bytes for g in groups),
        disk_bytes_by_dtype=dict(sorted(by_dtype.items())),
        device_bytes=sum(g.device_bytes for g in groups),
        bytes_per_device=sum(g.bytes_per_device for g in groups),
        mesh=mesh,
        numerics=runtime.numerics,
        cache=cache,
        decode=tuple(decode_cost(config, n, cache=cache) for n in CONTEXTS),
        prefill=tuple(prefill_cost(config, n) for n in CONTEXTS),
        weight_reads=tuple(weight_reads(config, n) for n in BATCHES),
        kernels=names(OPS, runtime.backend),
        effective_config=_settings(engine) if engine is not None else (),
    )


def _settings(engine: EngineConfig) -> tuple[Setting, ...]:
    def plain(value: Any) -> Any:
        return value.name if isinstance(value, enum.Enum) else value

    return tuple(Setting(name=n, value=plain(engine.value(n)), source=source) for n, source in engine.sources)


def _group_figures(
    config: ModelConfig, mesh: tuple[int, int] | None, tensors: Mapping[str, TensorSpec], with_vision: bool
) -> tuple[GroupFigures, ...]:
    device, per_device = dict[str, int](), dict[str, int]()
    placed = placed_params(config, abstract_mesh(*(mesh or (1, 1))), with_vision=with_vision)
    for spec in schema_of(placed, config):
        group = DERIVED_GROUP
        if spec.path not in DERIVED_LEAVES:
            group = tensors[payload_name(spec, config, (0, 0))].group
        arrays = jax.tree.leaves(leaf_at(placed, spec.path))
        shards = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
        device[group] = device.get(group, 0) + sum(a.size * a.dtype.itemsize for a in arrays)
        per_device[group] = per_device.get(group, 0) + shards
    known = inventory(config)
    return tuple(
        GroupFigures(
            name=name,
            num_tensors=known[name].num_tensors if name in known else 0,
            num_parameters=known[name].num_parameters if name in known else 0,
            disk_bytes=known[name].num_bytes if name in known else 0,
            device_bytes=device.get(name, 0),
            bytes_per_device=per_device.get(name, 0),
        )
        for name in dict.fromkeys([*known, *device])
    )


def to_json(description: Description) -> str:
    """The figures as one JSON object."""
    return json.dumps(dataclasses.asdict(description), indent=1)


def to_text(description: Description) -> str:
    """The figures as tables; bytes in powers of ten."""
    d = description
    parts = [
        f"parameters: {_billions(d.backbone_parameters)} in the backbone, {_billions(d.total_parameters)} in all",
        _groups_table(d),
        "bytes on disk by dtype:\n" + table([(k, f"{v:,}") for k, v in d.disk_bytes_by_dtype.items()]),
        _cache_text(d),
        _decode_table(d),
        _prefill_table(d),
        _reads_table(d),
        _kernels_table(d),
    ]
    if d.effective_config:
        shown = {None: "unset", "": "(empty)"}
        rows = [(s.name, shown[s.value] if s.value in shown else str(s.value), s.source) for s in d.effective_config]
        parts.append("effective configuration:\n" + table(rows, is_numeric=False))
    return "\n\n".join(parts) + "\n"


def _groups_table(d: Description) -> str:
    per_device = f"of {d.mesh[0] * d.mesh[1]} devices, each" if d.mesh else ""
    rows = [("group", "tensors", "parameters", "bytes on disk", "bytes on device", per_device)]
    for g in d.groups:
        each = f"{g.bytes_per_device:,}" if d.mesh else ""
        rows.append(
            (g.name, f"{g.num_tensors:,}", f"{g.num_parameters:,}", f"{g.disk_bytes:,}", f"{g.device_bytes:,}", each)
        )
    each = f"{d.bytes_per_device:,}" if d.mesh else ""
    num_tensors = sum(g.num_tensors for g in d.groups)
    rows.append(
        ("total", f"{num_tensors:,}", f"{d.total_parameters:,}", f"{d.disk_bytes:,}", f"{d.device_bytes:,}", each)
    )
    return table(rows)


def _cache_text(d: Description) -> str:
    c = d.cache
    rows = [
        ("main KV and index K, each token", f"{c.bytes_per_token:,g}"),
        ("rings, tails and history, each request", f"{c.bytes_per_request:,}"),
        (f"  window rings of {c.ring_len} rows", f"{c.ring_bytes:,}"),
        ("  of these the window itself", f"{c.window_bytes:,}"),
        ("  compressor tails", f"{c.tail_bytes:,}"),
        ("  token history", f"{c.history_bytes:,}"),
        ("one row of window KV", f"{c.window_row_bytes}"),
        ("one row of main KV", f"{c.main_kv_row_bytes}"),
        ("one row of index K", f"{c.index_k_row_bytes}"),
    ]
    return f"cache bytes ({d.numerics}):\n" + table(rows)


def _decode_table(d: Description) -> str:
    labels = ("linear", "attention", "dense_scan", "candidate_scan", "total")
    rows = [("context", *(f"{cost.context:,}" for cost in d.decode))]
    rows += [(label.replace("_", " "), *(_giga(getattr(cost, label)) for cost in d.decode)) for label in labels]
    sizes = ("kv_bytes_read", "index_bytes_read", "bytes_written", "bytes_held")
    rows += [(label.replace("_", " "), *(f"{getattr(cost, label):,.0f}" for cost in d.decode)) for label in sizes]
    return "decode, GFLOP and cache bytes for one token:\n" + table(rows)


def _prefill_table(d: Description) -> str:
    labels = ("bounded", "full", "encoder_scan", "encoder_attention")
    rows = [("prompt", *(f"{cost.prompt_len:,}" for cost in d.prefill))]
    rows += [(label.replace("_", " "), *(_giga(getattr(cost, label)) for cost in d.prefill)) for label in labels]
    return "prefill, GFLOP for each prompt token:\n" + table(rows)


def _reads_table(d: Description) -> str:
    rows = [("batch", "experts of a layer", "backbone bytes", "Engram bytes")]
    rows += [
        (str(r.batch), f"{r.experts_per_layer:.1f}", f"{r.backbone_bytes:,}", f"{r.engram_bytes:,}")
        for r in d.weight_reads
    ]
    return "weights read by a decode step (experts chosen evenly):\n" + table(rows)


def _kernels_table(d: Description) -> str:
    rows = [(op, ", ".join(found) or "none") for op, found in d.kernels.items()]
    return "implementations, first choice first:\n" + table(rows, is_numeric=False)


def table(rows: Sequence[Sequence[str]], *, is_numeric: bool = True) -> str:
    """Columns as wide as their longest cell; in numeric tables all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            t.rjust(w) if is_numeric and i else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B ({count:,})"


def _giga(flops: int | float) -> str:
    return f"{flops / 1e9:.3f}"


def add_describe_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `describe` to the subparsers of an `argparse` parser, and returns its own."""
    parser = subparsers.add_parser("describe", help="parameters, bytes and arithmetic of a model; loads no weights")
    parser.add_argument(
        "model",
        nargs="?",
        help="checkpoint directory, config.json or Hugging Face id; left out, the model that generate would use",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument("--vision", action="store_true", help="count the vision encoder among what devices hold")
    parser.add_argument("--mesh", type=parse_mesh, metavar="DPxCP", help="also the bytes of one device of this mesh")
    return parser


def parse_mesh(text: str) -> tuple[int, int]:
    """(dp, cp) from a text such as "8x1"."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; give DPxCP with both at least 1, such as 8x1")
    return int(match[1]), int(match[2])


def describe_model(args: argparse.Namespace) -> tuple[Description, Path]:
    """The figures of `args.model`, and where it is. Raises ValueError for what cannot be described."""
    engine = resolve(EngineArgs(model=args.model))
    if engine.model is None:
        location = locate_configured(engine)
    else:
        location = locate_model(engine.model, revision=engine.revision, needs_weights=False)
    config = load_config(location)
    runtime = make_runtime(engine, config, target="cpu" if engine.device == "auto" else engine.device)
    return describe(config, runtime=runtime, mesh=args.mesh, engine=engine, with_vision=args.vision), location
