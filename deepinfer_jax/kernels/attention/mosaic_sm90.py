"""Attention of decode and verify rows over packed keys on Hopper; `kernels/attention/api.py` has the reference.

Roofline of the released shape (64 heads x 512, window 128, 512 selected): a row multiplies 64 x 640 x 512 twice, 84
MFLOP, and reads 512 x 288 + 128 x 528 bytes of keys and 128 KiB of queries and results, 0.35 MB. At 128 rows that is
14 us of tensor cores (790 TFLOP/s) against 11 us of memory: the arithmetic is the floor.

`row_kernel` says how; here are its products, whose results are registers of the warpgroup that starts them.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from deepinfer_jax.kernels.attention import row_kernel
from deepinfer_jax.kernels.attention.block import HEADS, STAGES, Block, Products
from deepinfer_jax.kernels.attention.row_kernel import refuses
from deepinfer_jax.ops.attention import KEY_BLOCK

__all__ = ["attend", "refuses"]


class WarpgroupProducts(Products):
    """`wgmma`, which interpretation replaces by products of float32."""

    consumer_registers, producer_registers = 200, 104
    line = 64

    def scratch_types(self, width: int) -> dict[str, Any]:
        """Nothing."""
        del width
        return {}

    def no_sums(self, half: int) -> Sequence[Array]:
        """One piece."""
        return (plgpu.layout_cast(jnp.zeros((HEADS, half), jnp.float32), plgpu.Layout.WGMMA),)

    def scores(self, block: Block, stage: Array) -> Array:
        """q . k for the keys of a tile."""
        smem, half = block.smem, block.half
        pairs = [(smem.q.at[part], smem.keys.at[stage, :, pl.ds(part * half, half)].T) for part in range(2)]
        if block.interpret:
            return _dot(*pairs[0]) + _dot(*pairs[1])

        def run(acc: Any) -> Array:
            for q, keys in pairs:
                plgpu.wgmma(acc, q, keys)
            return acc[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((HEADS, KEY_BLOCK), jnp.float32))

    def add_values(self, block: Block, sums: Sequence[Array], shrink: Array, tile: Array, half: int) -> Sequence[Array]:
        """The products are added to the sums by the tensor cores."""
        values = block.smem.keys.at[lax.rem(tile, STAGES), :, pl.ds(half * block.half, block.half)]
        scaled = sums[0] * lax.broadcast_in_dim(shrink, sums[0].shape, [0])
        if block.interpret:
            return (scaled + _dot(block.smem.weights, values),)
        run: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, block.smem.weights, values))
        return (run(plgpu.WGMMAAccumulatorRef.init(scaled)),)

    def results(self, block: Block, sums: Sequence[Array], half: int) -> Iterator[Array]:
        """The sums."""
        del block, half
        return iter(sums)


PRODUCTS = WarpgroupProducts()


attend = functools.partial(row_kernel.attend, products=PRODUCTS)


def _dot(a: Any, b: Any) -> Array:
    return jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32), precision=lax.Precision.HIGHEST)
