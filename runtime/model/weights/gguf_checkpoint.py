"""The tensors of a GGUF file as a checkpoint, with Hugging Face's order of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import lcm, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import MissingTensor
from . import READABLE
from .ggml import SUPPORTED
from .gguf import GGUFFile, StoredTensor


class GGUFCheckpoint:
    """The tensors of `file`. `pairs` has the tensors with a rotated pair in neighboring rows.

    Its values are the size of a head, and the number of rows, from the first one on, that are in such pairs.
    """

    def __init__(self, file: GGUFFile, pairs: Mapping[str, tuple[int, int]]) -> None:
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

    def quantized(self) -> dict[str, str]:
        """Return the type of each tensor that is stored in blocks of more than one element."""
        return {name: tensor.type.name for name, tensor in self._tensors.items() if tensor.type.block > 1}

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor: float32, float16, or bf16 bits as uint16; blocks as uint8 [rows, row bytes].

        Raises MissingTensor, or CorruptCheckpoint if it cannot be read.
        """
        stored = self._find(name)
        order = self._order(name)
        data = stored.file.read(stored.begin, stored.end)
        shape = stored.shape if stored.type.name in READABLE else (-1, stored.row_bytes)
        array = _typed(stored, data).reshape(shape)
        return array if order is None else array[order]

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor. See `weights.Checkpoint`."""
        stored = self._find(name)
        order = self._order(name)
        wanted = range(prod(stored.shape[:-1]))[rows]
        if order is not None:  # a row order within heads: whole heads are read, and whole tiles of 32 rows
            unit = lcm(self._pairs[name][0], 32)
            num_rows = max(num_rows // unit, 1) * unit
        for row, chunk in stored.file.chunks(stored.begin, stored.row_bytes, wanted, num_rows):
            array = _typed(stored, chunk)
            first = wanted.start + row
            yield row, array if order is None else array[order[first : first + len(array)] - first]

    def _find(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensor(f"tensor {name} is not in {self.path}") from None

    def _order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Return the row of the file for each row of the checkpoint; None if the order is the same."""
        if name not in self._pairs:
            return None
        head_dim, paired = self._pairs[name]
        rows = np.arange(self.shape(name)[0])
        rows[:paired] = rows[:paired].reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows


def _typed(stored: StoredTensor, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the bytes of rows as numbers; blocks as they are."""
    return rows.view(READABLE[stored.type.name]) if stored.type.name in READABLE else rows
