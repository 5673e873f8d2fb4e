"""Matrices as compressed-tensors stores them, [out, in]: integers in int32 words, int8, and FP8.

FP8 has the same form where `quant_method` is fp8 or fbgemm_fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.words import widen_codes
from ...common.errors import WrongTensor
from . import as_f32
from .grouped import GroupedMatrix, Octets, Words, expect, find_grid, read_group_order, unpack_words
from .quantization import Quantization
from .safetensors import SafetensorsCheckpoint

COMPRESSED_TENSORS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


class CompressedMatrix(GroupedMatrix):
    """A matrix of signed numbers; subclasses yield `number + half its range`."""

    def __init__(
        self, stored: SafetensorsCheckpoint, module: str, how: Quantization, shape: tuple[int, int], bits: int
    ) -> None:
        scale = f"{module}.weight_scale"
        self._zero_name = f"{module}.weight_zero_point"
        self._grid = find_grid(stored, scale, shape, how.block)
        num_groups = -(-shape[1] // self._grid.columns)
        self._zeros_in_words = self._zero_name in stored and stored.dtype(self._zero_name) == "I32"
        if self._zeros_in_words:
            expect(stored, self._zero_name, ("I32",), -(-shape[0] * bits // 32), num_groups)
        elif self._zero_name in stored:
            expect(stored, self._zero_name, ("I8",), *stored.shape(scale))
        if (order := f"{module}.weight_g_idx") in stored:
            expect(stored, order, ("I32", "I64"), shape[1])
        groups = partial(read_group_order, stored, order, shape[1], num_groups, self._grid.columns)
        super().__init__(stored, module, COMPRESSED_TENSORS, shape, bits, groups)

    def _scales(self) -> npt.NDArray[Any]:
        return self._grid.read(self._stored, self._name("weight_scale"), self.shape[0])

    def _zeros(self) -> Octets:
        num_rows = self.shape[0]
        middle = np.uint8(1 << self._bits - 1)
        if self._zeros_in_words:
            words = self._stored.tensor(self._zero_name)
            return np.ascontiguousarray(unpack_words(words.T, self._bits)[:, :num_rows].T)
        if self._zero_name in self._stored:
            signed: npt.NDArray[np.int8] = self._grid.read(self._stored, self._zero_name, num_rows)
            return signed.view(np.uint8) + middle
        return np.full((num_rows, self._groups.max() + 1), middle)


class WordsMatrix(CompressedMatrix):
    """A matrix in int32 words: each word of `weight_packed` has 8 (or 4) inputs of one output."""

    def __init__(self, stored: SafetensorsCheckpoint, module: str, how: Quantization) -> None:
        name = f"{module}.weight_packed"
        size = f"{module}.weight_shape"
        expect(stored, size, ("I32", "I64"), 2)
        rows, columns = map(int, stored.tensor(size))
        _, words = expect(stored, name, ("I32",), rows, None)
        bits = next((bits for bits in (4, 8) if -(-columns * bits // 32) == words), 0)
        if not bits:
            raise WrongTensor(
                f"tensor {name} in {stored.path} has {words} words for {columns} inputs; each must have 4 or 8 bits"
            )
        self.label = f"compressed-tensors {bits}-bit"
        super().__init__(stored, module, how, (rows, columns), bits)

    def _words(self, rows: slice, num_rows: int) -> Iterator[tuple[int, Words]]:
        return self._stored.chunks(self._name("weight_packed"), rows, num_rows)


class Int8Matrix(CompressedMatrix):
    """A matrix of int8 numbers."""

    def __init__(self, stored: SafetensorsCheckpoint, module: str, how: Quantization) -> None:
        rows, columns = expect(stored, f"{module}.weight", ("I8",), None, None)
        self.label = "int8"
        super().__init__(stored, module, how, (rows, columns), 8)

    def _words(self, rows: slice, num_rows: int) -> Iterator[tuple[int, Words]]:
        whole = np.zeros((num_rows, -(-self.shape[1] // 4) * 4), np.uint8)
        for row, signed in self._stored.chunks(self._name("weight"), rows, num_rows):
            np.bitwise_xor(signed.view(np.uint8), np.uint8(0x80), out=whole[: len(signed), : self.shape[1]])
            yield row, whole[: len(signed)].view(np.int32)


class FP8Matrix:
    """A matrix of FP8 numbers in E4M3, which is widened to float32; its scales belong to the matrix, rows or blocks."""

    label = "FP8"
    kind = "F32"

    def __init__(self, stored: SafetensorsCheckpoint, module: str, how: Quantization) -> None:
        self._stored = stored
        self._weight = f"{module}.weight"
        self._scale = next(
            (name for name in (f"{module}.weight_scale_inv", f"{module}.weight_scale") if name in stored),
            f"{module}.weight_scale",
        )
        rows, columns = expect(stored, self._weight, ("F8_E4M3",), None, None)
        self.shape = rows, columns
        self._grid = find_grid(stored, self._scale, self.shape, how.block)
        self.tensors = self._weight, self._scale

    def chunks(self, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield each `num_rows` of the given rows, and the number of rows before them. See `weights.Checkpoint`."""
        scales = as_f32(self._grid.read(self._stored, self._scale, self.shape[0]))
        first = rows.indices(self.shape[0])[0]
        for row, numbers in self._stored.chunks(self._weight, rows, num_rows):
            yield row, widen_codes(numbers, E4M3, scales[first + row : first + row + len(numbers)], self._grid.columns)


def _e4m3() -> npt.NDArray[np.float32]:
    """Return the value of each byte: sign, 4 bits of exponent, 3 of mantissa; no infinity, NaN where all are set."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3()
