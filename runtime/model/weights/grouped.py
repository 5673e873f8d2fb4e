"""Matrices of 4-bit or 8-bit integers with a scale and a zero point for each group of inputs.

Weight (n, k) is `scale[n, g] * (number[n, k] - zero[n, g])`, where g is the group of input k. Quantised folders store
the same four arrays in several layouts, which subclasses read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import CorruptCheckpoint, WrongTensor
from . import READABLE
from .safetensors import SafetensorsCheckpoint

Octets = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32]
BLOCK = 32  # inputs of a block of Q4_0 and Q8_0


class GroupedMatrix(ABC):
    """A quantised matrix of shape [out, in], in the tensors `tensors` of a folder.

    `kind` is the type of its chunks: Q4_0, Q4_Z or Q8_0, blocks with the numbers of the file, where each 32 inputs
    share a group, and 8-bit numbers have no zero point; else F32. Scales of blocks are rounded to fp16. Zero points and
    the order of groups are read on opening.
    """

    label: str  # for people
    kind: str

    def __init__(
        self,
        stored: SafetensorsCheckpoint,
        module: str,
        parts: Sequence[str],
        shape: tuple[int, int],
        bits: int,
        groups: npt.NDArray[np.intp],
    ) -> None:
        self.tensors = tuple(f"{module}.{part}" for part in parts if f"{module}.{part}" in stored)
        self.shape = shape
        self._stored = stored
        self._module = module
        self._bits = bits
        self._groups = groups  # [in], the group of each input
        self._of_blocks = groups[::BLOCK]  # [in / 32]
        self.kind = self._find_kind()

    def chunks(self, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows, and the number of rows before them. See `weights.Checkpoint`."""
        scales, zeros = self._scales(), self._zeros()
        first = rows.indices(self.shape[0])[0]
        for row, numbers in self._numbers(rows, num_rows):
            here = slice(first + row, first + row + len(numbers))
            yield row, self._encoded(numbers, scales[here], zeros[here])

    @abstractmethod
    def _numbers(self, rows: slice, num_rows: int) -> Iterator[tuple[int, Octets]]:
        """Yield each `num_rows` of the given rows of unsigned numbers, [n, in], and the number of rows before them."""

    @abstractmethod
    def _scales(self) -> Scales:
        """Return the scales, [out, groups]."""

    @abstractmethod
    def _zeros(self) -> Octets:
        """Return the zero points, [out, groups]."""

    def _name(self, part: str) -> str:
        return f"{self._module}.{part}"

    def _find_kind(self) -> str:
        whole_blocks = self.shape[1] % BLOCK == 0
        if not whole_blocks or (self._groups.reshape(-1, BLOCK) != self._of_blocks[:, None]).any():
            return "F32"
        if (self._zeros() == 1 << self._bits - 1).all():
            return "Q4_0" if self._bits == 4 else "Q8_0"
        return "Q4_Z" if self._bits == 4 else "F32"  # a difference of 8-bit numbers takes 9 bits

    def _encoded(self, numbers: Octets, scales: Scales, zeros: Octets) -> npt.NDArray[Any]:
        """Return rows of numbers as rows of `kind`."""
        if self.kind == "F32":
            with np.errstate(over="ignore", invalid="ignore"):  # a NaN ends the requests that meet it, not the load
                widened = numbers.astype(np.float32)
                widened -= zeros[:, self._groups]
                widened *= scales[:, self._groups]
            return widened
        whole, zero_points = numbers.reshape(len(numbers), -1, BLOCK), zeros[:, self._of_blocks]
        # A difference is modulo 256, as signed numbers are.
        blocks = whole - zero_points[:, :, None] if self.kind == "Q8_0" else _halves_together(whole)
        fields = [("scale", "<f2"), ("zero", "u1"), ("numbers", f"V{blocks.shape[2]}")]
        out = np.empty(blocks.shape[:2], [field for field in fields if self.kind == "Q4_Z" or field[0] != "zero"])
        with np.errstate(over="ignore"):
            out["scale"] = scales[:, self._of_blocks]
        if self.kind == "Q4_Z":
            out["zero"] = zero_points
        out["numbers"] = blocks.view(fields[-1][1])[:, :, 0]
        return out.view(np.uint8)


