"""The tensors of a Hugging Face folder: shapes, dtypes and arrays.

Once a `SafetensorsCheckpoint` is open, every one of its tensors lies completely inside its file. The safetensors
library validates each file (header, offsets without gap or overlap, no byte missing or left over). It cannot return
bf16 as numpy arrays, so the bytes are read at the offsets that it validated.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ...common.errors import CorruptCheckpoint, MissingTensor, ModelNotFound, WrongTensor
from . import READABLE
from .mapped_file import MappedFile

# Element types that can be returned: READABLE, and the types of quantized tensors; FP8 is returned as bits.
ELEMENTS: dict[str, type[np.generic]] = {
    **READABLE, "F8_E4M3": np.uint8, "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64,
}  # fmt: skip

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Prefixes of the language model in a model with images, depending on the program that wrote the file.
_LANGUAGE_MODEL = re.compile(r"(model\.)?language_model\.(model\.)?(?P<tensor>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The header entry of a tensor, and the file that contains it."""

    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    begin: int
    end: int


class SafetensorsCheckpoint:
    """The tensors of `folder`, from `model.safetensors` or from the shards in its index; no tensor is read on opening.

    The tensors of a model with images are found by their names in a model without images.

    With `file`, the tensors are those of this file in the folder. Raises ModelNotFound without a folder or weights in
    it, CorruptCheckpoint when a file is invalid, MissingTensor when a shard does not have a tensor of the index.
    """

    def __init__(self, folder: str | Path, file: str | None = None) -> None:
        self.path = Path(folder)
        self.config_name = "config.json"
        self.matrix_dtypes: Collection[str] = READABLE
        found = _open_folder(self.path) if file is None else _open_file(self.path / file)
        self._stored = {text_name(name): stored for name, stored in found.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as safetensors names it: BF16, F16, F32, I64, … Raises MissingTensor."""
        return self._find(name).dtype

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        yield from ((stored.dtype, stored.end - stored.begin) for stored in self._stored.values())

    def __contains__(self, name: str) -> bool:
        """Return whether the folder has a tensor of exactly this name."""
        return name in self._stored

    def names(self) -> Iterator[str]:
        """Iterate over the names of all tensors."""
        return iter(self._stored)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor in its file. Raises MissingTensor."""
        stored = self._find(name)
        return stored.end - stored.begin

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor: elements as in ELEMENTS, bf16 bits as uint16.

        Raises MissingTensor, WrongTensor for a dtype that is not in ELEMENTS, CorruptCheckpoint if it cannot be read.
        """
        stored = self._find(name)
        kind = self._kind(name)
        return stored.file.read(stored.begin, stored.end).view(kind).reshape(stored.shape)

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor. See `weights.Checkpoint`."""
        stored = self._find(name)
        kind = self._kind(name)
        row_bytes = stored.shape[-1] * np.dtype(kind).itemsize
        wanted = range(prod(stored.shape[:-1]))[rows]
        for row, chunk in stored.file.chunks(stored.begin, row_bytes, wanted, num_rows):
            yield row, chunk.view(kind)

    def _kind(self, name: str) -> type[np.generic]:
        """Return the numpy type of a tensor. Raises WrongTensor for a dtype that is not in ELEMENTS."""
        dtype = self._find(name).dtype
        if dtype not in ELEMENTS:
            raise WrongTensor(f"tensor {name} in {self.path} is {dtype}; it must be one of {', '.join(ELEMENTS)}")
        return ELEMENTS[dtype]

    def _find(self, name: str) -> _Stored:
        """Return the entry of a tensor. A weight that belongs to no linear layer has no suffix `.weight`."""
        stored = self._stored.get(name) or self._stored.get(name.removesuffix(".weight"))
        if stored is None:
            raise MissingTensor(f"tensor {name} is not in {self.path}")
        return stored


def text_name(name: str) -> str:
    """Return a tensor's name in a model without images."""
    found = _LANGUAGE_MODEL.fullmatch(name)
    if found is None:
        return name
    tensor = found["tensor"]
    return tensor if tensor.startswith("lm_head.") else f"model.{tensor}"


def _open_folder(folder: Path) -> dict[str, _Stored]:
    if not isdir(folder):
        raise ModelNotFound(f"{folder} is not a folder")
    if isfile(folder / SINGLE_FILE):
        return _open_file(folder / SINGLE_FILE)
    if isfile(folder / INDEX_FILE):
        return _open_shards(folder)
    raise ModelNotFound(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; other weight formats are not read")


def _open_shards(folder: Path) -> dict[str, _Stored]:
    weight_map = _read_index(folder / INDEX_FILE)
    shards = {name: _open_shard(folder, name) for name in sorted(set(weight_map.values()))}
    stored = {}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise MissingTensor(f"tensor {tensor} is not in {folder / shard}, where {INDEX_FILE} says it is")
        stored[tensor] = shards[shard][tensor]
    return stored


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CorruptCheckpoint(f"{path} has no weight_map from tensor names to file names")
    return weight_map


def _open_shard(folder: Path, name: str) -> dict[str, _Stored]:
    if Path(name).name != name:
        raise CorruptCheckpoint(f"{folder / INDEX_FILE} names a shard {name!r}; shards must lie in the same folder")
    if not isfile(folder / name):
        raise CorruptCheckpoint(f"shard {folder / name} is missing; {INDEX_FILE} lists it")
    return _open_file(folder / name)


def _open_file(path: Path) -> dict[str, _Stored]:
    try:
        with safe_open(path, framework="np"):
            pass
        file = MappedFile(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} is not a whole safetensors file: {error}") from error
    header, data_start = _read_header(path, file)
    return {
        name: _locate(path, name, entry, file, data_start) for name, entry in header.items() if name != "__metadata__"
    }


def _read_header(path: Path, file: MappedFile) -> tuple[Mapping[str, Any], int]:
    (length,) = struct.unpack("<Q", file.view[:8])
    try:
        header = json.loads(bytes(file.view[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} has a header that is not JSON: {error}") from error
    return header, 8 + length


def _locate(path: Path, name: str, entry: Any, file: MappedFile, data_start: int) -> _Stored:
    """Check a header entry again: if a key is repeated, the library may have validated the other entry."""
    dtype = entry["dtype"]
    shape = tuple(entry["shape"])
    (begin, end) = entry["data_offsets"]
    inside = 0 <= begin <= end <= file.size - data_start
    if not inside or (dtype in ELEMENTS and end - begin != prod(shape) * np.dtype(ELEMENTS[dtype]).itemsize):
        raise CorruptCheckpoint(f"{path} places tensor {name} at bytes {begin}..{end}, which does not fit its shape")
    return _Stored(dtype, shape, file, data_start + begin, data_start + end)
