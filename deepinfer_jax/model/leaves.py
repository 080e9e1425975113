"""Leaves of a parameter tree, described before they exist: paths, storage, shapes and axes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

from deepinfer_jax.ops.quant import FP8_GROUP, ScaledArray

Storage = Literal["fp8", "fp4", "fp8_rows", "bf16", "f32", "int32"]
WEIGHT_BLOCK = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """One leaf of the tree: its path, how it is stored, and what its axes mean.

    shape: the logical shape; `axes` names each axis for sharding. stack: the layer ids stacked in the first axis,
    None where the leaf belongs to the model as a whole. The last two axes of a weight are [out, in].
    """

    path: str
    shape: tuple[int, ...]
    storage: Storage
    axes: tuple[str, ...]
    stack: tuple[int, ...] | None = None
    memory_kind: str | None = None  # JAX's name of the memory that its arrays are in; None: the device's own

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """Shape of the stored values; two FP4 values share a byte."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.storage == "fp4" else self.shape

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scales, None for unscaled storage."""
        if self.storage not in ("fp8", "fp4", "fp8_rows"):
            return None
        rows = -(-self.shape[-2] // WEIGHT_BLOCK) if self.storage == "fp8" else self.shape[-2]
        return (*self.shape[:-2], rows, self.shape[-1] // FP8_GROUP)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the payload."""
        return np.dtype(_PAYLOAD_DTYPES[self.storage])

    @property
    def num_parameters(self) -> int:
        """Logical values, scales not counted."""
        return int(np.prod(self.shape))

    @property
    def num_bytes(self) -> int:
        """Stored bytes, scales included."""
        scale = int(np.prod(self.scale_shape)) if self.scale_shape is not None else 0
        return int(np.prod(self.payload_shape)) * self.dtype.itemsize + scale

    def leaf(self, make: Callable[[str, tuple[int, ...], np.dtype], Any]) -> Any:
        """The leaf with arrays from `make(part, shape, dtype)`; part is "payload" or "scale"."""
        payload = make("payload", self.payload_shape, self.dtype)
        if self.scale_shape is None:
            return payload
        block = (WEIGHT_BLOCK, WEIGHT_BLOCK) if self.storage == "fp8" else (1, FP8_GROUP)
        scale = make("scale", self.scale_shape, np.dtype(np.uint8))
        form = "fp4" if self.storage == "fp4" else "fp8"
        return unchecked(ScaledArray, {"payload": payload, "scale": scale, "form": form, "block": block})


_PAYLOAD_DTYPES: dict[str, Any] = {
    "fp8": np.uint8,  # packed forms are raw bytes, see ScaledArray
    "fp4": np.uint8,
    "fp8_rows": np.uint8,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "int32": np.int32,
}


def node_of[C](leaves: Mapping[str, Any], cls: type[C], prefix: str, **given: Any) -> C:
    """A node of the tree from the values whose paths are `prefix` and a field's name; `given`: its other fields."""
    names = [f.name for f in dataclasses.fields(cls) if f.name not in given]  # type: ignore[arg-type]
    return unchecked(cls, {name: leaves[f"{prefix}{name}"] for name in names} | given)


def unchecked[C](cls: type[C], values: dict[str, Any]) -> C:
    """An instance filled without `__init__`, so that shape structs and shardings may stand for arrays."""
    node = object.__new__(cls)
    node.__dict__.update(values)
    return node
