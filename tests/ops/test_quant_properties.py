"""Properties of the quantisers on arbitrary groups, against an oracle of ml_dtypes casts."""

from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from deepinfer_jax.ops import quant
from deepinfer_jax.ops.quant import dequantize
from deepinfer_jax.testing import compare

EXACT = {"xla_allow_excess_precision": False}
WIDTH = 64
# The mean of n errors of a fair rounding stays within five standard errors in all but 6e-7 of the cases.
FAIR_STANDARD_ERRORS = 5.0
# Smallest magnitude of a non-zero input: no product with a scale falls below the normal floats.
SMALLEST = 2.0**-100
NORMAL_SCALE_AMAX = 6 * 2.0**-6  # from here on the E4M3 scale is a normal number, within 1/16 of the quotient


def fp8_oracle(x: np.ndarray) -> np.ndarray:
    groups = grouped(x, 32)
    amax = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(1e-4))
    scale = power_at_least(amax * np.float32(1 / 448))
    codes = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape).astype(x.dtype)


def index_oracle(x: np.ndarray) -> np.ndarray:
    groups = grouped(x, 32)
    amax = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(6 * 2.0**-126))
    return fp4_oracle(x, groups, power_at_least(amax * np.float32(1 / 6)))


def main_kv_oracle(x: np.ndarray) -> np.ndarray:
    groups = grouped(x, 16)
    amax = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(6 * 2.0**-9))
    scale = np.minimum(amax / np.float32(6), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return fp4_oracle(x, groups, scale.astype(np.float64))


def fp4_oracle(x: np.ndarray, groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The quotient in float64 and the cast of ml_dtypes."""
    codes = np.clip(groups.astype(np.float64) / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape).astype(x.dtype)


def grouped(x: np.ndarray, group: int) -> np.ndarray:
    return x.astype(np.float32).reshape(*x.shape[:-1], -1, group)


def power_at_least(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(1.0, exponent - (mantissa == 0.5))


QUANTIZERS: dict[str, tuple[Callable, Callable]] = {
    "fp8": (quant.quantize_fp8, fp8_oracle),
    "index": (quant.quantize_index, index_oracle),
    "main KV": (quant.quantize_main_kv, main_kv_oracle),
}
ROUNDTRIPS = {
    name: jax.jit(lambda x, q=quantizer: dequantize(q(x), x.dtype), compiler_options=EXACT)
    for name, (quantizer, _) in QUANTIZERS.items()
}
BOTH_VALUES = {
    name: jax.jit(lambda x, q=quantizer: tuple(dequantize(q(x), t) for t in (jnp.float32, jnp.bfloat16)))
    for name, (quantizer, _) in QUANTIZERS.items()
}


def magnitudes() -> st.SearchStrategy[np.ndarray]:
    """Rows of bf16 values whose groups have very different sizes, with zeros and many ties."""
    steps = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0, 449.0])
    loose = st.floats(-448.0, 448.0, width=32)
    values = hnp.arrays(np.float32, (2, WIDTH), elements=st.one_of(steps, loose))
    powers = hnp.arrays(np.int32, (2, WIDTH // 16), elements=st.integers(-60, 20))
    return st.builds(scaled, values, powers)


def scaled(values: np.ndarray, powers: np.ndarray) -> np.ndarray:
    made = np.ldexp(values, np.repeat(powers, 16, axis=1)).astype(ml_dtypes.bfloat16)
    return np.where(np.abs(made.astype(np.float32)) < SMALLEST, ml_dtypes.bfloat16(0), made)


@pytest.mark.parametrize("name", QUANTIZERS)
@given(x=magnitudes())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_round_trip_equals_the_cast_of_an_exact_quotient(name: str, x: np.ndarray):
    compare.assert_bitwise(np.asarray(ROUNDTRIPS[name](x)) + 0, QUANTIZERS[name][1](x) + 0)


@pytest.mark.parametrize("name", QUANTIZERS)
@given(x=magnitudes())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_round_trip_of_a_round_trip_is_identical(name: str, x: np.ndarray):
    """For main KV from a largest value of 6 * 2^-6 on: below, a step of the E4M3 scale is no longer small."""
    if name == "main KV":
        amax = np.abs(grouped(x, 16)).max(axis=-1, keepdims=True)
        x = np.where(amax >= NORMAL_SCALE_AMAX, grouped(x, 16), 0).reshape(x.shape).astype(x.dtype)
    once = np.asarray(ROUNDTRIPS[name](x))
    compare.assert_bitwise(ROUNDTRIPS[name](once), once)


def test_main_kv_with_a_subnormal_scale_shrinks_again_when_quantised_again():
    """5 * 2^-8 becomes 4 * 2^-8 with the scale 2^-8; that gets the scale 2^-9 and is cut to 6 * 2^-9."""
    x = np.full((1, WIDTH), 5 * 2.0**-8, np.float32)
    once = np.asarray(ROUNDTRIPS["main KV"](x))
    compare.assert_bitwise(once, np.full_like(x, 4 * 2.0**-8))
    compare.assert_bitwise(ROUNDTRIPS["main KV"](once), np.full_like(x, 6 * 2.0**-9))


@pytest.mark.parametrize("name", QUANTIZERS)
@given(x=magnitudes())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_packed_rows_give_the_same_values_in_both_dtypes(name: str, x: np.ndarray):
    """A bf16 value of the packed bytes is the float32 value exactly: packed and simulated caches agree."""
    wide, narrow = BOTH_VALUES[name](x)
    compare.assert_bitwise(np.asarray(narrow).astype(np.float32), np.asarray(wide))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_bytes_of_a_row_are_those_of_the_specification(name: str):
    """528, 288 and 68 bytes for rows of 512, 512 and 128 channels."""
    width, want = {"fp8": (512, 528), "main KV": (512, 288), "index": (128, 68)}[name]
    packed = jax.eval_shape(QUANTIZERS[name][0], jax.ShapeDtypeStruct((1, width), jnp.bfloat16))
    assert packed.payload.dtype == jnp.uint8 and packed.scale.dtype == jnp.uint8
    assert packed.payload.size + packed.scale.size == want


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_errors_are_on_no_one_side(name: str, dtype):
    """Uniform values up to a largest one that the format holds exactly: a scale rounded down would cut the others."""
    largest = 0.9375 if name == "main KV" else 1.0
    x = np.random.default_rng(7).uniform(-largest, largest, (4096, WIDTH)).astype(dtype)
    x[:, ::16] = largest
    compare.assert_unbiased(ROUNDTRIPS[name](x), x, standard_errors=FAIR_STANDARD_ERRORS)


def positive_bf16(low: float, high: float) -> np.ndarray:
    every = np.arange(1 << 15, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return every[(every.astype(np.float32) >= low) & (every.astype(np.float32) <= high)]


def test_main_kv_scale_is_the_rounded_quotient_for_every_bf16_amax():
    amax = positive_bf16(2.0**-126, 2688.0)
    made = jax.jit(quant.quantize_main_kv, compiler_options=EXACT)(spread_over_groups(amax, 16))
    quotient = np.maximum(amax.astype(np.float64), 6 * 2.0**-9) / 6
    want = quotient.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    compare.assert_bitwise(np.asarray(made.scale)[:, 0], want.view(np.uint8))


@pytest.mark.parametrize("name, largest", [("fp8", 448), ("index", 6)])
def test_power_of_two_scale_is_the_least_for_every_bf16_amax(name: str, largest: int):
    """No power of two below it holds the group, and it does itself."""
    floor = {"fp8": 1e-4, "index": 6 * 2.0**-126}[name]
    amax = positive_bf16(floor, 3e38)
    made = jax.jit(QUANTIZERS[name][0], compiler_options=EXACT)(spread_over_groups(amax, 32))
    scale = 2.0 ** (np.asarray(made.scale)[:, 0].astype(np.float64) - 127)
    assert np.all(amax.astype(np.float64) <= largest * scale)
    assert np.all(amax.astype(np.float64) > largest * scale / 2)


def spread_over_groups(amax: np.ndarray, group: int) -> np.ndarray:
    """One row for each value, which stands somewhere in a group of zeros."""
    rows = np.zeros((len(amax), group), ml_dtypes.bfloat16)
    rows[np.arange(len(amax)), np.arange(len(amax)) % group] = amax
    return rows
