"""A4: every element type crosses the bridge, by `put` and `get` and through a staged copy; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import ascend
from deepinfer_jax.kernels.ascend_call import ascend_call, like, result
from deepinfer_jax.kernels.rms_norm import cann as rms_norm
from deepinfer_jax.kernels.scatter_rows import cann as scatter_rows
from deepinfer_jax.testing import compare

COPY = "deepinfer.cann.copy.v2"
WIDE = {np.dtype(name) for name in ("int64", "uint64", "float64")}  # JAX has them with x64 only
# What a handler refuses: XLA makes one of the two of it.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
SHAPES = [(), (0, 3), (1,), (7,), (3, 5)]


def bytes_of(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Every bit pattern that fits, but only 0 and 1 where others are no value."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.arange(count, dtype=np.uint8) * 37
    return (raw % 2 if dtype == np.bool_ else raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", ascend.DTYPE_CODES, ids=str)
def test_put_and_get_keep_every_byte(bridge, dtype):
    for shape in SHAPES:
        array = bytes_of(shape, dtype)
        placed = bridge.put(array)
        compare.assert_bitwise(bridge.get(placed), array)
        bridge.release(placed)
    assert bridge.usage() == (0, 0)


@pytest.mark.parametrize("dtype", [dtype for dtype in ascend.DTYPE_CODES if dtype not in WIDE], ids=str)
def test_a_staged_copy_keeps_every_byte(bridge, dtype):
    for shape in SHAPES:
        array = bytes_of(shape, dtype)
        (got,) = ascend_call(COPY, (jnp.asarray(array),), [like(jnp.asarray(array))])
        compare.assert_bitwise(np.asarray(got), array)


@pytest.mark.parametrize("length", [6, 7], ids=["even", "odd"])
def test_packed_fp4_crosses_as_bytes(bridge, length):
    packed = np.arange((length + 1) // 2, dtype=np.uint8)
    compare.assert_bitwise(bridge.get(bridge.put(packed)), packed)


def test_fp4_arrays_are_refused(bridge):
    array = jnp.zeros(4, jnp.float4_e2m1fn)
    with pytest.raises(ValueError, match="4-bit values cross as uint8"):
        bridge.put(np.asarray(array))
    with pytest.raises(FAILURES, match="4-bit values cross as uint8"):
        ascend_call(COPY, (array,), [like(array)])[0].block_until_ready()


def test_wrong_operands_are_named(bridge):
    name = "deepinfer.cann.rms_norm.v2"
    x, y = jnp.ones((2, 8)), result((2, 8), jnp.float32)
    cases = [
        ((x, jnp.ones(7)), "operand weight dimension 0 is 7; it must be 8"),
        ((x, jnp.ones((1, 8))), r"operand weight has 2 dimensions; it must be \(D,\)"),
        ((x, jnp.ones(8, jnp.int32)), "operand weight has type code 3; it must be bfloat16 or float32"),
        ((x,), "was given 1 operands; it takes 2"),
    ]
    for operands, text in cases:
        with pytest.raises(FAILURES, match=text):
            jax.block_until_ready(ascend_call(name, operands, [y], eps=np.float64(1)))
    with pytest.raises(FAILURES, match=r"result y was asked for as \(2, 9\)"):
        jax.block_until_ready(ascend_call(name, (x, jnp.ones(8)), [result((2, 9), jnp.float32)], eps=np.float64(1)))
    with pytest.raises(FAILURES, match="attribute eps is missing or has another type"):
        jax.block_until_ready(ascend_call(name, (x, jnp.ones(8)), [y], eps=np.int64(3)))


def test_sizes_that_the_operator_refuses_are_refused(bridge):
    call = jnp.ones((1, 200), jnp.bfloat16)
    with pytest.raises(FAILURES, match="operand x dimension 1 is 200; it must be a positive multiple of 512"):
        jax.block_until_ready(
            ascend_call("deepinfer.cann.swiglu_mxfp8.v2", (call, jnp.ones(1)), [like(call)] * 3, limit=np.float64(1))
        )


def test_a_count_of_experts_that_cannot_be_is_refused(bridge):
    shapes = [result((1, 5), jnp.float32), result((1, 5), jnp.int32)]
    with pytest.raises(FAILURES, match="attribute k is 5; it must be 1 to 4"):
        attributes = {"k": np.int64(5), "scaling": np.float64(1), "eps": np.float64(0)}
        jax.block_until_ready(
            ascend_call("deepinfer.cann.router.v2", (jnp.ones((1, 4)), jnp.ones(4)), shapes, **attributes)
        )


def test_a_weight_on_the_device_serves_arrays(bridge):
    """The result is an array with the bits of a call on arrays, and the call leaves nothing on the device."""
    x, weight = jnp.asarray([[3.0, 4.0]]), np.asarray([1.0, 2.0], np.float32)
    placed = bridge.put(weight)
    at_rest = bridge.usage()
    mixed = jax.jit(lambda x, w: rms_norm.rms_norm(x, w, eps=0.0))(x, placed)
    compare.assert_bitwise(np.asarray(mixed), np.asarray(rms_norm.rms_norm(x, jnp.asarray(weight), eps=0.0)))
    assert bridge.usage() == at_rest


def test_one_of_several_stacked_tensors(bridge):
    """Words with a leading axis name tensors of one shape; a traced index takes one, inside a loop too."""
    placed = [bridge.put(np.full(2, value, np.float32)) for value in (1.0, 3.0)]
    words = jnp.stack([one.words for one in placed])
    stacked = ascend.DeviceArray(words=words, shape=(2,), dtype=np.dtype(np.float32))

    @jax.jit
    def sum_of_all(x, stacked):
        def body(total, index):
            own = jax.tree.map(lambda a: a[index], stacked)
            return total + rms_norm.rms_norm(x, own, eps=0.0), None

        return jax.lax.scan(body, jnp.zeros((1, 2)), jnp.arange(2))[0]

    np.testing.assert_array_equal(sum_of_all(jnp.ones((1, 2)), stacked), [[4.0, 4.0]])


def test_what_is_written_in_place_is_not_mixed(bridge):
    cache, index = bridge.put(np.zeros((2, 2), np.float32)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="arrays and device arrays"):
        scatter_rows.scatter_rows(cache, index, jnp.ones((1, 2)))
