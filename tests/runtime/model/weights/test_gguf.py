"""GGUF containers: exact values of metadata and tensors, and every lie a header can tell."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import CorruptCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from quire.runtime.model.weights.gguf import MAX_ITEMS_READ, GGUFFile, StoredTensor, open_gguf

from tests.support.gguf_files import NUMBERS, Tensor, encode, header, info, pair, text, write

FLOATS = np.arange(64, dtype=np.float32).reshape(2, 32) - 9.5  # exact in f16 and bf16
F32 = NUMBERS["F32"]
Q8_0 = NUMBERS["Q8_0"]


def data_of(tensor: StoredTensor) -> bytes:
    return tensor.file.read(tensor.begin, tensor.end).tobytes()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_tensors_have_their_shape_type_and_bytes(tmp_path: Path, version: int, alignment: int) -> None:
    written = {kind: encode(FLOATS, kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0")}
    path = write(tmp_path / "a.gguf", {"general.architecture": "llama"}, written, version, alignment)
    file = GGUFFile(path)
    assert list(file.tensors) == list(written)
    for name, tensor in written.items():
        stored = file.tensors[name]
        assert (stored.shape, stored.type.name, data_of(stored)) == ((2, 32), name, tensor.data)
        assert stored.row_bytes * 2 == len(tensor.data)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    written: dict[str, Any] = {
        "a.u8": ("u8", 200), "a.i8": ("i8", -3), "a.u16": ("u16", 60000), "a.i16": ("i16", -9), "a.i32": ("i32", -7),
        "a.u64": ("u64", 1 << 60), "a.f32": 1e-6, "a.f64": ("f64", 1e-6), "a.yes": True, "a.text": "ü€𝄞", "a.int": 7,
        "a.list": ["", "a", "ü"], "a.flags": [True, False], "a.ids": [1, 2, 3], "a.none": [], "a.floats": [0.1, -2.0],
    }  # fmt: skip
    metadata = GGUFFile(write(tmp_path / "a.gguf", written, {})).metadata
    expected = {key: value[1] if isinstance(value, tuple) else value for key, value in written.items()}
    assert dict(metadata) == expected
    assert all(type(metadata[key]) is type(value) for key, value in expected.items())


@pytest.mark.parametrize(
    "numbers",
    [[-5.0, 0.0, 16777215.0], [16777216.0, 123456790.0], [-123456790.0, 1.0], [1e20, 2.0], [3.0, 0.1, float("inf")]],
)
def test_floats_of_a_list_are_the_shortest_decimals_of_their_bits(tmp_path: Path, numbers: list[float]) -> None:
    assert GGUFFile(write(tmp_path / "a.gguf", {"a.scores": numbers}, {})).metadata["a.scores"] == numbers


def test_typed_access_names_the_file_the_key_and_what_is_allowed(tmp_path: Path) -> None:
    metadata = GGUFFile(write(tmp_path / "a.gguf", {"a.n": 7, "a.t": "x"}, {})).metadata
    assert (metadata.integer("a.n", 0, 7), metadata.integer("a.m", 0, 7, 3), metadata.text("a.t")) == (7, 3, "x")
    for read, message in [
        (lambda: metadata.integer("a.n", 0, 6), r"a\.gguf: a\.n is 7; it must be an integer from 0 to 6"),
        (lambda: metadata.integer("a.t", 0, 6), r"a\.t is 'x'; it must be an integer from 0 to 6"),
        (lambda: metadata.integer("a.q", 0, 6), r"a\.q is missing; it must be an integer"),
        (lambda: metadata.text("a.n"), r"a\.n is 7; it must be a string"),
    ]:
        with pytest.raises(UnsupportedModel, match=message):
            read()


def test_values_are_checked_when_they_are_read(tmp_path: Path) -> None:
    raw = {"a.flag": ("raw", struct.pack("<IB", 7, 2)), "a.text": ("raw", struct.pack("<I", 8) + text(b"\xff"))}
    metadata = GGUFFile(write(tmp_path / "a.gguf", raw, {})).metadata
    with pytest.raises(CorruptCheckpoint, match=r"a\.flag holds a boolean that is neither 0 nor 1"):
        metadata["a.flag"]
    with pytest.raises(CorruptCheckpoint, match=r"a\.text holds a string that is not UTF-8"):
        metadata["a.text"]


def test_a_list_of_millions_of_values_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    few, many = (
        ("raw", struct.pack("<IIQ", 9, 0, count) + b"\1" * count) for count in (MAX_ITEMS_READ, MAX_ITEMS_READ + 1)
    )
    metadata = GGUFFile(write(tmp_path / "a.gguf", {"a.few": few, "a.many": many}, {})).metadata
    assert len(metadata["a.few"]) == MAX_ITEMS_READ
    with pytest.raises(
        CorruptCheckpoint, match=rf"a\.many has {MAX_ITEMS_READ + 1} values; at most {MAX_ITEMS_READ} are"
    ):
        metadata.integer("a.many", 0, 1)


ALIGNED = b"\0" * 256
GOOD = info("a", (8,), F32, 0)
HUGE = (1 << 64) - 1
HOSTILE: list[tuple[bytes, type[ModelError], str]] = [
    (b"", CorruptCheckpoint, "cannot be read"),
    (b"GGML" + ALIGNED, CorruptCheckpoint, "is not a GGUF file: it begins with b'GGML', not b'GGUF'"),
    (b"GG", CorruptCheckpoint, "is not a GGUF file"),
    (b"GGUF\3\0", CorruptCheckpoint, "ends inside its version"),
    (b"GGUF\3\0\0\0" + b"\0" * 9, CorruptCheckpoint, "ends inside its counts"),
    (header([], [], version=1), UnsupportedModel, "is GGUF version 1; it must be one of 2, 3"),
    (header([], [], version=4), UnsupportedModel, "is GGUF version 4"),
    (header([], [], version=0), UnsupportedModel, "is GGUF version 0"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "big-endian"),
    (header([], [], num_keys=1), CorruptCheckpoint, "ends inside metadata key 0"),
    (header([], [], num_tensors=1), CorruptCheckpoint, "ends inside the name of tensor 0"),
    (header([], [], num_keys=HUGE), CorruptCheckpoint, "claims 0 tensors and 18446744073709551615 metadata keys"),
    (header([], [], num_tensors=HUGE), CorruptCheckpoint, "claims 18446744073709551615 tensors"),
    (header([text(b"a", HUGE)], []), CorruptCheckpoint, "metadata key 0 has 18446744073709551615 bytes, not 1 to"),
    (header([text(b"a", 60000)], []), CorruptCheckpoint, "ends inside metadata key 0"),
    (header([text(b"")], []), CorruptCheckpoint, "metadata key 0 has 0 bytes"),
    (header([pair(b"\xff", 1)], []), CorruptCheckpoint, "metadata key 0 is not UTF-8"),
    (header([pair("a", 1), pair("a", 2)], []), CorruptCheckpoint, "has metadata key a twice"),
    (header([text("a") + struct.pack("<I", 13)], []), CorruptCheckpoint, "a has type 13, which is not a type"),
    (header([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), CorruptCheckpoint, "a has type 9, which is not a type"),
    (header([text("a") + struct.pack("<IIQ", 9, 4, HUGE)], []), CorruptCheckpoint, "ends inside a"),
    (header([text("a") + struct.pack("<IIQ", 9, 4, 1 << 62)], []), CorruptCheckpoint, "ends inside a"),
    (header([text("a") + struct.pack("<IIQ", 9, 8, HUGE)], []), CorruptCheckpoint, "claims 1.* strings"),
    (header([text("a") + struct.pack("<IIQ", 9, 8, 5)], []) + ALIGNED[:39], CorruptCheckpoint, "ends inside a"),
    (header([text("a") + struct.pack("<I", 8) + text("b", HUGE)], []), CorruptCheckpoint, "ends inside a"),
    (header([text("a") + struct.pack("<I", 8) + text("b", 2)], []), CorruptCheckpoint, "ends inside a"),
    (header([], [info(b"", (8,), F32, 0)]), CorruptCheckpoint, "the name of tensor 0 has 0 bytes"),
    (header([], [info("a" * 65, (8,), F32, 0)]), CorruptCheckpoint, "the name of tensor 0 has 65 bytes, not 1 to 64"),
    (header([], [GOOD, GOOD]) + ALIGNED, CorruptCheckpoint, "has tensor a twice"),
    (header([], [info("a", (), F32, 0)]) + ALIGNED, CorruptCheckpoint, "tensor a has 0 dimensions, not 1 to 4"),
    (header([], [info("a", (1,) * 5, F32, 0)]) + ALIGNED, CorruptCheckpoint, "tensor a has 5 dimensions"),
    (header([], [text("a") + struct.pack("<I", 1 << 31)]), CorruptCheckpoint, "tensor a has 2147483648 dimensions"),
    (header([], [info("a", (4, 0), F32, 0)]) + ALIGNED, CorruptCheckpoint, "tensor a has a dimension of 0"),
    (header([], [info("a", (8,), 4, 0)]) + ALIGNED, UnsupportedModel, "type 4, .* one of BF16, F16, F32, Q8_0, "),
    (header([], [info("a", (8,), 1 << 31, 0)]) + ALIGNED, UnsupportedModel, "tensor a has type 2147483648"),
    (header([], [info("a", (2, 48), Q8_0, 0)]) + ALIGNED, CorruptCheckpoint, "not a multiple of 32"),
    (header([], [info("a", (HUGE,) * 4, F32, 0)]) + ALIGNED, CorruptCheckpoint, "tensor a of shape .* lies at bytes"),
    (header([], [info("a", (1 << 32, 1 << 32), F32, 0)]) + ALIGNED, CorruptCheckpoint, "it must lie inside the file"),
    (header([], [info("a", (8,), F32, 16)]) + ALIGNED, CorruptCheckpoint, "at a multiple of 32 bytes"),
    (header([], [info("a", (8,), F32, HUGE - 31)]) + ALIGNED, CorruptCheckpoint, "it must lie inside the file"),
    (header([], [GOOD]), CorruptCheckpoint, "it must lie inside the file"),
    (header([], [info("a", (16,), F32, 0), info("b", (8,), F32, 32)]) + ALIGNED, CorruptCheckpoint, "a and b overlap"),
    (header([], [GOOD, info("b", (8,), F32, 0)]) + ALIGNED, CorruptCheckpoint, "tensors a and b overlap"),
    (header([pair("general.alignment", 48)], [GOOD]) + ALIGNED, UnsupportedModel, "48; it must be a power of two"),
    (header([pair("general.alignment", 0)], [GOOD]) + ALIGNED, UnsupportedModel, "general.alignment is 0"),
    (header([pair("general.alignment", "32")], [GOOD]) + ALIGNED, UnsupportedModel, "general.alignment is '32'"),
    (header([pair("split.count", "2")], []), UnsupportedModel, "split.count is '2'"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "error", "message"), HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes, error: type[ModelError], message: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(error, match=message):
        GGUFFile(tmp_path / "a.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.gguf", {"a": [1, 2], "b": "text"}, {"a": encode(FLOATS, "F32"), "b": encode(FLOATS, "F16")}
    )
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptCheckpoint):
            GGUFFile(path)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"a\.gguf does not exist"):
        GGUFFile(tmp_path / "a.gguf")


TENSORS = {name: Tensor((8,), "F32", bytes(range(i, i + 32))) for i, name in enumerate("abc")}


def write_split(folder: Path, count: int = 3, **changed: dict[str, Any]) -> list[Path]:
    """Write the parts of a split file with one tensor each; `part0={...}` changes the metadata of a part."""
    paths = []
    for number, (name, tensor) in enumerate(list(TENSORS.items())[:count]):
        metadata = {"split.no": ("u16", number), "split.count": ("u16", count), "split.tensors.count": ("i32", count)}
        if number == 0:
            metadata |= {"general.architecture": "llama"}
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write(path, {**metadata, **changed.get(f"part{number}", {})}, {name: tensor}))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_a_split_file(tmp_path: Path, given: int) -> None:
    paths = write_split(tmp_path)
    file = GGUFFile(paths[given])
    assert (file.path, file.paths) == (paths[0], tuple(paths))
    assert file.metadata["general.architecture"] == "llama"
    assert {name: data_of(tensor) for name, tensor in file.tensors.items()} == {
        name: tensor.data for name, tensor in TENSORS.items()
    }


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(CorruptCheckpoint, match=r"m-00002-of-00003\.gguf is missing; .* is one of 3 parts"):
        GGUFFile(paths[0])


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    renamed = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CorruptCheckpoint, match=r"its name must end with -NNNNN-of-00003\.gguf"):
        GGUFFile(renamed)


def test_parts_that_are_the_same_file_are_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[2].unlink()
    paths[2].symlink_to(paths[1])
    with pytest.raises(CorruptCheckpoint, match="says that it is part 2 of 3, its name says part 3 of 3"):
        GGUFFile(paths[0])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"part1": {"split.count": 2}}, CorruptCheckpoint, "says that it is part 2 of 2, its name says part 2 of 3"),
        ({"part1": {"split.no": 0}}, CorruptCheckpoint, "says that it is part 1 of 3"),
        ({"part0": {"split.tensors.count": 4}}, CorruptCheckpoint, "have 3 tensors of 4"),
        ({"part0": {"split.count": 70_000}}, UnsupportedModel, "split.count is 70000"),
        ({"part0": {"split.count": 4}}, CorruptCheckpoint, "its name must end with -NNNNN-of-00004"),
        ({"part2": {"split.no": -1.0}}, UnsupportedModel, "split.no is -1.0; it must be an integer"),
    ],
)
def test_foreign_parts_are_refused(
    tmp_path: Path, changed: dict[str, Any], error: type[ModelError], message: str
) -> None:
    paths = write_split(tmp_path, **changed)
    with pytest.raises(error, match=message):
        GGUFFile(paths[0])


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    metadata = {"split.no": ("u16", 2), "split.count": ("u16", 3)}
    write(paths[2], metadata, {"b": TENSORS["b"]})
    with pytest.raises(CorruptCheckpoint, match="has tensor b, which another part has too"):
        GGUFFile(paths[0])


def test_a_file_is_opened_again_when_it_has_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", {"general.name": "first"}, {})
    assert open_gguf(path) is not open_gguf(path), "it was written a moment ago"
    os.utime(path, (1e9, 1e9))
    assert open_gguf(path) is open_gguf(path)
    write(tmp_path / "b.gguf", {"general.name": "other"}, {}).replace(path)
    assert open_gguf(path).metadata["general.name"] == "other"
    path.unlink()
    with pytest.raises(ModelNotFound):
        open_gguf(path)
