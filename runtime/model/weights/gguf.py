"""GGUF files, versions 2 and 3: metadata and tensors, from one file or from the parts of a split one.

A file is read as untrusted input: every count, length, dimension and offset is checked against the bytes of the file
before memory of that size is allocated, and values are decoded on access. Must not import the names that
model families use.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from . import READABLE
from .ggml import SUPPORTED, TYPES, BlockType
from .mapped_file import MappedFile

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 24  # strings in one array: tokens or merges of a vocabulary
MAX_ITEMS_READ = 1 << 21  # values of an array that is read: merges of a large vocabulary
MAX_NAME_BYTES = 64  # size of a tensor's name
MAX_KEY_BYTES = (1 << 16) - 1
MAX_DIMENSIONS = 4
SETTLED_NS = 2_000_000_000  # age after which a written file is settled
MAX_INTEGRAL = 1 << 24  # float32 cannot represent all larger integers
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # type -> struct format
_BOOL = 7
_STRING = 8
_ARRAY = 9
_SIZES = {**{kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}, _BOOL: 1}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The header entry of a tensor, and the file that contains it: bytes begin..end, which are inside the file."""

    shape: tuple[int, ...]  # torch's shape: [rows, columns], [columns]; the last dimension is contiguous
    type: BlockType
    file: MappedFile
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one row, the elements along the last dimension."""
        return self.shape[-1] // self.type.block * self.type.nbytes


class Metadata(Mapping[str, Any]):
    """The metadata of a file: numbers, booleans, strings, and lists of them, which are decoded at each access.

    A float32 becomes the shortest decimal that rounds to it, so that 1e-6 stays 1e-6. Raises CorruptCheckpoint for a
    value that is not UTF-8, or neither true nor false, and for a list of more than MAX_ITEMS_READ.
    """

    def __init__(self, path: Path, data: memoryview, entries: Mapping[str, _Entry]) -> None:
        self.path = path
        self._data = data
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        """Return a value. Raises KeyError."""
        entry = self._entries[key]
        if entry.count > MAX_ITEMS_READ:
            raise CorruptCheckpoint(
                f"{self.path}: {key} has {entry.count} values; at most {MAX_ITEMS_READ} are supported"
            )
        return self._decode(key, entry) if entry.is_array else self._decode(key, entry)[0]

    def __contains__(self, key: object) -> bool:
        """Return whether the file has the key."""
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys in the order of the file."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._entries)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in low..high; `default` if the key is absent, an error without a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refused(key, f"an integer from {low} to {high}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; `default` if the key is absent, an error without a default."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.refused(key, "a string")
        return value

    def refused(self, key: str, allowed: str) -> UnsupportedModel:
        """Return the error to raise for the value of `key`."""
        got = repr(self[key])[:80] if key in self else "missing"
        return UnsupportedModel(f"{self.path}: {key} is {got}; it must be {allowed}")

    def _decode(self, key: str, entry: _Entry) -> list[Any]:
        if entry.kind == _STRING:
            return self._strings(key, entry)
        if entry.kind == _BOOL:
            values = list(self._data[entry.begin : entry.begin + entry.count])
            if any(value > 1 for value in values):
                raise CorruptCheckpoint(f"{self.path}: {key} holds a boolean that is neither 0 nor 1")
            return [value == 1 for value in values]
        array = np.frombuffer(self._data, f"<{_NUMBERS[entry.kind]}", entry.count, entry.begin)
        if array.dtype == np.float32 and not _is_integral(array):
            return [float(str(value)) for value in array]
        return list(array.tolist())

    def _strings(self, key: str, entry: _Entry) -> list[str]:
        values = []
        at = entry.begin
        for _ in range(entry.count):
            begin = at + 8
            at = begin + _U64.unpack_from(self._data, at)[0]
            try:
                values.append(str(self._data[begin:at], "utf-8"))
            except UnicodeDecodeError as error:
                raise CorruptCheckpoint(f"{self.path}: {key} holds a string that is not UTF-8: {error}") from error
        return values


def _is_integral(array: npt.NDArray[np.float32]) -> bool:
    """Return whether all values, such as scores of tokens, are integers that float32 represents exactly."""
    return bool(np.all((np.abs(array) < MAX_INTEGRAL) & (array == np.trunc(array))))


class GGUFFile:
    """The metadata and tensors of a GGUF file; `path` may name any part of a split file.

    Raises ModelNotFound without the file, CorruptCheckpoint if the file or a part is invalid or missing,
    UnsupportedModel for an unknown version, byte order or type of tensor.
    """

    def __init__(self, path: str | Path) -> None:
        given = _Part(Path(path))
        count = given.metadata.integer("split.count", 0, MAX_KEYS, 1)
        parts = [given] if count <= 1 else _open_parts(given, count)
        self.path = parts[0].path
        self.paths = tuple(part.path for part in parts)
        self.metadata = parts[0].metadata
        self.tensors: dict[str, StoredTensor] = {}
        for part in parts:
            if twice := self.tensors.keys() & part.tensors.keys():
                raise CorruptCheckpoint(f"{part.path} has tensor {min(twice)}, which another part has too")
            self.tensors |= part.tensors
        expected = self.metadata.integer("split.tensors.count", 0, MAX_TENSORS, len(self.tensors))
        if expected != len(self.tensors):
            raise CorruptCheckpoint(f"{self.path} and its parts have {len(self.tensors)} tensors of {expected}")


def open_gguf(path: str | Path) -> GGUFFile:
    """Return `GGUFFile(path)`, from a cache if the file has not changed. Raises as GGUFFile.

    Several readers of a model's header follow each other, and reading a large vocabulary takes a tenth of a second. A
    file that was written a moment ago is opened each time, because another change may not change its timestamp.
    """
    try:
        status = os.stat(path)
    except OSError:
        return GGUFFile(path)
    if time.time_ns() - status.st_mtime_ns < SETTLED_NS:
        return GGUFFile(path)
    return _open_unchanged(str(path), (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def header_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, which may be one part of a split one. Raises as `GGUFFile`."""
    return _Part(Path(path)).tensors


