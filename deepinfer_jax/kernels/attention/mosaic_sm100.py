"""Attention of decode and verify rows over packed keys on Blackwell; `kernels/attention/api.py` has the reference.

Roofline of a B200 at 128 rows of the released shape (64 heads x 512, window 128, 512 selected): 10.7 GFLOP, 10 us at
half of 2.25 PFLOP/s, which instructions of 64 rows are taken to reach; 45 MB, 6 us at 8 TB/s. Arithmetic limits.

`row_kernel` says how; here are its products, which tensor memory holds: the scores of a tile until they are read, and
the sums of values, which are scaled there before those of the next tile are added. Keys, queries and weights lie in
lines of 64 bytes: an instruction of 64 rows works on two halves of its columns, and 64 keys are then 32 in each.
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

PIECE = 64  # channels of values that a thread has in registers together; 32 columns of tensor memory


class TensorMemoryProducts(Products):
    """`tcgen05.mma`, started by one thread of a warpgroup, which then waits and reads the result."""

    consumer_registers, producer_registers = 152, 200
    line = 32

    def scratch_types(self, width: int) -> dict[str, Any]:
        """Tensor memory for the scores of a tile and for the sums of values in pieces, and barriers."""
        ordered = {"orders_tensor_core": True}
        return {
            "scores": plgpu.TMEM((HEADS, KEY_BLOCK), jnp.float32),
            "sums": [plgpu.TMEM((HEADS, PIECE), jnp.float32) for _ in range(width // PIECE)],
            "scored": plgpu.Barrier(**ordered),  # the scores are made,
            "scores_read": plgpu.Barrier(**ordered),  # and in registers
            "scaled": plgpu.Barrier(num_barriers=2, **ordered),  # of each half: the sums so far are scaled,
            "multiplied": plgpu.Barrier(num_barriers=2, **ordered),  # and have the values of the tile
        }

    def no_sums(self, half: int) -> Sequence[Array]:
        """Nothing: the sums are in tensor memory."""
        del half
        return ()

    def scores(self, block: Block, stage: Array) -> Array:
        """q . k for the keys of a tile."""
        smem, half = block.smem, block.half
        for part in range(2):
            keys = smem.keys.at[stage, :, pl.ds(part * half, half)].T
            plgpu.tcgen05_mma(smem.scores, smem.q.at[part], keys, accumulate=part > 0)
        plgpu.tcgen05_commit_arrive(smem.scored)
        plgpu.barrier_wait(smem.scored)
        found = plgpu.async_load_tmem(smem.scores)
        plgpu.wait_load_tmem()
        _meet(smem.scores_read)
        return found

    def add_values(self, block: Block, sums: Sequence[Array], shrink: Array, tile: Array, half: int) -> Sequence[Array]:
        """The sums are scaled in tensor memory, where the products are added to them."""
        smem, pieces = block.smem, _pieces(block, half)
        factors = lax.broadcast_in_dim(shrink, (HEADS, PIECE), [0])

        @pl.when(tile > 0)
        def _():
            for piece in pieces:
                old = plgpu.async_load_tmem(piece)
                plgpu.wait_load_tmem()
                plgpu.async_store_tmem(piece, old * factors)
            plgpu.commit_tmem()

        _meet(smem.scaled.at[half])  # also behind the weights, which all warps of the first warpgroup have written
        for i, piece in enumerate(pieces):
            channels = pl.ds(half * block.half + i * PIECE, PIECE)
            values = smem.keys.at[lax.rem(tile, STAGES), :, channels]
            plgpu.tcgen05_mma(piece, smem.weights, values, accumulate=tile > 0)
        plgpu.tcgen05_commit_arrive(smem.multiplied.at[half])
        plgpu.barrier_wait(smem.multiplied.at[half])
        return sums

    def results(self, block: Block, sums: Sequence[Array], half: int) -> Iterator[Array]:
        """One piece after the other from tensor memory."""
        del sums
        return (plgpu.async_load_tmem(piece) for piece in _pieces(block, half))


PRODUCTS = TensorMemoryProducts()


def _pieces(block: Block, half: int) -> Sequence[Any]:
    """Tensor memory for the sums of a half of the channels."""
    count = block.half // PIECE
    return block.smem.sums[half * count : (half + 1) * count]


def _meet(barrier: Any) -> None:
    """Waits for all threads of the warpgroup, one of which then starts what reads or writes after them."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


attend = functools.partial(row_kernel.attend, products=PRODUCTS)
