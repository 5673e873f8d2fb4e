from libc.stdint cimport int64_t, uint16_t

from .isa cimport quire_tiles
from .step cimport Step, Value

cdef struct LinearOp:
    Value input
    Value out
    const char *panels
    const uint16_t *scales          # q8, else NULL
    int64_t num_pairs               # of 16-column panels
    int64_t panel_bytes
    const float *bias               # [16 * panels] or NULL
    int epilogue
    bint sampled                    # runs over the rows that sample, not over all

cdef void run_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil
