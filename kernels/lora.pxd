from libc.stdint cimport int32_t, int64_t

from .isa cimport quire_tiles
from .step cimport Step, Value

cdef enum:
    PLACE = 3                       # numbers of a panel in `LoraMatrix.places`

# One of the two matrices that an adapter has for a linear layer: panels of 16 columns, each with some of K.
cdef struct LoraMatrix:
    const char *data
    int dtype                       # bf16 or f32
    int64_t panels                  # 0: the adapter has no such matrix
    const int32_t *places           # [panels][PLACE]: the first element of K, their number, and the row of 16 in `data`

cdef struct LoraOp:
    Value input
    const float *squares            # squares of a `Normed` input: [rows][squares_width]; or NULL
    int64_t squares_width
    float eps, scale
    const LoraMatrix *matrices      # [slots]
    Value out
    int64_t panels                  # panels of the widest adapter

cdef class LoraTable:
    cdef object memory, adapters
    cdef readonly tuple widths
    cdef readonly int64_t slots
    cdef LoraMatrix *first

    cdef LoraMatrix *matrices(self, int64_t target, bint is_b) except NULL

cdef int64_t num_lora_items(const LoraOp *op, const Step *step, int workers) noexcept nogil
cdef int64_t run_lora(const LoraOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                      int workers) noexcept nogil
cdef bint has_adapters(const Step *step, int64_t row, int64_t end) noexcept nogil
cdef void add_adapters(const LoraMatrix *matrices, const Value *rows, const Step *step, const quire_tiles *tiles,
                       int64_t row, int64_t end, int64_t panel, float *y, int64_t stride) noexcept nogil
