from libc.stdint cimport int32_t, int64_t

from .experts cimport RoutingTables
from .isa cimport quire_output
from .step cimport Value

cdef class Regions:
    cdef object memory              # the arena
    cdef char *data
    cdef int64_t nbytes
    cdef int64_t max_rows
    cdef list keep_alive            # objects outside the arena that the ops point at
    cdef set sampled                # regions of which only the rows that sample are computed

    cdef Value value(self, region, columns, dtype, rows) except *
    cdef quire_output output(self, region, columns, rows) except *
    cdef bint normed(self, quire_output *output, op, rows) except -1
    cdef bint follows(self, source, out)
    cdef const float *vector(self, array, length, stored) except NULL
    cdef const int32_t *order(self, array, length) except NULL
    cdef RoutingTables tables(self, routing) except *
