# cython: language_level=3
"""The regions of a program's arena: pointers for the ops, taken once when the program is built.

Every size is checked here or by the caller, so that no op has to.
"""
from libc.stdint cimport int32_t, int64_t

import numpy as np

from .experts cimport RoutingTables
from .isa cimport quire_itemsize, quire_output
from .isa import DTYPE_CODES
from .ops import BLOCK, aligned, max_groups, padded
from .pack import GROUPS
from .step cimport Value

_NUMPY_DTYPES = {"f32": np.float32, "bf16": np.uint16, "q8": np.int8, "i32": np.int32}
_CODES = DTYPE_CODES | {"i32": DTYPE_CODES["f32"]}    # i32 has the code of a dtype with elements of the same size


cdef class Regions:
    def __init__(self, nbytes, max_rows):
        self.nbytes = nbytes
        self.max_rows = max_rows
        self.memory = aligned_zeros(nbytes)
        cdef char[::1] memory = self.memory
        self.data = &memory[0]
        self.keep_alive, self.sampled = [], set()

    cdef Value value(self, region, columns, dtype, rows) except *:
        """Return the region's pointers. Its columns, its dtype and a capacity of at least `rows` are checked."""
        cdef Value value
        if region.columns != columns or region.dtype != dtype or region.rows < rows:
            raise ValueError(f"{region!r} should hold at least {rows} rows of {columns} columns as {dtype}")
        if region.offset < 0 or region.offset % 64 or region.offset + region.nbytes > self.nbytes:
            raise ValueError(f"{region!r} is not aligned or not inside an arena of {self.nbytes} bytes")
        width = padded(columns)
        if region.group not in GROUPS or region.group and dtype != "q8":
            raise ValueError(f"only q8 has groups, of 1, 2 or 4 blocks, not {region!r}")
        planes = region.offset + aligned(region.rows * width * quire_itemsize(_CODES[dtype]))
        value.dtype = _CODES[dtype]
        value.columns = columns
        value.rows.width = width
        value.rows.data = self.data + <int64_t>region.offset
        value.rows.group = region.group
        value.rows.scales = NULL
        value.rows.sums = NULL
        if dtype == "q8":
            value.rows.scales = <float *>(self.data + <int64_t>planes)
            value.rows.sums = <int32_t *>(self.data + <int64_t>(planes + aligned(region.rows * width // 32 * 4)))
        return value

    cdef quire_output output(self, region, columns, rows) except *:
        """Return the region as a destination of results."""
        cdef Value value = self.value(region, columns, region.dtype, rows)
        cdef quire_output output
        output.dtype = value.dtype
        output.rows = value.rows
        output.norm = NULL
        return output

    cdef bint normed(self, quire_output *output, op, rows) except -1:
        """Set `output` to the op's `normed` if it has one; return whether it does."""
        cdef Value squares
        if op.normed is None:
            return False
        if op.out.dtype != "f32":
            raise ValueError(f"a norm needs f32, not {op.out!r}")
        columns = op.out.columns
        squares = self.value(op.normed.squares, padded(columns) // BLOCK, "f32", rows)
        output[0] = self.output(op.normed.data, columns, rows)
        output.norm = self.vector(op.normed.weight, columns, padded(columns))
        output.squares = <float *>squares.rows.data
        output.squares_width = squares.rows.width
        self.follows(op.out, op.normed.data)
        return True

    cdef bint follows(self, source, out):
        """Return whether an op computes sampling rows only: its input comes, through any ops, from a `Gather`."""
        if source in self.sampled:
            self.sampled.add(out)
            return True
        self.sampled.discard(out)
        return False

    cdef const float *vector(self, array, length, stored) except NULL:
        """Return a private copy of a norm or bias, padded with zeros."""
        if array.shape != (length,):
            raise ValueError(f"expected a vector of {length}, not {list(array.shape)}")
        copy = np.zeros(stored, np.float32)
        copy[:length] = array
        self.keep_alive.append(copy)
        cdef float[::1] view = copy
        return &view[0]

    cdef const int32_t *order(self, array, length) except NULL:
        """Return a private copy of an order of columns."""
        if array.shape != (length,) or not np.array_equal(np.sort(array), np.arange(length)):
            raise ValueError(f"an order has each of {length} columns once")
        cdef int32_t[::1] view = np.array(array, np.int32)
        self.keep_alive.append(view)
        return &view[0]

    cdef RoutingTables tables(self, routing) except *:
        """Return pointers to the tables of a `Routing`, whose sizes are checked."""
        cdef RoutingTables tables
        cdef Value weights, places, groups
        if not 1 <= routing.top_k <= routing.num_experts:
            raise ValueError(f"top_k must be 1 to the {routing.num_experts} experts, not {routing.top_k}")
        weights = self.value(routing.weights, routing.top_k, "f32", self.max_rows)
        places = self.value(routing.places, routing.top_k, "i32", self.max_rows)
        groups = self.value(routing.groups, 3, "i32", 1 + max_groups(self.max_rows, routing.num_experts, routing.top_k))
        tables.num_experts = routing.num_experts
        tables.top_k = routing.top_k
        tables.weights = <float *>weights.rows.data
        tables.weights_width = weights.rows.width
        tables.places = <int32_t *>places.rows.data
        tables.places_width = places.rows.width
        tables.groups = <int32_t *>groups.rows.data
        tables.groups_width = groups.rows.width
        return tables

    def view(self, region):
        """Return a region's data plane [rows, padded columns] as an array that shares the arena's memory."""
        width = padded(region.columns)
        dtype = np.dtype(_NUMPY_DTYPES[region.dtype])
        flat = self.memory[region.offset: region.offset + region.rows * width * dtype.itemsize].view(dtype)
        return flat.reshape(region.rows, width)


def aligned_zeros(nbytes):
    raw = np.zeros(nbytes + 64, np.int8)
    start = -raw.ctypes.data % 64
    return raw[start: start + nbytes]
