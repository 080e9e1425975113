"""The three comparators of all tests: equal in every bit, close in norm, and errors on no one side."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def assert_bitwise(got: Any, want: Any) -> None:
    """Both trees have the same structure, and each pair of leaves the same dtype, shape and bits.

    The first differing element is named. NaN equals NaN of the same bits; 0.0 and -0.0 differ.
    """
    got_leaves, got_structure = jax.tree.flatten(got)
    want_leaves, want_structure = jax.tree_util.tree_flatten_with_path(want)
    if got_structure != want_structure:
        raise AssertionError(f"the tree is {got_structure}; expected is {want_structure}")
    for got_leaf, (path, want_leaf) in zip(got_leaves, want_leaves, strict=True):
        _assert_same_bits(np.asarray(got_leaf), np.asarray(want_leaf), jax.tree_util.keystr(path))


def _assert_same_bits(got: np.ndarray, want: np.ndarray, name: str) -> None:
    if got.dtype != want.dtype:
        raise AssertionError(f"{name}: dtype {got.dtype}; expected is {want.dtype}")
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}; expected is {want.shape}")
    unsigned = _UNSIGNED[got.dtype.itemsize]
    differs = np.argwhere(got.view(unsigned) != want.view(unsigned))
    if len(differs):
        first = tuple(int(i) for i in differs[0])
        raise AssertionError(
            f"{name}: {len(differs)} of {got.size} elements differ, the first at {first}: "
            f"{got[first]!r}; expected is {want[first]!r}"
        )


def ulp_distances(got: Any, want: Any) -> np.ndarray:
    """Steps between neighbouring values of their common floating dtype from one array to the other, int64.

    0.0 and -0.0 are 0 apart. Raises ValueError for other dtypes, or two of them.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype != want.dtype or not jnp.issubdtype(got.dtype, jnp.floating) or got.dtype.itemsize > 4:
        raise ValueError(f"dtypes {got.dtype} and {want.dtype}: distances are counted in one float of 32 bits or less")
    return np.asarray(np.abs(_places(got) - _places(want)))


def _places(values: np.ndarray) -> np.ndarray:
    """Where a value stands among all of its dtype, 0 for zero."""
    bits = values.view(_UNSIGNED[values.dtype.itemsize]).astype(np.int64)
    sign = 1 << (8 * values.dtype.itemsize - 1)
    return np.asarray(np.where(bits >= sign, sign - bits, bits))


def assert_close(got: Array | np.ndarray, want: Array | np.ndarray, *, rel_l2: float) -> None:
    """NaN and infinities stand at the same places, and |got - want| <= rel_l2 |want| over all other elements.

    Shapes must be equal; dtypes need not be, so that an oracle may be more exact than the result.
    """
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}; expected is {want.shape}")
    got64, want64 = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    for kind, is_kind in (("nan", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        differs = np.argwhere(is_kind(got64) != is_kind(want64))
        if len(differs):
            first = tuple(int(i) for i in differs[0])
            raise AssertionError(
                f"{kind} stands at {len(differs)} other places, the first is {first}: "
                f"{got64[first]}; expected is {want64[first]}"
            )
    is_finite = np.isfinite(want64)
    errors = np.where(is_finite, got64, 0.0) - np.where(is_finite, want64, 0.0)
    error, size = float(np.linalg.norm(errors)), float(np.linalg.norm(want64[is_finite]))
    if error > rel_l2 * size:
        worst = np.unravel_index(int(np.argmax(np.abs(errors))), errors.shape)
        raise AssertionError(
            f"relative L2 error {error / size if size else float('inf'):.3g} is above {rel_l2:.3g}; "
            f"the largest error is at {tuple(int(i) for i in worst)}: {got64[worst]}; expected is {want64[worst]}"
        )


def assert_unbiased(got: Array | np.ndarray, want: Array | np.ndarray, *, standard_errors: float) -> None:
    """The mean error is within so many standard errors of zero: the signed one, and that of the magnitudes.

    The second finds a rounding towards zero, whose signed errors cancel when both signs occur.
    """
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}; expected is {want.shape}")
    got64, want64 = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    for kind, errors in (("value", got64 - want64), ("magnitude", np.abs(got64) - np.abs(want64))):
        spread = float(np.std(errors)) / max(errors.size, 1) ** 0.5 if errors.size else 0.0
        mean = float(np.mean(errors)) if errors.size else 0.0
        if not abs(mean) <= standard_errors * spread:
            raise AssertionError(
                f"the mean error of the {kind} is {mean:.3g}, {mean / spread if spread else float('inf'):.1f} "
                f"standard errors from zero; allowed are {standard_errors}"
            )
