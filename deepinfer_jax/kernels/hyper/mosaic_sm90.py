"""Doubly stochastic mixes of the residual streams on Hopper; `ops.hyper.sinkhorn` has the reference.

Roofline: 16 numbers of a row in and out, which is nothing. As operations of XLA each of 20 iterations is a loop trip
of several kernels, and the launches of all layers together take longer than a step should.

A thread has a row and its 16 numbers in registers. Sums are made in the order of the reference.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.ops.invariant import ordered_sum

STREAMS = 4
ROWS = 128  # of a block: one for each thread of a warpgroup
_LAYOUT = plgpu.Layout.WG_STRIDED((ROWS,), vec_size=1)
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

Numbers = list[list[Array]]  # [i][j]: of all rows of a block


def refuses(logits: Array, **_: Any) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype}, not float32"
    if logits.shape[1:] != (STREAMS, STREAMS):
        return f"there are {logits.shape[1]} streams, not {STREAMS}"
    return None


def sinkhorn(
    logits: Float32[Array, "T C C"], *, iterations: int, eps: float, interpret: Interpret = None
) -> Float32[Array, "T C C"]:
    """`ops.hyper.sinkhorn`; exponentials and divisions are those of the compiler's float32."""
    rows = logits.shape[0]
    if not rows:
        return logits
    by_number = logits.reshape(rows, STREAMS * STREAMS).T
    padded = jnp.pad(by_number, ((0, 0), (0, -rows % ROWS)))
    out = plgpu.kernel(
        functools.partial(_block, iterations=iterations, eps=eps),
        out_type=jax.ShapeDtypeStruct(padded.shape, jnp.float32),
        grid=(padded.shape[1] // ROWS,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=_COMPILER_PARAMS,
        interpret=False if interpret is None else interpret,
    )(padded)
    return out[:, :rows].T.reshape(logits.shape)


def _block(logits: Any, out: Any, *, iterations: int, eps: float) -> None:
    """The mixes of 128 rows."""
    rows = pl.ds(lax.axis_index("block") * ROWS, ROWS)
    numbers = range(STREAMS)

    def load(i: int, j: int) -> Array:
        return plgpu.load(logits.at[STREAMS * i + j, rows], layout=_LAYOUT, optimized=False)

    m = [[load(i, j) for j in numbers] for i in numbers]
    peaks = [functools.reduce(jnp.maximum, line) for line in m]
    raised = [[jnp.exp(value - peak) for value in line] for line, peak in zip(m, peaks, strict=True)]
    totals = [ordered_sum(line) for line in raised]
    comb = [[value / total + eps for value in line] for line, total in zip(raised, totals, strict=True)]
    comb = _columns_to_one(comb, eps)

    def step(_: Array, flat: Sequence[Array]) -> tuple[Array, ...]:
        comb = [list(flat[STREAMS * i : STREAMS * (i + 1)]) for i in numbers]
        sums = [ordered_sum(line) + eps for line in comb]
        comb = [[value / total for value in line] for line, total in zip(comb, sums, strict=True)]
        return tuple(value for line in _columns_to_one(comb, eps) for value in line)

    flat = lax.fori_loop(0, iterations - 1, step, tuple(value for line in comb for value in line))
    for place, value in enumerate(flat):
        out[place, rows] = value


def _columns_to_one(comb: Numbers, eps: float) -> Numbers:
    sums = [ordered_sum([line[j] for line in comb]) + eps for j in range(STREAMS)]
    return [[value / total for value, total in zip(line, sums, strict=True)] for line in comb]
