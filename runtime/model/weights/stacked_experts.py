"""The tensors of gpt-oss folders in the order of packing: a row for each output column, gate before up.

A folder has one tensor for all experts of a layer. `gate_up_proj` [experts, hidden, 2 size] and `down_proj` [experts,
size, hidden] are transposed, and columns of gate and up take turns. In MXFP4, `gate_up_proj_blocks` [experts, 2 size,
hidden / 32, 16] and `gate_up_proj_scales` [experts, 2 size, hidden / 32] have a row for each column, of gate and up in
turn, with two neighboring weights in each byte; the same for `down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.words import join_mxfp4
from ...common.errors import WrongTensor
from ..spec import DecoderSpec
from . import READABLE
from .safetensors import SafetensorsCheckpoint

MXFP4_BLOCK_BYTES = 16  # bytes of 32 codes
_OF_EXPERTS = re.compile(
    r"(?P<stored>.*\.experts\.(?P<matrix>gate_up_proj|down_proj))\.(?P<kind>weight|bias)", re.DOTALL
)


class StackedExperts:
    """The tensors of `folder` with experts as [experts, rows, columns], in MXFP4 where `spec` says so.

    Experts are called `gate_up_proj.weight`, whose rows of gate precede the rows of up, `down_proj.weight`, and the
    same with `.bias`. Tensors of MXFP4 are in GGML's blocks: a byte with the exponent, then the codes in the order of
    Q4_0.
    """

    def __init__(self, folder: SafetensorsCheckpoint, spec: DecoderSpec) -> None:
        self.path = folder.path
        self.config_name = folder.config_name
        self.matrix_dtypes: Collection[str] = (*READABLE, "MXFP4")
        self._folder = folder
        self._spec = spec
        self._biases: tuple[str, npt.NDArray[Any]] = "", np.empty(0)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor or WrongTensor."""
        found = _OF_EXPERTS.fullmatch(name)
        if found is None:
            return self._folder.shape(name)
        if found["kind"] == "bias":
            return self._folder.shape(f"{found['stored']}_bias")
        if name in self._spec.quantized:
            return self._shape_in_blocks(found["stored"])
        experts, columns, rows = self._dimensions(found["stored"], 3)
        return experts, rows, columns

    def dtype(self, name: str) -> str:
        """Return the type of a tensor's elements: as safetensors names it, or MXFP4. Raises MissingTensor."""
        found = _OF_EXPERTS.fullmatch(name)
        if found is None:
            return self._folder.dtype(name)
        if found["kind"] == "bias":
            return self._folder.dtype(f"{found['stored']}_bias")
        return "MXFP4" if name in self._spec.quantized else self._folder.dtype(found["stored"])

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        yield from self._folder.sizes()

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor that is no matrix of experts. See `SafetensorsCheckpoint`."""
        found = _OF_EXPERTS.fullmatch(name)
        if found is None:
            return self._folder.tensor(name)
        if self._biases[0] != name:  # the biases of a layer are requested once per expert
            biases = self._folder.tensor(f"{found['stored']}_bias")
            self._biases = name, biases[:, _file_order(found["matrix"], biases.shape[1])]
        return self._biases[1]

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor. See `weights.Checkpoint`."""
        found = _OF_EXPERTS.fullmatch(name)
        if found is None:
            yield from self._folder.chunks(name, rows, num_rows)
            return
        experts, rows_each, _ = self.shape(name)
        order = _file_order(found["matrix"], rows_each)
        first, last, _ = rows.indices(experts * rows_each)
        for expert in range(first // rows_each, -(-last // rows_each)):
            begin, end = max(first - expert * rows_each, 0), min(last - expert * rows_each, rows_each)
            before = expert * rows_each + begin - first
            for row, chunk in self._chunks_of_expert(found["stored"], name, expert, order[begin:end], num_rows):
                yield before + row, chunk

    def _chunks_of_expert(
        self, stored: str, name: str, expert: int, order: npt.NDArray[np.intp], num_rows: int
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` rows of one expert, those with the numbers `order` in the file."""
        if name in self._spec.quantized:
            codes = self._of_expert(f"{stored}_blocks", expert)
            exponents = self._of_expert(f"{stored}_scales", expert)
            words = codes.reshape(len(codes), -1).view(np.int32)
            for row in range(0, len(order), num_rows):
                chosen = order[row : row + num_rows]
                yield row, join_mxfp4(words[chosen], exponents[chosen])
        else:
            columns = self._of_expert(stored, expert)
            for row in range(0, len(order), num_rows):
                yield row, np.ascontiguousarray(columns[:, order[row : row + num_rows]].T)

    def _of_expert(self, stored: str, expert: int) -> npt.NDArray[Any]:
        """Return one expert's part of a stored tensor [experts, …]."""
        shape = self._folder.shape(stored)[1:]
        rows = prod(shape[:-1])
        _, chunk = next(self._folder.chunks(stored, slice(expert * rows, (expert + 1) * rows), rows))
        return chunk.reshape(shape)

    def _shape_in_blocks(self, stored: str) -> tuple[int, ...]:
        experts, rows, blocks, nbytes = self._dimensions(f"{stored}_blocks", 4)
        scales = self._dimensions(f"{stored}_scales", 3)
        for part in ("blocks", "scales"):
            if (kind := self._folder.dtype(f"{stored}_{part}")) != "U8":
                raise WrongTensor(f"tensor {stored}_{part} in {self.path} is {kind}; it must be U8")
        if nbytes != MXFP4_BLOCK_BYTES or scales != (experts, rows, blocks):
            found = [experts, rows, blocks, nbytes], list(scales)
            raise WrongTensor(
                f"tensors {stored}_blocks and _scales in {self.path} are {found[0]} and {found[1]}; they must be "
                f"[experts, rows, n, {MXFP4_BLOCK_BYTES}] and [experts, rows, n]"
            )
        return experts, rows, blocks * 32

    def _dimensions(self, name: str, count: int) -> tuple[int, ...]:
        """Return the shape of a stored tensor that must have `count` dimensions."""
        shape = self._folder.shape(name)
        if len(shape) != count:
            raise WrongTensor(f"tensor {name} in {self.path} is {list(shape)}; it must have {count} dimensions")
        return shape


def _file_order(matrix: str, rows: int) -> npt.NDArray[np.intp]:
    """Return the row in the file of each row: in `gate_up_proj`, rows of gate and up take turns."""
    numbers = np.arange(rows)
    return np.concatenate([numbers[::2], numbers[1::2]]) if matrix == "gate_up_proj" else numbers
