# cython: language_level=3
"""Everything that works on one row at a time: embedding, conversion, gathering, and RoPE with the page write.

A row's result depends on that row alone, so any split of rows over workers gives the same bits.
"""
from libc.stdint cimport uint16_t
from libc.string cimport memcpy, memset

from .isa cimport QUIRE_BF16, QUIRE_MAX_HEAD, QUIRE_Q8, quire_output, quire_page
from .step cimport page_at


cdef void run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles, int worker,
                    int workers) noexcept nogil:
    cdef int64_t row, token, width = op.out.rows.width
    cdef float *out
    for row in range(step.rows * worker // workers, step.rows * (worker + 1) // workers):
        token = step.token_ids[row]
        out = <float *>op.out.rows.data + row * width
        tiles.unpack_column(op.panels + token // 16 * op.panel_bytes,
                            op.scales + token // 16 * (op.width // 2) if op.scales != NULL else NULL,
                            op.form, op.width, <int>(token % 16), out)
        if op.is_normed:
            tiles.convert(out, width, 1, op.out.columns, &op.normed, row, 0)


cdef void run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles, int worker,
                      int workers) noexcept nogil:
    cdef int64_t width = op.input.rows.width, rows = step.samples if op.sampled else step.rows
    cdef int64_t first = rows * worker // workers, last = rows * (worker + 1) // workers
    tiles.convert(<const float *>op.input.rows.data + first * width, width, last - first, op.input.columns, &op.out,
                  first, 0)


cdef void run_gather(const GatherOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil:
    cdef int64_t i, width = op.input.rows.width
    cdef float *out
    for i in range(step.samples * worker // workers, step.samples * (worker + 1) // workers):
        out = <float *>op.out.rows.data + i * width
        memcpy(out, <const float *>op.input.rows.data + step.sample_rows[i] * width, width * sizeof(float))
        if op.is_normed:
            tiles.convert(out, width, 1, op.out.columns, &op.normed, i, 0)


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
    cdef quire_page kv = page_at(step, op.layer, step.page_ids[step.page_start[sequence] + page], head)
    cdef const float *qkv
    cdef const float *rotary
    cdef float x[QUIRE_MAX_HEAD]
    if position % step.page_size == 0:
        memset(kv.k, 0, step.head_bytes)    # what a masked lane reads must be a number: 0 * NaN is NaN
    for position in range(position, min(end, (page + 1) * step.page_size)):
        row = step.row_start[sequence] + position - first
        qkv = <const float *>op.qkv.rows.data + row * op.qkv.rows.width
        rotary = op.rotary + position * op.head_dim
        for g in range(head * group, (head + 1) * group):
            tiles.head(qkv + g * op.head_dim, &op.query, rotary, x)
            _store_query(op, tiles, x, row, g)
        tiles.head(qkv + (op.num_heads + head) * op.head_dim, &op.key, rotary, x)
        tiles.store_key(x, position % step.page_size, &kv)
        tiles.head(qkv + (op.num_heads + op.num_kv_heads + head) * op.head_dim, &op.value, NULL, x)
        tiles.store_value(x, position % step.page_size, &kv)


cdef void _store_query(const RotateStoreOp *op, const quire_tiles *tiles, const float *x, int64_t row,
                       int64_t head) noexcept nogil:
    """Into columns [head * d, (head + 1) * d) of row `row` of q, in the KV dtype; q8 by blocks of 32."""
    cdef int64_t d = op.padded_head_dim, at = row * op.q.rows.width + head * d
    cdef quire_output out
    if op.q.form == QUIRE_Q8:
        out.form, out.norm, out.rows.width = QUIRE_Q8, NULL, d
        out.rows.data = <char *>op.q.rows.data + at
        out.rows.scales, out.rows.sums = op.q.rows.scales + at // 32, op.q.rows.sums + at // 32
        tiles.convert(x, d, 1, d, &out, 0, 0)
    elif op.q.form == QUIRE_BF16:
        tiles.to_bf16(x, d, <uint16_t *>op.q.rows.data + at)
    else:
        memcpy(<float *>op.q.rows.data + at, x, d * sizeof(float))
