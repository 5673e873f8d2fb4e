from libc.stdint cimport int32_t, int64_t, uint64_t

from .isa cimport quire_output, quire_tiles
from .lora cimport LoraMatrix
from .pack cimport MOST_RANGES, Panels
from .pool cimport quire_share
from .step cimport Step, Value

cdef enum:
    ROWS_IN_CACHE = 192             # activations that stay in L2 while a worker's panels pass over them; also in ops.py

cdef struct Weight:                 # a `PackedMatrix`
    Panels parts[MOST_RANGES]
    int num_parts
    const float *bias               # [16 * panels] or NULL

cdef struct LinearOp:
    Value input
    const float *squares            # squares of a `Normed` input: [rows][squares_width]; or NULL
    int64_t squares_width
    float eps
    bint has_factors                # each row's sums are multiplied: by 1 / rms, by `scale`, or by both
    float scale
    bint has_minimums               # some columns have minimums: their weights are q4_k or q5_k
    bint has_half_blocks            # some columns have scales of half blocks: their weights are q6_k
    int64_t packed_bytes            # bytes of packed rows, if a function packs them
    float softcap                   # softcap of the results; 0: none
    Value out
    bint converts                   # results are also written to `converted`: `out` if not f32, or a `Normed`
    quire_output converted
    uint64_t *written               # [groups of rows][groups of blocks] of `converted` if it is a `Normed` with groups:
    # the blocks that were written, in all steps; else NULL
    float *maxima                   # [rows][maxima_width], the maximum of each block of out; or NULL
    int64_t maxima_width
    const int32_t *groups           # a `Routing`'s [1 + groups][groups_width]: the rows of each expert; else NULL
    int64_t groups_width
    const Weight *weights           # one matrix per expert or head, else one matrix
    int64_t heads                   # 1, or heads whose rows of the input, `capacity` each, have matrices of their own
    int64_t capacity
    int64_t head_columns            # columns of out between two heads
    int64_t num_blocks              # blocks of 32 output columns
    int64_t span                    # blocks of one item: the blocks that share a scale in out
    int64_t num_spans
    const LoraMatrix *lora          # [slots]: B of adapters; NULL: the layer has none
    Value lora_rows                 # A x of each row that has an adapter
    int64_t lora_scratch            # bytes from a worker's scratch to 32 columns of an item's rows, before their gates
    int epilogue
    bint sampled                    # computes only the rows that sample

cdef int64_t linear_scratch_bytes(int64_t width, bint has_minimums, bint has_half_blocks, list dtypes, int64_t span,
                                  int64_t group)
cdef int64_t packed_rows_bytes(int dtype, int64_t width, int64_t group) noexcept
cdef int64_t num_items(const LinearOp *op, const Step *step) noexcept nogil
cdef int64_t run_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, quire_share *shares,
                        uint64_t number, int worker, int workers) noexcept nogil
cdef void help_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, quire_share *shares,
                      uint64_t number, int worker, int workers) noexcept nogil
