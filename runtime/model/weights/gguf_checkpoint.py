"""The tensors of a GGUF file as a checkpoint, with Hugging Face's order of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import MissingTensor
from . import READABLE
from .ggml import SUPPORTED
from .gguf import GGUFFile, StoredTensor


class GGUFCheckpoint:
    """The tensors of `file`. `pairs` has the size of a head for tensors with a rotated pair in neighbouring rows."""

    def __init__(self, file: GGUFFile, pairs: Mapping[str, int]) -> None:
        self.path = file.path
        self.config_name = "the metadata"
        self.matrix_dtypes: Collection[str] = (*READABLE, *SUPPORTED)
        self._tensors = file.tensors
        self._pairs = pairs

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Return a tensor's type as GGML names it: F32, BF16, Q4_K, … Raises MissingTensor."""
        return self._find(name).type.name

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        yield from ((tensor.type.name, tensor.end - tensor.begin) for tensor in self._tensors.values())

    def quantised(self) -> dict[str, str]:
        """Return the type of each tensor that is stored in blocks of more than one element."""
        return {name: tensor.type.name for name, tensor in self._tensors.items() if tensor.type.block > 1}

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor, read-only: float32, float16, or bf16 bits as uint16; blocks as uint8 [rows, row bytes].

        Raises MissingTensor.
        """
        array, order = _array(self._find(name)), self._order(name)
        return array if order is None else array[order]

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor. See `weights.Checkpoint`."""
        stored, order = self._find(name), self._order(name)
        array = _array(stored)
        for row, chunk in stored.file.chunks(array, stored.begin, stored.end, rows, num_rows):
            first = row + (rows.start or 0)
            yield row, chunk if order is None else array[order[first : first + len(chunk)]]

    def _find(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensor(f"tensor {name} is not in {self.path}") from None

    def _order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Return the row of the file for each row of the checkpoint; None if the order is the same."""
        if name not in self._pairs:
            return None
        rows = np.arange(self.shape(name)[0])
        return rows.reshape(-1, self._pairs[name] // 2, 2).swapaxes(1, 2).reshape(-1)


def _array(stored: StoredTensor) -> npt.NDArray[Any]:
    data = stored.file.bytes[stored.begin : stored.end]
    if stored.type.name not in READABLE:
        return data.reshape(-1, stored.row_bytes)
    array = data.view(READABLE[stored.type.name]).reshape(stored.shape)
    return array if array.flags.aligned else array.copy()
