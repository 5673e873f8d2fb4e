from libc.stdint cimport int64_t

from .isa cimport quire_convolution, quire_gated_norm, quire_output, quire_recurrence, quire_tiles
from .regions cimport Regions
from .step cimport Step, Value

cdef struct ConvolutionOp:
    Value input
    int64_t columns
    int64_t column                  # first column of the input
    int64_t num_normed, head_dim    # heads that are normed, before other columns
    quire_output out
    quire_convolution all           # all columns, with the ring of no sequence
    int64_t offset                  # offset of the ring in a state, in bytes

cdef struct RecurrenceOp:
    Value input
    Value gates
    Value out
    int64_t query, key, value, decay, rate  # first columns; rate: -1 if there is none
    int64_t heads, keys, group              # heads of values, of keys, and of values for each head of keys
    bint tiled                              # a head of keys serves each `keys`-th head of values
    int64_t segments, value_dim
    int64_t rollback, offset, segment_bytes, matrix_bytes, input_columns    # see MatrixState in ops.py
    const float *a                          # [heads], as bias and skip
    const float *bias
    const float *skip                       # NULL: 0 for all heads
    quire_recurrence all                    # the fields that all heads share

cdef struct GatedNormOp:
    Value input
    Value gate
    int64_t column
    quire_output out
    quire_gated_norm norm

cdef bind_short_conv(ConvolutionOp *record, op, Regions regions, max_rows)
cdef bind_causal_conv(ConvolutionOp *record, op, Regions regions, max_rows)
cdef bind_recurrence(RecurrenceOp *record, op, Regions regions, max_rows)
cdef bind_gated_norm(GatedNormOp *record, op, Regions regions, max_rows)
cdef int64_t num_convolved_items(const ConvolutionOp *op, const Step *step) noexcept nogil
cdef int64_t num_recurrent_items(const RecurrenceOp *op, const Step *step) noexcept nogil
cdef int64_t run_convolution(const ConvolutionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                             int workers) noexcept nogil
cdef int64_t run_recurrence(const RecurrenceOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                            int workers) noexcept nogil
cdef int64_t run_gated_norm(const GatedNormOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                            int workers) noexcept nogil
