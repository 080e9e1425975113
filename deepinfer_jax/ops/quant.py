"""The three quantisers and the packed forms they produce (spec: backbone 7.1, checkpoint 3)."""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt8

from deepinfer_jax.pytree import pytree_dataclass, static_field

FP8_GROUP = 32  # channels that share one power-of-two scale: activations, window KV, Engram rows
INDEX_GROUP = 32  # channels of an index query or key that share one power-of-two scale
MAIN_KV_GROUP = 16  # channels of a main KV row that share one E4M3 scale
FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
INDEX_AMAX_FLOOR = 6.0 * 2.0**-126
MAIN_KV_AMAX_FLOOR = 6.0 * 2.0**-9

# e2m1 values halfway between neighbours. True: a tie rounds up, since the upper code is even.
_FP4_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


Form = Literal["fp8", "fp4", "fp4_e4m3"]


@pytree_dataclass
class ScaledArray:
    """An array in its packed form: values are payload times the scale of their block.

    form: "fp8" (E4M3 bytes, E8M0 scale bytes), "fp4" (two E2M1 values in a byte, even column in the low nibble, E8M0
    scale bytes) or "fp4_e4m3" (the same with E4M3 scale bytes). payload and scale are uint8: a compiler that has no
    float8 gather or scatter would widen a whole cache or table for a few rows. Plain values have scale None.
    block: rows and columns that share a scale.
    """

    payload: Array
    scale: UInt8[Array, "..."] | None
    form: Form = static_field(default="fp8")
    block: tuple[int, int] = static_field(default=(1, 1))


def dequantize(w: ScaledArray | Array, dtype: Any) -> Float[Array, "..."]:
    """The values of a packed or plain array in `dtype`; exact in float32 and, but for underflow, in bfloat16."""
    if not isinstance(w, ScaledArray):
        return w.astype(dtype)
    if w.scale is None:
        return w.payload.astype(dtype)
    values = decode_e4m3(w.payload) if w.form == "fp8" else decode_fp4(w.payload)
    scale = decode_e4m3(w.scale) if w.form == "fp4_e4m3" else decode_e8m0(w.scale)
    rows, cols = w.block
    if rows > 1:
        scale = jnp.repeat(scale, rows, axis=-2)[..., : values.shape[-2], :]
    grouped = values.reshape(*scale.shape, cols)
    return (grouped * scale[..., None]).reshape(values.shape).astype(dtype)


def decode_e4m3(codes: UInt8[Array, "*N"]) -> Float32[Array, "*N"]:
    """E4M3 bytes as float32."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def decode_e8m0(codes: UInt8[Array, "*N"]) -> Float32[Array, "*N"]:
    """Power-of-two bytes as float32: 2^(code - 127), where code 0 gives 0 and 255 (NaN) is refused by the loader."""
    return _pow2(codes.astype(jnp.int32))


def decode_fp4(codes: UInt8[Array, "*B M"]) -> Float32[Array, "*B N"]:
    """Two e2m1 values for each byte, low nibble first, as float32 (N = 2 M)."""
    nibbles = jnp.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], codes.shape[-1] * 2)
    nibbles = nibbles.astype(jnp.uint32)
    magnitude = nibbles & 7
    # Exponent and mantissa bits of 1 and more sit two binades below float32's bias; 0 and 0.5 are special.
    bits = jnp.where(magnitude == 0, 0, jnp.where(magnitude == 1, 126 << 23, (magnitude << 22) + (126 << 23)))
    return lax.bitcast_convert_type(bits | ((nibbles >> 3) << 31), jnp.float32)


def pow2ceil_exponent(x: Float32[Array, "*N"]) -> Int[Array, "*N"]:
    """The biased exponent of the smallest power of two that is at least x, from the bits of a positive normal x."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)


def quantize_fp8(x: Float[Array, "*B N"]) -> ScaledArray:
    """x as E4M3 with one power-of-two scale for each 32 channels: activations and window KV rows."""
    groups, amax = _grouped(x, FP8_GROUP)
    exponent = pow2ceil_exponent(jnp.maximum(amax, FP8_AMAX_FLOOR) * jnp.float32(1.0 / FP8_MAX))
    scaled = groups * _pow2(254 - exponent)[..., None]
    codes = _e4m3_codes(jnp.clip(scaled, -FP8_MAX, FP8_MAX)).reshape(x.shape)
    return ScaledArray(payload=codes, scale=exponent.astype(jnp.uint8), form="fp8", block=(1, FP8_GROUP))


def quantize_index(x: Float[Array, "*B N"]) -> ScaledArray:
    """x as packed E2M1 with one power-of-two scale for each 32 channels: index queries and keys."""
    groups, amax = _grouped(x, INDEX_GROUP)
    exponent = pow2ceil_exponent(jnp.maximum(amax, INDEX_AMAX_FLOOR) * jnp.float32(1.0 / FP4_MAX))
    # Scaled up first: a midpoint times the smallest scale would be flushed to zero, and zero would not be below it.
    codes = _fp4_codes(groups * _pow2(254 - exponent)[..., None], jnp.ones_like(amax)[..., None]).reshape(x.shape)
    return ScaledArray(payload=_pack(codes), scale=exponent.astype(jnp.uint8), form="fp4", block=(1, INDEX_GROUP))


def quantize_main_kv(x: Float[Array, "*B N"]) -> ScaledArray:
    """x as packed E2M1 with one E4M3 scale for each 16 channels: main KV rows."""
    groups, amax = _grouped(x, MAIN_KV_GROUP)
    # Capped at the largest E4M3 value: the cast of anything above gives NaN.
    scale = _e4m3_codes(jnp.minimum(jnp.maximum(amax, MAIN_KV_AMAX_FLOOR) / FP4_MAX, FP8_MAX))
    codes = _fp4_codes(groups, decode_e4m3(scale)[..., None]).reshape(x.shape)
    return ScaledArray(payload=_pack(codes), scale=scale, form="fp4_e4m3", block=(1, MAIN_KV_GROUP))


def fp8_roundtrip(x: Float[Array, "*B N"]) -> Float[Array, "*B N"]:
    """x quantised by `quantize_fp8` and dequantised to its own dtype."""
    return dequantize(quantize_fp8(x), x.dtype)


def _grouped(x: Float[Array, "*B N"], group: int) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return groups, jnp.max(jnp.abs(groups), axis=-1)


def _pow2(biased_exponent: Int[Array, "*N"]) -> Float32[Array, "*N"]:
    return lax.bitcast_convert_type(biased_exponent << 23, jnp.float32)


def _e4m3_codes(x: Float32[Array, "*N"]) -> UInt8[Array, "*N"]:
    return lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)


def _fp4_codes(x: Float32[Array, "*B G"], scale: Float32[Array, "*B one"]) -> UInt8[Array, "*B G"]:
    """E2M1 codes of x / scale, ties to the even code.

    Compares |x| with midpoint * scale, which is exact: a division by a broadcast scale would become a multiplication
    by a rounded reciprocal and move ties.
    """
    size = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for midpoint, tie_up in _FP4_MIDPOINTS:
        border = scale * midpoint
        code += (size >= border if tie_up else size > border).astype(jnp.uint8)
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def _pack(codes: UInt8[Array, "*B N"]) -> UInt8[Array, "*B M"]:
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)
