"""Weights in the forms that the kernels of a step read, made once after they are loaded."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.experts.api import PackedMatrix, pack_matrix, wants_packed
from deepinfer_jax.kernels.linear.api import keeps_plain, packed
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.model.params import MoeParams, Params, layer_slice
from deepinfer_jax.ops.quant import ScaledArray, dequantize

_PROJECTIONS = ("wq_a", "wq_b", "wkv", "wo_b")  # of attention that take FP8 rows
_MATRICES = ("w1", "w2", "w3")  # of experts


def for_kernels(
    params: Params, *, config: RuntimeConfig, pack: Callable[[ScaledArray], PackedMatrix] = pack_matrix
) -> Params:
    """The parameters for the steps of this config; on a mesh the pieces stay where they are.

    Weights of linear layers that a kernel multiplies packed get their scales in its form (0.4 % of their bytes for
    Hopper, 3 % for Blackwell); payloads stay where they are. The first factor of the output projection is multiplied
    with rows that are never quantised, so its kernel reads bfloat16: unpacked here, with twice the bytes. Signs and
    scales of routed experts are arranged for their kernel, which adds a seventeenth of their bytes. Everything else
    stays as it is, and so do these where no kernel takes them.

    pack: `pack_matrix`, or a compiled form of it, which may take over the memory of what it is given.
    """
    attention, indexer, engram, moe = params.attention, params.indexer, params.engram, params.moe

    def with_experts(moe: MoeParams) -> MoeParams:
        experts = moe.experts
        if not config.policy.quantizes_activations or not isinstance(experts.w1, ScaledArray):
            return moe
        if not wants_packed(experts, dtype=config.activation_dtype, backend=config.backend):
            return moe
        return _with(moe, experts=_with(experts, **{name: pack(getattr(experts, name)) for name in _MATRICES}))

    def with_packed[C](node: C, *names: str) -> C:
        return _with(node, **{name: _packed(getattr(node, name), config) for name in names})

    attention = _with(with_packed(attention, *_PROJECTIONS), wo_a=_plain(attention.wo_a, config))
    return _with(
        params,
        attention=attention,
        indexer=with_packed(indexer, "wq_b"),
        engram=with_packed(engram, "wkv"),
        moe=_with(with_experts(moe), shared=with_packed(moe.shared, *_MATRICES)),
        draft=None if params.draft is None else _with(params.draft, moe=with_experts(params.draft.moe)),
    )


def _packed(w: Any, config: RuntimeConfig) -> Any:
    if not isinstance(w, ScaledArray) or not w.payload.shape[0] or not config.policy.quantizes_activations:
        return w
    return packed(w, dtype=config.activation_dtype, backend=config.backend)


def _plain(w: ScaledArray | Array, config: RuntimeConfig) -> ScaledArray | Array:
    if not isinstance(w, ScaledArray):
        return w
    num_layers, outputs, width = w.payload.shape
    groups = config.model.o_groups
    if not keeps_plain(groups, outputs, width, dtype=config.activation_dtype, backend=config.backend):
        return w
    return jnp.stack([dequantize(layer_slice(w, layer), jnp.bfloat16) for layer in range(num_layers)])


def _with[C](node: C, **values: Any) -> C:
    """The node with other values, whose types its own annotations need not name."""
    return unchecked(type(node), {**node.__dict__, **values})
