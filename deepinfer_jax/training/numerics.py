"""How training computes: bfloat16 or float32 products, and quantisers that gradients pass straight through."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import Numerics, RuntimeConfig
from deepinfer_jax.kernels.registry import TRAINING
from deepinfer_jax.ops.quant import ScaledArray, dequantize

# The rounding points of bfloat16 serving; caches hold plain rows, which `straight_through` quantises.
_BF16 = Numerics(name="bf16", rounds_activations=True, quantizes_caches=False, quantizes_activations=False)
_FP32 = Numerics(name="fp32_noqdq", rounds_activations=False, quantizes_caches=False, quantizes_activations=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(RuntimeConfig):
    """A runtime config whose steps have gradients: products see all rows at once, layers are unrolled.

    Make it with `training_config`.
    """

    has_bf16_products: bool

    @property
    def policy(self) -> Numerics:
        """The numerics policy of the layers that training shares with serving."""
        return _BF16 if self.has_bf16_products else _FP32


def training_config(model: ModelConfig, *, seq_len: int, has_bf16_products: bool) -> TrainingConfig:
    """The config of a training step over sequences of `seq_len` tokens, each of which fills one page.

    Raises ValueError for a length that the groups of a ratio-2 cache do not fit into.
    """
    if seq_len < 2 or seq_len % 2:
        raise ValueError(f"seq_len={seq_len} must be positive and even: a ratio-2 entry covers two tokens")
    return TrainingConfig(
        model=model,
        page_tokens=seq_len,
        is_invariant=False,
        target=TRAINING,
        has_bf16_products=has_bf16_products,
    )


def straight_through(
    x: Float[Array, "*B N"],
    quantize: Callable[[Array], ScaledArray | Array],
    strength: Float32[Array, ""],
) -> Float[Array, "*B N"]:
    """x moved towards its quantised value by `strength` (0: x itself, 1: the quantised value); gradients see x."""
    still = lax.stop_gradient(x)
    error = dequantize(quantize(still), jnp.dtype(jnp.float32)) - still.astype(jnp.float32)
    return x + (strength * error).astype(x.dtype)
