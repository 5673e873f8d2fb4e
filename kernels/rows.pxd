from libc.stdint cimport int64_t, uint16_t

from .isa cimport quire_head, quire_output, quire_tiles
from .step cimport Step, Value

cdef struct EmbedOp:
    Value out
    bint is_normed
    quire_output normed
    const char *panels
    const uint16_t *scales
    int64_t panel_bytes
    int64_t width
    int form

cdef struct ConvertOp:
    Value input
    quire_output out
    bint sampled

cdef struct GatherOp:
    Value input
    Value out
    bint is_normed
    quire_output normed

cdef struct RotateStoreOp:
    Value qkv
    Value q
    int64_t layer
    int64_t num_heads
    int64_t num_kv_heads
    int64_t head_dim
    int64_t padded_head_dim
    quire_head query                # norm and scale of each kind of head
    quire_head key
    quire_head value
    const float *rotary             # [positions][head_dim]: cos | sin

cdef void run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles, int worker,
                    int workers) noexcept nogil
cdef void run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles, int worker,
                      int workers) noexcept nogil
cdef void run_gather(const GatherOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil
cdef void run_rotate_store(const RotateStoreOp *op, const Step *step, const quire_tiles *tiles, int worker,
                           int workers) noexcept nogil
