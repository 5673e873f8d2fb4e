"""One block of anonymous memory for packed weights, on huge pages where the system gives them.

It must not know what is put there. The one invariant: the block starts on a 2 MiB boundary and reads as zero.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..errors import ModelError

HUGE_PAGE_BYTES = 2 << 20


def map_block(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` zeroed bytes, given back when the last view is gone. Raises ModelError when the system has none."""
    try:
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ModelError(f"cannot map {nbytes:,} bytes for the weights ({error}); try weights q8") from error
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    return whole[start : start + nbytes]
