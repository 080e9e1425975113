"""Linear layers for SM100, interpreted on the CPU with race detection: all but the block-scaled instruction."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.linear import api, cases, mosaic_sm100, packed_sm90
from deepinfer_jax.kernels.linear.mosaic_sm100 import Tiling
from deepinfer_jax.kernels.linear.packed_sm100 import PackedLinear, pack, quantized_rows, rows_of_tile, scale_tiles
from deepinfer_jax.kernels.registry import MOSAIC_SM90, MOSAIC_SM100, NVIDIA
from deepinfer_jax.ops.linear import grouped_linear, linear, linear_f32
from deepinfer_jax.testing import compare

# Sums of exact products in another order, rounded to bfloat16 once.
REL_L2 = 1e-3
# float32 sums of exact products in another order.
F32_REL_L2 = 1e-6
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TILING = Tiling(row_tile=16, most_stages=2)  # so that the ring goes round


@functools.cache
def kernel(*, row_tile: int = 16) -> jax.stages.Wrapped:
    tiling = Tiling(row_tile=row_tile, most_stages=2)
    return jax.jit(functools.partial(mosaic_sm100.linear, num_sms=2, tiling=tiling, interpret=INTERPRET))


def make(num_rows: int, num_outputs: int = 128, width: int = 256) -> tuple:
    return cases.make_inputs(jax.random.key(num_rows), num_rows=num_rows, num_outputs=num_outputs, width=width)


@pytest.mark.parametrize(
    "num_rows, num_outputs, width",
    [
        pytest.param(37, 384, 384, id="several units of a block, ragged"),
        pytest.param(1, 128, 128, id="one row"),
        pytest.param(16, 256, 256, id="one tile", marks=pytest.mark.slow),
        pytest.param(40, 128, 1792, id="long pipeline", marks=pytest.mark.slow),
    ],
)
def test_matches_reference(num_rows, num_outputs, width, capfd):
    x, w = make(num_rows, num_outputs, width)
    # Threads of the interpreter call JAX, which may wait for ever while operations of the reference are dispatched too.
    got = jax.block_until_ready(kernel()(x, w))
    compare.assert_close(got, linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_packed_weights_give_the_same():
    x, w = make(16)
    compare.assert_bitwise(kernel()(x, pack(w)), kernel()(x, w))
    stacked = pack(jax.tree.map(lambda a: jnp.stack([a, a]), w))
    compare.assert_bitwise(stacked.scales[1], pack(w).scales)


def test_scales_lie_as_the_copy_to_tensor_memory_reads_them():
    scales = jax.random.randint(jax.random.key(0), (256, 12), 1, 255, jnp.int32).astype(jnp.uint8)
    tiles = scale_tiles(scales, 128)
    compare.assert_bitwise(tiles, scales.reshape(2, 4, 32, 3, 4).transpose(0, 3, 2, 1, 4).reshape(2, 3, 32, 16))
    # Fewer rows in each tile leave the rest of it empty.
    tiles = scale_tiles(scales[:96], 48)
    assert tiles.shape == (2, 3, 32, 16)
    compare.assert_bitwise(rows_of_tile(tiles[1, 2], 48), scales[48:96, 8:12])
    assert not rows_of_tile(tiles[1, 2], 128)[48:].any()


def test_a_block_scale_is_that_of_its_32_rows():
    _, w = make(8, num_outputs=256)
    scales = rows_of_tile(pack(w).scales[1, 0], 128)
    compare.assert_bitwise(scales, jnp.repeat(w.scale[4:8, :4], 32, axis=0))


def test_rows_behind_the_last_repeat_it():
    x, _ = make(5)
    codes, scales = quantized_rows(x, num_rows=16, row_tile=16, interpret=INTERPRET)
    compare.assert_bitwise(codes[5:], jnp.repeat(codes[4:5], 11, axis=0))
    assert scales.shape == (1, 2, 32, 16)


def test_row_does_not_depend_on_others():
    x, w = make(16)
    both = kernel()(x, w)
    alone = kernel()(*cases.keep_rows((x, w), jnp.int32(3)))
    compare.assert_bitwise(alone[:3], both[:3])


@pytest.mark.parametrize(
    "counts", [pytest.param((5, 24), id="few"), pytest.param((1, 8, 33, 64, 100), id="all", marks=pytest.mark.slow)]
)
def test_row_does_not_depend_on_the_number_of_rows(counts):
    x, w = make(128)
    run = kernel(row_tile=128)
    everything = run(x, w)
    for count in counts:
        compare.assert_bitwise(run(x[:count], w), everything[:count])


@pytest.mark.slow
def test_rows_are_quantised():
    _, w = make(16)
    x = jax.random.normal(jax.random.key(2), (16, 256), jnp.bfloat16)
    on_grid = cases.dequantize(cases.quantize_fp8(x), jnp.bfloat16)
    compare.assert_bitwise(kernel()(x, w), kernel()(on_grid, w))


def make_bf16(num_rows: int, groups: int, num_outputs: int, width: int) -> tuple:
    keys = jax.random.split(jax.random.key(num_rows + groups), 2)
    x = jax.random.normal(keys[0], (num_rows, groups, width), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (num_outputs, width), jnp.bfloat16)


def test_groups_have_columns_of_their_own(capfd):
    x, w = make_bf16(21, 2, 512, 192)
    got = jax.block_until_ready(mosaic_sm100.grouped_linear(x, w, num_sms=2, tiling=TILING, interpret=INTERPRET))
    compare.assert_close(got, grouped_linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("out_dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_bf16_products_are_exact(out_dtype):
    x, w = make_bf16(8, 1, 128, 384)
    run = functools.partial(mosaic_sm100.linear_bf16, num_sms=2, tiling=TILING, interpret=INTERPRET)
    got = jax.block_until_ready(run(x[:, 0], w, out_dtype=out_dtype))
    assert got.dtype == out_dtype
    compare.assert_close(
        got, linear_f32(x[:, 0], w).astype(out_dtype), rel_l2=F32_REL_L2 if out_dtype == jnp.float32 else REL_L2
    )


def test_no_rows_give_no_rows():
    x, w = make(8)
    assert kernel()(x[:0], w).shape == (0, 128)
    x, w = make_bf16(8, 2, 256, 128)
    assert mosaic_sm100.grouped_linear(x[:0], w).shape == (0, 2, 128)


def test_refusals_say_why():
    x, w = make(8)
    assert mosaic_sm100.refuses(x, w) is None
    assert "float32" in mosaic_sm100.refuses(x.astype(jnp.float32), w)
    assert "E4M3" in mosaic_sm100.refuses(x, w.payload)
    assert "192 x 256" in mosaic_sm100.refuses(x, make(8, num_outputs=192)[1])
    assert "3 axes" in mosaic_sm100.refuses(x, jax.tree.map(lambda a: a[None], w))
    with pytest.raises(NotImplementedError, match="use the reference"):
        mosaic_sm100.linear(x, make(8, num_outputs=64)[1])
    x, plain = make_bf16(8, 2, 128, 128)
    assert "64 x 128" in mosaic_sm100.refuses_grouped(x, plain)
    assert "plain bfloat16" in mosaic_sm100.refuses_grouped(x, w)
    with pytest.raises(NotImplementedError, match="use the reference"):
        mosaic_sm100.linear_bf16(x[:, 0], plain[:64])


def test_bad_tiling_is_an_error():
    with pytest.raises(ValueError, match="row_tile=24"):
        Tiling(row_tile=24)


def test_weights_are_packed_for_the_kernel_that_is_asked_for():
    _, w = make(8)
    kinds = {MOSAIC_SM90: packed_sm90.PackedLinear, MOSAIC_SM100: PackedLinear}
    for name, kind in kinds.items():
        packed = api.packed(w, dtype=jnp.bfloat16, backend=Backend(target=NVIDIA, kernels=name))
        assert isinstance(packed, kind)
    assert api.packed(w, dtype=jnp.bfloat16, backend=Backend(target=NVIDIA)) is w
