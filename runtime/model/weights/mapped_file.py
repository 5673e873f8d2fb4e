"""A checkpoint file: mapped for its header, read by position for its tensors."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...common.errors import CorruptCheckpoint

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A file opened for reading. Raises OSError if it cannot be opened, ValueError if it is empty.

    `read` and `chunks` do not use the map: if the file were truncated, an access beyond its new end would kill the
    process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.view = memoryview(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ))
        self.size = len(self.view)

    def read(self, begin: int, end: int) -> Bytes:
        """Return a copy of the bytes from `begin` to `end`. Raises CorruptCheckpoint if they cannot be read."""
        out = np.empty(end - begin, np.uint8)
        self._fill(out, begin)
        return out

    def chunks(self, begin: int, row_bytes: int, rows: range, num_rows: int) -> Iterator[tuple[int, Bytes]]:
        """Yield the bytes of each `num_rows` of `rows`, as [rows, row_bytes], and the number of rows before them.

        Row 0 begins at byte `begin`. The next iteration overwrites the array; its rows are read ahead.
        Raises CorruptCheckpoint if bytes cannot be read.
        """
        buffer = np.empty((min(num_rows, len(rows)), row_bytes), np.uint8)
        for start in range(0, len(rows), num_rows):
            some = rows[start : start + num_rows]
            following = begin + some.stop * row_bytes
            os.posix_fadvise(self._descriptor, following, len(some) * row_bytes, os.POSIX_FADV_WILLNEED)
            chunk = buffer[: len(some)]
            self._fill(chunk.reshape(-1), begin + some.start * row_bytes)
            yield start, chunk

    def _fill(self, out: Bytes, begin: int) -> None:
        """Fill `out` with the bytes from `begin` on; without the GIL."""
        rest = out.data
        at = begin
        while rest:
            try:
                count = os.preadv(self._descriptor, [rest], at)
            except OSError as error:
                raise CorruptCheckpoint(f"{self.path} cannot be read at byte {at}: {error}") from error
            if count == 0:
                raise CorruptCheckpoint(f"{self.path} was truncated while it was read: it ends at byte {at}")
            rest = rest[count:]
            at += count
