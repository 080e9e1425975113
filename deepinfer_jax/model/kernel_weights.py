"""Weights in the forms that the kernels of a step read, made once after they are loaded."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.linear.api import keeps_plain, packed
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.model.params import Params, layer_slice
from deepinfer_jax.ops.quant import ScaledArray, dequantize

_PROJECTIONS = ("wq_a", "wq_b", "wkv", "wo_b")  # of attention that take FP8 rows


def for_kernels(params: Params, *, config: RuntimeConfig) -> Params:
    """The parameters for the steps of this config, for one device.

    Weights of linear layers that a kernel multiplies packed get their scales in its form (0.4 % of their bytes);
    payloads stay where they are. The first factor of the output projection is multiplied with rows that are never
    quantised, so its kernel reads bfloat16: unpacked here, with twice the bytes. Everything else stays as it is, and
    so do these where no kernel takes them.
    """
    attention, indexer, engram, moe = params.attention, params.indexer, params.engram, params.moe

    def with_packed[C](node: C, *names: str) -> C:
        return _with(node, **{name: _packed(getattr(node, name), config) for name in names})

    attention = _with(with_packed(attention, *_PROJECTIONS), wo_a=_plain(attention.wo_a, config))
    return _with(
        params,
        attention=attention,
        indexer=with_packed(indexer, "wq_b"),
        engram=with_packed(engram, "wkv"),
        moe=_with(moe, shared=with_packed(moe.shared, "w1", "w2", "w3")),
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
