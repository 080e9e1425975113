"""Rotary positions by aclnnInplacePartialRotaryMul; `ops.rope` is the reference."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float32

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, like

TARGET = "deepinfer.cann.rope.v1"


def expand_angles(
    cos: Float32[Array, "T F"], sin: Float32[Array, "T F"], *, inverse: bool = False
) -> tuple[Float32[Array, "T R"], Float32[Array, "T R"]]:
    """Cosine and sine of F pairs for each of their R = 2 F channels; the sine negated for the inverse rotation."""
    return jnp.repeat(cos, 2, axis=1), jnp.repeat(-sin if inverse else sin, 2, axis=1)


def rotate(x: Operand, cos: Operand, sin: Operand, *, after: Sequence[Operand] = ()) -> Operand:
    """x [T, H, K] with its last R channels rotated by the angles of `expand_angles`, adjacent channels forming a pair.

    A device array x is written in place: its old handle is void, and what read it belongs into `after`.
    """
    return ascend_call(TARGET, (x, cos, sin), [like(x)], after=after)[0]
