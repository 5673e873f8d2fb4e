"""The heap of glibc: how much of it is allocated, and the fate of freed memory. Other libraries lack the calls."""

from __future__ import annotations

import ctypes
import resource

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MAX_ARENAS = 4  # the default is 8 per core: each keeps what its threads have freed
MAPPED_BYTES = 4 << 20  # blocks of this size go back to the system when they are freed; glibc would raise it to 32 MiB
MAX_UNUSED = 16 << 20  # bytes that are freed inside arenas, where glibc keeps them, before they are returned
MIN_RETURNED = 8 << 20  # bytes that are freed since, before they are returned again
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
    """Watches the memory that the process holds and does not use: what jobs free between blocks that stay."""

    def __init__(self) -> None:
        self._least = _unused_bytes()  # least unused memory since the start; it includes mapped files and the KV cache
        self._left = self._least  # memory left when some was last returned: not all of it can be

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
