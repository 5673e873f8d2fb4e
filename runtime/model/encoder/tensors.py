"""The tensors of an encoder's folder, under the names that its spec implies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import MissingTensor, WrongTensor
from ..weights import READABLE, as_f32
from ..weights.safetensors import SafetensorsCheckpoint
from ..weights.tensors import check_built
from .spec import EncoderSpec
from .weights import build_encoder_weights

SCORE = "answer score"  # a matrix of one row that no file has: the difference of two rows of the LM head


class EncoderTensors:
    """The tensors of a folder and of its modules' folders: a `Checkpoint`.

    A body's names are found with `prefix`, which checkpoints with a head have, and without. `files` maps folders of
    modules to the prefix of their tensors. `answer_rows` are the matrix and the rows whose difference is `SCORE`.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        files: Mapping[str, str],
        answer_rows: tuple[str, int, int | None] | None = None,
    ) -> None:
        self.path = folder
        self.config_name = "config.json"
        self.matrix_dtypes: Collection[str] = READABLE
        self._prefix = prefix
        self._main = SafetensorsCheckpoint(folder)
        self._modules = {start: SafetensorsCheckpoint(folder / name) for name, start in files.items()}
        self._answer_rows = answer_rows

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        if name == f"{SCORE}.weight":
            return self._score_rows().shape
        checkpoint, stored = self._find(name)
        return checkpoint.shape(stored)

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as safetensors names it. Raises MissingTensor."""
        if name == f"{SCORE}.weight":
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
        if name == f"{SCORE}.weight":
            return self._score_rows()
        checkpoint, stored = self._find(name)
        return checkpoint.tensor(stored)

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the given rows of a tensor. See `weights.Checkpoint`."""
        if name == f"{SCORE}.weight":
            yield 0, self._score_rows()
            return
        checkpoint, stored = self._find(name)
        yield from checkpoint.chunks(stored, rows, num_rows)

    def _score_rows(self) -> npt.NDArray[np.float32]:
        """Return the row of the token for true less that of the token for false, f32 [1, hidden]."""
        assert self._answer_rows is not None, "only a spec with answer tokens has this matrix"
        name, true, false = self._answer_rows
        checkpoint, stored = self._find(name)
        shape = checkpoint.shape(stored)
        if len(shape) != 2 or max(true, false or 0) >= shape[0]:
            raise WrongTensor(f"tensor {stored} in {self.path} is {list(shape)}; it must have the answer tokens' rows")
        if checkpoint.dtype(stored) not in READABLE:
            raise WrongTensor(f"tensor {stored} in {self.path} must be one of {', '.join(READABLE)}")

        def row(index: int) -> npt.NDArray[np.float32]:
            (chunk,) = (as_f32(rows) for _, rows in checkpoint.chunks(stored, slice(index, index + 1), 1))
            return chunk.copy()

        return row(true) if false is None else row(true) - row(false)

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
        """Yield the names that a tensor may have, depending on what wrote the file."""
        for found in (f"{self._prefix}{name}", name, name.removeprefix("model.")):
            yield found
            yield found.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def check_encoder_tensors(spec: EncoderSpec, tensors: EncoderTensors) -> None:
    """Check presence, shape and dtype of every tensor. Raises MissingTensor or WrongTensor."""
    check_built(lambda factory: build_encoder_weights(spec, "f32", factory), tensors)
