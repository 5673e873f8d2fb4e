"""The tensors of a folder whose matrices are quantised: GPTQ, AWQ, compressed-tensors and FP8."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import READABLE
from .compressed import FP8Matrix, Int8Matrix, WordsMatrix
from .gptq import AWQMatrix, GPTQMatrix
from .grouped import GroupedMatrix
from .quantisation import Quantisation
from .safetensors import SafetensorsCheckpoint

ELEMENTS_AT_ONCE = 1 << 18  # of a matrix: intermediate arrays stay in a core's cache


class QuantisedCheckpoint:
    """The tensors of `stored`, in which each quantised matrix has the name that it has without quantisation.

    A matrix is quantised if its tensors are, whatever config.json lists as excluded. Other tensors, such as scales of
    activations and of a KV cache, are not used. Zero points and orders of groups are read on opening, no other tensor.

    Raises MissingTensor or WrongTensor if a matrix lacks a tensor, or has one of another type or shape;
    CorruptCheckpoint if an order of groups names a group that does not exist.
    """

    def __init__(self, stored: SafetensorsCheckpoint, how: Quantisation) -> None:
        self.path = stored.path
        self.config_name = stored.config_name
        self.matrix_dtypes: Collection[str] = (*READABLE, "Q4_0", "Q4_Z", "Q8_0")
        self._stored = stored
        self._matrices = dict(_find_matrices(stored, how))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        return self._matrices[name].shape if name in self._matrices else self._stored.shape(name)

    def dtype(self, name: str) -> str:
        """Return the type in which `chunks` has a tensor: Q4_0, Q4_Z, Q8_0 or elements. Raises MissingTensor."""
        return self._matrices[name].kind if name in self._matrices else self._stored.dtype(name)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every quantised matrix, and of every other tensor in the files."""
        rest = dict.fromkeys(self._stored.names())
        for matrix in self._matrices.values():
            yield matrix.label, sum(self._stored.nbytes(tensor) for tensor in matrix.tensors)
            for tensor in matrix.tensors:
                rest.pop(tensor, None)
        yield from ((self._stored.dtype(name), self._stored.nbytes(name)) for name in rest)

    def quantised(self) -> dict[str, str]:
        """Return the type of each matrix of integers: Q4_0, Q4_Z or Q8_0 if it has such blocks, or its format."""
        return {
            name: matrix.label if matrix.kind == "F32" else matrix.kind
            for name, matrix in self._matrices.items()
            if isinstance(matrix, GroupedMatrix)
        }

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor, read-only. See `weights.Checkpoint`. Raises MissingTensor."""
        if name not in self._matrices:
            return self._stored.tensor(name)
        return np.concatenate([rows for _, rows in self.chunks(name, slice(None), self.shape(name)[0])])

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor, or fewer. See `weights.Checkpoint`."""
        if name not in self._matrices:
            return self._stored.chunks(name, rows, num_rows)
        matrix = self._matrices[name]
        in_cache = max(ELEMENTS_AT_ONCE // matrix.shape[1] // 32, 1) * 32
        return matrix.chunks(rows, min(num_rows, in_cache))


def _find_matrices(stored: SafetensorsCheckpoint, how: Quantisation) -> Iterator[tuple[str, GroupedMatrix | FP8Matrix]]:
    """Yield the name and the reader of each quantised matrix."""
    for name in stored.names():
        module, _, part = name.rpartition(".")
        weight, dtype = f"{module}.weight", stored.dtype(name)
        if part == "qweight":
            yield weight, (AWQMatrix if how.layout == "awq" else GPTQMatrix)(stored, module, how)
        elif part == "weight_packed":
            yield weight, WordsMatrix(stored, module, how)
        elif part == "weight" and dtype == "I8":
            yield weight, Int8Matrix(stored, module, how)
        elif part == "weight" and dtype == "F8_E4M3":
            yield weight, FP8Matrix(stored, module, how)
