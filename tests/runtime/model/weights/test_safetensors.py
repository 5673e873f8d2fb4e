"""Checkpoint files: exact values of every dtype, and every kind of invalid file."""

from __future__ import annotations

import json
import os
import struct
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import CorruptCheckpoint, MissingTensor, ModelNotFound, WrongTensor
from quire.runtime.model.weights import safetensors as safetensors_module
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5
BF16_BITS = (FLOATS.view(np.uint32) >> 16).astype(np.uint16)  # exact: these values fit


def write(folder: Path, header: Any, data: bytes = b"\0" * 64) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = (8,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def save_sharded(folder: Path, weight_map: dict[str, Any]) -> None:
    save_file({"a": FLOATS}, folder / "one.safetensors")
    save_file({"b": FLOATS + 1, "c": FLOATS + 2}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_values_of_each_dtype(tmp_path: Path) -> None:
    bf16 = TensorSpec(dtype="bfloat16", shape=[2, 3], data_ptr=BF16_BITS.ctypes.data, data_len=BF16_BITS.nbytes)
    half = FLOATS.astype(np.float16)
    f16 = TensorSpec(dtype="float16", shape=[2, 3], data_ptr=half.ctypes.data, data_len=half.nbytes)
    f32 = TensorSpec(dtype="float32", shape=[2, 3], data_ptr=FLOATS.ctypes.data, data_len=FLOATS.nbytes)
    serialize_file({"bf16": bf16, "f16": f16, "f32": f32}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert [checkpoint.dtype(name) for name in ("bf16", "f16", "f32")] == ["BF16", "F16", "F32"]
    assert all(checkpoint.shape(name) == (2, 3) for name in ("bf16", "f16", "f32"))
    for name, expected in (("bf16", BF16_BITS), ("f16", half), ("f32", FLOATS)):
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == expected.dtype
        np.testing.assert_array_equal(tensor, expected)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.language_model.model."])
def test_the_language_model_of_a_model_with_images_has_its_usual_names(tmp_path: Path, prefix: str) -> None:
    head = "language_model.lm_head.weight"
    save_file({f"{prefix}norm.weight": FLOATS, head: FLOATS, "vision.norm": FLOATS}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name in ("model.norm.weight", "lm_head.weight", "vision.norm"):
        assert checkpoint.shape(name) == (2, 3)


def test_chunks_are_the_rows_of_a_tensor(tmp_path: Path) -> None:
    """The rows of experts follow one another."""
    values = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    save_file({"a": values}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    found = [(row, chunk.tolist()) for row, chunk in checkpoint.chunks("a", slice(3, 10), 3)]
    rows = values.reshape(12, 2).tolist()
    assert found == [(0, rows[3:6]), (3, rows[6:9]), (6, rows[9:10])]


def test_a_file_that_is_truncated_after_opening_is_a_typed_error(tmp_path: Path) -> None:
    save_file({"a": FLOATS}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    os.truncate(tmp_path / "model.safetensors", size - 4)
    for read in (checkpoint.tensor, lambda name: list(checkpoint.chunks(name, slice(None), 1))):
        with pytest.raises(CorruptCheckpoint, match=rf"model.safetensors was truncated .* ends at byte {size - 4}"):
            read("a")


def test_an_unaligned_tensor_is_read_into_an_aligned_place(tmp_path: Path) -> None:
    header = json.dumps({"a": entry(0, 4, shape=[1])})
    header += " " * ((1 - len(header)) % 4)  # padding, so that the data starts at an odd byte
    write(tmp_path, header.encode(), struct.pack("<f", 1.5))
    tensor = SafetensorsCheckpoint(tmp_path).tensor("a")
    assert tensor.flags.aligned
    assert tensor.tolist() == [1.5]


def test_shards_read_as_one_checkpoint(tmp_path: Path) -> None:
    save_sharded(tmp_path, {"a": "one.safetensors", "c": "two.safetensors"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with pytest.raises(MissingTensor):
        checkpoint.shape("b")  # a tensor in a shard but not in the index
    np.testing.assert_array_equal(checkpoint.tensor("c"), FLOATS + 2)


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": FLOATS}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for read in (checkpoint.tensor, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(MissingTensor, match="tensor b is not in"):
            read("b")


def test_integers_of_quantized_tensors(tmp_path: Path) -> None:
    tensors = {"I64": np.arange(3), "I32": np.arange(3, dtype=np.int32), "I8": np.arange(-3, 3, dtype=np.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for dtype, values in tensors.items():
        assert checkpoint.dtype(dtype) == dtype
        np.testing.assert_array_equal(checkpoint.tensor(dtype), values)


def test_other_types_have_a_name_but_cannot_be_read(tmp_path: Path) -> None:
    save_file({"mask": np.ones(3, np.bool_)}, tmp_path / "model.safetensors")
    assert SafetensorsCheckpoint(tmp_path).dtype("mask") == "BOOL"
    with pytest.raises(WrongTensor, match=r"mask .* is BOOL; it must be one of BF16, F16, F32"):
        SafetensorsCheckpoint(tmp_path).tensor("mask")


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"garbage", b""),
        (b"[1, 2]", b""),
        (b"\xff\xfe", b""),
        ({"a": entry(0, 32), "b": entry(16, 48)}, b"\0" * 48),
        ({"a": entry(0, 64)}, b"\0" * 64),
        ({"a": entry(0, 32)}, b"\0" * 31),
        ({"a": entry(0, 32)}, b"\0" * 33),
        ({"a": entry(32, 64)}, b"\0" * 64),
        ({"a": entry(32, 0)}, b"\0" * 32),
        ({"a": entry(0, 32, shape=[-8])}, b"\0" * 32),
        ({"a": entry(0, 64, shape=[1 << 40, 1 << 40])}, b"\0" * 64),
        ({"a": entry(0, 32, dtype="F31")}, b"\0" * 32),
        ({"a": {"dtype": "F32", "shape": [8]}}, b"\0" * 32),
    ],
    ids=[
        "garbage", "list", "not utf-8", "overlap", "longer than its shape", "file too short", "file too long", "gap",
        "backwards", "negative size", "overflow", "unknown dtype", "no offsets",
    ],
)  # fmt: skip
def test_an_invalid_file_is_named(tmp_path: Path, header: Any, data: bytes) -> None:
    write(tmp_path, header, data)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors is not a whole safetensors file"):
        SafetensorsCheckpoint(tmp_path)


def test_a_repeated_key_does_not_bypass_the_check_of_offsets(tmp_path: Path) -> None:
    """The tensor of either entry is inside the file and as long as its shape."""
    first = json.dumps(entry(0, 32))
    second = json.dumps(entry(0, 1 << 40, shape=[1 << 38]))
    for one, other in ((first, second), (second, first)):
        write(tmp_path, f'{{"a": {one}, "a": {other}}}'.encode(), b"\0" * 32)
        with suppress(CorruptCheckpoint):
            assert SafetensorsCheckpoint(tmp_path).tensor("a").shape == (8,)


@pytest.mark.parametrize(
    "invalid", [entry(0, 64, shape=[16]), entry(-32, 0), entry(32, 0), entry(0, 16), entry(0, 32, dtype="F16")]
)
def test_offsets_are_checked_against_the_bytes_that_were_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invalid: Any
) -> None:
    """The library opens the file by itself and earlier; the file may have changed since then."""
    monkeypatch.setattr(safetensors_module, "safe_open", lambda path, framework: nullcontext())
    write(tmp_path, {"a": invalid}, b"\0" * 32)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors places tensor a at bytes"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 60])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    save_file({"a": FLOATS}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_header_length_beyond_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_an_invalid_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors\.index\.json"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("shard", ["gone.safetensors", "../one.safetensors", "/etc/passwd", "", ".", "a\0b"])
def test_a_shard_that_is_not_in_the_folder(tmp_path: Path, shard: str) -> None:
    save_sharded(tmp_path, {"a": "one.safetensors", "b": shard})
    with pytest.raises(CorruptCheckpoint, match="shard"):
        SafetensorsCheckpoint(tmp_path)


def test_a_shard_without_a_tensor_of_the_index(tmp_path: Path) -> None:
    save_sharded(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(MissingTensor, match=r"tensor b is not in .*one\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "file", "a\0b", "x" * 300])
def test_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="is not a folder"):
        SafetensorsCheckpoint(tmp_path / name)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsCheckpoint(tmp_path)
