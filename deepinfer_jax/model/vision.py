"""The vision encoder: patches of one image to the embeddings of its span (spec: vision 4, 5, 6).

One call encodes one image, so that its bits cannot depend on other images. The number of patches is data: images of
every shape that fit into an array of patches share one program, and in batch-invariant mode the bits of an image do not
depend on the size of that array either.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt8

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model.batch import ImageRows
from deepinfer_jax.model.params import layer_slice
from deepinfer_jax.model.stages import Stages
from deepinfer_jax.model.vision_params import AlignerParams, VisionBlocks, VisionParams
from deepinfer_jax.ops import image_grid as grids
from deepinfer_jax.ops.affine import affine
from deepinfer_jax.ops.full_attention import attend_all, key_blocks
from deepinfer_jax.ops.invariant import map_rows, round_to
from deepinfer_jax.ops.linear import linear
from deepinfer_jax.ops.norm import rms_norm
from deepinfer_jax.ops.rope import frequencies
from deepinfer_jax.ops.rope_2d import angles_2d, rotate_halves
from deepinfer_jax.pytree import pytree_dataclass

NORM_EPS = 1e-6
PATCH_TILE = 64  # rows of one product in batch-invariant mode: fixed, so that bits do not depend on padding
# Rows whose scores are in memory at once where products see all rows.
QUERY_TILE = 1024

MapTiles = Callable[..., Any]


@pytree_dataclass
class ImageOutput:
    """What the encoder makes of one image."""

    span: Float[Array, "span D"]  # max_image_tokens embeddings, delimiters included; zeros behind the span's end
    stages: dict[str, Array]  # the stages that `capture` asked for; patches lead, or tokens ("aligner.out")


@pytree_dataclass
class Places:
    """Where the patches of an image stand."""

    num_patches: Int[Array, ""]
    cos: Float32[Array, "patches pairs"]
    sin: Float32[Array, "patches pairs"]


def encode_image(
    params: VisionParams,
    patches: Float[Array, "patches pixels"],
    grid: Int[Array, " two"],
    *,
    config: RuntimeConfig,
    capture: tuple[str, ...] = (),
) -> ImageOutput:
    """The span of one image, in the dtype of activations.

    patches: the grid's patches in reading order, then padding of any value; 3 * patch_size^2 pixels each, channel by
    channel. grid: patch rows and columns, as `text/images.py` plans them: the span has at most max_image_tokens rows.
    capture: patterns of stage names ("vision.blocks.*.out", "aligner.out").
    Raises ValueError for patterns that match no stage.
    """
    stages = Stages(capture, {})
    num_patches = grid[0] * grid[1]
    tiles = functools.partial(
        map_rows,
        tile=PATCH_TILE if config.is_invariant else None,
        has_fixed_trips=config.has_fixed_trips,
    )
    is_patch = jnp.arange(patches.shape[0], dtype=jnp.int32) < num_patches
    x = jnp.where(is_patch[:, None], patches, jnp.zeros((), patches.dtype)).astype(config.activation_dtype)
    places = _places(grid, num_patches, x.shape[0], config=config)
    embed = params.patch_embed
    x = tiles(lambda rows: affine(rows, embed.weight, embed.bias), x, num_live=num_patches)
    x = stages.note("vision.patch_embed.out", x)
    x = _run_blocks(params.blocks, x, places, tiles, config=config, stages=stages)
    x = tiles(lambda rows: rms_norm(rows, params.norm, eps=NORM_EPS), x, num_live=num_patches)
    x = stages.note("vision.out", x)
    aligned = stages.note("aligner.out", align(params.aligner, x, grid, tiles, config=config))
    return ImageOutput(span=_make_span(params, aligned, grid, config=config), stages=stages.finish())


def pixel_values(codes: UInt8[Array, "patches pixels"]) -> Float32[Array, "patches pixels"]:
    """The encoder's input from 8-bit channels: (code / 255 - 0.5) / 0.5.

    Looked up: a compiler would turn the divisions into products with rounded reciprocals.
    """
    table = (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    return jnp.asarray(table)[codes.astype(jnp.int32)]


def place_spans(hidden: Float[Array, "T D"], images: ImageRows) -> Float[Array, "T D"]:
    """The embeddings of a step with those of image rows in their place."""
    found = images.features.at[images.index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jnp.where((images.index >= 0)[:, None], found.astype(hidden.dtype), hidden)


def _places(grid: Int[Array, " two"], num_patches: Int[Array, ""], num_rows: int, *, config: RuntimeConfig) -> Places:
    """Rotary angles of every patch: the first half of the pairs turns by row, the other by column."""
    vision = config.model.vision
    rows, columns = grids.patch_places(grid, num_patches=num_rows)
    freqs = frequencies(vision.hidden_size // vision.num_attention_heads // 2, vision.rope_theta, None)
    cos, sin = angles_2d(rows, columns, freqs)
    return Places(num_patches=num_patches, cos=cos, sin=sin)


def _run_blocks(
    blocks: VisionBlocks,
    x: Float[Array, "patches width"],
    places: Places,
    tiles: MapTiles,
    *,
    config: RuntimeConfig,
    stages: Stages,
) -> Float[Array, "patches width"]:
    """All blocks: one compiled body, or one for each block where stages are captured. Both give the same bits."""

    def body(x: Array, own: VisionBlocks) -> tuple[Array, None]:
        return block(own, x, places, tiles, config=config), None

    if not stages.is_active:
        return lax.scan(body, x, blocks)[0]
    for index in range(config.model.vision.num_hidden_layers):
        x = stages.note(f"vision.blocks.{index}.out", body(x, layer_slice(blocks, index))[0])
    return x


def block(
    own: VisionBlocks, x: Float[Array, "patches width"], places: Places, tiles: MapTiles, *, config: RuntimeConfig
) -> Float[Array, "patches width"]:
    """One block of the tower (spec: vision 5)."""
    heads = config.model.vision.num_attention_heads

    def project(x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        qkv = affine(rms_norm(x, own.norm1, eps=NORM_EPS), own.wqkv.weight, own.wqkv.bias)
        q, k, v = (part.reshape(x.shape[0], heads, -1) for part in jnp.split(qkv, 3, axis=1))
        return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin), v

    def finish(x: Array, attended: Array) -> Array:
        x = _add(x, affine(attended.reshape(x.shape), own.wo.weight, own.wo.bias))
        return _add(x, gated_mlp(own, rms_norm(x, own.norm2, eps=NORM_EPS)))

    q, k, v = tiles(project, x, places.cos, places.sin, num_live=places.num_patches)
    keys, values = key_blocks(k), key_blocks(v)
    attended = map_rows(
        lambda q: attend_all(q, keys, values, places.num_patches, has_fixed_trips=config.has_fixed_trips),
        q,
        tile=PATCH_TILE if config.is_invariant else QUERY_TILE,
        num_live=places.num_patches,
        has_fixed_trips=config.has_fixed_trips,
    )
    return tiles(finish, x, attended, num_live=places.num_patches)


def _add(x: Float[Array, "patches width"], out: Float[Array, "patches width"]) -> Float[Array, "patches width"]:
    return round_to(x.astype(jnp.float32) + out.astype(jnp.float32), x.dtype)


def gated_mlp(own: VisionBlocks, y: Float[Array, "patches width"]) -> Float[Array, "patches width"]:
    """w2 (silu(g) * u) with [g; u] = w1 y; silu(g) is rounded before the product, and so is the product."""
    gate, up = jnp.split(linear(y, own.w1), 2, axis=1)
    gate = round_to(jax.nn.silu(gate.astype(jnp.float32)), y.dtype)
    return linear(round_to(gate.astype(jnp.float32) * up.astype(jnp.float32), y.dtype), own.w2)


def align(
    params: AlignerParams,
    x: Float[Array, "patches width"],
    grid: Int[Array, " two"],
    tiles: MapTiles,
    *,
    config: RuntimeConfig,
) -> Float[Array, "span D"]:
    """One embedding for each square of patches, in reading order; max_image_tokens rows.

    The features of a square are ordered by channel, then row, then column; patches over the edge count as zeros.
    """
    vision = config.model.vision
    tokens = grids.token_grid(grid, factor=vision.downsample_ratio)
    patches = grids.merged_patches(grid, num_tokens=vision.max_image_tokens, factor=vision.downsample_ratio)

    def on_tile(patches: Array) -> Array:
        square = x.at[patches].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        features = jnp.swapaxes(square, 1, 2).reshape(patches.shape[0], -1)
        inner = affine(features, params.w1.weight, params.w1.bias)
        inner = round_to(jax.nn.gelu(inner.astype(jnp.float32), approximate=False), x.dtype)
        return affine(inner, params.w2.weight, params.w2.bias)

    return tiles(on_tile, patches, num_live=tokens[0] * tokens[1])


def _make_span(
    params: VisionParams, aligned: Float[Array, "span D"], grid: Int[Array, " two"], *, config: RuntimeConfig
) -> Float[Array, "span D"]:
    """Image embeddings between their delimiters, zeros behind the end (spec: vision 4)."""
    role, token = grids.span_roles(grid, num_rows=aligned.shape[0], factor=config.model.vision.downsample_ratio)
    marks = jnp.stack([params.image_start, params.image_newline, params.image_end, jnp.zeros_like(params.image_end)])
    kinds = jnp.asarray([grids.START, grids.NEWLINE, grids.END, grids.OUTSIDE], jnp.int32)
    mark = jnp.argmax(role[:, None] == kinds[None, :], axis=1)
    return jnp.where((role == grids.IMAGE)[:, None], aligned[token], marks.astype(aligned.dtype)[mark])
