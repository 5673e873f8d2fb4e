"""The tensors of a folder whose matrices are quantized: GPTQ, AWQ, compressed-tensors and FP8."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import READABLE
from .compressed import FP8Matrix, Int8Matrix, WordsMatrix
from .gptq import AWQMatrix, GPTQMatrix
from .grouped import GroupedMatrix, Groups
from .quantization import SORTED, Quantization
from .safetensors import SafetensorsCheckpoint

ELEMENTS_IN_CACHE = 1 << 18  # elements of a matrix: intermediate arrays stay in a core's cache


class QuantizedCheckpoint:
    """The tensors of `stored`, with each quantized matrix under its name in an unquantized folder.

    A matrix is quantized if its tensors are, whatever config.json lists as excluded. Other tensors, such as scales of
    activations and of a KV cache, are not used. No tensor is read on opening; other methods read the zero points and
    orders of groups of their matrices.

    Raises MissingTensor or WrongTensor if a matrix lacks a tensor, or has one of another type or shape.
    """

    def __init__(self, stored: SafetensorsCheckpoint, how: Quantization) -> None:
        self.path = stored.path
        self.config_name = stored.config_name
        self.matrix_dtypes: Collection[str] = (*READABLE, "Q4_0", "Q4_Z", "Q8_0")
        self._stored = stored
        self._matrices = dict(_find_matrices(stored, how))
        self._sorted: dict[str, GroupedMatrix] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        matrix = self._matrix(name)
        return self._stored.shape(name) if matrix is None else matrix.shape

    def dtype(self, name: str) -> str:
        """Return the type in which `chunks` has a tensor: Q4_0, Q4_Z, Q8_0 or elements.

        Raises MissingTensor, or CorruptCheckpoint if an order of groups names a group that does not exist.
        """
        matrix = self._matrix(name)
        return self._stored.dtype(name) if matrix is None else matrix.kind

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every quantized matrix, and of every other tensor in the files."""
        rest = dict.fromkeys(self._stored.names())
        for matrix in self._matrices.values():
            yield matrix.label, sum(self._stored.nbytes(tensor) for tensor in matrix.tensors)
            for tensor in matrix.tensors:
                rest.pop(tensor, None)
        yield from ((self._stored.dtype(name), self._stored.nbytes(name)) for name in rest)

    def sort_by_group(self, names: Collection[str]) -> dict[str, Groups]:
        """Sort the inputs by group in the matrices of `names` that only then are blocks; return their orders.

        The sorted matrix is a tensor of its own, with SORTED after the name. Raises CorruptCheckpoint if an
        order of groups names a group that does not exist.
        """
        grouped = {name: self._matrices[name] for name in names if name in self._matrices}
        for name, matrix in grouped.items():
            in_order = matrix.sorted_by_group() if isinstance(matrix, GroupedMatrix) else None
            if in_order is not None:
                self._sorted[name] = in_order
        return {name: matrix.input_order for name, matrix in self._sorted.items() if matrix.input_order is not None}

    def quantized(self, names: Collection[str]) -> dict[str, str]:
        """Return the type of each matrix of integers in `names`: Q4_0, Q4_Z or Q8_0 for such blocks, or its format.

        Raises CorruptCheckpoint if an order of groups names a group that does not exist.
        """
        matrices = {**self._matrices, **{name + SORTED: matrix for name, matrix in self._sorted.items()}}
        return {
            name: matrix.label if matrix.kind == "F32" else matrix.kind
            for name, matrix in matrices.items()
            if name.removesuffix(SORTED) in names and isinstance(matrix, GroupedMatrix)
        }

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor, read-only. See `weights.Checkpoint`. Raises MissingTensor."""
        if self._matrix(name) is None:
            return self._stored.tensor(name)
        return np.concatenate([rows for _, rows in self.chunks(name, slice(None), self.shape(name)[0])])

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor, or fewer. See `weights.Checkpoint`."""
        matrix = self._matrix(name)
        if matrix is None:
            return self._stored.chunks(name, rows, num_rows)
        in_cache = max(ELEMENTS_IN_CACHE // matrix.shape[1] // 32, 1) * 32
        return matrix.chunks(rows, min(num_rows, in_cache))

    def _matrix(self, name: str) -> GroupedMatrix | FP8Matrix | None:
        """Return a quantized matrix; None if the tensor is not one."""
        return self._sorted.get(name.removesuffix(SORTED)) if name.endswith(SORTED) else self._matrices.get(name)


def _find_matrices(stored: SafetensorsCheckpoint, how: Quantization) -> Iterator[tuple[str, GroupedMatrix | FP8Matrix]]:
    """Yield the name and the reader of each quantized matrix."""
    for name in stored.names():
        module, _, part = name.rpartition(".")
        weight = f"{module}.weight"
        dtype = stored.dtype(name)
        if part == "qweight":
            yield weight, (AWQMatrix if how.layout == "awq" else GPTQMatrix)(stored, module, how)
        elif part == "weight_packed":
            yield weight, WordsMatrix(stored, module, how)
        elif part == "weight" and dtype == "I8":
            yield weight, Int8Matrix(stored, module, how)
        elif part == "weight" and dtype == "F8_E4M3":
            yield weight, FP8Matrix(stored, module, how)
