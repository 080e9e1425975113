"""Parameters of the vision encoder and their schema (spec: vision 2)."""

import functools
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.leaves import LeafSpec, node_of
from deepinfer_jax.pytree import pytree_dataclass

VISION_PREFIX = "vision."  # of the schema paths of everything that makes embeddings of an image
NUM_CHANNELS = 3  # red, green, blue


@pytree_dataclass
class Affine:
    """A linear layer with a bias; blocks may lead."""

    weight: Float[Array, "*blocks N K"]
    bias: Float[Array, "*blocks N"]


@pytree_dataclass
class VisionBlocks:
    """The transformer blocks of the tower; leading axis: blocks.

    Rows of wqkv: queries, keys, values, each head by head. Rows of w1: the gate, then what it multiplies.
    """

    norm1: Float[Array, "blocks width"]
    wqkv: Affine
    wo: Affine
    norm2: Float[Array, "blocks width"]
    w1: Float[Array, "blocks inner2 width"]
    w2: Float[Array, "blocks width inner"]


@pytree_dataclass
class AlignerParams:
    """From the features of a square of patches to one embedding; input order: channel, row, column."""

    w1: Affine
    w2: Affine


@pytree_dataclass
class VisionParams:
    """Tower, aligner, and the embeddings that stand around and between the rows of an image."""

    patch_embed: Affine  # input order: channel, row, column of a patch
    blocks: VisionBlocks
    norm: Float[Array, " width"]
    aligner: AlignerParams
    image_start: Float[Array, " D"]
    image_newline: Float[Array, " D"]
    image_end: Float[Array, " D"]


@functools.cache
def vision_schema(config: ModelConfig) -> tuple[LeafSpec, ...]:
    """Every leaf of `VisionParams`; `stack` counts blocks of the tower."""
    v, d = config.vision, config.hidden_size
    width, inner = v.hidden_size, v.intermediate_size
    blocks = tuple(range(v.num_hidden_layers))

    def one(path: str, *shape: int, axes: tuple[str, ...]) -> LeafSpec:
        return LeafSpec(path=VISION_PREFIX + path, shape=shape, storage="bf16", axes=axes)

    def affine(path: str, *shape: int, axes: tuple[str, ...]) -> tuple[LeafSpec, LeafSpec]:
        return one(f"{path}.weight", *shape, axes=axes), one(f"{path}.bias", shape[0], axes=axes[:1])

    def stacked(name: str, *shape: int, axes: tuple[str, ...]) -> LeafSpec:
        path = f"{VISION_PREFIX}blocks.{name}"
        return LeafSpec(path=path, shape=(len(blocks), *shape), storage="bf16", axes=("layer", *axes), stack=blocks)

    return (
        *affine("patch_embed", width, NUM_CHANNELS * v.patch_size**2, axes=("hidden", "latent")),
        stacked("norm1", width, axes=("hidden",)),
        stacked("wqkv.weight", 3 * width, width, axes=("head", "hidden")),
        stacked("wqkv.bias", 3 * width, axes=("head",)),
        stacked("wo.weight", width, width, axes=("hidden", "head")),
        stacked("wo.bias", width, axes=("hidden",)),
        stacked("norm2", width, axes=("hidden",)),
        stacked("w1", 2 * inner, width, axes=("inner", "hidden")),
        stacked("w2", width, inner, axes=("hidden", "inner")),
        one("norm", width, axes=("hidden",)),
        *affine("aligner.w1", d, v.downsample_ratio**2 * width, axes=("hidden", "latent")),
        *affine("aligner.w2", d, d, axes=("hidden", "latent")),
        *(one(name, d, axes=("hidden",)) for name in ("image_start", "image_newline", "image_end")),
    )


def build_vision(leaves: Mapping[str, Any]) -> VisionParams:
    """The vision part of a tree from one value for each path of the schema (arrays, shape structs, shardings)."""
    part = functools.partial(node_of, leaves)
    blocks, aligner = f"{VISION_PREFIX}blocks.", f"{VISION_PREFIX}aligner."
    return part(
        VisionParams,
        VISION_PREFIX,
        patch_embed=part(Affine, f"{VISION_PREFIX}patch_embed."),
        blocks=part(VisionBlocks, blocks, wqkv=part(Affine, f"{blocks}wqkv."), wo=part(Affine, f"{blocks}wo.")),
        aligner=part(AlignerParams, aligner, w1=part(Affine, f"{aligner}w1."), w2=part(Affine, f"{aligner}w2.")),
    )