def _halves_together(blocks: Octets) -> Octets:
    """Return 4-bit numbers [n, blocks, 32] in bytes [n, blocks, 16]: the first half of a block is in the low halves."""
    eights = blocks.view(np.uint64).reshape(-1, 4)  # 8 numbers each: columns are faster than 16 bytes at a time
    out = np.empty((len(eights), 2), np.uint64)
    for half in (0, 1):
        out[:, half] = eights[:, half] | eights[:, half + 2] << np.uint64(4)
    return out.view(np.uint8).reshape(*blocks.shape[:2], BLOCK // 2)


def unpack_words(words: npt.NDArray[np.int32], bits: int) -> Octets:
    """Return the 4-bit or 8-bit numbers in the last dimension of int32 words, least significant first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    pairs = octets.astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)


def expect(stored: SafetensorsCheckpoint, name: str, dtypes: Collection[str], *sizes: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor, in which None stands for any positive size. Raises MissingTensor or WrongTensor."""
    shape, dtype = stored.shape(name), stored.dtype(name)
    fits = len(shape) == len(sizes) and all(size in (None, found) for size, found in zip(sizes, shape, strict=True))
    if not fits or 0 in shape or dtype not in dtypes:
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise WrongTensor(
            f"tensor {name} in {stored.path} is {dtype} {list(shape)}; it must be {' or '.join(dtypes)} [{wanted}]"
        )
    return shape


def group_order(
    stored: SafetensorsCheckpoint, name: str, inputs: int, num_groups: int, size: int
) -> npt.NDArray[np.intp]:
    """Return the group of each input, which tensor `name` has; without one, groups are `size` consecutive inputs.

    All zeros, or a -1, stand for consecutive groups too. Raises WrongTensor or CorruptCheckpoint.
    """
    consecutive = np.arange(inputs) // size
    if name not in stored:
        return consecutive
    expect(stored, name, ("I32", "I64"), inputs)
    order = stored.tensor(name).astype(np.intp)
    if not order.any() or order.min() == -1:
        order = consecutive
    if order.min() < 0 or order.max() >= num_groups:
        raise CorruptCheckpoint(
            f"tensor {name} in {stored.path} has groups {order.min()} to {order.max()}; there are {num_groups}"
        )
    return order


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The rectangles of a matrix that share a scale: `rows` x `columns` weights each."""

    rows: int
    columns: int

    def read(self, stored: SafetensorsCheckpoint, name: str, num_rows: int) -> npt.NDArray[Any]:
        """Return what a tensor has for each row of the matrix, [num_rows, groups of columns]."""
        values = stored.tensor(name)
        return values.reshape((*values.shape, 1, 1)[:2])[np.arange(num_rows) // self.rows]


def find_grid(
    stored: SafetensorsCheckpoint, name: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> ScaleGrid:
    """Return the grid of scales that their shape implies, in blocks of `block` where it has their number.

    Raises MissingTensor, or WrongTensor if the shape is neither that of blocks, nor of one scale for the matrix, for
    each row, or for each of equal groups of a row.
    """
    rows, columns = shape
    found, dtype = stored.shape(name), stored.dtype(name)
    if dtype in READABLE and len(found) <= 2 and 0 not in found:
        height, width = (*found, 1, 1)[:2]
        if block and (height, width) == (-(-rows // block[0]), -(-columns // block[1])):
            return ScaleGrid(min(block[0], rows), min(block[1], columns))
        if height == width == 1:
            return ScaleGrid(rows, columns)
        if height == rows and columns % width == 0:
            return ScaleGrid(1, columns // width)
    raise WrongTensor(
        f"tensor {name} in {stored.path} is {dtype} {list(found)}; it must have one scale for the matrix of {rows} x "
        f"{columns}, for each row, for each of equal groups of a row"
        + (f", or for each block of {block[0]} x {block[1]}" if block else "")
    )
