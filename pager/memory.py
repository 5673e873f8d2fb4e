"""Anonymous memory on huge pages where the system gives them: for KV pages, and for whoever else streams large arrays.

It must not know what is put there. The one invariant: a mapping starts on a 2 MiB boundary and reads as zero.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from .errors import OutOfMemory

HUGE_PAGE_BYTES = 2 << 20


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
    return whole[start : start + size]
