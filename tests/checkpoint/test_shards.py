"""What is wrong with a file is found in its header, before any data is read."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.names import TensorSpec
from deepinfer_jax.checkpoint.shards import (
    DTYPES,
    check_coverage,
    open_shards,
    read_file,
)
from deepinfer_jax.checkpoint.write import write_file


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def raw_file(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reads_back(tmp_path, dtype):
    codes = np.arange(48, dtype=np.uint8).view(DTYPES[dtype])
    values = codes.reshape(2, -1)
    write_file({"first": values, "none": values[:0]}, tmp_path / "a.safetensors")
    first, none = read_file(tmp_path / "a.safetensors")
    if first.name == "none":
        first, none = none, first
    assert (first.dtype, first.shape, none.shape) == (dtype, values.shape, (0, values.shape[1]))
    assert first.data.tobytes() == values.tobytes()


def test_data_need_not_be_aligned(tmp_path):
    header = {"a": entry("I8", (1,), (0, 1)), "b": entry("F32", (1,), (1, 5)), "__metadata__": {"k": "v"}}
    file = raw_file(tmp_path / "a", header, b"\x01" + np.float32(1.5).tobytes())
    a, b = read_file(file)
    assert int(a.data[0]) == 1 and float(b.data[0]) == 1.5


@pytest.mark.parametrize(
    "header, data, message",
    [
        pytest.param({"t": entry()}, b"\0" * 7, "truncated: tensor t ends at data byte 8", id="short"),
        pytest.param({"t": entry()}, b"\0" * 9, "1 bytes after its last tensor t", id="long"),
        pytest.param({"t": entry(), "u": entry(offsets=(4, 12))}, b"\0" * 12, "tensor u .* overlaps t", id="overlap"),
        pytest.param({"t": entry(), "u": entry(offsets=(10, 18))}, b"\0" * 18, "gap after t", id="gap"),
        pytest.param({"t": entry(offsets=(8, 0))}, b"\0" * 8, "tensor t .* span -8", id="reversed"),
        pytest.param({"t": entry(shape=(3,))}, b"\0" * 8, "tensor t .* takes 12 bytes", id="size"),
        pytest.param({"t": entry(shape=(-2,))}, b"\0" * 8, "tensor t .* shape", id="negative"),
        pytest.param({"t": entry("F64")}, b"\0" * 8, "tensor t .* 'F64'", id="dtype"),
        pytest.param({"t": {"dtype": "F32"}}, b"", "tensor t .* lacks", id="fields"),
        pytest.param({"t": 3}, b"", "tensor t .* lacks", id="entry"),
        pytest.param([1], b"", "not a JSON object", id="list"),
        pytest.param(b"{nonsense", b"", "malformed", id="json"),
        pytest.param(b'{"t": 1, "t": 2}', b"", "'t' occurs twice", id="twice"),
    ],
)
def test_malformed_file_is_refused(tmp_path, header, data, message):
    file = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as error:
        read_file(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\1\0", b"\xff" * 64], ids=["empty", "short", "length"])
def test_file_without_a_header_is_refused(tmp_path, content):
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        read_file(file)


def test_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither model.safetensors.index.json nor"):
        open_shards(tmp_path)
    with pytest.raises(ValueError, match="cannot read .*absent"):
        open_shards(tmp_path, weights_file=tmp_path / "absent")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"t": "../t"}}'])
def test_bad_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="index"):
        open_shards(tmp_path)


def test_long_lists_of_problems_are_cut(tmp_path):
    write_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    spec = TensorSpec(shape=(1,), dtypes=("F32",), group="g", num_parameters=1)
    with pytest.raises(ValueError, match=r"\(21 problems\)[\s\S]*and 13 more"):
        check_coverage(open_shards(tmp_path), {f"t{i}": spec for i in range(20)})
