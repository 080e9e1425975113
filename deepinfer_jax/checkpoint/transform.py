"""Tensors of a checkpoint -> slices of the parameter tree's leaves."""

import dataclasses
import itertools
from typing import Literal

import numpy as np

from deepinfer_jax.checkpoint.names import num_lead_axes, payload_name, scale_name
from deepinfer_jax.checkpoint.shards import DTYPES, PACKED_DTYPES, Shards, Tensor
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.model.params import LeafSpec

type Part = Literal["payload", "scale"]
type Index = tuple[slice, ...]
_NAN_SCALE = 255  # the only E8M0 byte that is not a power of two


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSource:
    """Where one array of a leaf comes from, and what it will be.

    tensors: in C order over the leading axes (`lead_shape`: layers, then experts; empty for a single tensor).
    shape: of the whole array; rows beyond those of the file are zero bytes.
    """

    part: Part
    tensors: tuple[Tensor, ...]
    lead_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype


def leaf_sources(
    shards: Shards, spec: LeafSpec, config: ModelConfig, *, shape: tuple[int, ...] | None = None
) -> dict[Part, LeafSource]:
    """The arrays of a leaf: the payload, and its scales where the checkpoint is packed.

    shape: the logical shape with padded axes, None for the schema's own.
    """
    num_lead = num_lead_axes(spec)
    lead_shape = spec.shape[:num_lead]
    names = [payload_name(spec, config, lead) for lead in itertools.product(*map(range, lead_shape))]
    padded = dataclasses.replace(spec, shape=shape or spec.shape)
    payloads = tuple(shards.tensors[name] for name in names)
    if padded.scale_shape is None or not shards.is_quantized:
        return {"payload": _source("payload", payloads, lead_shape, padded.shape, _common_dtype(payloads))}
    scales = tuple(shards.tensors[scale_name(name)] for name in names)
    return {
        "payload": _source("payload", payloads, lead_shape, padded.payload_shape, padded.dtype),
        "scale": _source("scale", scales, lead_shape, padded.scale_shape, np.dtype(np.uint8)),
    }


def read_slice(source: LeafSource, index: Index) -> np.ndarray:
    """One slice of a leaf's array; touches only the bytes that it covers.

    The result may be a view of the mapped file. Raises ValueError for a NaN scale, naming tensor and file.
    """
    bounds = [range(*part.indices(size)) for part, size in zip(index, source.shape, strict=True)]
    num_lead = len(source.lead_shape)
    inner = tuple(slice(b.start, b.stop) for b in bounds[num_lead:])
    inner_shape = tuple(len(b) for b in bounds[num_lead:])
    if num_lead == 0:
        return zero_padded(_read(source, source.tensors[0], inner), inner_shape)
    lead_bounds = bounds[:num_lead]
    stack = np.empty((*(len(b) for b in lead_bounds), *inner_shape), source.dtype)
    for target, lead in zip(np.ndindex(*stack.shape[:num_lead]), itertools.product(*lead_bounds), strict=True):
        if any(place >= size for place, size in zip(lead, source.lead_shape, strict=True)):
            stack[target] = np.zeros((), source.dtype)  # a place that the file has no tensor for
            continue
        position = int(np.ravel_multi_index(lead, source.lead_shape))
        stack[target] = _read(source, source.tensors[position], inner)
    return stack


def zero_padded(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The values followed by zero bytes up to `shape`."""
    if values.shape == shape:
        return values
    out = np.zeros(shape, np.dtype(f"u{values.itemsize}")).view(values.dtype)
    out[tuple(map(slice, values.shape))] = values
    return out


def _source(
    part: Part,
    tensors: tuple[Tensor, ...],
    lead_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> LeafSource:
    return LeafSource(part=part, tensors=tensors, lead_shape=lead_shape, shape=shape, dtype=dtype)


def _common_dtype(tensors: tuple[Tensor, ...]) -> np.dtype:
    """BF16 where all are, else F32, which holds every BF16 value."""
    dtypes = {t.dtype for t in tensors}
    return DTYPES["F32" if "F32" in dtypes else dtypes.pop()]


def _read(source: LeafSource, tensor: Tensor, inner: Index) -> np.ndarray:
    values = tensor.data[inner]
    if source.part == "scale":
        _check_scales(tensor, values)
    if tensor.dtype in PACKED_DTYPES:
        return values.view(np.uint8)  # packed forms stay raw bytes, unsigned so that shifts bring in zeros
    return values.astype(source.dtype, copy=False)


def _check_scales(tensor: Tensor, values: np.ndarray) -> None:
    is_nan = values.view(np.uint8) == _NAN_SCALE
    if is_nan.any():
        raise ValueError(
            f"tensor {tensor.name} in {tensor.file} holds {int(is_nan.sum())} NaN scales (byte 255); "
            "the file is damaged, copy or download it again"
        )
