"""The block-scaled linear layer for SM90, interpreted on the CPU with race detection."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepinfer_jax.config.runtime import ROW_TILE_SIZES, Backend
from deepinfer_jax.kernels.linear import api, cases, mosaic_sm90, units_sm90
from deepinfer_jax.kernels.linear.mosaic_sm90 import num_splits
from deepinfer_jax.kernels.linear.packed_sm90 import pack, unpack
from deepinfer_jax.kernels.linear.products_sm90 import Fp8RowsProduct
from deepinfer_jax.kernels.linear.units_sm90 import Product, Tiling
from deepinfer_jax.kernels.registry import MOSAIC_SM90, NVIDIA, REFERENCE
from deepinfer_jax.ops.linear import grouped_linear, linear, linear_f32
from deepinfer_jax.ops.quant import dequantize, fp8_roundtrip
from deepinfer_jax.testing import compare

# Sums over groups of 32 columns in another order, rounded to bfloat16 once.
REL_L2 = 1e-3
# float32 sums of exact products in another order.
F32_REL_L2 = 1e-6
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
TILING = Tiling(row_tile=16, most_stages=2)


@functools.cache
def kernel(*, row_tile: int = 16, splits: int | None = None) -> jax.stages.Wrapped:
    tiling = Tiling(row_tile=row_tile, most_stages=2)  # so that the ring goes round
    run = functools.partial(mosaic_sm90.linear, num_sms=2, splits=splits, tiling=tiling, interpret=INTERPRET)
    return jax.jit(run)


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
    # Threads of the interpreter call JAX, which may wait for ever while operations of the reference are dispatched too.
    got = jax.block_until_ready(kernel()(x, w))
    compare.assert_close(got, linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "num_rows, width, splits, row_tile",
    [
        pytest.param(16, 1280, 3, 16, id="unequal runs"),
        pytest.param(64, 768, 2, 128, id="rows left, half of the outputs"),
        pytest.param(70, 512, 2, 128, id="rows left, all outputs"),
        pytest.param(64, 256, 1, 128, id="rows left, no split", marks=pytest.mark.slow),
        pytest.param(130, 512, 1, 128, id="two tiles of rows left", marks=pytest.mark.slow),
        pytest.param(5, 1024, 4, 16, id="a chunk each", marks=pytest.mark.slow),
    ],
)
def test_sums_of_runs_are_added(num_rows, width, splits, row_tile, capfd):
    x, w = make(num_rows, 256, width)
    run = kernel(row_tile=row_tile, splits=splits)
    compare.assert_close(jax.block_until_ready(run(x, w)), linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


def test_packed_weights_give_the_same():
    x, w = make(16)
    compare.assert_bitwise(kernel()(x, pack(w)), kernel()(x, w))
    stacked = pack(jax.tree.map(lambda a: jnp.stack([a, a]), w))
    compare.assert_bitwise(stacked.scales[1], pack(w).scales)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "as stored"])
def test_many_rows_are_multiplied_by_xla(is_packed, monkeypatch):
    """Where a kernel would write sums of several runs of columns; what is multiplied is the same."""
    calls = []
    monkeypatch.setattr(api.mosaic_sm90, "linear", lambda x, w: calls.append(x.shape) or linear(fp8_roundtrip(x), w))
    x, w = make(api.MANY_ROWS, num_outputs=256, width=2560)
    x = x * jnp.asarray(1.7, x.dtype)  # off the grid of quantised rows
    weights = pack(w) if is_packed else w
    assert mosaic_sm90.is_split(weights)
    compare.assert_close(api.linear_sm90(x, weights), linear(fp8_roundtrip(x), w), rel_l2=REL_L2)
    assert not calls
    api.linear_sm90(x[:-1], w)
    monkeypatch.setattr(api.mosaic_sm90, "num_splits", lambda *_: 1)
    api.linear_sm90(x, w)
    assert [shape[0] for shape in calls] == [api.MANY_ROWS - 1, api.MANY_ROWS]


def test_a_tile_of_batch_invariant_mode_never_has_many_rows():
    assert max(ROW_TILE_SIZES) < api.MANY_ROWS


def test_packed_weights_are_unpacked_exactly():
    _, w = make(1, num_outputs=384, width=256)
    compare.assert_bitwise(unpack(pack(w), jnp.bfloat16), dequantize(w, jnp.bfloat16))


def test_splits_follow_from_the_shape_of_the_weights():
    # Outputs and chunks of the released layers: wq_b and the head fill all multiprocessors, the others do not.
    assert [num_splits(*shape) for shape in ((32768, 5), (129280, 40))] == [1, 1]
    assert [num_splits(*shape) for shape in ((1792, 20), (5120, 32), (5120, 9), (8192, 32), (384, 40))] == [
        7,
        3,
        3,
        2,
        20,
    ]
    for outputs, chunks in ((128, 1), (256, 7), (640, 100)):
        assert 1 <= num_splits(outputs, chunks) <= chunks


def test_row_does_not_depend_on_others():
    x, w = make(16)
    both = kernel()(x, w)
    alone = kernel()(*cases.keep_rows((x, w), jnp.int32(3)))
    compare.assert_bitwise(alone[:3], both[:3])


@pytest.mark.parametrize(
    "counts", [pytest.param((5, 24), id="few"), pytest.param((1, 8, 33, 64, 100), id="all", marks=pytest.mark.slow)]
)
def test_row_does_not_depend_on_the_number_of_rows(counts):
    x, w = make(128, width=512)
    run = kernel(row_tile=128, splits=2)
    everything = run(x, w)
    for count in counts:
        compare.assert_bitwise(run(x[:count], w), everything[:count])


def test_rows_are_quantised():
    _, w = make(8)
    x = jax.random.normal(jax.random.key(2), (8, 256), jnp.bfloat16)
    on_grid = cases.dequantize(cases.quantize_fp8(x), jnp.bfloat16)
    compare.assert_bitwise(kernel()(x, w), kernel()(on_grid, w))


def make_bf16(num_rows: int, groups: int, num_outputs: int, width: int) -> tuple:
    keys = jax.random.split(jax.random.key(num_rows + groups), 2)
    x = jax.random.normal(keys[0], (num_rows, groups, width), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (num_outputs, width), jnp.bfloat16)


@pytest.mark.parametrize("splits", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_groups_have_columns_of_their_own(splits, capfd):
    x, w = make_bf16(13, 2, 512, 512)
    got = jax.block_until_ready(
        mosaic_sm90.grouped_linear(x, w, num_sms=2, splits=splits, tiling=TILING, interpret=INTERPRET)
    )
    compare.assert_close(got, grouped_linear(x, w), rel_l2=REL_L2)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("out_dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_bf16_products_are_exact(out_dtype):
    x, w = make_bf16(8, 1, 128, 384)
    run = functools.partial(mosaic_sm90.linear_bf16, num_sms=2, tiling=TILING, interpret=INTERPRET)
    got = jax.block_until_ready(run(x[:, 0], w, out_dtype=out_dtype))
    assert got.dtype == out_dtype
    compare.assert_close(
        got, linear_f32(x[:, 0], w).astype(out_dtype), rel_l2=F32_REL_L2 if out_dtype == jnp.float32 else REL_L2
    )


def test_float32_outputs_of_several_weights_lie_side_by_side(monkeypatch):
    given = {"num_sms": 2, "tiling": TILING, "interpret": INTERPRET}
    monkeypatch.setattr(mosaic_sm90, "linear_bf16", functools.partial(mosaic_sm90.linear_bf16, **given))
    x, w = make_bf16(8, 1, 256, 128)
    backends = [Backend(target=NVIDIA, kernels=kernels) for kernels in (MOSAIC_SM90, REFERENCE)]
    got, want = (api.linear_f32(x[:, 0], (w[:128], w[128:]), backend=backend) for backend in backends)
    compare.assert_close(got, want, rel_l2=F32_REL_L2)
    compare.assert_bitwise(want, linear_f32(x[:, 0], w))


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
    with pytest.raises(ValueError, match="row_tile=96 must be 64 or 128"):
        Fp8RowsProduct(row_tile=96, sum_registers=64)


@pytest.mark.parametrize("num_rows", [1, 16, 57, 64, 65, 72, 128, 200])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.bfloat16])
def test_every_copy_begins_where_the_copy_engine_can_write(num_rows, dtype):
    is_scaled = dtype == jnp.uint8
    padded, row_tile = mosaic_sm90._tiled(num_rows, units_sm90.TILING, is_scaled=is_scaled)
    product = Product(
        num_rows=padded,
        num_outputs=256,
        width=1024,
        splits=1,
        row_tile=row_tile,
        tiling=units_sm90.TILING,
        dtype=jnp.dtype(dtype),
        out_dtype=jnp.dtype(jnp.bfloat16),
        num_sms=2,
        interpret=None,
    )
    scratch = product._scratch_types()
    # Leading axes that a copy takes one place of: the stage, and of weights and rows the line.
    names = {"weights": 2, "x": 2} | ({"scales": 1, "x_scales": 1} if is_scaled else {})
    for name, leading in names.items():
        part_bytes = math.prod(scratch[name].shape[leading:]) * scratch[name].dtype.itemsize
        assert part_bytes % 128 == 0, (name, part_bytes)
