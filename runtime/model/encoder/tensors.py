"""The tensors of an encoder's folder, under the names that its spec implies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.pack import widen_blocks
from ...common.errors import MissingTensor, WrongTensor
from ..weights import READABLE, Checkpoint, as_f32
from ..weights.safetensors import SafetensorsCheckpoint
from .spec import ANSWER, AnswerRows, EncoderSpec

ANSWER_TENSOR = f"{ANSWER}.weight"


class EncoderTensors:
    """The tensors of a folder and of its modules' folders: a `Checkpoint`.

    The body's names are found with the prefix that they have in a checkpoint with a head, and without.
    """

    def __init__(self, folder: Path, spec: EncoderSpec) -> None:
        self.path = folder
        self.config_name = "config.json"
        self.matrix_dtypes: Collection[str] = READABLE
        self._prefix = spec.tensor_prefix
        self._main = SafetensorsCheckpoint(folder)
        self._modules = {start: SafetensorsCheckpoint(folder / name) for name, start in spec.files.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        checkpoint, stored = self._find(name)
        return checkpoint.shape(stored)

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as safetensors names it. Raises MissingTensor."""
        checkpoint, stored = self._find(name)
        return checkpoint.dtype(stored)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        yield from self._main.sizes()
        for module in self._modules.values():
            yield from module.sizes()

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor. See `weights.Checkpoint`."""
        checkpoint, stored = self._find(name)
        return checkpoint.tensor(stored)

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the given rows of a tensor. See `weights.Checkpoint`."""
        checkpoint, stored = self._find(name)
        yield from checkpoint.chunks(stored, rows, num_rows)

    def _find(self, name: str) -> tuple[SafetensorsCheckpoint, str]:
        """Return the file that has a tensor, and the tensor's name in it. Raises MissingTensor."""
        for start, module in self._modules.items():
            if name.startswith(start):
                return module, name.removeprefix(start)
        for stored in self._stored_names(name):
            if stored in self._main:
                return self._main, stored
        raise MissingTensor(f"tensor {name} is not in {self.path}")

    def _stored_names(self, name: str) -> Iterator[str]:
        """Yield the names that a tensor may have, depending on the program that wrote the file."""
        for found in (f"{self._prefix}{name}", name, name.removeprefix("model.")):
            yield found
            yield found.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


class AnswerTensors:
    """A checkpoint with the tensor `ANSWER_TENSOR`: the row of the token for true, less that of the token for false."""

    def __init__(self, stored: Checkpoint, answer: AnswerRows) -> None:
        self.path = stored.path
        self.config_name = stored.config_name
        self.matrix_dtypes = stored.matrix_dtypes
        self._stored = stored
        self._answer = answer

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor or WrongTensor."""
        return self._row().shape if name == ANSWER_TENSOR else self._stored.shape(name)

    def dtype(self, name: str) -> str:
        """Return a tensor's type. Raises MissingTensor."""
        return "F32" if name == ANSWER_TENSOR else self._stored.dtype(name)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        return self._stored.sizes()

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor. See `weights.Checkpoint`."""
        return self._row() if name == ANSWER_TENSOR else self._stored.tensor(name)

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the given rows of a tensor. See `weights.Checkpoint`."""
        return iter([(0, self._row())]) if name == ANSWER_TENSOR else self._stored.chunks(name, rows, num_rows)

    def _row(self) -> npt.NDArray[np.float32]:
        """Return the tensor, f32 [1, hidden]."""
        name = self._answer.matrix
        shape = self._stored.shape(name)
        kind = self._stored.dtype(name)
        if len(shape) != 2 or max(self._answer.true, self._answer.false or 0) >= shape[0]:
            raise WrongTensor(f"tensor {name} in {self.path} is {list(shape)}; it must have the answer tokens' rows")
        if kind not in self.matrix_dtypes:
            raise WrongTensor(f"tensor {name} in {self.path} must be one of {', '.join(self.matrix_dtypes)}")

        def row(index: int) -> npt.NDArray[np.float32]:
            ((_, chunk),) = self._stored.chunks(name, slice(index, index + 1), 1)
            return (as_f32(chunk) if kind in READABLE else widen_blocks(chunk, kind)).reshape(1, -1).copy()

        answer = self._answer
        return row(answer.true) if answer.false is None else row(answer.true) - row(answer.false)
