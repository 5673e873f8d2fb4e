"""A checkpoint file in memory-mapped form, whose pages are given back once they have been read."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FAULT_AROUND = 2 << 20  # bytes: with a page, the system may map pages before it, which were given back already


class MappedFile:
    """A file mapped for reading. Raises OSError if it cannot be opened, ValueError if it is empty.

    A page counts as memory of this process from the first access on, until `chunks` gives it back.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self._map)
        self.bytes = np.frombuffer(self._map, np.uint8)  # [file size], read-only

    def chunks(
        self, array: npt.NDArray[Any], begin: int, end: int, rows: slice, num_rows: int
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of `array`, and the number of rows before them.

        `array` is a view of the bytes from `begin` to `end`, or has that content. The next rows are read ahead, and the
        memory of pages is given back when the rows after them are asked for.
        """
        first, last, _ = rows.indices(len(array))
        row_bytes = (end - begin) // len(array)
        for row in range(first, last, num_rows):
            stop = min(row + num_rows, last)
            self._advise(mmap.MADV_WILLNEED, begin + stop * row_bytes, begin + min(stop + num_rows, last) * row_bytes)
            yield row - first, array[row:stop]
            self._advise(mmap.MADV_DONTNEED, max(0, begin + row * row_bytes - FAULT_AROUND), begin + stop * row_bytes)

    def _advise(self, advice: int, begin: int, end: int) -> None:
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._map.madvise(advice, first, end - first)
