"""Each comparator accepts what it should and names what it refuses."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.testing import compare

FOUR_ERRORS = 4.0


def test_bitwise_accepts_equal_nans_and_every_dtype():
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.uint8, np.bool_):
        array = np.asarray([0, 1, 1, 0], dtype)
        compare.assert_bitwise(array.copy(), array)
    compare.assert_bitwise(jnp.asarray([jnp.nan, -0.0]), np.asarray([np.nan, -0.0], np.float32))
    compare.assert_bitwise(np.float32(2.0), jnp.float32(2.0))


@pytest.mark.parametrize(
    "got, message",
    [
        (np.asarray([[1.0, 2.0], [3.0, 5.0]], np.float32), r"1 of 4 elements differ, the first at \(1, 1\)"),
        (np.asarray([[1.0, 2.0], [3.0, 4.0]]), "dtype float64; expected is float32"),
        (np.asarray([1.0, 2.0], np.float32), r"shape \(2,\); expected is \(2, 2\)"),
    ],
    ids=["bits", "dtype", "shape"],
)
def test_bitwise_names_the_difference(got: np.ndarray, message: str):
    want = np.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
    with pytest.raises(AssertionError, match=message):
        compare.assert_bitwise(got, want)


def test_bitwise_tells_zeros_of_both_signs_apart():
    with pytest.raises(AssertionError, match="differ"):
        compare.assert_bitwise(np.float32([0.0]), np.float32([-0.0]))


def test_bitwise_names_the_leaf_of_a_tree():
    want = {"a": np.zeros(2, np.int32), "b": (np.ones(3, np.int32),)}
    compare.assert_bitwise(want, want)
    with pytest.raises(AssertionError, match=r"\['b'\]\[0\]: 3 of 3"):
        compare.assert_bitwise({"a": np.zeros(2, np.int32), "b": (np.zeros(3, np.int32),)}, want)
    with pytest.raises(AssertionError, match="the tree is"):
        compare.assert_bitwise({"a": np.zeros(2, np.int32)}, want)


def test_close_measures_the_relative_norm():
    want = np.asarray([3.0, 4.0], np.float32)
    got = want + np.asarray([0.0, 0.05], np.float32)
    compare.assert_close(got, want, rel_l2=0.0101)
    with pytest.raises(AssertionError, match=r"0.01 is above 0.0099; the largest error is at \(1,\)"):
        compare.assert_close(got, want, rel_l2=0.0099)


def test_close_needs_equal_places_of_nan_and_inf():
    want = np.asarray([np.nan, np.inf, -np.inf, 1.0])
    compare.assert_close(want.astype(np.float32), want, rel_l2=0.0)
    for index, value, kind in ((0, 1.0, "nan"), (1, -np.inf, "inf"), (2, 0.0, "-inf"), (3, np.inf, "inf")):
        got = want.copy()
        got[index] = value
        with pytest.raises(AssertionError, match=rf"^{kind} stands at 1 other places, the first is \({index},\)"):
            compare.assert_close(got, want, rel_l2=1.0)


def test_close_to_zero_is_zero():
    compare.assert_close(np.zeros(3), np.zeros(3), rel_l2=0.0)
    with pytest.raises(AssertionError, match="inf is above"):
        compare.assert_close(np.full(3, 1e-30), np.zeros(3), rel_l2=1.0)


def test_empty_arrays_are_equal_if_their_shapes_are():
    empty = np.zeros((0, 3), np.float32)
    compare.assert_bitwise(empty, empty)
    compare.assert_close(empty, empty, rel_l2=0.0)
    compare.assert_unbiased(empty, empty, standard_errors=0.0)
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_close(empty, empty.T, rel_l2=1.0)


@pytest.mark.parametrize("shift", [0.5, -0.5], ids=["up", "down"])
def test_unbiased_refuses_a_directed_rounding_and_accepts_the_nearest(shift: float):
    exact = np.random.default_rng(0).uniform(-8, 8, 4096)
    compare.assert_unbiased(np.round(exact), exact, standard_errors=FOUR_ERRORS)
    with pytest.raises(AssertionError, match="mean error of the value"):
        compare.assert_unbiased(np.round(exact + shift), exact, standard_errors=FOUR_ERRORS)


def test_unbiased_refuses_a_rounding_towards_zero():
    exact = np.random.default_rng(0).uniform(-8, 8, 4096)
    with pytest.raises(AssertionError, match="mean error of the magnitude"):
        compare.assert_unbiased(np.trunc(exact), exact, standard_errors=FOUR_ERRORS)
