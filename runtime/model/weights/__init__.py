"""The weights of a model: tensors in a checkpoint, and packed matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

READABLE: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # element types


def as_f32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return elements of a type in READABLE as float32, exactly."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class Checkpoint(Protocol):
    """The tensors of a model's files. Rows of q and k are in Hugging Face's order: a rotated pair is half a head apart.

    No tensor is read on opening, but every tensor is checked to lie completely inside its file. The methods raise
    MissingTensor.
    """

    path: Path  # the folder or file, for messages
    config_name: str  # name of the file that describes the model's shape, for messages
    matrix_dtypes: Collection[str]  # dtypes of matrices; vectors have one of READABLE

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def dtype(self, name: str) -> str:
        """Return the type of a tensor's elements, as the format names it: BF16, F16, F32, Q8_0, …"""

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor: float32, float16, or bf16 bits as uint16; blocks as uint8 [rows, row bytes].

        Raises CorruptCheckpoint if it cannot be read.
        """

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor, or fewer, in order, and the number of rows before them.

        A tensor of experts has the rows of the first expert, then the rows of the second one, and so on.
        The next iteration may overwrite the array. Raises CorruptCheckpoint if rows cannot be read.
        """


__all__ = ["READABLE", "Checkpoint", "as_f32"]
