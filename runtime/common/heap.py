"""The heap of glibc: how much of it is allocated, and when freed memory returns to the system.

Other C libraries lack the calls.
"""

from __future__ import annotations

import ctypes
import resource

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MAX_ARENAS = 4  # glibc's default is 8 per core, and each keeps memory that its threads have freed
MAPPED_BYTES = 4 << 20  # blocks of this size go back to the system when they are freed; glibc would raise it to 32 MiB
MAX_UNUSED = 16 << 20  # freed bytes inside arenas, which glibc keeps, before they are returned
MIN_RETURNED = 8 << 20  # freed bytes since the last return before the next one
TRIMMED_BYTES = 16 << 20  # freed memory at the end of an arena
INFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

_libc = ctypes.CDLL(None)


class _Info(ctypes.Structure):
    """`struct mallinfo2`, of all arenas."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in INFO.split())


def limit_heap() -> None:
    """Let jobs in many threads use the memory that others have freed. Call it before there are threads."""
    if hasattr(_libc, "mallinfo2"):
        for name, value in (
            (M_ARENA_MAX, MAX_ARENAS),
            (M_MMAP_THRESHOLD, MAPPED_BYTES),
            (M_TRIM_THRESHOLD, TRIMMED_BYTES),
        ):
            _libc.mallopt(name, value)


def return_unused_memory() -> None:
    """Return freed memory to the system. That takes some milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


class UnusedMemory:
    """The memory that the process holds but does not use: freed blocks between live ones."""

    def __init__(self) -> None:
        self._least = _unused_bytes()  # least unused memory since the start; it includes mapped files and the KV cache
        self._left = self._least  # memory left after the last return: not all of it can be returned

    def return_excess(self) -> None:
        """Return freed memory to the system if there is `MAX_UNUSED` more of it. That takes some milliseconds."""
        unused = _unused_bytes()
        self._least = min(self._least, unused)
        self._left = min(self._left, unused)
        if unused > max(self._least + MAX_UNUSED, self._left + MIN_RETURNED):
            return_unused_memory()
            self._left = _unused_bytes()


def _unused_bytes() -> int:
    return resident_bytes() - allocated_bytes()


def resident_bytes() -> int:
    """Return the bytes of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def allocated_bytes() -> int:
    """Return the bytes that all threads of the process have allocated; 0 if the C library does not say."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    mallinfo = _libc.mallinfo2
    mallinfo.restype = _Info
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
