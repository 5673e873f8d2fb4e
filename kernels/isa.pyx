# cython: language_level=3
"""The choice of an ISA level, and the tables of simd/ by level; other modules get their table here.

NAMES are the levels of this build, for one architecture. The default level is `QUIRE_ISA` if set, else the best that
processor and operating system support.
"""
import os

DTYPE_CODES = {"f32": QUIRE_F32, "bf16": QUIRE_BF16, "q8": QUIRE_Q8}    # codes of activation dtypes
WEIGHT_CODES = DTYPE_CODES | {"q4": QUIRE_Q4, "q4_k": QUIRE_Q4_K, "q5_k": QUIRE_Q5_K, "q6_k": QUIRE_Q6_K,
                              "mxfp4": QUIRE_MXFP4, "q4_z": QUIRE_Q4_Z}
NAMES = tuple([quire_isa_tiles(level).name.decode() for level in range(QUIRE_LEVELS)])


def supported_levels():
    return tuple(name for name in NAMES if _obstacle(name) is None)


def unsupported_levels():
    return {name: reason for name in NAMES if (reason := _obstacle(name)) is not None}


def _level(name):
    if name not in NAMES:
        raise ValueError(f"unknown ISA level {name!r}; this build has {', '.join(NAMES)}")
    if (reason := _obstacle(name)) is not None:
        raise ValueError(f"ISA level {name!r} is not supported by this machine: {reason}; "
                         f"it has {', '.join(supported_levels())}")
    return name


def pick_level(requested=None):
    wanted = requested or os.environ.get("QUIRE_ISA")
    return _level(wanted) if wanted else next(name for name in reversed(NAMES) if _obstacle(name) is None)


def _obstacle(name):
    """Return why this machine cannot run a level, or None if it can."""
    cdef const char *reason = quire_isa_obstacle(NAMES.index(name))
    return reason.decode() if reason != NULL else None


cdef const quire_tiles *tiles_of(object level) except NULL:
    return quire_isa_tiles(NAMES.index(pick_level(level)))
