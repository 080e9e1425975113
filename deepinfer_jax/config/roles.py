"""The role of each layer, derived once from the config (spec: backbone 1.2)."""

import dataclasses
import functools

from deepinfer_jax.config.model import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRole:
    """What one layer reads and owns. Ordinals index the stacked parameter and cache arrays; -1 means none."""

    layer: int
    ratio: int  # 0 window only; 1 or 2 reads a compressed cache of that ratio
    kv_ordinal: int  # which KV source this layer reads, counted over all sources
    cache_ordinal: int  # the same source, counted inside its ratio's cache arrays
    owns_kv: bool  # runs a compressor and writes main KV and index K
    index_ordinal: int  # which indexer this layer runs, -1 for layers that reuse a selection
    is_candidate_source: bool
    uses_candidates: bool
    engram_ordinal: int  # which Engram table feeds this layer's entry, -1 for none
    is_decoder: bool  # from the first ratio-1 source on: bounded replay may skip rows here

    @property
    def name(self) -> str:
        """The mode's name in the specification."""
        if self.ratio == 0:
            return "window"
        if self.owns_kv:
            return f"full r{self.ratio}"
        return f"reindex r{self.ratio}" if self.index_ordinal >= 0 else f"reuse r{self.ratio}"


@functools.cache
def layer_roles(config: ModelConfig) -> tuple[LayerRole, ...]:
    """The roles of the backbone layers, in order."""
    boundary = replay_boundary(config)
    return tuple(_role(config, layer, boundary) for layer in range(config.num_hidden_layers))


def replay_boundary(config: ModelConfig) -> int:
    """The first decoder layer: the first ratio-1 layer, which owns the last KV source (spec: backbone 2.2)."""
    return config.backbone_ratios.index(1)


def sources_of_ratio(config: ModelConfig, ratio: int) -> tuple[int, ...]:
    """Layers that own a cache of this ratio, in order: the leading axis of that ratio's cache arrays."""
    return tuple(i for i in config.kv_source_layer_ids if config.compress_ratios[i] == ratio)


def _role(config: ModelConfig, layer: int, boundary: int) -> LayerRole:
    ratio = config.backbone_ratios[layer]
    owners = [i for i in config.kv_source_layer_ids if i <= layer] if ratio else []
    owner = owners[-1] if owners else -1
    index_ids = config.index_source_layer_ids
    runs_indexer = layer in index_ids
    return LayerRole(
        layer=layer,
        ratio=ratio,
        kv_ordinal=config.kv_source_layer_ids.index(owner) if owners else -1,
        cache_ordinal=sources_of_ratio(config, ratio).index(owner) if owners else -1,
        owns_kv=layer in config.kv_source_layer_ids,
        index_ordinal=index_ids.index(layer) if runs_indexer else -1,
        is_candidate_source=layer == config.candidate_source_layer_id,
        uses_candidates=runs_indexer and layer not in config.kv_source_layer_ids,
        engram_ordinal=config.engram_layer_ids.index(layer) if layer in config.engram_layer_ids else -1,
        is_decoder=layer >= boundary,
    )
