"""The block-scaled linear layer for SM90, interpreted on the CPU with race detection."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.kernels.linear import cases, mosaic_sm90
from deepinfer_jax.kernels.linear.mosaic_sm90 import Tiling
from deepinfer_jax.ops.linear import grouped_linear, linear, linear_f32
from deepinfer_jax.testing import compare

# Sums over groups of 32 columns in another order, rounded to bfloat16 once.
REL_L2 = 1e-3
# float32 sums of exact products in another order.
F32_REL_L2 = 1e-6
TILING = Tiling(row_tile=16, most_stages=2)  # so that the ring goes round
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@functools.cache
def kernel() -> jax.stages.Wrapped:
    return jax.jit(functools.partial(mosaic_sm90.linear, num_sms=2, tiling=TILING, interpret=INTERPRET))


def make(num_rows: int, num_outputs: int = 128, width: int = 256) -> tuple:
    return cases.make_inputs(jax.random.key(num_rows), num_rows=num_rows, num_outputs=num_outputs, width=width)


@pytest.mark.parametrize(
    "num_rows, num_outputs, width",
    [
        pytest.param(21, 256, 512, id="ragged"),
        pytest.param(1, 128, 256, id="one row", marks=pytest.mark.slow),
        pytest.param(16, 384, 256, id="one tile", marks=pytest.mark.slow),
        pytest.param(40, 128, 1792, id="long pipeline", marks=pytest.mark.slow),
    ],
)
def test_matches_reference(num_rows, num_outputs, width, capfd):
    x, w = make(num_rows, num_outputs, width)
    compare.assert_close(kernel()(x, w), linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_row_does_not_depend_on_others():
    x, w = make(16)
    both = kernel()(x, w)
    alone = kernel()(*cases.keep_rows((x, w), jnp.int32(3)))
    compare.assert_bitwise(alone[:3], both[:3])


@pytest.mark.slow
def test_row_does_not_depend_on_the_number_of_rows():
    x, w = make(24)
    compare.assert_bitwise(kernel()(x[:5], w), kernel()(x, w)[:5])


def test_rows_are_quantised():
    _, w = make(8)
    x = jax.random.normal(jax.random.key(2), (8, 256), jnp.bfloat16)
    on_grid = cases.dequantize(cases.quantize_fp8(x), jnp.bfloat16)
    compare.assert_bitwise(kernel()(x, w), kernel()(on_grid, w))


def make_bf16(num_rows: int, groups: int, num_outputs: int, width: int) -> tuple:
    keys = jax.random.split(jax.random.key(num_rows + groups), 2)
    x = jax.random.normal(keys[0], (num_rows, groups, width), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (num_outputs, width), jnp.bfloat16)


def test_groups_have_columns_of_their_own(capfd):
    x, w = make_bf16(13, 2, 512, 256)
    got = mosaic_sm90.grouped_linear(x, w, num_sms=2, tiling=TILING, interpret=INTERPRET)
    compare.assert_close(got, grouped_linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("out_dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_bf16_products_are_exact(out_dtype):
    x, w = make_bf16(8, 1, 128, 384)
    run = functools.partial(mosaic_sm90.linear_bf16, num_sms=2, tiling=TILING, interpret=INTERPRET)
    got = run(x[:, 0], w, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    compare.assert_close(
        got, linear_f32(x[:, 0], w).astype(out_dtype), rel_l2=F32_REL_L2 if out_dtype == jnp.float32 else REL_L2
    )


def test_no_rows_give_no_rows():
    x, w = make(8)
    assert kernel()(x[:0], w).shape == (0, 128)
    x, w = make_bf16(8, 2, 256, 128)
    assert mosaic_sm90.grouped_linear(x[:0], w).shape == (0, 2, 128)


def test_refusals_say_why():
    x, w = make(8)
    assert mosaic_sm90.refuses(x, w) is None
    assert "float32" in mosaic_sm90.refuses(x.astype(jnp.float32), w)
    assert "E4M3" in mosaic_sm90.refuses(x, w.payload)
    assert "192 x 256" in mosaic_sm90.refuses(x, make(8, num_outputs=192)[1])
    assert "3 axes" in mosaic_sm90.refuses(x, jax.tree.map(lambda a: a[None], w))
    with pytest.raises(NotImplementedError, match="use the reference"):
        mosaic_sm90.linear(x.astype(jnp.bfloat16), make(8, num_outputs=64)[1])
    x, plain = make_bf16(8, 2, 128, 128)
    assert "64 x 128" in mosaic_sm90.refuses_grouped(x, plain)
    assert "plain bfloat16" in mosaic_sm90.refuses_grouped(x, w)
    with pytest.raises(NotImplementedError, match="use the reference"):
        mosaic_sm90.linear_bf16(x[:, 0], plain[:64])


def test_bad_tiling_is_an_error():
    with pytest.raises(ValueError, match="row_tile=12"):
        Tiling(row_tile=12)
