from libc.stdint cimport int64_t

from .heads cimport HeadsOp
from .isa cimport quire_output, quire_tiles
from .latent cimport LatentHeads
from .step cimport Partition, Step

cdef struct AttentionOp:
    HeadsOp heads                   # latent attention has only the numbers of heads and the place of pages here
    LatentHeads latent              # latent.rank is 0 unless the op is latent attention
    const Partition *partition
    quire_output out                # [tokens][num_heads][head_dim]; of latent attention [num_heads][capacity][rank]
    int64_t value_dim               # elements of a value, padded
    int64_t stored_heads            # KV heads of a page: num_kv_heads, unless several groups of query heads share one
    int64_t window                  # 0: all earlier tokens
    bint causal                     # 0: a row sees the rest of its text, or `window` tokens of it
    bint gated                      # each query head is followed by its gate
    float softcap                   # softcap of the scores; 0: none
    const float *sinks              # [num_heads], a score of each head without a value; or NULL
    const float *bias               # [num_heads][bias_columns], added to scores; or NULL
    int64_t bias_columns, bias_origin       # column of a key: bias_origin + its position - that of the query

cdef int64_t attention_scratch_bytes(int64_t padded_head_dim, int64_t values_in_keys) noexcept nogil
cdef int64_t attention_shared_bytes(int64_t padded_head_dim) noexcept nogil
cdef bint partitions_by_split(const Step *step, int64_t num_kv_heads, int workers) noexcept nogil
cdef int64_t num_units(const Step *step, int64_t sequence, const Partition *partition) noexcept nogil
cdef int64_t num_chunk_units(const AttentionOp *op, const Step *step) noexcept nogil
cdef int64_t num_attention_items(const AttentionOp *op, const Step *step) noexcept nogil
cdef int64_t store_chunks(const AttentionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                          int workers) noexcept nogil
cdef int64_t run_attention(const AttentionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                           int worker, int workers) noexcept nogil
