"""Safetensors files as memory-mapped arrays: headers, the index, and what is wrong with them.

The package's own reader knows no FP8, so the header is parsed here. A tensor is a view of the mapped file;
only the pages that a reader touches are read from disk.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.names import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
PACKED_DTYPES = frozenset({"F8_E4M3", "F8_E8M0", "I8"})
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_SHOWN_PROBLEMS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file; `data` is a view of the mapped bytes in the tensor's dtype and shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The tensors of a checkpoint by name, and the place they were found."""

    location: Path
    tensors: Mapping[str, Tensor]

    @property
    def is_quantized(self) -> bool:
        """Whether this is the packed form (FP8 and FP4 weights with scales) or the unpacked one."""
        return any(tensor.dtype in PACKED_DTYPES for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.data.nbytes for t in self.tensors.values())


def open_shards(directory: Path, *, weights_file: Path | None = None) -> Shards:
    """The checkpoint of a directory: one named file, the files of the index, or model.safetensors.

    Raises ValueError for a file that is absent, truncated or malformed, and for tensors that the index and the
    files do not agree on.
    """
    if weights_file is not None:
        return Shards(location=weights_file, tensors=_by_name(read_file(weights_file)))
    index = directory / INDEX_NAME
    if index.exists():
        return _open_indexed(index)
    single = directory / SINGLE_NAME
    if single.exists():
        return Shards(location=single, tensors=_by_name(read_file(single)))
    raise ValueError(
        f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}; give a directory with released weights, "
        "name the file with weights_file, or ask for random weights with load_format='dummy'"
    )


def read_file(file: Path) -> list[Tensor]:
    """The tensors of one safetensors file, mapped; nothing but the header is read."""
    try:
        size = file.stat().st_size
        mapped = np.memmap(file, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    header, data_start = _parse_header(file, mapped)
    entries = sorted(
        ((name, *_parse_entry(file, name, entry)) for name, entry in header.items()),
        key=lambda entry: entry[3:],
    )
    _check_layout(file, entries, size - data_start)
    return [
        Tensor(
            name=name,
            file=file,
            dtype=dtype,
            shape=shape,
            data=mapped[data_start + begin : data_start + end].view(DTYPES[dtype]).reshape(shape),
        )
        for name, dtype, shape, begin, end in entries
    ]


def check_coverage(shards: Shards, expected: Mapping[str, TensorSpec]) -> None:
    """Raises ValueError unless the checkpoint holds exactly the expected tensors; names tensors and files."""
    problems: list[str] = []
    for name, spec in expected.items():
        tensor = shards.tensors.get(name)
        if tensor is None:
            problems.append(f"tensor {name} is missing from {shards.location}")
            continue
        if tensor.dtype not in spec.dtypes:
            problems.append(f"tensor {name} in {tensor.file} is {tensor.dtype}; it must be {' or '.join(spec.dtypes)}")
        if tensor.shape != spec.shape:
            problems.append(
                f"tensor {name} in {tensor.file} has shape {list(tensor.shape)}; the config asks for {list(spec.shape)}"
            )
    problems += [
        f"tensor {name} in {tensor.file} is unexpected; no part of this config has it"
        for name, tensor in shards.tensors.items()
        if name not in expected
    ]
    _raise_problems(f"{shards.location} does not match the config", problems)


def _open_indexed(index: Path) -> Shards:
    weight_map = _read_index(index)
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for file_name in sorted(set(weight_map.values())):
        file = index.parent / file_name
        if not file.exists():
            listed = sorted(name for name, f in weight_map.items() if f == file_name)
            problems.append(
                f"file {file} is absent; {index.name} lists {len(listed)} tensors in it, the first is {listed[0]}"
            )
            continue
        for tensor in read_file(file):
            if weight_map.get(tensor.name) == file_name:
                tensors[tensor.name] = tensor
            else:
                place = weight_map.get(tensor.name, "no file")
                problems.append(f"tensor {tensor.name} is in {file}, but {index.name} lists it in {place}")
        absent = [n for n, f in weight_map.items() if f == file_name and n not in tensors]
        problems += [f"tensor {n} is missing from {file}, where {index.name} lists it" for n in absent]
    _raise_problems(f"{index} and the files do not agree", problems)
    return Shards(location=index.parent, tensors=tensors)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except OSError as error:
        raise ValueError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensor names to file names")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(f"{index} places tensor {name} in {file_name!r}; only plain file names are read")
    return weight_map


def _by_name(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


def _parse_header(file: Path, mapped: np.ndarray) -> tuple[dict[str, Any], int]:
    """The JSON header without its metadata, and the position of the first data byte."""
    length = int.from_bytes(mapped[:_LENGTH_BYTES].tobytes(), "little")
    if len(mapped) < _LENGTH_BYTES or length > min(len(mapped) - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise ValueError(
            f"{file} is truncated or no safetensors file: it has {len(mapped)} bytes, "
            f"its first 8 announce a header of {length}"
        )
    data_start = _LENGTH_BYTES + length
    try:
        header = json.loads(mapped[_LENGTH_BYTES:data_start].tobytes(), object_pairs_hook=_refuse_repeats)
    except ValueError as error:
        raise ValueError(f"the header of {file} is malformed: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"the header of {file} is a {type(header).__name__}, not a JSON object")
    header.pop("__metadata__", None)
    return header, data_start


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated!r} occurs twice")
    return values


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, and the first and last byte (exclusive) of one header entry."""
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - set(entry):
        raise ValueError(f"tensor {name} in {file} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} in {file} has dtype {dtype!r}; known ones are {list(DTYPES)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name} in {file} has shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(
            f"tensor {name} in {file}: shape {shape} of {dtype} takes {needed} bytes, "
            f"data_offsets {offsets} span {end - begin}"
        )
    return dtype, tuple(shape), begin, end


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_layout(file: Path, entries: list[tuple[str, str, tuple[int, ...], int, int]], data_size: int) -> None:
    """Tensors must follow each other without overlap or gap and fill the file."""
    position, previous = 0, "the header"
    for name, _, _, begin, end in entries:
        if begin != position:
            fault = "overlaps" if begin < position else "leaves a gap after"
            raise ValueError(
                f"tensor {name} in {file} {fault} {previous}: it begins at data byte {begin}, not {position}"
            )
        if end > data_size:
            raise ValueError(
                f"{file} is truncated: tensor {name} ends at data byte {end}, the file has {data_size}; "
                "copy or download it again"
            )
        position, previous = end, name
    if position != data_size:
        raise ValueError(
            f"{file} has {data_size - position} bytes after its last tensor {previous}; copy or download it again"
        )


def _raise_problems(title: str, problems: list[str]) -> None:
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        rest = len(problems) - len(shown)
        lines = "\n  ".join([*shown, *([f"and {rest} more"] if rest else [])])
        raise ValueError(f"{title} ({len(problems)} problems):\n  {lines}")
