from libc.stdint cimport int64_t

from .isa cimport quire_tiles
from .step cimport Step, Value

cdef struct AttentionOp:
    Value q
    Value out
    int64_t layer
    int64_t num_heads
    int64_t num_kv_heads
    int64_t head_dim
    int64_t padded_head_dim
    int64_t window                  # 0: all earlier tokens

cdef int64_t attention_scratch_bytes(int64_t padded_head_dim) noexcept nogil

cdef void run_attention(const AttentionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                        int worker) noexcept nogil
