from libc.stdint cimport int64_t, uint8_t, uint16_t

from .isa cimport quire_tiles

cdef class PackedMatrix:
    cdef object memory
    cdef char *data
    cdef uint16_t *scales
    cdef readonly int64_t out_features
    cdef readonly int64_t in_features
    cdef readonly str dtype
    cdef readonly int64_t nbytes
    cdef int dtype_code
    cdef int64_t width              # in_features padded to 32
    cdef int64_t panels             # of 16 columns; even
    cdef int64_t panel_bytes
    cdef const quire_tiles *tiles

    cdef void _fill_column(self, const float *row, int64_t column) noexcept nogil
    cdef void _fill_q4(self, const float *rows, int64_t column, int64_t count) noexcept nogil
    cdef void _quantise(self, const float *w, int64_t n, uint8_t *tile, uint16_t *scale) noexcept nogil
