from libc.stdint cimport int64_t

from .isa cimport quire_head, quire_output, quire_rows, quire_tiles
from .regions cimport Regions
from .step cimport Slot, Step, Value

cdef struct LatentHeads:
    int64_t rank                    # elements of a latent
    Value queries                   # f32 [tokens][columns]
    int64_t stride                  # columns from a query head to the next
    int64_t rotated                 # first rotated column of a head
    Value absorbed                  # f32 [tokens][num_heads][rank]
    Value keys                      # f32 [tokens][columns]
    int64_t first_key               # column of the latent, which the rotated part follows
    int64_t capacity                # most rows of a step: rows of `out` between two heads
    const float *rotary             # [positions][rotary_dim]: cos | sin
    quire_head query_latent         # scale
    quire_head query_rotated        # rotation and scale
    quire_head key_latent           # norm
    quire_head key_rotated          # rotation

cdef struct SplitOp:
    Value input
    int64_t stride
    quire_output out
    int64_t num_heads, columns
    int64_t capacity                # rows of `out` between two heads

cdef bind_latent_heads(LatentHeads *heads, op, Regions regions, max_rows)
cdef bind_split(SplitOp *record, op, Regions regions, max_rows)
cdef int64_t run_split(const SplitOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                       int workers) noexcept nogil
cdef void load_latent_queries(const LatentHeads *op, const Step *step, const quire_tiles *tiles, int64_t first_row,
                              int64_t first_position, int64_t queries, int64_t first_head, int64_t heads, float *x,
                              const quire_rows *out) noexcept nogil
cdef void store_latents(const LatentHeads *op, const Slot *slot, const Step *step, const quire_tiles *tiles,
                        int64_t sequence, int64_t page) noexcept nogil
