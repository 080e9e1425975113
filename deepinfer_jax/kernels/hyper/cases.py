"""Sizes at which the mixes of residual streams are tested and timed: the released width, decode rows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from deepinfer_jax.kernels.case import REFERENCE, Case
from deepinfer_jax.kernels.hyper import mosaic
from deepinfer_jax.ops import hyper, norm
from deepinfer_jax.ops.hyper import Mix, Mixer

WIDTH, STREAMS, OUTPUTS = 5120, 4, 24
ROWS = (128, 16, 8, 1, 512)
TARGET_ROWS = 128
SINKHORN = {"iterations": 20, "eps": 1e-6}
NORM_EPS = 1e-20
# Coefficients differ in their last bits, which turns a bfloat16 rounding here and there.
TOLERANCE = 1e-3
MIX_FAMILY = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def make_inputs(key: Array, *, num_rows: int, width: int) -> tuple[Any, ...]:
    """A sublayer's output, streams, the mix before, and weights by which logits are of order one."""
    keys = jax.random.split(key, 8)
    make, mixes = jax.random.normal, jax.random.uniform
    before = Mix(
        pre=mixes(keys[0], (num_rows, STREAMS)),
        post=2.0 * mixes(keys[1], (num_rows, STREAMS)),
        comb=mixes(keys[2], (num_rows, STREAMS, STREAMS)) / STREAMS,
    )
    mixer = Mixer(
        fn=make(keys[3], (OUTPUTS, STREAMS * width), jnp.float32) * (STREAMS * width) ** -0.5,
        scale=jnp.asarray([0.7, 1.3, 1.1], jnp.float32),
        base=make(keys[4], (OUTPUTS,), jnp.float32),
        norm=make(keys[5], (width,), jnp.bfloat16),
    )
    out = make(keys[6], (num_rows, width), jnp.bfloat16)
    return out, make(keys[7], (num_rows, STREAMS, width), jnp.bfloat16), before, mixer


def keep_rows(inputs: tuple[Any, ...], count: Array) -> tuple[Any, ...]:
    """Rows behind the first `count` are zeros."""
    *of_rows, mixer = inputs

    def keep(x: Array) -> Array:
        is_kept = jnp.arange(x.shape[0], dtype=jnp.int32) < count
        return jnp.where(jnp.expand_dims(is_kept, range(1, x.ndim)), x, 0)

    return *jax.tree.map(keep, of_rows), mixer


def cut_rows(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The first `count` rows."""
    *of_rows, mixer = inputs
    return *jax.tree.map(lambda x: x[:count], of_rows), mixer


def reference_mix(out: Array, streams: Array, before: Mix, mixer: Mixer) -> tuple[Mix, Array]:
    """`mosaic.mix` as `ops` say it; `out` is not read."""
    del out
    made = hyper.coefficients(streams, mixer.fn, mixer.scale, mixer.base, **SINKHORN)
    return made, norm.rms_norm(hyper.collapse(streams, before.pre), mixer.norm, eps=NORM_EPS)


def reference_both(out: Array, streams: Array, before: Mix, mixer: Mixer) -> tuple[Array, Mix, Array]:
    """`mosaic.expand_and_mix` as `ops` say it."""
    new = hyper.expand(out, streams, before)
    return new, *reference_mix(out, new, before, mixer)


def reference_expand(out: Array, streams: Array, before: Mix, mixer: Mixer) -> Array:
    """`mosaic.expand` as `ops` say it; the mixer is not read."""
    del mixer
    return hyper.expand(out, streams, before)


def kernel_mix(out: Array, streams: Array, before: Mix, mixer: Mixer, **given: Any) -> tuple[Mix, Array]:
    """`mosaic.mix`."""
    del out
    return mosaic.mix(streams, before.pre, mixer, **SINKHORN, norm_eps=NORM_EPS, **given)


def kernel_both(out: Array, streams: Array, before: Mix, mixer: Mixer, **given: Any) -> tuple[Array, Mix, Array]:
    """`mosaic.expand_and_mix`."""
    return mosaic.expand_and_mix(out, streams, before, mixer, **SINKHORN, norm_eps=NORM_EPS, **given)


def kernel_expand(out: Array, streams: Array, before: Mix, mixer: Mixer, **given: Any) -> Array:
    """`mosaic.expand`."""
    del mixer
    return mosaic.expand(out, streams, before, **given)


# name: the reference, the kernels, how often they read or write the streams, whether they expand, whether they mix
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, bool, bool]] = {
    "expand_and_mix": (reference_both, kernel_both, 2, True, True),
    "mix": (reference_mix, kernel_mix, 1, False, True),
    "expand": (reference_expand, kernel_expand, 2, True, False),
}


def _case(name: str, num_rows: int) -> Case:
    reference, kernel, passes, expands, mixes = FORMS[name]
    numbers = STREAMS * WIDTH
    return Case(
        op="hyper",
        name=f"{name}_{num_rows}_rows",
        make=functools.partial(make_inputs, num_rows=num_rows, width=WIDTH),
        implementations={REFERENCE: reference, "mosaic_sm90": kernel, "mosaic_sm100": kernel},
        num_bytes=2 * num_rows * (passes * numbers + (expands + mixes) * WIDTH) + mixes * 4 * OUTPUTS * numbers,
        flops=2 * num_rows * numbers * (expands * (STREAMS + 1) + mixes * (OUTPUTS + 2)),
        tolerance=TOLERANCE,
        keep_rows=keep_rows,
        cut_rows=cut_rows if num_rows >= TARGET_ROWS else None,
        num_rows=num_rows,
        has_target=num_rows == TARGET_ROWS,
        families=dict.fromkeys(("mosaic_sm90", "mosaic_sm100"), (*((MIX_FAMILY,) if mixes else ()), "ld.v4.b32")),
    )


CASES = tuple(_case(name, num_rows) for name in FORMS for num_rows in ROWS)
