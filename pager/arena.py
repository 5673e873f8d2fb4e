"""The memory of the KV pages, and `map_memory`, which maps it: mapped at start, never grown.

Must not import anything about page ownership. `KVArena.memory` is laid out as `KVLayout` defines it. The kernel that
writes a page's first slot zeroes the page, so allocating a page costs nothing here.
"""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from .exceptions import OutOfMemory
from .layout import KVLayout

HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap module has no constant for it yet
POPULATED_AT_ONCE = 64 << 20  # bytes; `madvise` holds the GIL, so signals and heartbeats wait for it


class KVArena:
    """Memory of `num_pages` pages of `layout`, on huge pages where the system has them. Raises OutOfMemory.

    With `populate`, all of it is backed by memory at once, else each page when it is first written.
    """

    def __init__(self, layout: KVLayout, num_pages: int, *, populate: bool = True) -> None:
        if num_pages < 1:
            raise ValueError(f"an arena needs at least 1 page, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.memory = map_memory(
            layout.page_bytes * num_pages, populate=populate
        )  # [planes * pages * page_stride] uint8

    def copy_page(self, source: int, destination: int) -> None:
        """Copy all layers of page `source` to page `destination`."""
        pages = self._pages()
        pages[:, destination] = pages[:, source]

    def read_page(self, page: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy all layers of one page into `out`  # [page_bytes] uint8."""
        out.reshape(self.layout.planes, -1)[:] = self._pages()[:, page]

    def write_page(self, page: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy `data`, in the order of `read_page`, into all layers of one page  # [page_bytes] uint8."""
        self._pages()[:, page] = data.reshape(self.layout.planes, -1)

    def close(self) -> None:
        """Drop the memory; the system gets it back when no view of `memory` is left. Idempotent."""
        self.memory = np.empty(0, np.uint8)

    def _pages(self) -> npt.NDArray[np.uint8]:  # [planes, pages, page_stride]
        return self.memory.reshape(self.layout.planes, self.num_pages, self.layout.page_stride)


def map_memory(size: int, *, populate: bool = True) -> npt.NDArray[np.uint8]:
    """Map `size` anonymous bytes that read as zero and start on a 2 MiB boundary. Raises OutOfMemory.

    With `populate`, all of it is backed by memory when this returns; memory that turns out to be missing later would
    kill the process under load. Unmapped when the last view is gone.
    """
    try:
        mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemory(f"cannot map {size:,} bytes ({error})") from error
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    if populate:
        _populate(mapping, start, size)
    return whole[start : start + size]


def _populate(mapping: mmap.mmap, start: int, size: int) -> None:
    """Back the mapping with memory now. Kernels older than 5.14 do it at the first write instead."""
    try:
        for offset in range(start, start + size, POPULATED_AT_ONCE):
            mapping.madvise(MADV_POPULATE_WRITE, offset, min(POPULATED_AT_ONCE, start + size - offset))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OutOfMemory(f"cannot populate {size:,} bytes ({error})") from error
