"""One call of a bridge target from inside a JAX program, on arrays (staged), device arrays (resident) or both."""

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array

from deepinfer_jax.kernels import ffi
from deepinfer_jax.kernels.ascend import HANDLE_WORDS, AscendUnsupportedError, DeviceArray, why_not

type Operand = Array | DeviceArray
FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))  # activations that operators take
type Attribute = np.float64 | np.int64


def ascend_call(
    target: str,
    operands: Sequence[Operand],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    after: Sequence[Operand] = (),
    **attributes: Attribute,
) -> tuple[Any, ...]:
    """The results of a target: device arrays where all operands are some, else arrays, for which the call waits.

    after: operands that must exist before the call runs although it does not read them. A target that writes a device
    array in place needs there whatever was computed from the old value (a missing one is found when its stale handle is
    used), a collective the one before it.
    Raises AscendUnsupportedError when the open bridge lacks an operator, ValueError for arrays beside device arrays in
    `after` and where a target writes in place.
    """
    is_in_place = _require(target)
    kinds = {isinstance(operand, DeviceArray) for operand in (*operands, *after)}
    if len(kinds) > 1 and (after or is_in_place):
        raise ValueError(f"{target} was given arrays and device arrays; put() the arrays, or get() the device arrays")
    stays = kinds == {True}
    handle = jax.ShapeDtypeStruct((HANDLE_WORDS,), np.uint32)
    # A call that gives handles makes new tensors, or writes: none may be merged with another or dropped.
    call = jax.ffi.ffi_call(target, [handle] * len(results) if stays else list(results), has_side_effect=stays)
    handles = sum(1 << i for i, operand in enumerate(operands) if isinstance(operand, DeviceArray))
    made = call(
        *(operand.words if isinstance(operand, DeviceArray) else operand for operand in (*operands, *after)),
        handles=np.int64(handles),
        is_resident=np.int64(stays),
        num_after=np.int64(len(after)),
        **attributes,
    )
    if not stays:
        return tuple(made)
    return tuple(
        DeviceArray(words=words, shape=tuple(result.shape), dtype=np.dtype(result.dtype))
        for words, result in zip(made, results, strict=True)
    )


def _require(target: str) -> bool:
    """Whether the target writes in place; raises for one that is not there, or whose operators are not."""
    library = ffi.load_bridge()
    known = {entry["name"]: entry for entry in ffi.target_table(library)}
    if target not in known:
        raise ValueError(f"{target} is no target of the built library; it has {', '.join(sorted(known))}")
    for operator in known[target]["operators"]:
        reason, _ = why_not(library, operator)
        if reason:
            raise AscendUnsupportedError(f"{target} needs {operator}, which cannot be used: {reason}")
    return known[target]["is_in_place"]


def like(operand: Operand) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an operand of either kind."""
    return jax.ShapeDtypeStruct(operand.shape, operand.dtype)


def result(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result's shape and dtype."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def on_host(operand: Operand) -> Array:
    """A result that is an array, since the call had arrays among its operands."""
    assert not isinstance(operand, DeviceArray)
    return operand
