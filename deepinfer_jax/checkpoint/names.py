"""The released tensor names, and the shape and dtype of every tensor that a released checkpoint holds.

This file is the only place that spells a name; shapes and storage come from the parameter schemas (spec:
checkpoint 2, vision 2, dspark 2).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.leaves import LeafSpec, Storage
from deepinfer_jax.model.params import DRAFT_PREFIX
from deepinfer_jax.model.parts import wanted_schema

# Leaves of the parameter tree that no checkpoint holds.
DERIVED_LEAVES = frozenset({"engram.token_map"})

# Schema path -> name inside a block ("layers.L." or "mtp.K."). A scaled weight NAME.weight has its NAME.scale.
_BLOCK_NAMES: dict[str, str] = {
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "attention.wq_a": "attn.wq_a.weight",
    "attention.q_norm": "attn.q_norm.weight",
    "attention.wq_b": "attn.wq_b.weight",
    "attention.wkv": "attn.wkv.weight",
    "attention.kv_norm": "attn.kv_norm.weight",
    "attention.attn_sink": "attn.attn_sink",
    "attention.wo_a": "attn.wo_a.weight",
    "attention.wo_b": "attn.wo_b.weight",
    "hc_attn.fn": "hc_attn_fn",
    "hc_attn.scale": "hc_attn_scale",
    "hc_attn.base": "hc_attn_base",
    "hc_ffn.fn": "hc_ffn_fn",
    "hc_ffn.scale": "hc_ffn_scale",
    "hc_ffn.base": "hc_ffn_base",
    "moe.gate": "ffn.gate.weight",
    "moe.bias": "ffn.gate.bias",
    "moe.bias_vl": "ffn.gate.bias_vl",
    "moe.experts.w1": "ffn.experts.{expert}.w1.weight",
    "moe.experts.w2": "ffn.experts.{expert}.w2.weight",
    "moe.experts.w3": "ffn.experts.{expert}.w3.weight",
    "moe.shared.w1": "ffn.shared_experts.w1.weight",
    "moe.shared.w2": "ffn.shared_experts.w2.weight",
    "moe.shared.w3": "ffn.shared_experts.w3.weight",
}
# Blocks of the backbone only.
_LAYER_NAMES: dict[str, str] = {
    "compressor.wkv": "attn.compressor.wkv.weight",
    "compressor.wgate": "attn.compressor.wgate.weight",
    "compressor.norm": "attn.compressor.norm.weight",
    "indexer.wq_b": "attn.indexer.wq_b.weight",
    "indexer.weights_proj": "attn.indexer.weights_proj.weight",
    "indexer.wk": "attn.indexer.wk.weight",
    "indexer.k_norm": "attn.indexer.k_norm.weight",
    "engram.embed": "engram.embed.weight",
    "engram.wkv": "engram.wkv.weight",
    "engram.q_weight": "engram.q_weight",
    "engram.k_weight": "engram.k_weight",
}
_WHOLE_NAMES: dict[str, str] = {"embed": "embed.weight", "head": "head.weight", "norm": "norm.weight"}
# What only one draft stage has; {last}: the last one.
_DRAFT_NAMES: dict[str, str] = {
    "main_proj": "mtp.0.main_proj.weight",
    "main_norm": "mtp.0.main_norm.weight",
    "norm": "mtp.{last}.norm.weight",
    "markov.embed": "mtp.{last}.markov_head.embed.weight",
    "markov.head": "mtp.{last}.markov_head.head.weight",
    "confidence": "mtp.{last}.confidence_head.proj.weight",
}
# Everything behind an image; {block}: of the tower.
_VISION_NAMES: dict[str, str] = {
    "vision.patch_embed.weight": "vision.patch_embed.proj.weight",
    "vision.patch_embed.bias": "vision.patch_embed.proj.bias",
    "vision.blocks.norm1": "vision.blocks.{block}.norm1.weight",
    "vision.blocks.wqkv.weight": "vision.blocks.{block}.attn.wqkv.weight",
    "vision.blocks.wqkv.bias": "vision.blocks.{block}.attn.wqkv.bias",
    "vision.blocks.wo.weight": "vision.blocks.{block}.attn.wo.weight",
    "vision.blocks.wo.bias": "vision.blocks.{block}.attn.wo.bias",
    "vision.blocks.norm2": "vision.blocks.{block}.norm2.weight",
    "vision.blocks.w1": "vision.blocks.{block}.mlp.w1.weight",
    "vision.blocks.w2": "vision.blocks.{block}.mlp.w2.weight",
    "vision.norm": "vision.norm.weight",
    "vision.aligner.w1.weight": "aligner.w1.weight",
    "vision.aligner.w1.bias": "aligner.w1.bias",
    "vision.aligner.w2.weight": "aligner.w2.weight",
    "vision.aligner.w2.bias": "aligner.w2.bias",
    "vision.image_start": "image_start",
    "vision.image_newline": "image_newline",
    "vision.image_end": "image_end",
}

_GROUPS: dict[str, str] = {  # longest matching prefix of a schema path -> group of the inventory
    "embed": "embed and head",
    "head": "embed and head",
    "norm": "norms",
    "attn_norm": "norms",
    "ffn_norm": "norms",
    "attention": "attention",
    "compressor": "compressor",
    "indexer": "indexer",
    "hc_attn": "mHC",
    "hc_ffn": "mHC",
    "moe": "router",
    "moe.experts": "routed experts",
    "moe.shared": "shared experts",
    "engram": "Engram",
    "draft": "mtp",
    "vision": "vision",
    "vision.aligner": "aligner",
    "vision.image_start": "image span",
    "vision.image_newline": "image span",
    "vision.image_end": "image span",
}
_DTYPES: dict[Storage, str] = {
    "fp8": "F8_E4M3",
    "fp4": "I8",
    "fp8_rows": "F8_E4M3",
    "bf16": "BF16",
    "f32": "F32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a checkpoint holds under one name.

    dtypes: accepted safetensors dtypes, the released one first. num_parameters: logical values, 0 for scales.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    group: str
    num_parameters: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the released dtype."""
        return math.prod(self.shape) * {"BF16": 2, "F32": 4}.get(self.dtypes[0], 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupTotals:
    """Sums over the tensors of one group."""

    num_tensors: int = 0
    num_bytes: int = 0
    num_parameters: int = 0


def num_lead_axes(spec: LeafSpec) -> int:
    """How many leading axes of a leaf run over separate tensors: layers, then experts."""
    return (spec.stack is not None) + ("expert" in spec.axes)


def payload_name(spec: LeafSpec, config: ModelConfig, lead: tuple[int, ...] = ()) -> str:
    """The name of the tensor at these leading indices of a leaf."""
    if spec.path in _WHOLE_NAMES:
        return _WHOLE_NAMES[spec.path]
    if spec.path in _VISION_NAMES:
        return _VISION_NAMES[spec.path].format(block=spec.stack[lead[0]] if spec.stack is not None else -1)
    path, block = spec.path.removeprefix(DRAFT_PREFIX), "mtp" if spec.path.startswith(DRAFT_PREFIX) else "layers"
    if block == "mtp" and path in _DRAFT_NAMES:
        return _DRAFT_NAMES[path].format(last=config.num_nextn_predict_layers - 1)
    layer = spec.stack[lead[0]] if spec.stack is not None else -1
    if path.startswith("engram.embed."):
        path, ordinal = path.rsplit(".", 1)
        layer = config.engram_layer_ids[int(ordinal)]
    template = _BLOCK_NAMES[path] if path in _BLOCK_NAMES else _LAYER_NAMES[path]
    expert = lead[1] if len(lead) > 1 else -1
    return f"{block}.{layer}.{template.format(expert=expert)}"


def scale_name(name: str) -> str:
    """The name of the scales that belong to a weight."""
    return f"{name.removesuffix('.weight')}.scale"


def expected_tensors(config: ModelConfig, *, is_quantized: bool = True) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of this shape, vision and draft stages included, in a stable order.

    is_quantized=False: the unpacked form, the same names without scales, weights in BF16 or F32.
    """
    tensors: dict[str, TensorSpec] = {}
    for kind in _kinds(config):
        payload, scale = _specs(kind, is_quantized)
        for name in kind.names:
            tensors[name] = payload
            if scale is not None:
                tensors[scale_name(name)] = scale
    return tensors


def inventory(config: ModelConfig) -> dict[str, GroupTotals]:
    """Tensors, bytes and parameters of a released checkpoint by group (spec: checkpoint 2)."""
    totals: dict[str, GroupTotals] = {}
    for kind in _kinds(config):
        old, count = totals.get(kind.group, GroupTotals()), len(kind.names)
        stored = [spec for spec in _specs(kind, is_quantized=True) if spec is not None]
        totals[kind.group] = GroupTotals(
            num_tensors=old.num_tensors + count * len(stored),
            num_bytes=old.num_bytes + count * sum(s.num_bytes for s in stored),
            num_parameters=old.num_parameters + count * sum(s.num_parameters for s in stored),
        )
    return totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """Tensors that differ in nothing but their name; shape: the logical one."""

    names: tuple[str, ...]
    storage: Storage
    shape: tuple[int, ...]
    group: str


def _specs(kind: _Kind, is_quantized: bool) -> tuple[TensorSpec, TensorSpec | None]:
    """What is stored under each name of a kind, and under the name of its scales."""
    num_parameters = math.prod(kind.shape)
    if not is_quantized:
        dtypes = ("F32",) if kind.storage == "f32" else ("BF16", "F32")
        return TensorSpec(shape=kind.shape, dtypes=dtypes, group=kind.group, num_parameters=num_parameters), None
    leaf = LeafSpec(path=kind.names[0], shape=kind.shape, storage=kind.storage, axes=())
    dtypes = (_DTYPES[kind.storage],)
    if kind.storage == "bf16" and _is_flexible(kind.names[0]):
        dtypes = (*dtypes, "F32")
    payload = TensorSpec(shape=leaf.payload_shape, dtypes=dtypes, group=kind.group, num_parameters=num_parameters)
    if leaf.scale_shape is None:
        return payload, None
    scale = TensorSpec(shape=leaf.scale_shape, dtypes=("F8_E8M0",), group=kind.group, num_parameters=0)
    return payload, scale


def _is_flexible(name: str) -> bool:
    """Whether a tensor may be BF16 or F32 (fixtures: storage dtypes): norms, compressors, vision."""
    return "norm" in name or ".compressor." in name or name.startswith(("vision.", "aligner."))


def _kinds(config: ModelConfig) -> Iterator[_Kind]:
    for spec in wanted_schema(config, with_draft=True, with_vision=True):
        if spec.path not in DERIVED_LEAVES:
            num_lead = num_lead_axes(spec)
            leads = itertools.product(*map(range, spec.shape[:num_lead]))
            yield _Kind(
                names=tuple(payload_name(spec, config, lead) for lead in leads),
                storage=spec.storage,
                shape=spec.shape[num_lead:],
                group=_group(spec.path),
            )


def _group(path: str) -> str:
    return _GROUPS[max((p for p in _GROUPS if path == p or path.startswith(f"{p}.")), key=len)]
