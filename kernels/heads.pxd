from libc.stdint cimport int64_t

from .isa cimport quire_head, quire_rows, quire_tiles
from .step cimport Slot, Step, Value

cdef struct HeadsOp:
    Value qkv                       # f32 [tokens][columns]: queries, keys, values
    Slot slot                       # place of the keys and values that attention reads
    bint stores                     # 0: another layer has stored them, and `qkv` has queries alone
    int64_t num_heads
    int64_t num_kv_heads
    int64_t group                   # query heads per KV head
    int64_t head_dim
    int64_t query_stride            # columns from a query head to the next
    int64_t first_key               # column of the first key head
    int64_t first_value             # column of the first value head
    quire_head query                # norm, rotation and scale of each kind of head
    quire_head key
    quire_head value
    bint norms_rows                 # queries, and keys, are normed over all heads of a row
    bint own_norms                  # each head has weights of its own, as with norms_rows: norm [heads][head_dim]
    const float *query_scales       # [positions], or NULL
    const float *rotary             # [positions][rotary_dim]: cos | sin; of a step, if it has rows of its own

cdef void load_queries(const HeadsOp *op, const Step *step, const quire_tiles *tiles, int64_t first_row,
                       int64_t first_position, int64_t queries, int64_t head, float *x,
                       const quire_rows *out) noexcept nogil
cdef void store_queries(const Step *step, const quire_tiles *tiles, int64_t rows, const float *x,
                        const quire_rows *out) noexcept nogil
cdef void store_rows(const HeadsOp *op, const Step *step, const quire_tiles *tiles, int64_t sequence, int64_t page,
                     int64_t head) noexcept nogil

cdef inline const float *heads_of(const HeadsOp *op, int64_t row) noexcept nogil:
    """Return the heads of a row: queries, keys, values."""
    return <const float *>op.qkv.rows.data + row * op.qkv.rows.width
