"""Residual streams around a sublayer, expanded, mixed and collapsed by whatever the backend has for it.

A sublayer's mix says by what its output expands the streams, and by what the next sublayer collapses them. So a
sublayer reads the streams that the sublayer before has expanded, collapsed by that one's mix.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Float32

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels import registry
from deepinfer_jax.kernels.calls import shared_call
from deepinfer_jax.kernels.hyper import mosaic
from deepinfer_jax.kernels.registry import ASCEND, NVIDIA, REFERENCE, TRAINING, Impl, select
from deepinfer_jax.kernels.rms_norm.api import rms_norm
from deepinfer_jax.ops import hyper
from deepinfer_jax.ops.hyper import Mix, Mixer

OP = "hyper"
# The host computes this part of a step for an Ascend device, which its caller has agreed to (`ascend_coverage`).
_TARGETS = ("cpu", NVIDIA, ASCEND, TRAINING)


def _expand_by_kernel(out: Array, streams: Array, mix: Mix) -> Array:
    return shared_call(mosaic.expand)(out, streams, mix)


def _mix_by_kernel(streams: Array, pre: Array, mixer: Mixer, *, backend: Backend, **given: Any) -> tuple[Mix, Array]:
    del backend
    return shared_call(mosaic.mix, **given)(streams, pre, mixer)


def _both_by_kernel(
    out: Array, streams: Array, before: Mix, mixer: Mixer, *, backend: Backend, **given: Any
) -> tuple[Array, Mix, Array]:
    del backend
    return shared_call(mosaic.expand_and_mix, **given)(out, streams, before, mixer)


def _mix(
    streams: Array, pre: Array, mixer: Mixer, *, iterations: int, eps: float, norm_eps: float, backend: Backend
) -> tuple[Mix, Array]:
    made = hyper.coefficients(streams, mixer.fn, mixer.scale, mixer.base, iterations=iterations, eps=eps)
    return made, rms_norm(hyper.collapse(streams, pre), mixer.norm, eps=norm_eps, backend=backend)


def _both(out: Array, streams: Array, before: Mix, mixer: Mixer, **given: Any) -> tuple[Array, Mix, Array]:
    streams = hyper.expand(out, streams, before)
    return streams, *_mix(streams, before.pre, mixer, **given)


def _refuses_expansion(out: Array, streams: Array, *_: Any) -> str | None:
    return mosaic.refuses(streams, out)


def _refuses_mix(streams: Array, _: Array, mixer: Mixer, **__: Any) -> str | None:
    return mosaic.refuses(streams, mixer.norm)


def _refuses_both(out: Array, streams: Array, _: Mix, mixer: Mixer, **__: Any) -> str | None:
    return mosaic.refuses(streams, out, mixer.norm)


IMPLS = (
    *registry.mosaic(_both_by_kernel, _refuses_both),
    Impl(name=REFERENCE, fn=_both, targets=_TARGETS),
)
_MIX_IMPLS = (
    *registry.mosaic(_mix_by_kernel, _refuses_mix),
    Impl(name=REFERENCE, fn=_mix, targets=_TARGETS),
)
_EXPAND_IMPLS = (
    *registry.mosaic(_expand_by_kernel, _refuses_expansion),
    Impl(name=REFERENCE, fn=hyper.expand, targets=_TARGETS),
)


def expand(
    out: Float[Array, "T D"], streams: Float[Array, "T C D"], mix: Mix, *, backend: Backend
) -> Float[Array, "T C D"]:
    """See `ops.hyper.expand`."""
    return select(OP, _EXPAND_IMPLS, backend, out, streams, mix).fn(out, streams, mix)


def mix(
    streams: Float[Array, "T C D"],
    pre: Float32[Array, "T C"],
    mixer: Mixer,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    backend: Backend,
) -> tuple[Mix, Float[Array, "T D"]]:
    """The mix of a sublayer (`ops.hyper.coefficients`), and its input: the streams collapsed by `pre`, normed."""
    given = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps}
    chosen = select(OP, _MIX_IMPLS, backend, streams, pre, mixer, **given)
    return chosen.fn(streams, pre, mixer, **given, backend=backend)


def expand_and_mix(
    out: Float[Array, "T D"],
    streams: Float[Array, "T C D"],
    before: Mix,
    mixer: Mixer,
    *,
    note: Callable[[Array], Array] | None,
    iterations: int,
    eps: float,
    norm_eps: float,
    backend: Backend,
) -> tuple[Float[Array, "T C D"], Mix, Float[Array, "T D"]]:
    """The streams expanded by the mix of the sublayer before, and what `mix` makes of them with its `pre`.

    note: gives what is to be used in the place of the expanded streams; None: these.
    """
    given = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps}
    if note is not None:
        streams = note(expand(out, streams, before, backend=backend))
        return streams, *mix(streams, before.pre, mixer, **given, backend=backend)
    chosen = select(OP, IMPLS, backend, out, streams, before, mixer, **given)
    return chosen.fn(out, streams, before, mixer, **given, backend=backend)