@lru_cache(maxsize=2)  # a model that generates, and an encoder
def _open_unchanged(path: str, status: tuple[int, ...]) -> GGUFFile:
    return GGUFFile(path)


def part_paths(path: Path, count: int) -> list[Path]:
    """Return the paths of all parts of a split file, one of which is `path`; none if its name is not a part's."""
    named = PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        return []
    return [path.with_name(f"{named[1]}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]


def _open_parts(given: _Part, count: int) -> list[_Part]:
    paths = part_paths(given.path, count)
    if not paths:
        raise CorruptCheckpoint(
            f"{given.path} is one of {count} parts; its name must end with -NNNNN-of-{count:05d}.gguf, as the names of "
            "the others do"
        )
    parts = []
    for number, path in enumerate(paths):
        if not path.is_file():
            raise CorruptCheckpoint(f"{path} is missing; {given.path} is one of {count} parts")
        part = given if path == given.path else _Part(path)
        found = part.metadata.integer("split.no", 0, MAX_KEYS), part.metadata.integer("split.count", 0, MAX_KEYS)
        if found != (number, count):
            raise CorruptCheckpoint(
                f"{path} says that it is part {found[0] + 1} of {found[1]}, its name says part {number + 1} of {count}"
            )
        parts.append(part)
    return parts


@dataclass(frozen=True, slots=True)
class _Entry:
    """A metadata value: `count` elements of type `kind` from byte `begin` on."""

    kind: int
    is_array: bool
    count: int
    begin: int


class _Part:
    """One file: its metadata, and the entries of its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = MappedFile(path)
        except FileNotFoundError as error:
            raise ModelNotFound(f"{path} does not exist") from error
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(path, self._file.view)
        num_tensors, num_keys = self._read_counts(cursor)
        self.metadata = Metadata(path, cursor.data, self._read_entries(cursor, num_keys))
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_counts(self, cursor: _Cursor) -> tuple[int, int]:
        magic = cursor.data[:4]
        if magic != GGUF_MAGIC:
            raise CorruptCheckpoint(
                f"{self.path} is not a GGUF file: it begins with {bytes(magic)!r}, not {GGUF_MAGIC!r}"
            )
        cursor.skip(4, "its first bytes")
        version = cursor.u32("its version")
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModel(f"{self.path} is a big-endian GGUF file; only little-endian files are supported")
        if version not in VERSIONS:
            raise UnsupportedModel(f"{self.path} is GGUF version {version}; it must be one of 2, 3")
        num_tensors = cursor.u64("its counts")
        num_keys = cursor.u64("its counts")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise CorruptCheckpoint(
                f"{self.path} claims {num_tensors} tensors and {num_keys} metadata keys; at most {MAX_TENSORS} and "
                f"{MAX_KEYS} are allowed"
            )
        return num_tensors, num_keys

    def _read_entries(self, cursor: _Cursor, num_keys: int) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        for number in range(num_keys):
            key = cursor.name(MAX_KEY_BYTES, f"metadata key {number}")
            if key in entries:
                raise CorruptCheckpoint(f"{self.path} has metadata key {key} twice")
            entries[key] = self._read_entry(cursor, key)
        return entries

    def _read_entry(self, cursor: _Cursor, key: str) -> _Entry:
        kind = cursor.u32(key)
        is_array = kind == _ARRAY
        kind, count = (cursor.u32(key), cursor.u64(key)) if is_array else (kind, 1)
        begin = cursor.at
        if kind == _STRING:
            cursor.skip_strings(count, key)
        elif kind in _SIZES:
            cursor.skip(count * _SIZES[kind], key)
        else:
            raise CorruptCheckpoint(f"{self.path}: {key} has type {kind}, which is not a type of a value")
        return _Entry(kind, is_array, count, begin)

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> dict[str, StoredTensor]:
        entries: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
        for number in range(num_tensors):
            name = cursor.name(MAX_NAME_BYTES, f"the name of tensor {number}")
            if name in entries:
                raise CorruptCheckpoint(f"{self.path} has tensor {name} twice")
            entries[name] = self._read_shape(cursor, name), self._read_type(cursor, name), cursor.u64(name)
        alignment = self.metadata.integer("general.alignment", 1, 1 << 31, DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1):
            raise self.metadata.refused("general.alignment", "a power of two")
        data = -(-cursor.at // alignment) * alignment
        tensors = {name: self._locate(name, *entry, data, alignment) for name, entry in entries.items()}
        self._check_overlap(tensors)
        return tensors

    def _read_shape(self, cursor: _Cursor, name: str) -> tuple[int, ...]:
        dimensions = cursor.u32(name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CorruptCheckpoint(f"{self.path}: tensor {name} has {dimensions} dimensions, not 1 to 4")
        sizes = [cursor.u64(name) for _ in range(dimensions)]
        if 0 in sizes:
            raise CorruptCheckpoint(f"{self.path}: tensor {name} has a dimension of 0")
        return tuple(reversed(sizes))

    def _read_type(self, cursor: _Cursor, name: str) -> BlockType:
        number = cursor.u32(name)
        if number not in TYPES:
            allowed = ", ".join((*READABLE, *SUPPORTED))
            raise UnsupportedModel(
                f"{self.path}: tensor {name} has type {number}, which is not known; it must be one of {allowed}"
            )
        return TYPES[number]

    def _locate(
        self, name: str, shape: tuple[int, ...], kind: BlockType, offset: int, data: int, alignment: int
    ) -> StoredTensor:
        if shape[-1] % kind.block:
            raise CorruptCheckpoint(
                f"{self.path}: tensor {name} has rows of {shape[-1]} elements, not a multiple of {kind.block} as "
                f"{kind.name} needs"
            )
        begin = data + offset
        end = begin + prod(shape) // kind.block * kind.nbytes
        if offset % alignment or end > self._file.size:
            raise CorruptCheckpoint(
                f"{self.path}: tensor {name} of shape {list(shape)} lies at bytes {begin}..{end} of "
                f"{self._file.size}; it must lie inside the file, at a multiple of {alignment} bytes"
            )
        return StoredTensor(shape, kind, self._file, begin, end)

    def _check_overlap(self, tensors: Mapping[str, StoredTensor]) -> None:
        end = 0
        before = ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise CorruptCheckpoint(f"{self.path}: tensors {before} and {name} overlap")
            end = tensor.end
            before = name


class _Cursor:
    """A position in the bytes of a file. Its methods raise CorruptCheckpoint if the file ends within `what`."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def skip(self, nbytes: int, what: str) -> int:
        """Move past `nbytes` bytes; return where they begin."""
        begin = self.at
        if nbytes > len(self.data) - begin:
            raise self._ended(what)
        self.at += nbytes
        return begin

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.skip(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.skip(8, what))[0]
        return value

    def name(self, most: int, what: str) -> str:
        """Read a string of 1 to `most` bytes."""
        length = self.u64(what)
        if not 1 <= length <= most:
            raise CorruptCheckpoint(f"{self.path}: {what} has {length} bytes, not 1 to {most}")
        begin = self.skip(length, what)
        try:
            return str(self.data[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint(f"{self.path}: {what} is not UTF-8: {error}") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Move past `count` strings, which are a length and bytes each."""
        data = self.data
        at = self.at
        last = len(self.data) - 8
        if count > MAX_STRINGS:
            raise CorruptCheckpoint(f"{self.path}: {what} claims {count} strings; at most {MAX_STRINGS} are allowed")
        for _ in range(count):
            if at > last:
                raise self._ended(what)
            at += 8 + _U64.unpack_from(data, at)[0]
        if at > len(data):
            raise self._ended(what)
        self.at = at

    def _ended(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.path} ends inside {what}, after {len(self.data)} bytes")
