"""Matrices of 4-bit or 8-bit integers with a scale and a zero point for each group of inputs.

Weight (n, k) is `scale[n, g] * (number[n, k] - zero[n, g])`, where g is the group of input k. Quantized folders store
the same four arrays in several layouts, which subclasses read.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.words import join_blocks, reorder_words, widen_words
from ...common.errors import CorruptCheckpoint, WrongTensor
from . import READABLE, as_f32
from .safetensors import SafetensorsCheckpoint

Octets = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]
Groups = npt.NDArray[np.int32]  # group of each input of a matrix
BLOCK = 32  # inputs of a block of Q4_0 and Q8_0


class GroupedMatrix(ABC):
    """A quantized matrix of shape [out, in], in the tensors `tensors` of a folder.

    `kind` is the type of its chunks. Where each 32 inputs share a group, and 8-bit numbers have no zero point, chunks
    are blocks with the numbers of the file: Q4_0, Q4_Z or Q8_0; otherwise F32. Scales of blocks are rounded to fp16.
    The zero points and the order of groups are read at the first use of `kind`, after the shape was compared with the
    model's.
    """

    label: str  # label in messages

    def __init__(
        self,
        stored: SafetensorsCheckpoint,
        module: str,
        parts: Sequence[str],
        shape: tuple[int, int],
        bits: int,
        read_groups: Callable[[], Groups],
    ) -> None:
        self.tensors = tuple(f"{module}.{part}" for part in parts if f"{module}.{part}" in stored)
        self.shape = shape
        self._stored = stored
        self._module = module
        self._bits = bits
        self._read_groups = read_groups
        self.input_order: Groups | None = None  # the input of each column of the chunks, if the order differs

    @cached_property
    def kind(self) -> str:
        """The type of the chunks. Raises CorruptCheckpoint if an order of groups names a group that does not exist."""
        whole_blocks = self.shape[1] % BLOCK == 0
        if not whole_blocks or (self._groups.reshape(-1, BLOCK) != self._groups[::BLOCK, None]).any():
            return "F32"
        if (self._zeros() == 1 << self._bits - 1).all():
            return "Q4_0" if self._bits == 4 else "Q8_0"
        return "Q4_Z" if self._bits == 4 else "F32"  # a difference of 8-bit numbers takes 9 bits

    def chunks(self, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows, and the number of rows before them. See `weights.Checkpoint`."""
        scales, zeros = self._scales(), self._zeros()
        first = rows.indices(self.shape[0])[0]
        of_blocks = self._groups[::BLOCK].copy()
        for row, words in self._words(rows, num_rows):
            if self.input_order is not None:
                words = reorder_words(words, self._bits, self.input_order)
            here = slice(first + row, first + row + len(words))
            if self.kind == "F32":
                yield row, widen_words(words, self._bits, as_f32(scales[here]), zeros[here], self._groups)
            else:
                yield row, join_blocks(words, _f16_bits(scales[here]), zeros[here], of_blocks, self.kind)

    def sorted_by_group(self) -> GroupedMatrix | None:
        """Return the matrix with its inputs sorted by group, if its chunks are blocks in this order only."""
        if self.kind != "F32":
            return None
        order = np.argsort(self._groups, kind="stable").astype(np.int32)
        matrix = copy.copy(self)
        del matrix.kind  # the cached kind
        matrix.input_order = order
        matrix._groups = self._groups[order]
        return matrix if matrix.kind != "F32" else None

    @cached_property
    def _groups(self) -> Groups:
        return self._read_groups()

    @abstractmethod
    def _words(self, rows: slice, num_rows: int) -> Iterator[tuple[int, Words]]:
        """Yield each `num_rows` of the given rows of unsigned numbers in words, and the number of rows before them."""

    @abstractmethod
    def _scales(self) -> npt.NDArray[Any]:
        """Return the scales, [out, groups] of a type in READABLE."""

    @abstractmethod
    def _zeros(self) -> Octets:
        """Return the zero points, [out, groups]."""

    def _name(self, part: str) -> str:
        return f"{self._module}.{part}"


def _f16_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return elements of a type in READABLE rounded to fp16, as their bits."""
    with np.errstate(over="ignore"):
        halves = values if values.dtype == np.float16 else as_f32(values).astype(np.float16)
    return halves.view(np.uint16)


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
    shape = stored.shape(name)
    dtype = stored.dtype(name)
    fits = len(shape) == len(sizes) and all(size in (None, found) for size, found in zip(sizes, shape, strict=True))
    if not fits or 0 in shape or dtype not in dtypes:
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise WrongTensor(
            f"tensor {name} in {stored.path} is {dtype} {list(shape)}; it must be {' or '.join(dtypes)} [{wanted}]"
        )
    return shape


def consecutive_groups(inputs: int, size: int) -> Groups:
    """Return the group of each input, where each `size` inputs are a group."""
    return np.arange(inputs, dtype=np.int32) // np.int32(size)


def read_group_order(stored: SafetensorsCheckpoint, name: str, inputs: int, num_groups: int, size: int) -> Groups:
    """Return the group of each input from the tensor `name`; without it, groups are `size` consecutive inputs.

    A -1, or all zeros where there are several groups, also stand for consecutive groups. Raises CorruptCheckpoint, or
    WrongTensor if the inputs have another number of consecutive groups.
    """
    order = stored.tensor(name) if name in stored else np.full(1, -1)
    if order.min() == -1 or (num_groups > 1 and not order.any()):
        order = consecutive_groups(inputs, size)
        if order[-1] + 1 != num_groups:
            raise WrongTensor(
                f"{name.rpartition('.')[0]} in {stored.path} has scales of {num_groups} groups; {inputs} inputs in "
                f"groups of {size}, as {stored.config_name} says, have {order[-1] + 1}"
            )
    if order.min() < 0 or order.max() >= num_groups:
        raise CorruptCheckpoint(
            f"tensor {name} in {stored.path} has groups {order.min()} to {order.max()}; there are {num_groups}"
        )
    return order.astype(np.int32)


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """The rectangles of a matrix that share a scale: `rows` x `columns` weights each."""

    rows: int
    columns: int

    def read(self, stored: SafetensorsCheckpoint, name: str, num_rows: int) -> npt.NDArray[Any]:
        """Return the values of a tensor for each row of the matrix, [num_rows, groups of columns]."""
        values = stored.tensor(name)
        return values.reshape((*values.shape, 1, 1)[:2])[np.arange(num_rows) // self.rows]


def find_grid(
    stored: SafetensorsCheckpoint, name: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> ScaleGrid:
    """Return the grid of scales that their shape implies: blocks of `block` if the shape fits their number.

    Raises MissingTensor, or WrongTensor if the shape fits neither blocks nor one scale per matrix, row or equal group
    of a row.
    """
    rows, columns = shape
    found = stored.shape(name)
    dtype = stored.dtype(name)
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
