"""Weights of routed experts as their kernels read them: E2M1 codes that become E5M2, scales folded in.

`fp4_codes` says how codes are made. Each row has one float32 scale, and each group of 32 columns a byte, its step.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt8, UInt32

from deepinfer_jax.kernels.fp4_codes import MAGNITUDES, TOP_FACTOR, TOP_STEP
from deepinfer_jax.kernels.mosaic import GROUP, scale_of
from deepinfer_jax.ops.quant import ScaledArray, decode_e8m0, decode_fp4
from deepinfer_jax.pytree import pytree_dataclass

ROW_BLOCK = 32  # rows whose steps of a chunk lie together
CHUNK = 256  # columns
GROUPS = CHUNK // GROUP


@pytree_dataclass
class PackedExperts:
    """E2M1 weights made once from a ScaledArray by `pack_experts`; leading axes, as of layers and experts, stay.

    payload: magnitudes where they were, eight in a word of 4 bytes; of these, the sign of the first four lies in the
    even nibbles (low ones), that of the others in the odd nibbles. steps: byte 8 r + g is of row r of the block and of
    group g of the chunk. scale: the E8M0 bytes as they were, which the kernel does not read.
    """

    payload: UInt8[Array, "*B N K_bytes"]
    steps: UInt8[Array, "*B N_blocks K_chunks block"]
    row_scales: Float32[Array, "*B N"]
    scale: UInt8[Array, "*B N K_groups"]


def refuses(w: ScaledArray | Array | PackedExperts) -> str | None:
    """Why weights cannot be packed, None if they can or are."""
    if isinstance(w, PackedExperts):
        return None
    if not isinstance(w, ScaledArray) or w.form != "fp4" or w.block != (1, GROUP):
        return f"weights are not packed E2M1 with a scale for each {GROUP} columns"
    rows, columns = w.payload.shape[-2], 2 * w.payload.shape[-1]
    if rows % ROW_BLOCK or columns % CHUNK:
        return f"{rows} x {columns} weights are not multiples of {ROW_BLOCK} x {CHUNK}"
    return None


def pack_experts(w: ScaledArray) -> PackedExperts:
    """The weights in the form that no call has to change. Raises ValueError for what `refuses` refuses.

    The payload is changed element by element, one layer of a stack after the other: under `jax.jit` with `w` donated
    it stays where it is.
    """
    reason = refuses(w)
    if reason is not None:
        raise ValueError(reason)
    exponents = scale_of(w).astype(jnp.int32)
    largest = jnp.max(exponents, axis=-1, keepdims=True)
    # A group that is raised to step 0 lies at least 2^-26 below its row's largest: below float32's own rounding.
    steps = jnp.maximum(4 * (exponents - largest) + TOP_STEP, 0).astype(jnp.uint8)
    *lead, rows, groups = steps.shape
    steps = steps.reshape(*lead, rows // ROW_BLOCK, ROW_BLOCK, groups // GROUPS, GROUPS)
    return PackedExperts(
        payload=_each_layer(w.payload),
        steps=jnp.swapaxes(steps, -2, -3).reshape(*lead, rows // ROW_BLOCK, groups // GROUPS, ROW_BLOCK * GROUPS),
        row_scales=decode_e8m0(largest[..., 0].astype(jnp.uint8)) / TOP_FACTOR,
        scale=scale_of(w),
    )


def unpacked(w: PackedExperts) -> ScaledArray:
    """What `pack_experts` was given, bit for bit."""
    return ScaledArray(payload=with_signs_at_home(w.payload), scale=w.scale, form="fp4", block=(1, GROUP))


def decode_chunk(payload: UInt8[Array, "M half"], steps: UInt8[Array, "M groups"]) -> Float32[Array, "M K"]:
    """Values of a packed chunk of rows without their row scales, as E5M2 holds them."""
    values = decode_fp4(with_signs_at_home(payload)).reshape(*steps.shape, GROUP)
    exponents = steps.astype(jnp.int32)[:, :, None] // 4 + (127 - 13)
    return (values * lax.bitcast_convert_type(exponents << 23, jnp.float32)).reshape(payload.shape[0], -1)


def with_signs_at_home(payload: UInt8[Array, "*B M"]) -> UInt8[Array, "*B M"]:
    """A packed payload with the sign of each weight in its own nibble."""
    words = _words(payload)
    signs = jnp.zeros_like(words)
    for k in range(4):
        signs |= (words >> (4 * k)) & jnp.uint32(8 << 4 * k)
        signs |= (words << (12 - 4 * k)) & jnp.uint32(8 << 16 + 4 * k)
    return _bytes((words & jnp.uint32(MAGNITUDES)) | signs)


def _with_signs_apart(payload: UInt8[Array, "*B M"]) -> UInt8[Array, "*B M"]:
    words = _words(payload)
    signs = jnp.zeros_like(words)
    for k in range(4):
        signs |= (words << (4 * k)) & jnp.uint32(8 << 8 * k)
        signs |= (words >> (12 - 4 * k)) & jnp.uint32(128 << 8 * k)
    return _bytes((words & jnp.uint32(MAGNITUDES)) | signs)


def _each_layer(payload: UInt8[Array, "*B M"]) -> UInt8[Array, "*B M"]:
    if payload.ndim < 4:
        return _with_signs_apart(payload)
    return lax.fori_loop(0, payload.shape[0], lambda i, whole: whole.at[i].set(_with_signs_apart(whole[i])), payload)


def _words(payload: UInt8[Array, "*B M"]) -> UInt32[Array, "*B words"]:
    return lax.bitcast_convert_type(payload.reshape(*payload.shape[:-1], -1, 4), jnp.uint32)


def _bytes(words: UInt32[Array, "*B words"]) -> UInt8[Array, "*B M"]:
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
