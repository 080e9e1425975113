"""Residual streams around a sublayer: expanded, mixed and collapsed by two kernels; `ops.hyper` says how.

Roofline at 128 rows of four streams of 5120: 12 MB of streams read and written, 2 MB of weights for each tile of rows,
28 MB that mostly come from the L2 cache, about 6 us; 63 M products of float32 weights are little for tensor cores. As
operations of XLA the same was eight kernels and more.

The first kernel has a block for 128 channels of up to 16 rows. It expands the streams, collapses them by the weights of
the sublayer before, and adds up its channels' part of the coefficients. The second adds these parts in the order of the
channels and makes the coefficients of a row in one block, while another one norms the row. No row meets another one.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32

from deepinfer_jax.kernels.hyper.products import (
    CHANNELS,
    LINES,
    NUMBERS,
    OF_LINES,
    OUTPUTS,
    ROWS,
    SUMS,
    WARPS,
    add_products,
    no_sums,
)
from deepinfer_jax.kernels.mosaic import Interpret
from deepinfer_jax.ops.hyper import NORM_EPS, Mix, Mixer
from deepinfer_jax.ops.invariant import ordered_sum
from deepinfer_jax.pytree import pytree_dataclass

STREAMS = 4
ROW_BLOCK = 8  # what rows are padded to a multiple of
THREADS = 128
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)

Numbers = Sequence[Sequence[Array]]  # [i][j] of one row


def refuses(streams: Array, *others: Array) -> str | None:
    """Why the kernels cannot run these arguments; None if they can. others: what must be bfloat16 too."""
    dtypes = {x.dtype.name for x in (streams, *others)} - {"bfloat16"}
    if dtypes:
        return f"streams, what expands them or weights of the norm are {', '.join(sorted(dtypes))}, not bfloat16"
    if streams.shape[1] != STREAMS:
        return f"there are {streams.shape[1]} streams, not {STREAMS}"
    if streams.shape[2] % CHANNELS:
        return f"streams of {streams.shape[2]} channels are no multiple of {CHANNELS}"
    return None


def expand(
    out: BFloat16[Array, "T D"], streams: BFloat16[Array, "T C D"], mix: Mix, *, interpret: Interpret = None
) -> BFloat16[Array, "T C D"]:
    """`ops.hyper.expand`; a product and a sum may be one operation in either."""
    if not streams.shape[0]:
        return streams
    operands = _Operands(streams=streams, expansion=(_padded_expansion(out, mix),), mixing=())
    return _run_streams(operands, interpret)[0][: streams.shape[0]]


def mix(
    streams: BFloat16[Array, "T C D"],
    pre: Float32[Array, "T C"],
    mixer: Mixer,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    interpret: Interpret = None,
) -> tuple[Mix, BFloat16[Array, "T D"]]:
    """The mix of a sublayer, and its normed input: the streams collapsed by `pre`, which is of the sublayer before.

    Differs from the reference by the order of float32 sums, and by quotients that are products with a reciprocal.
    """
    given = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps, "interpret": interpret}
    return _mixed(None, streams, pre, mixer, **given)[1:]


def expand_and_mix(
    out: BFloat16[Array, "T D"],
    streams: BFloat16[Array, "T C D"],
    before: Mix,
    mixer: Mixer,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    interpret: Interpret = None,
) -> tuple[BFloat16[Array, "T C D"], Mix, BFloat16[Array, "T D"]]:
    """The streams that `expand` gives, and what `mix` makes of them."""
    given = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps, "interpret": interpret}
    return _mixed((out, before), streams, before.pre, mixer, **given)


@pytree_dataclass
class _Expansion:
    """What streams are expanded by. Coefficients lie by number, rows side by side, as the second kernel writes them."""

    out: Any  # [T, D]
    post: Any  # [4, T]
    comb: Any  # [16, T]: number 4 i + j carries stream i into stream j


@pytree_dataclass
class _Mixing:
    """What streams are collapsed and mixed by."""

    pre: Any  # [4, T]
    fn: Any  # [24, 4, D]


@pytree_dataclass
class _Operands:
    """Of the first kernel; empty tuples for what it does not do."""

    streams: Any  # [T, 4, D]
    expansion: tuple[Any, ...]
    mixing: tuple[Any, ...]


def _mixed(
    expansion: tuple[Array, Mix] | None,
    streams: Array,
    pre: Array,
    mixer: Mixer,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    interpret: Interpret,
) -> tuple[Array, Mix, Array]:
    rows, _, width = streams.shape
    if not rows:
        empty = Mix(pre=pre, post=pre, comb=jnp.zeros((0, STREAMS, STREAMS), jnp.float32))
        return streams, empty, jnp.zeros((0, width), streams.dtype)
    operands = _Operands(
        streams=_padded(streams),
        expansion=() if expansion is None else (_padded_expansion(*expansion),),
        mixing=(_Mixing(pre=_padded(pre).T, fn=mixer.fn.reshape(OUTPUTS, STREAMS, width)),),
    )
    *made, collapsed, sums = _run_streams(operands, interpret)
    given = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps, "interpret": interpret}
    x, pre, post, comb = _run_rows(collapsed, sums, mixer, **given)
    coefficients = Mix(pre=pre.T[:rows], post=post.T[:rows], comb=comb.T[:rows].reshape(rows, STREAMS, STREAMS))
    return made[0][:rows] if made else streams, coefficients, x[:rows]


def _padded(x: Array) -> Array:
    return jnp.pad(x, [(0, -x.shape[0] % ROW_BLOCK)] + [(0, 0)] * (x.ndim - 1))


def _padded_expansion(out: Array, mix: Mix) -> _Expansion:
    comb = mix.comb.reshape(-1, STREAMS * STREAMS)
    return _Expansion(out=_padded(out), post=_padded(mix.post).T, comb=_padded(comb).T)


def _run_streams(operands: _Operands, interpret: Interpret) -> tuple[Array, ...]:
    """The first kernel: new streams if it expands; if it mixes, collapsed rows, and sums [D / 128, T, 32]."""
    operands = dataclasses.replace(operands, streams=_padded(operands.streams))
    rows, _, width = operands.streams.shape
    row_tile, runs = ROWS if rows % ROWS == 0 else ROW_BLOCK, width // CHANNELS
    leaves, structure = jax.tree.flatten(operands)
    new_streams = [jax.ShapeDtypeStruct(operands.streams.shape, jnp.bfloat16)] if operands.expansion else []
    of_mix = [
        jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((runs, rows, SUMS), jnp.float32),
    ]

    def body(*refs: Any, **scratch: Any) -> None:
        given = jax.tree.unflatten(structure, refs[: len(leaves)])
        _streams_block(given, refs[len(leaves) :], row_tile=row_tile, interpret=interpret, **scratch)

    return tuple(
        plgpu.kernel(
            body,
            kernel_name="_and_".join(["expand"] * bool(operands.expansion) + ["mix"] * bool(operands.mixing)),
            out_type=tuple(new_streams + (of_mix if operands.mixing else [])),
            grid=(rows // row_tile, runs),
            grid_names=("tile", "run"),
            compiler_params=_COMPILER_PARAMS,
            interpret=False if interpret is None else interpret,
            scratch_types={"shared": plgpu.SMEM((WARPS * ROWS, SUMS), jnp.float32)},
        )(*leaves)
    )


def _streams_block(
    operands: _Operands, made: Sequence[Any], shared: Any, *, row_tile: int, interpret: Interpret
) -> None:
    """128 channels of a tile of rows."""
    run = lax.axis_index("run")
    rows, channels = pl.ds(lax.axis_index("tile") * row_tile, row_tile), pl.ds(run * CHANNELS, CHANNELS)

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=LINES, optimized=False)

    def of_rows(ref: Any, number: int) -> Array:
        value = plgpu.load(ref.at[number, rows], layout=OF_LINES, optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(value, (row_tile, CHANNELS), (0,)), LINES)

    streams = [load(operands.streams.at[rows, j, channels]) for j in range(STREAMS)]
    for by in operands.expansion:
        new_streams, *made = made
        out, old = load(by.out.at[rows, channels]).astype(jnp.float32), [x.astype(jnp.float32) for x in streams]
        for j in range(STREAMS):
            mixed = ordered_sum([of_rows(by.comb, STREAMS * i + j) * old[i] for i in range(STREAMS)])
            streams[j] = (of_rows(by.post, j) * out + mixed).astype(jnp.bfloat16)
            new_streams[rows, j, channels] = streams[j]
    for by in operands.mixing:
        collapsed, sums = made
        terms = [of_rows(by.pre, j) * x.astype(jnp.float32) for j, x in enumerate(streams)]
        collapsed[rows, channels] = ordered_sum(terms).astype(jnp.bfloat16)
        total = no_sums()
        for j, x in enumerate(streams):
            total = add_products(total, x, load(by.fn.at[:, j, channels]), interpret=interpret)
        shared[...] = total
        plgpu.commit_smem()
        layout = plgpu.Layout.WG_STRIDED((row_tile, SUMS), vec_size=row_tile * SUMS // THREADS)
        of_warps = [shared.at[pl.ds(ROWS * warp, row_tile)] for warp in range(WARPS)]
        sums[run, rows] = ordered_sum([plgpu.load(ref, layout=layout, optimized=False) for ref in of_warps])


def _run_rows(
    collapsed: Array,
    sums: Array,
    mixer: Mixer,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    interpret: Interpret,
) -> tuple[Array, Array, Array, Array]:
    """The second kernel: normed rows, and coefficients by number, [4, T], [4, T] and [16, T]."""
    rows = collapsed.shape[0]
    counts = (STREAMS, STREAMS, STREAMS * STREAMS)
    return plgpu.kernel(
        functools.partial(_row_block, iterations=iterations, eps=eps, norm_eps=norm_eps),
        kernel_name="norm_and_coefficients",
        out_type=(
            jax.ShapeDtypeStruct(collapsed.shape, jnp.bfloat16),
            *(jax.ShapeDtypeStruct((count, rows), jnp.float32) for count in counts),
        ),
        grid=(rows, 2),
        grid_names=("row", "part"),
        compiler_params=_COMPILER_PARAMS,
        interpret=False if interpret is None else interpret,
        scratch_types={"numbers": plgpu.SMEM((SUMS,), jnp.float32)},
    )(collapsed, sums, mixer.norm, mixer.scale, mixer.base)


def _row_block(
    collapsed: Any,
    sums: Any,
    weight: Any,
    scale: Any,
    base: Any,
    x: Any,
    pre: Any,
    post: Any,
    comb: Any,
    *,
    numbers: Any,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> None:
    """The norm or the coefficients of one row; every thread computes all of these."""
    row, part = lax.axis_index("row"), lax.axis_index("part")

    @pl.when(part == 0)
    def _() -> None:
        x[row] = _normed(collapsed.at[row], weight, norm_eps)

    @pl.when(part == 1)
    def _() -> None:
        parts = plgpu.load(sums.at[:, row], layout=NUMBERS, optimized=False)
        numbers[...] = jnp.sum(parts, axis=0)
        plgpu.commit_smem()
        totals = [numbers[i] for i in range(SUMS)]
        mean_square = ordered_sum(totals[OUTPUTS:]) / (STREAMS * collapsed.shape[1])
        inv_rms = lax.rsqrt(mean_square + NORM_EPS)
        logits = [total * inv_rms * scale[min(i // STREAMS, 2)] + base[i] for i, total in enumerate(totals[:OUTPUTS])]
        for j in range(STREAMS):
            pre[j, row] = _sigmoid(logits[j]) + eps
            post[j, row] = 2.0 * _sigmoid(logits[STREAMS + j])
        lines = [logits[STREAMS * (2 + i) : STREAMS * (3 + i)] for i in range(STREAMS)]
        for place, value in enumerate(value for line in _sinkhorn(lines, iterations, eps) for value in line):
            comb[place, row] = value


def _normed(row: Any, weight: Any, eps: float) -> Array:
    """`ops.norm.rms_norm` of one row."""
    (width,) = row.shape
    vec_size = next(size for size in (8, 4, 2, 1) if width % (size * THREADS) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vec_size)
    value, scale = (plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32) for ref in (row, weight))
    inv_rms = lax.rsqrt(jnp.sum(value * value) / width + eps)
    return (scale * (value * inv_rms)).astype(jnp.bfloat16)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _sinkhorn(logits: Numbers, iterations: int, eps: float) -> Numbers:
    """`ops.hyper.sinkhorn` of one row, with the same order of sums and products with reciprocals."""
    numbers = range(STREAMS)
    peaks = [functools.reduce(jnp.maximum, line) for line in logits]
    raised = [[jnp.exp(value - peak) for value in line] for line, peak in zip(logits, peaks, strict=True)]
    comb = _columns_to_one([[value + eps for value in line] for line in _lines_to_one(raised, 0.0)], eps)

    def step(_: Array, flat: Sequence[Array]) -> tuple[Array, ...]:
        comb = [flat[STREAMS * i : STREAMS * (i + 1)] for i in numbers]
        return tuple(value for line in _columns_to_one(_lines_to_one(comb, eps), eps) for value in line)

    flat = lax.fori_loop(0, iterations - 1, step, tuple(value for line in comb for value in line))
    return [flat[STREAMS * i : STREAMS * (i + 1)] for i in numbers]


def _lines_to_one(comb: Numbers, eps: float) -> Numbers:
    shares = [1.0 / (ordered_sum(list(line)) + eps) for line in comb]
    return [[value * share for value in line] for line, share in zip(comb, shares, strict=True)]


def _columns_to_one(comb: Numbers, eps: float) -> Numbers:
    columns = _lines_to_one(list(zip(*comb, strict=True)), eps)
    return list(zip(*columns, strict=True))
