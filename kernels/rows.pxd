from libc.stdint cimport int32_t, int64_t

from .isa cimport quire_output, quire_tiles
from .pack cimport Panels
from .step cimport Step, Value

cdef struct EmbedOp:
    Value out
    bint is_normed
    quire_output normed
    Panels panels                   # panels of the weight
    int64_t width
    float scale
    bint has_types, has_positions   # 0: the panels below are not set
    Panels types, positions

cdef struct ConvertOp:
    Value input
    quire_output out
    bint sampled
    const int32_t *order            # [columns], or NULL

cdef struct GatherOp:
    Value input
    Value out
    bint is_normed
    quire_output normed

cdef struct AddNormOp:
    Value input
    Value out
    const float *weight             # [columns], padded to 32
    float eps
    float scale                     # factor of the sum
    bint is_normed
    quire_output normed

cdef struct GateRowsOp:
    Value input
    Value a, b
    int64_t column
    const float *weight             # [columns], padded to 32
    float eps
    float scale
    quire_output out

cdef struct AddGivenOp:
    Value out
    int64_t first                   # first column within a given row
    bint is_normed
    quire_output normed

cdef struct NormOp:
    Value input
    int kind
    const float *weight             # [columns], padded to 32; or NULL
    const float *bias
    float eps
    bint keeps                      # results are written to `out`
    Value out
    bint converts                   # results are also written to `converted`
    quire_output converted
    bint sampled

cdef struct PoolOp:
    Value input
    Value out
    int pooling

cdef enum Pooling:
    MEAN
    FIRST
    LAST

cdef int64_t run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                       int worker, int workers) noexcept nogil
cdef int64_t run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                         int worker, int workers) noexcept nogil
cdef int64_t run_gather(const GatherOp *op, const Step *step, const quire_tiles *tiles,
                        long long *counter) noexcept nogil
cdef int64_t run_norm(const NormOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                      int worker, int workers) noexcept nogil
cdef int64_t run_pool(const PoolOp *op, const Step *step, const quire_tiles *tiles,
                      long long *counter) noexcept nogil
cdef int64_t run_add_given(const AddGivenOp *op, const Step *step, const quire_tiles *tiles,
                           long long *counter) noexcept nogil
cdef int64_t run_gate_rows(const GateRowsOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                           int workers) noexcept nogil
cdef int64_t run_add_norm(const AddNormOp *op, const Step *step, const quire_tiles *tiles,
                          long long *counter) noexcept nogil
