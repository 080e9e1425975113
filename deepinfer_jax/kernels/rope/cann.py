"""Rotary positions by aclnnInplacePartialRotaryMul; `ops.rope` is the reference."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from deepinfer_jax.kernels.ascend_call import FLOATS, Operand, ascend_call, like, on_host

TARGET = "deepinfer.cann.rope.v2"


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


def rotate_rows(
    x: Float[Array, "T *H N"], cos: Float32[Array, "T F"], sin: Float32[Array, "T F"], *, inverse: bool = False
) -> Float[Array, "T *H N"]:
    """`ops.rope.rotate` for rows with or without heads."""
    heads = x.reshape(x.shape[0], -1, x.shape[-1])
    made = on_host(rotate(heads, *expand_angles(cos, sin, inverse=inverse)))
    return made.reshape(x.shape)


def refuses(x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> str | None:
    """Why the operator cannot take these arguments, None if it can."""
    return None if x.dtype in FLOATS else f"x is {x.dtype}; the operator takes {' or '.join(map(str, FLOATS))}"
