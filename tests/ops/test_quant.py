"""The three quantisers against recorded codes, scales and round trips, and the anchors of backbone 7.1."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.ops import quant
from deepinfer_jax.ops.quant import ScaledArray, dequantize
from deepinfer_jax.testing import compare

QUANTIZERS = {"fp8": quant.quantize_fp8, "mxfp4": quant.quantize_index, "nvfp4": quant.quantize_main_kv}
FP4_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_TIES = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
PAGE_TOKENS, PAYLOAD_BYTES, SCALE_BYTES = 8, 256, 32

type Quantizer = Callable[[jax.Array], ScaledArray]


@pytest.fixture(params=["jit", "eager"])
def compiled(request, exact_jit) -> Callable[[Callable], Callable]:
    """Both ways of running an op: they simplify divisions differently."""
    return exact_jit if request.param == "jit" else lambda fn: fn


def roundtrip(quantizer: Quantizer) -> Callable[[jax.Array], jax.Array]:
    return lambda x: dequantize(quantizer(x), x.dtype)


@pytest.mark.parametrize(
    "name, source, codes, scale",
    [
        ("fp8", "x", "codes", "scale_e8m0"),
        ("mxfp4", "x", "packed", "scale_e8m0"),
        ("nvfp4", "x_nv", "packed", "scale_e4m3"),
    ],
)
def test_recorded_codes_scales_and_values_are_met(component, compiled, name: str, source: str, codes: str, scale: str):
    """All rows, also 2 and 9 with values near the smallest normal float: they only meet exact scalings."""
    fixture = component("quant")
    made = compiled(QUANTIZERS[name])(jnp.asarray(fixture[source]))
    compare.assert_bitwise(made.payload, fixture[f"{name}.{codes}"].view(np.uint8))
    compare.assert_bitwise(made.scale, fixture[f"{name}.{scale}"].view(np.uint8))
    values = compiled(roundtrip(QUANTIZERS[name]))(jnp.asarray(fixture[source]))
    compare.assert_bitwise(values, fixture[f"{name}.qdq"])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_recorded_float32_round_trips_are_met(component, compiled, name: str):
    fixture = component("quant")
    made = compiled(roundtrip(QUANTIZERS[name]))(jnp.asarray(fixture["x_fp32"]))
    compare.assert_bitwise(made, fixture[f"{name}.qdq_fp32"])


def test_recorded_page_of_main_kv_is_met(component, exact_jit):
    """One page in the layout of another engine: the code bytes of all tokens, then their scale bytes."""
    fixture = component("kv_page_fp4")
    made = exact_jit(quant.quantize_main_kv)(jnp.asarray(fixture["k"]))
    page = np.concatenate([np.asarray(made.payload).reshape(1, -1), np.asarray(made.scale).reshape(1, -1)], axis=1)
    assert page.shape[1] == PAGE_TOKENS * (PAYLOAD_BYTES + SCALE_BYTES)
    compare.assert_bitwise(page, fixture["pages"])
    compare.assert_bitwise(exact_jit(lambda w: dequantize(w, jnp.bfloat16))(made), fixture["dequantised"])


JITTED = {quantizer: jax.jit(quantizer) for quantizer in QUANTIZERS.values()}


def scale_value(quantizer: Quantizer, amax: float) -> float:
    """The scale that a group with this largest magnitude gets."""
    x = np.zeros((1, 32), np.float32)
    x[0, 5] = -amax
    made = JITTED[quantizer](x)
    scale = np.asarray(made.scale)[:1, 0]
    if made.form == "fp4_e4m3":
        return float(scale.view(ml_dtypes.float8_e4m3fn)[0])
    return 2.0 ** (int(scale[0]) - 127)


@pytest.mark.parametrize("amax, scale", [(1.0, 2.0**-8), (448.0, 1.0), (449.0, 2.0), (22.6, 2.0**-4), (0.0, 2.0**-22)])
def test_fp8_scale_anchors(amax: float, scale: float):
    assert scale_value(quant.quantize_fp8, amax) == scale


@pytest.mark.parametrize("amax, scale", [(3.0, 0.5), (6.0, 1.0), (6.03, 2.0), (1.0, 0.25), (0.0, 2.0**-126)])
def test_index_scale_anchors(amax: float, scale: float):
    assert scale_value(quant.quantize_index, amax) == scale


@pytest.mark.parametrize("amax, scale", [(6.0, 1.0), (0.0, 2.0**-9), (2688.0, 448.0), (1e30, 448.0), (6.3, 1.0)])
def test_main_kv_scale_anchors(amax: float, scale: float):
    assert scale_value(quant.quantize_main_kv, amax) == scale


def test_floor_of_the_fp8_scale_is_that_of_the_release():
    """U5: groups up to 1e-4 share the scale 2^-22; none is coarsened to 2^-13."""
    for amax in (1e-6, 1e-4):
        assert scale_value(quant.quantize_fp8, amax) == 2.0**-22
    for amax in (1e-2, 5e-2):
        assert scale_value(quant.quantize_fp8, amax) == 2.0 ** np.ceil(np.log2(amax / 448))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-20, 0, 20])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_ties_go_to_the_even_code(compiled, name: str, exponent: int, sign: int):
    """Every tie, with a scale of exactly 2^exponent (E4M3 reaches down to 2^-9 and up to 448)."""
    exponent = exponent if name == "mxfp4" else int(np.clip(exponent, -9, 8))
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [6, *FP4_TIES]
    x[0, 16:24] = [6, *FP4_TIES]
    made = np.asarray(compiled(roundtrip(QUANTIZERS[name]))(jnp.asarray(sign * x * 2.0**exponent, jnp.float32)))
    want = np.asarray([6, *FP4_TIES.values()]) * 2.0**exponent * sign
    compare.assert_bitwise(made[0, :8], want.astype(np.float32))


def test_ties_survive_a_scale_that_is_no_power_of_two(compiled):
    """0.29296875 / 0.234375 is exactly 1.25: a multiplication by the rounded reciprocal would move it up."""
    x = np.zeros((1, 16), np.float32)
    x[0, :2] = [6 * 0.234375, 0.29296875]
    made = np.asarray(compiled(roundtrip(quant.quantize_main_kv))(jnp.asarray(x)))
    compare.assert_bitwise(made[0, :2], np.asarray([6 * 0.234375, 0.234375], np.float32))


def test_every_fp4_byte_is_decoded_low_nibble_first(exact_jit):
    codes = jnp.arange(256, dtype=jnp.uint8)[:, None]
    made = np.asarray(exact_jit(quant.decode_fp4)(codes))
    signed = np.concatenate([FP4_VALUES, -FP4_VALUES])
    want = np.stack([signed[np.arange(256) & 15], signed[np.arange(256) >> 4]], axis=-1)
    compare.assert_bitwise(made, want)


def test_every_scale_byte_is_decoded(exact_jit):
    codes = jnp.arange(255, dtype=jnp.uint8)
    powers = np.asarray(exact_jit(quant.decode_e8m0)(codes))
    compare.assert_bitwise(powers[1:], (2.0 ** (np.arange(1, 255) - 127)).astype(np.float32))
    assert powers[0] == 0  # below the smallest normal float
    small = np.delete(np.arange(256, dtype=np.uint8), [127, 255])  # the two NaN codes
    compare.assert_bitwise(
        exact_jit(quant.decode_e4m3)(jnp.asarray(small)), small.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 64)], ids=["no row", "no row of two axes"])
def test_no_rows_give_no_rows(exact_jit, shape: tuple[int, ...]):
    for quantizer in QUANTIZERS.values():
        assert exact_jit(roundtrip(quantizer))(jnp.zeros(shape, jnp.bfloat16)).shape == shape


def test_zero_groups_have_zero_codes(exact_jit):
    for quantizer in QUANTIZERS.values():
        made = exact_jit(quantizer)(jnp.zeros((1, 32), jnp.bfloat16))
        assert not np.any(np.asarray(made.payload))
