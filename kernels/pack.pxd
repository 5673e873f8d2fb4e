from libc.stdint cimport int64_t, uint8_t, uint16_t

from .isa cimport quire_tiles

cdef enum:
    MOST_RANGES = 4

# Consecutive panels of a matrix in one dtype.
cdef struct Panels:
    int dtype
    int64_t first_panel
    int64_t panel_bytes
    char *data
    int64_t group                   # q8: blocks that share a scale, if columns are rotated; else 0
    uint16_t *scales                # q8, q4: [panels][width / 32, or groups of it][16]; else NULL
    int64_t panel_scales            # fp16 numbers of one panel

cdef class PackedMatrix:
    cdef object memory
    cdef readonly int64_t out_features
    cdef readonly int64_t in_features
    cdef readonly str dtype
    cdef readonly tuple ranges
    cdef readonly int64_t nbytes
    cdef readonly object input_order
    cdef readonly int64_t group
    cdef Panels parts[MOST_RANGES]
    cdef int num_parts
    cdef int64_t width              # in_features padded to 32
    cdef int64_t panels             # panels of 16 columns; even
    cdef const quire_tiles *tiles

    cdef _add_part(self, Panels *part, uint8_t *memory, columns, dtype, has_padding)
    cdef const Panels *_part(self, int64_t panel) noexcept nogil
    cdef int _check_columns(self, int64_t start, int64_t n, interleave, int native) except -2
    cdef _fill_rows(self, const float[:, ::1] rows, int64_t first, int64_t base, int phase)
    cdef void _fill_columns(self, const Panels *part, const float *rows, int64_t column, int64_t count,
                            float *rotated) noexcept nogil
    cdef void _fill_q8(self, const Panels *part, const float *row, int64_t inputs, int64_t column) noexcept nogil
    cdef void _fill_f32(self, const Panels *part, const float *row, int64_t column) noexcept nogil
    cdef void _fill_bf16(self, const Panels *part, const float *rows, int64_t column, int64_t count) noexcept nogil
    cdef void _fill_q4(self, const Panels *part, const float *rows, int64_t column, int64_t count) noexcept nogil
