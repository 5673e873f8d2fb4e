# cython: language_level=3
"""Which ISA level the kernels run at. Owns the tables of simd/; every other module asks here.

The level is picked once at import: `QUIRE_ISA` if set, else the best that processor and system support.
"""
import os

NAMES = ("scalar", "avx2", "avx512-vnni-bf16")


def supported_levels():
    return tuple(name for level, name in enumerate(NAMES) if quire_isa_supported(level))


def _level(name):
    if name not in NAMES:
        raise ValueError(f"unknown ISA level {name!r}; this build knows {', '.join(NAMES)}")
    if name not in supported_levels():
        raise ValueError(f"ISA level {name!r} is not supported by this machine; it has {', '.join(supported_levels())}")
    return name


def pick_level(requested=None):
    return _level(requested) if requested else max(supported_levels(), key=NAMES.index)


DEFAULT_LEVEL = pick_level(os.environ.get("QUIRE_ISA"))


cdef const quire_tiles *tiles_of(object level) except NULL:
    return quire_isa_tiles(NAMES.index(_level(level or DEFAULT_LEVEL)))
