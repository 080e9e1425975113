"""Master weights, their released forms, and the parameters of a training step (spec: checkpoint 3)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.draft_params import param_schema
from deepinfer_jax.model.leaves import WEIGHT_BLOCK, LeafSpec, Storage
from deepinfer_jax.model.moe import EveryExpert
from deepinfer_jax.model.params import DRAFT_PREFIX, MoeParams, Params, build_params, leaf_at, schema
from deepinfer_jax.ops.invariant import round_to
from deepinfer_jax.ops.quant import (
    FP8_AMAX_FLOOR,
    FP8_MAX,
    ScaledArray,
    decode_e8m0,
    dequantize,
    pow2ceil_exponent,
    quantize_fp8,
    quantize_index,
)
from deepinfer_jax.training.numerics import straight_through

Masters = dict[str, Float32[Array, "..."]]  # schema path -> float32 values that the optimiser changes
Fixed = dict[str, Array]  # schema path -> what it does not change: the router's biases and the Engram token map

_BIASES = ("moe.bias", "moe.bias_vl")
TOKEN_MAP = "engram.token_map"


def trained_specs(config: ModelConfig, *, with_draft: bool = False) -> tuple[LeafSpec, ...]:
    """The leaves that have masters: of the backbone, or of the draft stages."""
    specs = param_schema(config, with_draft=with_draft)
    return tuple(s for s in specs if s.path.startswith(DRAFT_PREFIX) == with_draft and not is_fixed(s.path))


def is_fixed(path: str) -> bool:
    """Whether no gradient changes this leaf."""
    return path == TOKEN_MAP or path.removeprefix(DRAFT_PREFIX) in _BIASES


def quantize_weight(values: Float[Array, "*B N K"]) -> ScaledArray:
    """A matrix as E4M3 with one power-of-two scale for each block of 32 x 32; the last block of rows may be short."""
    *lead, rows, cols = values.shape
    missing = -rows % WEIGHT_BLOCK
    padded = jnp.pad(values.astype(jnp.float32), [(0, 0)] * len(lead) + [(0, missing), (0, 0)])
    counts = ((rows + missing) // WEIGHT_BLOCK, cols // WEIGHT_BLOCK)
    blocks = padded.reshape(*lead, counts[0], WEIGHT_BLOCK, counts[1], WEIGHT_BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1))
    exponent = pow2ceil_exponent(jnp.maximum(amax, FP8_AMAX_FLOOR) * jnp.float32(1.0 / FP8_MAX))
    inverse = decode_e8m0((254 - exponent).astype(jnp.uint8))
    scaled = jnp.clip(blocks * inverse[..., :, None, :, None], -FP8_MAX, FP8_MAX)
    codes = lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
    return ScaledArray(
        payload=codes.reshape(padded.shape)[..., :rows, :],
        scale=exponent.astype(jnp.uint8),
        form="fp8",
        block=(WEIGHT_BLOCK, WEIGHT_BLOCK),
    )


_QUANTIZERS = {
    "fp8": quantize_weight,
    "fp4": quantize_index,  # MXFP4: the form of index rows is that of the experts' weights
    "fp8_rows": quantize_fp8,
    "bf16": functools.partial(round_to, dtype=jnp.bfloat16),
}


def released_form(values: Float32[Array, "..."], storage: Storage) -> ScaledArray | Array:
    """Master values as the checkpoint stores them."""
    return values if storage == "f32" else _QUANTIZERS[storage](values)


def training_params(
    masters: Mapping[str, Array],
    fixed: Mapping[str, Array],
    config: ModelConfig,
    *,
    strength: Float32[Array, ""],
    frozen: Params | None = None,
) -> Params:
    """The parameters of a training step: plain values, quantised straight-through by `strength`.

    Matrices that are packed in a checkpoint become a `ScaledArray` without scale, and every routed expert computes
    every row. frozen: released parameters to which draft masters are added; without it, masters are the backbone's.
    """
    leaves = dict(fixed)
    specs = trained_specs(config, with_draft=frozen is not None)
    leaves |= {spec.path: _training_leaf(masters[spec.path], spec, strength) for spec in specs}
    if frozen is None:
        params = build_params(leaves, config)
        return dataclasses.replace(params, moe=with_every_expert(params.moe))
    own = build_params(leaves | dict.fromkeys((s.path for s in schema(config)), None), config).draft
    assert own is not None
    return dataclasses.replace(frozen, draft=dataclasses.replace(own, moe=with_every_expert(own.moe)))


def plain_params(params: Params, config: ModelConfig, *, dtype: Any, with_draft: bool = False) -> Params:
    """Released parameters unpacked to `dtype`, for training steps that leave them as they are.

    with_draft: whether to keep the draft stages, which the parameters must have then.
    """

    def unpacked(leaf: ScaledArray | Array) -> ScaledArray | Array:
        is_packed = isinstance(leaf, ScaledArray)
        return ScaledArray(payload=dequantize(leaf, dtype), scale=None) if is_packed else leaf

    specs = param_schema(config, with_draft=with_draft)
    plain = build_params({spec.path: unpacked(leaf_at(params, spec.path)) for spec in specs}, config)
    draft = plain.draft
    if draft is not None:
        draft = dataclasses.replace(draft, moe=with_every_expert(draft.moe))
    return dataclasses.replace(plain, moe=with_every_expert(plain.moe), draft=draft)


def with_every_expert(moe: MoeParams) -> MoeParams:
    """The sublayer's parameters with experts that all compute all rows."""
    experts = moe.experts
    return dataclasses.replace(moe, experts=EveryExpert(w1=experts.w1, w2=experts.w2, w3=experts.w3))


def packed_params(
    masters: Mapping[str, Array], fixed: Mapping[str, Array], config: ModelConfig, *, with_draft: bool = False
) -> Params:
    """The parameters in their released forms, with draft stages if there are masters for them."""
    specs = {spec.path: spec for spec in param_schema(config, with_draft=with_draft)}
    leaves = {path: released_form(values, specs[path].storage) for path, values in masters.items()}
    return build_params(dict(fixed) | leaves, config)


def decays(spec: LeafSpec) -> bool:
    """Whether weight decay pulls a leaf to zero: matrices, but for the mHC projections and the embeddings."""
    return len(spec.axes) - (spec.stack is not None) >= 2 and not _has_own_scale(spec.path)


def _has_own_scale(path: str) -> bool:
    return path.removeprefix(DRAFT_PREFIX).split(".")[0].startswith("hc_") or path.endswith(("embed", "_weight"))


def _training_leaf(values: Float32[Array, "..."], spec: LeafSpec, strength: Float32[Array, ""]) -> ScaledArray | Array:
    if spec.storage == "f32":
        return values
    moved = straight_through(values, _QUANTIZERS[spec.storage], strength)
    return moved if spec.scale_shape is None else ScaledArray(payload=moved, scale=None)
