"""The matrix that makes the rows of a head, divided into the columns of embeddings and the columns of hidden states.

The stored matrix is [hidden, 2 hidden]. Rows of blocks are widened, because a row's half is no row of whole blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.pack import widen_blocks
from ...common.errors import WrongTensor
from ..spec import DecoderSpec, TensorNames
from . import READABLE, Checkpoint


def fusion_names(names: TensorNames) -> tuple[str, str]:
    """Return the names of both halves of the matrix."""
    return f"{names.fusion}.embedding.weight", f"{names.fusion}.hidden.weight"


class FusedColumns:
    """The tensors of `stored`, with both halves of the matrix as tensors of their own. See `Checkpoint`."""

    def __init__(self, stored: Checkpoint, spec: DecoderSpec) -> None:
        self.path: Path = stored.path
        self.config_name: str = stored.config_name
        self.matrix_dtypes: Collection[str] = stored.matrix_dtypes
        self._stored = stored
        self._matrix = f"{spec.names.fusion}.weight"
        self._hidden = spec.hidden_size
        self._first = dict(zip(fusion_names(spec.names), (0, spec.hidden_size), strict=True))  # name -> first column

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor or WrongTensor."""
        if name not in self._first:
            return self._stored.shape(name)
        wanted = self._hidden, 2 * self._hidden
        if (found := self._stored.shape(self._matrix)) != wanted:
            raise WrongTensor(
                f"tensor {self._matrix} in {self.path} is {list(found)}; {self.config_name} implies {list(wanted)}"
            )
        return self._hidden, self._hidden

    def dtype(self, name: str) -> str:
        """Return the type of a tensor's elements. Raises MissingTensor."""
        if name not in self._first:
            return self._stored.dtype(name)
        kind = self._stored.dtype(self._matrix)
        return "F32" if kind in self.matrix_dtypes and kind not in READABLE else kind

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        return self._stored.sizes()

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor. See `weights.Checkpoint`. Raises MissingTensor."""
        if name not in self._first:
            return self._stored.tensor(name)
        return np.concatenate([rows for _, rows in self.chunks(name, slice(0, self._hidden), self._hidden)])

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the given rows of a tensor. See `weights.Checkpoint`."""
        if name not in self._first:
            yield from self._stored.chunks(name, rows, num_rows)
            return
        first = self._first[name]
        kind = self._stored.dtype(self._matrix)
        for row, stored in self._stored.chunks(self._matrix, rows, num_rows):
            widened = stored if kind in READABLE else widen_blocks(stored, kind)
            yield row, np.ascontiguousarray(widened[:, first : first + self._hidden])
