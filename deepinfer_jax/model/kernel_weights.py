"""Weights in the forms that the kernels of a step read, made once after they are loaded."""

import jax.numpy as jnp

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.linear.api import keeps_plain
from deepinfer_jax.model.leaves import unchecked
from deepinfer_jax.model.params import Params, layer_slice
from deepinfer_jax.ops.quant import ScaledArray, dequantize


def for_kernels(params: Params, *, config: RuntimeConfig) -> Params:
    """The parameters for the steps of this config, for one device.

    The first factor of the output projection is multiplied with rows that are never quantised, so its kernel reads
    bfloat16: unpacked here (twice the bytes of its checkpoint form), it is not unpacked again in every step. Everything
    else stays as it is, and so does this one where no kernel takes it.
    """
    attention = params.attention
    wo_a = attention.wo_a
    if not isinstance(wo_a, ScaledArray):
        return params
    num_layers, outputs, width = wo_a.payload.shape
    groups = config.model.o_groups
    if not keeps_plain(groups, outputs, width, dtype=config.activation_dtype, backend=config.backend):
        return params
    layers = [dequantize(layer_slice(wo_a, layer), jnp.bfloat16) for layer in range(num_layers)]
    attention = unchecked(type(attention), {**attention.__dict__, "wo_a": jnp.stack(layers)})
    return unchecked(Params, {**params.__dict__, "attention": attention})
