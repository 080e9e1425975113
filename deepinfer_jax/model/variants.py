"""Layers as numbers: where each finds its weights and caches, and which variant of each part it runs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.roles import LayerRole, layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.linear.api import PackedLinear, multiplies_packed
from deepinfer_jax.model.params import layer_slice
from deepinfer_jax.ops import rope
from deepinfer_jax.ops.quant import ScaledArray, dequantize, fp8_roundtrip
from deepinfer_jax.pytree import pytree_dataclass

Index = int | Int[Array, ""]


@pytree_dataclass
class Layer:
    """One layer as numbers: Python ints where layers are unrolled, traced ints inside the layer loop.

    Ordinals are 0 where the layer has no such part; the kind numbers say so and choose among the variants.
    """

    layer: Index
    kv_ordinal: Index  # its KV source among all sources
    cache_ordinal: Index  # the same source among those of its ratio
    index_ordinal: Index  # its indexer
    ratio_kind: Index  # 0 window only, 1 ratio 2, 2 ratio 1
    source_kind: Index  # 0 no compressor, 1 ratio 2, 2 ratio 1
    selection_kind: Index  # 0 keeps the selection, i runs `selection_kinds(config)[i - 1]`
    engram_kind: Index  # 0 none, i uses table i - 1
    target_ordinal: Index  # place among the drafter's target layers, their number where it is none of them
    decoder_kind: Index  # 0 encoder layer, 1 decoder layer: bounded replay cuts its window at the tail's start


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionKind:
    """One variant of an index source."""

    ratio: int
    uses_candidates: bool
    is_candidate_source: bool


RATIO_OF_KIND = (0, 2, 1)


@functools.cache
def selection_kinds(config: ModelConfig) -> tuple[SelectionKind, ...]:
    """The variants of index sources that this model has, in order of first use."""
    kinds = [_selection_kind(role) for role in layer_roles(config) if role.index_ordinal >= 0]
    return tuple(dict.fromkeys(kinds))


def _selection_kind(role: LayerRole) -> SelectionKind:
    return SelectionKind(
        ratio=role.ratio, uses_candidates=role.uses_candidates, is_candidate_source=role.is_candidate_source
    )


@functools.cache
def all_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """Every layer with Python ints."""
    kinds, targets = selection_kinds(config), config.dspark_target_layer_ids
    return tuple(
        Layer(
            layer=role.layer,
            kv_ordinal=max(role.kv_ordinal, 0),
            cache_ordinal=max(role.cache_ordinal, 0),
            index_ordinal=max(role.index_ordinal, 0),
            ratio_kind=RATIO_OF_KIND.index(role.ratio),
            source_kind=RATIO_OF_KIND.index(role.ratio) if role.owns_kv else 0,
            selection_kind=kinds.index(_selection_kind(role)) + 1 if role.index_ordinal >= 0 else 0,
            engram_kind=role.engram_ordinal + 1,
            target_ordinal=targets.index(role.layer) if role.layer in targets else len(targets),
            decoder_kind=int(role.is_decoder),
        )
        for role in layer_roles(config)
    )


def stacked_layers(layers: Sequence[Layer]) -> Layer:
    """Layers as arrays with a leading layer axis: what the layer loop scans over."""
    return jax.tree.map(lambda *numbers: jnp.asarray(numbers, jnp.int32), *layers)


def pick(kind: Index, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """The branch that `kind` names: called directly for a Python int, else the only one to run on the device."""
    if isinstance(kind, int):
        return branches[kind](*operands)
    return lax.switch(kind, branches, *operands)


def layer_weights[T](tree: T, ordinal: Index, *, dtype: Any, config: RuntimeConfig | None = None) -> T:
    """One layer of stacked parameters with its packed matrices as values in `dtype`.

    config: of the step whose kernels multiply some of them as they are stored, which stay packed; None: unpacks all.
    """
    own = layer_slice(tree, ordinal)
    is_packed = lambda node: isinstance(node, ScaledArray)  # noqa: E731

    def unpacked(w: Any) -> Any:
        if not is_packed(w) or (config is not None and stays_packed(w, dtype=dtype, config=config)):
            return w
        return dequantize(w, dtype)

    return jax.tree.map(unpacked, own, is_leaf=is_packed)


def rows_for(x: Float[Array, "T K"], *weights: Any, config: RuntimeConfig) -> Float[Array, "T K"]:
    """x as its products with these weights read it: through FP8 and back where the numerics quantise activations.

    Kernels for packed weights quantise x themselves, to the same values.
    """
    by_kernels = all(isinstance(w, ScaledArray | PackedLinear) for w in weights)
    return fp8_roundtrip(x) if config.policy.quantizes_activations and not by_kernels else x


def stays_packed(w: ScaledArray, *, dtype: Any, config: RuntimeConfig) -> bool:
    """Whether a step multiplies this weight of one layer as it is stored: its kernels quantise the rows for that."""
    return config.policy.quantizes_activations and multiplies_packed(w, dtype=dtype, backend=config.backend)


@pytree_dataclass
class RopeTables:
    """Cosine and sine of each row's position for the rotations of one layer."""

    cos: Float32[Array, "T F"]
    sin: Float32[Array, "T F"]


def rope_tables(positions: Int[Array, " T"], layer: Layer, *, config: ModelConfig) -> RopeTables:
    """The tables of a layer: plain in window layers, YaRN in layers that read a compressed cache."""
    plain = jnp.asarray(window_frequencies(config))
    scaled = jnp.asarray(compressed_frequencies(config))
    freqs = jnp.where(jnp.asarray(layer.ratio_kind) == 0, plain, scaled)
    cos, sin = rope.angles(positions, freqs)
    return RopeTables(cos=cos, sin=sin)


def window_frequencies(config: ModelConfig) -> Float32[np.ndarray, " F"]:
    """Frequencies of the layers without a compressed cache."""
    return rope.frequencies(config.qk_rope_head_dim, config.rope_theta, None)


def compressed_frequencies(config: ModelConfig) -> Float32[np.ndarray, " F"]:
    """Frequencies of every rotation in the other layers."""
    return rope.frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
