"""Every op that has more than a reference, with its implementations."""

from collections.abc import Mapping

from deepinfer_jax.kernels.attention import api as attention
from deepinfer_jax.kernels.experts import api as experts
from deepinfer_jax.kernels.host_rows import api as host_rows
from deepinfer_jax.kernels.hyper import api as hyper
from deepinfer_jax.kernels.indexer import api as indexer
from deepinfer_jax.kernels.linear import api as linear
from deepinfer_jax.kernels.registry import Impl
from deepinfer_jax.kernels.rms_norm import api as rms_norm
from deepinfer_jax.kernels.rope import api as rope
from deepinfer_jax.kernels.router import api as router

OPS: Mapping[str, tuple[Impl, ...]] = {
    attention.OP: attention.IMPLS,
    experts.OP: experts.IMPLS,
    experts.SHARED_OP: experts.SHARED_IMPLS,
    host_rows.OP: host_rows.IMPLS,
    hyper.OP: hyper.IMPLS,
    indexer.OP: indexer.IMPLS,
    linear.OP: linear.IMPLS,
    linear.GROUPED_OP: linear.GROUPED_IMPLS,
    rms_norm.OP: rms_norm.IMPLS,
    rope.OP: rope.IMPLS,
    router.OP: router.IMPLS,
}
