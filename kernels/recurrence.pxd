from libc.stdint cimport int64_t

from .isa cimport quire_convolution, quire_output, quire_tiles
from .regions cimport Regions
from .step cimport Step, Value

cdef struct ShortConvOp:
    Value input
    int64_t columns
    quire_output out
    quire_convolution all           # all columns, with the ring of no sequence
    int64_t offset                  # offset of the ring in a state, in bytes

cdef bind_short_conv(ShortConvOp *record, op, Regions regions, max_rows)
cdef int64_t num_recurrent_items(const ShortConvOp *op, const Step *step) noexcept nogil
cdef int64_t run_short_conv(const ShortConvOp *op, const Step *step, const quire_tiles *tiles,
                            long long *counter) noexcept nogil
