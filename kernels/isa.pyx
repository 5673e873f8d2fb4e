# cython: language_level=3
"""The choice of an ISA level, and the tables of simd/; other modules get their table here.

NAMES are the levels of this build, for one architecture. The default level is `QUIRE_ISA` if set, else the best that
processor and operating system support. A program may replace functions of its level by those of other levels, where all
compute the same bits.
"""
import os

from libc.string cimport memcpy

DTYPE_CODES = {"f32": QUIRE_F32, "bf16": QUIRE_BF16, "q8": QUIRE_Q8}    # codes of activation dtypes
KV_CODES = {"bf16": QUIRE_BF16, "f16": QUIRE_F16, "f32": QUIRE_F32, "int8": QUIRE_Q8}
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
    return _level(wanted) if wanted else best_level({name: _obstacle(name) for name in NAMES})


def best_level(obstacles):
    """Return the last level without an obstacle. The first level, plain C, is never chosen where others were built."""
    best = next(name for name in reversed(obstacles) if obstacles[name] is None)
    first, *others = obstacles
    if best == first and others:
        reasons = "; ".join(f"{name}: {obstacles[name]}" for name in others)
        raise ValueError(f"this machine has none of the levels that serve at a useful speed ({reasons}); "
                         f"QUIRE_ISA={first} runs in plain C, which is far slower")
    return best


def _obstacle(name):
    """Return why this machine cannot run a level, or None if it can."""
    cdef const char *reason = quire_isa_obstacle(NAMES.index(name))
    return reason.decode() if reason != NULL else None


cdef const quire_tiles *tiles_of(object level) except NULL:
    return quire_isa_tiles(NAMES.index(pick_level(level)))


# The functions of a program, by name: those for which every level computes the same bits. In bf16 levels differ.

ROW_CLASSES = ("1", "2-7", "8-15", "16-36", "37-")      # rows of an item, as `quire_row_class` divides them


def row_class(rows):
    return ROW_CLASSES[quire_row_class(rows)]


cdef quire_tiles _table
_ADDRESSES = {                      # name -> address of a function in _table
    "sum_blocks": <size_t>&_table.sum_blocks, "merge": <size_t>&_table.merge, "convert": <size_t>&_table.convert,
    "rms_factors": <size_t>&_table.rms_factors, "inverse_rms": <size_t>&_table.inverse_rms,
    "add_norm": <size_t>&_table.add_norm, "norm_row": <size_t>&_table.norm_row, "mean_rows": <size_t>&_table.mean_rows,
    "activate": <size_t>&_table.activate, "add_columns": <size_t>&_table.add_columns,
    "add_low_rank": <size_t>&_table.add_low_rank, "gate_columns": <size_t>&_table.gate_columns,
    "soft_cap": <size_t>&_table.soft_cap, "gate": <size_t>&_table.gate, "head": <size_t>&_table.head,
    "store_key": <size_t>&_table.store_key, "store_value": <size_t>&_table.store_value,
    "to_bf16": <size_t>&_table.to_bf16,
    "unpack_column": <size_t>&_table.unpack_column, "block_maxima": <size_t>&_table.block_maxima,
    "exp_scaled": <size_t>&_table.exp_scaled, "route": <size_t>&_table.route, "combine": <size_t>&_table.combine,
    "convolve": <size_t>&_table.convolve, "recurrent_gates": <size_t>&_table.recurrent_gates,
    "recur": <size_t>&_table.recur, "gated_norm": <size_t>&_table.gated_norm,
}
_OFFSETS = {name: address - <size_t>&_table for name, address in _ADDRESSES.items()}
_LINEAR = {f"linear {dtype} {rows}": (code, index) for dtype, code in WEIGHT_CODES.items() if dtype != "bf16"
           for index, rows in enumerate(ROW_CLASSES)}
_ATTENTION = {f"attention {dtype} {rows}": (quire_kv_index(code), index) for dtype, code in KV_CODES.items()
              if dtype != "bf16" for index, rows in enumerate(ROW_CLASSES)}
EQUAL_FUNCTIONS = (*_LINEAR, *_ATTENTION, *_OFFSETS)


cdef int mix_levels(object level, object choices, quire_tiles *out) except -1:
    """Set the table of a level, in which each function of `choices`, name -> level, is that of another level."""
    cdef const quire_tiles *of
    out[0] = tiles_of(level)[0]
    for name, chosen in choices.items():
        of = quire_isa_tiles(NAMES.index(_level(chosen)))
        _replace(name, of, out)
        for i in range(QUIRE_ENDS):
            if of.ends[i] != NULL:
                out.ends[i] = of.ends[i]
    return 0


cdef int _replace(object name, const quire_tiles *of, quire_tiles *out) except -1:
    """Replace one function of a table by that of another table."""
    cdef int dtype, rows
    cdef size_t offset
    if name in _LINEAR:
        dtype, rows = _LINEAR[name]
        out.linear[dtype][rows] = of.linear[dtype][rows]
    elif name in _ATTENTION:
        dtype, rows = _ATTENTION[name]
        out.attention[dtype][rows] = of.attention[dtype][rows]
    elif name in _OFFSETS:
        offset = _OFFSETS[name]
        memcpy(<char *>out + offset, <const char *>of + offset, sizeof(void *))
    else:
        raise ValueError(f"unknown function {name!r}; programs have {', '.join(EQUAL_FUNCTIONS)}")
    return 0
