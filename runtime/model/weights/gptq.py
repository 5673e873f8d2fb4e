"""Matrices as GPTQ and AWQ store them: int32 words of unsigned numbers, inputs along rows, outputs along columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.words import inputs_in_words
from ...common.errors import WrongTensor
from . import READABLE
from .grouped import GroupedMatrix, Octets, Words, consecutive_groups, expect, read_group_order, unpack_words
from .quantization import Quantization
from .safetensors import SafetensorsCheckpoint

GPTQ_TENSORS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # place in a word of each of 8 neighboring outputs


class GPTQMatrix(GroupedMatrix):
    """A matrix in GPTQ's layout: a word of `qweight` has 8 (or 4) inputs of one output.

    `g_idx` has the group of each input; with act-order, inputs of a group are not neighbors. Without it, the size of a
    group and the bits of its numbers follow from the shapes of scales and zero points. Version 1 of the format stores
    each zero point minus 1.
    """

    def __init__(self, stored: SafetensorsCheckpoint, module: str, how: Quantization) -> None:
        name = f"{module}.qweight"
        order = f"{module}.g_idx"
        words, outputs = expect(stored, name, ("I32",), None, None)
        if order in stored:
            inputs = expect(stored, order, ("I32", "I64"), None)[0]
        else:
            inputs = words * 32 // _bits_of_zeros(stored, f"{module}.qzeros", outputs, how.bits)
        bits = words * 32 // inputs
        if bits not in (4, 8) or words * 32 != bits * inputs:
            raise WrongTensor(
                f"tensor {name} in {stored.path} has {words} words for {inputs} inputs; each must have 4 or 8 bits"
            )
        num_groups, _ = expect(stored, f"{module}.scales", READABLE, None, outputs)
        expect(stored, f"{module}.qzeros", ("I32",), num_groups, -(-outputs * bits // 32))
        self.label = f"GPTQ {bits}-bit"
        self._zero_offset = how.zero_offset
        size = how.group_size or inputs
        if order not in stored and inputs % num_groups == 0 and -(-inputs // size) != num_groups:
            size = inputs // num_groups  # the group size of this module, which may differ from config.json
        groups = partial(read_group_order, stored, order, inputs, num_groups, size)
        super().__init__(stored, module, GPTQ_TENSORS, (outputs, inputs), bits, groups)

    def _words(self, rows: slice, num_rows: int) -> Iterator[tuple[int, Words]]:
        yield from _columns(self._stored.tensor(self._name("qweight")), rows, num_rows)

    def _scales(self) -> npt.NDArray[Any]:
        return self._stored.tensor(self._name("scales")).T

    def _zeros(self) -> Octets:
        zeros = unpack_words(self._stored.tensor(self._name("qzeros")), self._bits)[:, : self.shape[0]]
        zeros += np.uint8(self._zero_offset)
        zeros &= np.uint8((1 << self._bits) - 1)
        return zeros.T


class AWQMatrix(GroupedMatrix):
    """A matrix in AWQ's layout: a word of `qweight` has 8 outputs of one input, in the order AWQ_ORDER."""

    def __init__(self, stored: SafetensorsCheckpoint, module: str, how: Quantization) -> None:
        inputs, words = expect(stored, f"{module}.qweight", ("I32",), None, None)
        outputs = words * 8
        num_groups, _ = expect(stored, f"{module}.scales", READABLE, None, outputs)
        expect(stored, f"{module}.qzeros", ("I32",), num_groups, words)
        if inputs % num_groups:
            raise WrongTensor(
                f"tensor {module}.scales in {stored.path} has {num_groups} groups; {inputs} inputs must be a multiple"
            )
        self.label = "AWQ 4-bit"
        groups = partial(consecutive_groups, inputs, inputs // num_groups)
        super().__init__(stored, module, GPTQ_TENSORS, (outputs, inputs), 4, groups)

    def _words(self, rows: slice, num_rows: int) -> Iterator[tuple[int, Words]]:
        yield from _columns(inputs_in_words(self._stored.tensor(self._name("qweight"))), rows, num_rows)

    def _scales(self) -> npt.NDArray[Any]:
        return self._stored.tensor(self._name("scales")).T

    def _zeros(self) -> Octets:
        zeros = unpack_words(self._stored.tensor(self._name("qzeros")), 4)
        return zeros.reshape(len(zeros), -1, 8)[:, :, AWQ_ORDER].reshape(zeros.shape).T


def _bits_of_zeros(stored: SafetensorsCheckpoint, name: str, outputs: int, default: int) -> int:
    """Return the bits of the zero points of `outputs` outputs: `default`, unless only the other width fits."""
    words = expect(stored, name, ("I32",), None, None)[1]
    return next((bits for bits in (default, 4, 8) if words == -(-outputs * bits // 32)), default)


def _columns(words: Words, rows: slice, num_rows: int) -> Iterator[tuple[int, Words]]:
    """Yield each `num_rows` of the given columns as rows, and the number of columns before them."""
    first, last, _ = rows.indices(words.shape[1])
    for column in range(first, last, num_rows):
        yield column - first, words[:, column : min(column + num_rows, last)].T
