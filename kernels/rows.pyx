# cython: language_level=3
"""Everything that works on one row at a time: embedding, norm and conversion, gathering, and RoPE with the page write.

A row's result depends on that row alone, so any split of rows over workers gives the same bits.
"""
from libc.stdint cimport int32_t, uint16_t
from libc.string cimport memcpy, memset

from .isa cimport QUIRE_BF16, QUIRE_MAX_HEAD


cdef void run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles, int worker, int workers) noexcept nogil:
    cdef int64_t row, token
    cdef float *out = <float *>op.out.rows.data
    for row in range(step.rows * worker // workers, step.rows * (worker + 1) // workers):
        token = step.token_ids[row]
        tiles.unpack_column(op.panels + token // 16 * op.panel_bytes,
                            op.scales + token // 16 * (op.width // 2) if op.scales != NULL else NULL,
                            op.form, op.width, <int>(token % 16), out + row * op.out.rows.width)


cdef void run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles, int worker,
                      int workers) noexcept nogil:
    cdef int64_t row, rows = step.samples if op.sampled else step.rows
    cdef const float *x = <const float *>op.input.rows.data
    for row in range(rows * worker // workers, rows * (worker + 1) // workers):
        tiles.convert(x + row * op.input.rows.width, op.weight, op.eps, op.input.columns, op.out.form, &op.out.rows, row)


cdef void run_gather(const GatherOp *op, const Step *step, int worker, int workers) noexcept nogil:
    cdef int64_t i, width = op.input.rows.width
    for i in range(step.samples * worker // workers, step.samples * (worker + 1) // workers):
        memcpy(<float *>op.out.rows.data + i * width, <const float *>op.input.rows.data + step.sample_rows[i] * width,
               width * sizeof(float))


cdef void run_rotate_store(const RotateStoreOp *op, const Step *step, const quire_tiles *tiles, int worker,
                           int workers) noexcept nogil:
    """Work is dealt in (page-sized block of a sequence's rows, KV head): the owner of a block owns its page's head."""
    cdef int64_t units = step.block_start[step.sequences] * op.num_kv_heads
    cdef int64_t unit, block, sequence = 0
    for unit in range(units * worker // workers, units * (worker + 1) // workers):
        block = unit // op.num_kv_heads
        while step.block_start[sequence + 1] <= block:
            sequence += 1
        _rotate_block(op, step, tiles, sequence, block - step.block_start[sequence], unit % op.num_kv_heads)


cdef void _rotate_block(const RotateStoreOp *op, const Step *step, const quire_tiles *tiles, int64_t sequence,
                        int64_t block, int64_t head) noexcept nogil:
    cdef int64_t first = step.first_position[sequence]
    cdef int64_t end = first + step.row_start[sequence + 1] - step.row_start[sequence]
    cdef int64_t page = first // step.page_size + block
    cdef int64_t position = max(first, page * step.page_size), group = op.num_heads // op.num_kv_heads, row, g
    cdef int32_t page_id = step.page_ids[step.page_start[sequence] + page]
    cdef char *k = step.kv + op.layer * step.layer_bytes + page_id * step.page_bytes + head * step.head_bytes
    cdef char *v = k + step.head_bytes // 2
    cdef const float *qkv
    cdef float x[QUIRE_MAX_HEAD]
    if position % step.page_size == 0:
        memset(k, 0, step.head_bytes)       # what a masked lane reads must be a number: 0 * NaN is NaN
    for position in range(position, min(end, (page + 1) * step.page_size)):
        row = step.row_start[sequence] + position - first
        qkv = <const float *>op.qkv.rows.data + row * op.qkv.rows.width
        for g in range(group):
            _rotated(op, tiles, qkv + (head * group + g) * op.head_dim, op.q_norm, position, op.scale, x)
            _store_query(op, tiles, x, row, head * group + g)
        _rotated(op, tiles, qkv + (op.num_heads + head) * op.head_dim, op.k_norm, position, 1, x)
        _store_key(step, tiles, x, op.padded_head_dim, position % step.page_size, k)
        memset(x, 0, op.padded_head_dim * sizeof(float))
        memcpy(x, qkv + (op.num_heads + op.num_kv_heads + head) * op.head_dim, op.head_dim * sizeof(float))
        _store_value(step, tiles, x, op.padded_head_dim, position % step.page_size, v)


cdef void _rotated(const RotateStoreOp *op, const quire_tiles *tiles, const float *source, const float *norm,
                   int64_t position, float scale, float *x) noexcept nogil:
    """One head: norm where the model has it, rotation by halves, scale. Zero beyond head_dim."""
    cdef int64_t half = op.head_dim // 2, i
    cdef const float *cosine = op.rotary + position * op.head_dim
    cdef const float *sine = cosine + half
    cdef float a, b
    memset(x, 0, (op.head_dim + 31) // 32 * 32 * sizeof(float))
    memcpy(x, source, op.head_dim * sizeof(float))
    if norm != NULL:
        tiles.norm(x, norm, op.eps, op.head_dim)
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = (a * cosine[i] - b * sine[i]) * scale
        x[i + half] = (b * cosine[i] + a * sine[i]) * scale


cdef void _store_query(const RotateStoreOp *op, const quire_tiles *tiles, const float *x, int64_t row,
                       int64_t head) noexcept nogil:
    cdef int64_t at = row * op.q.rows.width + head * op.padded_head_dim
    if op.q.form == QUIRE_BF16:
        tiles.to_bf16(x, op.padded_head_dim, <uint16_t *>op.q.rows.data + at)
    else:
        memcpy(<float *>op.q.rows.data + at, x, op.padded_head_dim * sizeof(float))


cdef void _store_key(const Step *step, const quire_tiles *tiles, const float *x, int64_t d, int64_t slot,
                     char *page) noexcept nogil:
    """K is a packed weight with tokens as columns: bf16 [t/16][d/2][16][2], f32 [t/16][d][16]."""
    cdef uint16_t h[QUIRE_MAX_HEAD]
    cdef int64_t i
    cdef float *f = <float *>page + slot // 16 * 16 * d + slot % 16
    cdef uint16_t *b = <uint16_t *>page + slot // 16 * 16 * d + slot % 16 * 2
    if step.kv_form == QUIRE_BF16:
        tiles.to_bf16(x, d, h)
        for i in range(d // 2):
            b[i * 32] = h[2 * i]
            b[i * 32 + 1] = h[2 * i + 1]
    else:
        for i in range(d):
            f[i * 16] = x[i]


cdef void _store_value(const Step *step, const quire_tiles *tiles, const float *x, int64_t d, int64_t slot,
                       char *page) noexcept nogil:
    """V is a packed weight with head_dim as columns: bf16 [d/16][t/2][16][2], f32 [d/16][t][16]."""
    cdef uint16_t h[QUIRE_MAX_HEAD]
    cdef int64_t i, panel = 16 * step.page_size
    cdef float *f = <float *>page + slot * 16
    cdef uint16_t *b = <uint16_t *>page + slot // 2 * 32 + slot % 2
    if step.kv_form == QUIRE_BF16:
        tiles.to_bf16(x, d, h)
        for i in range(d):
            b[i // 16 * panel + i % 16 * 2] = h[i]
    else:
        for i in range(d):
            f[i // 16 * panel + i % 16] = x[i]
