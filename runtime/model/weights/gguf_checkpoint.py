"""The tensors of a GGUF file as a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import MissingTensor
from . import READABLE
from .ggml import SUPPORTED
from .gguf import GGUFFile, StoredTensor


class GGUFCheckpoint:
    """The tensors of `file`, with the order of rows that it has: rotated pairs may be neighbors."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.config_name = "the metadata"
        self.matrix_dtypes: Collection[str] = (*READABLE, *SUPPORTED)
        self._tensors = file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> str:
        """Return a tensor's type as GGML names it: F32, BF16, Q4_K, … Raises MissingTensor."""
        return self._find(name).type.name

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        yield from ((tensor.type.name, tensor.end - tensor.begin) for tensor in self._tensors.values())

    def quantized(self) -> dict[str, str]:
        """Return the type of each tensor that is stored in blocks of more than one element."""
        return {name: tensor.type.name for name, tensor in self._tensors.items() if tensor.type.block > 1}

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor: float32, float16, or bf16 bits as uint16; blocks as uint8 [rows, row bytes].

        Raises MissingTensor, or CorruptCheckpoint if it cannot be read.
        """
        stored = self._find(name)
        data = stored.file.read(stored.begin, stored.end)
        shape = stored.shape if stored.type.name in READABLE else (-1, stored.row_bytes)
        return _typed(stored, data).reshape(shape)

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor. See `weights.Checkpoint`."""
        stored = self._find(name)
        wanted = range(prod(stored.shape[:-1]))[rows]
        for row, chunk in stored.file.chunks(stored.begin, stored.row_bytes, wanted, num_rows):
            yield row, _typed(stored, chunk)

    def _find(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensor(f"tensor {name} is not in {self.path}") from None


def _typed(stored: StoredTensor, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the bytes of rows as numbers; blocks as they are."""
    return rows.view(READABLE[stored.type.name]) if stored.type.name in READABLE else rows
