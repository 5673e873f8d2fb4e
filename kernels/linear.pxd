from libc.stdint cimport int64_t, uint16_t

from .isa cimport quire_output, quire_tiles
from .step cimport Step, Value

cdef struct LinearOp:
    Value input
    const float *squares            # of an input whose RMS norm is half done: [rows][squares_width]; or NULL
    int64_t squares_width
    float eps
    Value out
    bint converts                   # results go on to `converted`: out where it is not f32, or its norm
    quire_output converted
    float *maxima                   # [rows][maxima_width], the largest of each block of out; or NULL
    int64_t maxima_width
    const char *panels
    const uint16_t *scales          # q8, else NULL
    int64_t num_blocks              # of 32 columns of out
    int64_t panel_bytes
    const float *bias               # [16 * panels] or NULL
    int epilogue
    bint sampled                    # runs over the rows that sample, not over all

cdef int64_t linear_scratch_bytes() noexcept
cdef void run_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil
