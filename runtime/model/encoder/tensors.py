"""The tensors of an encoder's folder, under the names that its spec implies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import MissingTensor, WrongTensor
from ..weights import READABLE, as_f32
from ..weights.safetensors import SafetensorsCheckpoint
from .spec import ANSWER, EncoderSpec

ANSWER_TENSOR = f"{ANSWER}.weight"


class EncoderTensors:
    """The tensors of a folder and of its modules' folders: a `Checkpoint`.

    The body's names are found with the prefix that they have in a checkpoint with a head, and without.
    """

    def __init__(self, folder: Path, spec: EncoderSpec) -> None:
        self.path = folder
        self.config_name = "config.json"
        self.matrix_dtypes: Collection[str] = READABLE
        self._spec = spec
        self._main = SafetensorsCheckpoint(folder)
        self._modules = {start: SafetensorsCheckpoint(folder / name) for name, start in spec.files.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        if name == ANSWER_TENSOR:
            return self._answer_row().shape
        checkpoint, stored = self._find(name)
        return checkpoint.shape(stored)

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as safetensors names it. Raises MissingTensor."""
        if name == ANSWER_TENSOR:
            return "F32"
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
        if name == ANSWER_TENSOR:
            yield 0, self._answer_row()
            return
        checkpoint, stored = self._find(name)
        yield from checkpoint.chunks(stored, rows, num_rows)

    def _answer_row(self) -> npt.NDArray[np.float32]:
        """Return the row of the token for true less the row of the token for false, f32 [1, hidden]."""
        answer = self._spec.answer
        assert answer is not None, "only a spec with answer tokens has this matrix"
        checkpoint, stored = self._find(answer.matrix)
        shape = checkpoint.shape(stored)
        if len(shape) != 2 or max(answer.true, answer.false or 0) >= shape[0]:
            raise WrongTensor(f"tensor {stored} in {self.path} is {list(shape)}; it must have the answer tokens' rows")
        if checkpoint.dtype(stored) not in READABLE:
            raise WrongTensor(f"tensor {stored} in {self.path} must be one of {', '.join(READABLE)}")

        def row(index: int) -> npt.NDArray[np.float32]:
            (chunk,) = (as_f32(rows) for _, rows in checkpoint.chunks(stored, slice(index, index + 1), 1))
            return chunk.copy()

        return row(answer.true) if answer.false is None else row(answer.true) - row(answer.false)

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
        for found in (f"{self._spec.tensor_prefix}{name}", name, name.removeprefix("model.")):
            yield found
            yield found.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
