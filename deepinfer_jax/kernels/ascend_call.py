"""One call of a bridge target from inside a JAX program, on ordinary arrays (staged) or on device arrays (resident)."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from deepinfer_jax.kernels import ffi
from deepinfer_jax.kernels.ascend import HANDLE_WORDS, AscendUnsupportedError, DeviceArray, why_not

type Operand = Array | DeviceArray
type Attribute = np.float64 | np.int64


def ascend_call(
    target: str,
    operands: Sequence[Operand],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    after: Sequence[Operand] = (),
    **attributes: Attribute,
) -> tuple[Any, ...]:
    """The results of a target, as arrays for arrays and as device arrays for device arrays.

    after: operands that must exist before the call runs although it does not read them. A target that writes a device
    array in place needs there whatever was computed from the old value (a missing one is found when its stale handle is
    used), a collective the one before it.
    Raises AscendUnsupportedError when the open bridge lacks an operator, ValueError for mixed operands.
    """
    _require(target)
    kinds = {isinstance(operand, DeviceArray) for operand in (*operands, *after)}
    if len(kinds) > 1:
        raise ValueError(f"{target} was given arrays and device arrays; put() the arrays, or get() the device arrays")
    if True in kinds:
        return _resident(target, operands, results, after, attributes)
    call = jax.ffi.ffi_call(target, list(results))
    made = call(*operands, *after, is_resident=np.int64(0), num_after=np.int64(len(after)), **attributes)
    return tuple(made)


def _resident(
    target: str,
    operands: Sequence[Operand],
    results: Sequence[jax.ShapeDtypeStruct],
    after: Sequence[Operand],
    attributes: dict[str, Attribute],
) -> tuple[DeviceArray, ...]:
    handle = jax.ShapeDtypeStruct((HANDLE_WORDS,), np.uint32)
    # A call with the same operands makes a new tensor, or writes: none may be merged with another or dropped.
    call = jax.ffi.ffi_call(target, [handle] * len(results), has_side_effect=True)
    words = [operand.words for operand in (*operands, *after) if isinstance(operand, DeviceArray)]
    made = call(*words, is_resident=np.int64(1), num_after=np.int64(len(after)), **attributes)
    return tuple(
        DeviceArray(words=words, shape=tuple(result.shape), dtype=np.dtype(result.dtype))
        for words, result in zip(made, results, strict=True)
    )


def _require(target: str) -> None:
    library = ffi.load_bridge()
    known = {entry["name"]: entry["operators"] for entry in ffi.target_table(library)}
    if target not in known:
        raise ValueError(f"{target} is no target of the built library; it has {', '.join(sorted(known))}")
    for operator in known[target]:
        reason, _ = why_not(library, operator)
        if reason:
            raise AscendUnsupportedError(f"{target} needs {operator}, which cannot be used: {reason}")


def like(operand: Operand) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an operand of either kind."""
    return jax.ShapeDtypeStruct(operand.shape, operand.dtype)


def result(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result's shape and dtype."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
