"""Anonymous memory on huge pages where the system gives them: for KV pages, and for whoever else streams large arrays.

It must not know what is put there. The one invariant: a mapping starts on a 2 MiB boundary, reads as zero, and is
really there: memory that is promised at start and missing later would be an engine killed under load.
"""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from .exceptions import OutOfMemory

HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14, not yet among mmap's constants


def map_memory(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes, given back when the last view is gone. Raises OutOfMemory."""
    try:
        mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemory(f"cannot map {size:,} bytes ({error})") from error
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    _populate(mapping, start, size)
    return whole[start : start + size]


def _populate(mapping: mmap.mmap, start: int, size: int) -> None:
    """Take the memory now. A kernel too old to be asked gives it when it is first written."""
    try:
        mapping.madvise(MADV_POPULATE_WRITE, start, size)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OutOfMemory(f"cannot take {size:,} bytes ({error})") from error
