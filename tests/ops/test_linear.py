"""Products over packed weights against the recorded block-scaled ones, and the dtypes of each kind."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.linear import grouped_linear, linear, linear_f32
from deepinfer_jax.ops.quant import FP8_GROUP, ScaledArray, dequantize, fp8_roundtrip, quantize_fp8
from deepinfer_jax.testing import compare

# Sums of 96 exact float32 products in another order.
SUM_REL_L2 = 2e-7


def as_bytes(array: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(array.view(np.uint8))


@pytest.fixture
def fp8_weight(component) -> ScaledArray:
    fixture = component("gemm")
    scale = as_bytes(fixture["fp8.w_scale"])
    return ScaledArray(payload=as_bytes(fixture["fp8.w_codes"]), scale=scale, form="fp8", block=(32, 32))


@pytest.fixture
def fp4_weight(component) -> ScaledArray:
    fixture = component("gemm")
    scale = as_bytes(fixture["fp4.w_scale"])
    return ScaledArray(payload=as_bytes(fixture["fp4.w_packed"]), scale=scale, form="fp4", block=(1, 32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_recorded_weights_are_dequantised_exactly(component, exact_jit, fp8_weight, fp4_weight, dtype):
    fixture = component("gemm")
    for weight, name in ((fp8_weight, "fp8.w_dequant"), (fp4_weight, "fp4.w_dequant")):
        made = exact_jit(lambda w: dequantize(w, dtype))(weight)
        compare.assert_bitwise(np.asarray(made).astype(np.float32), fixture[name])


def test_recorded_engram_rows_are_dequantised_exactly(component, exact_jit):
    fixture = component("gemm")
    rows = ScaledArray(
        payload=as_bytes(fixture["engram_rows.codes"]),
        scale=as_bytes(fixture["engram_rows.scale"]),
        form="fp8",
        block=(1, FP8_GROUP),
    )
    made = exact_jit(lambda rows: dequantize(rows, jnp.bfloat16))(rows)
    compare.assert_bitwise(made, fixture["engram_rows.dequant"])


def test_recorded_activation_codes_are_met(component, exact_jit):
    fixture = component("gemm")
    made = exact_jit(quantize_fp8)(fixture["fp8.a"])
    compare.assert_bitwise(made.payload, fixture["fp8.a_codes"].view(np.uint8))
    compare.assert_bitwise(made.scale, fixture["fp8.a_scale"].view(np.uint8))


def test_recorded_products_are_met(component, exact_jit, fp8_weight, fp4_weight):
    """Float32 sums of the block-scaled products, and the bf16 result bit for bit."""
    fixture = component("gemm")
    activation = exact_jit(fp8_roundtrip)(fixture["fp8.a"])
    wide = exact_jit(linear_f32)
    compare.assert_close(wide(activation, fp8_weight), fixture["fp8.out_fp32"], rel_l2=SUM_REL_L2)
    compare.assert_close(wide(activation, fp4_weight), fixture["fp4.out_fp32"], rel_l2=SUM_REL_L2)
    compare.assert_bitwise(exact_jit(linear)(activation, fp8_weight), fixture["fp8.out_bf16"])


def test_linear_keeps_the_dtype_of_its_input(fp8_weight):
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((2, 96), dtype)
        assert linear(x, fp8_weight).dtype == dtype
        assert linear_f32(x, fp8_weight).dtype == jnp.float32


def test_bf16_product_is_accumulated_in_float32(exact_jit):
    """256 ones and one 2^-8: a bf16 accumulator would stop at 256."""
    x = jnp.ones((1, 512), jnp.bfloat16)
    w = jnp.ones((1, 512), jnp.bfloat16)
    compare.assert_bitwise(exact_jit(linear)(x, w), np.asarray([[512]], jnp.bfloat16))


def test_grouped_linear_multiplies_group_by_group(exact_jit):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 3, 64), np.float32))
    w = jnp.asarray(rng.standard_normal((3 * 4, 64), np.float32))
    want = np.stack([np.asarray(x)[:, g] @ np.asarray(w)[4 * g : 4 * g + 4].T for g in range(3)], axis=1)
    compare.assert_close(exact_jit(grouped_linear)(x, w), want, rel_l2=SUM_REL_L2)


def test_no_rows_give_no_rows(fp8_weight, fp4_weight):
    for weight, width in ((fp8_weight, 50), (fp4_weight, 40)):
        assert linear(jnp.zeros((0, 96), jnp.bfloat16), weight).shape == (0, width)
    assert grouped_linear(jnp.zeros((0, 2, 8)), jnp.zeros((6, 8))).shape == (0, 2, 3)
