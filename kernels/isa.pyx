# cython: language_level=3
"""The choice of an ISA level, and the tables of simd/ by level; other modules get their table here.

NAMES are the levels of this build, for one architecture. The default level is `QUIRE_ISA` if set, else the best that
processor and operating system support.
"""
import os

DTYPE_CODES = {"f32": QUIRE_F32, "bf16": QUIRE_BF16, "q8": QUIRE_Q8}
NAMES = tuple([quire_isa_tiles(level).name.decode() for level in range(QUIRE_LEVELS)])


def supported_levels():
    return tuple(name for level, name in enumerate(NAMES) if quire_isa_supported(level))


def _level(name):
    if name not in NAMES:
        raise ValueError(f"unknown ISA level {name!r}; this build has {', '.join(NAMES)}")
    if name not in supported_levels():
        raise ValueError(f"ISA level {name!r} is not supported by this machine; it has {', '.join(supported_levels())}")
    return name


def pick_level(requested=None):
    wanted = requested or os.environ.get("QUIRE_ISA")
    return _level(wanted) if wanted else max(supported_levels(), key=NAMES.index)


cdef const quire_tiles *tiles_of(object level) except NULL:
    return quire_isa_tiles(NAMES.index(pick_level(level)))
