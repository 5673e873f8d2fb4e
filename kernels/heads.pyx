# cython: language_level=3
"""Heads of the QKV projection: queries for attention; keys and values into their page.

A head's numbers depend on its own token alone, so any worker may compute them.
"""
from libc.stdint cimport uint16_t
from libc.string cimport memcpy, memset

from .isa cimport QUIRE_BF16, QUIRE_MAX_HEAD, QUIRE_Q8, quire_head, quire_output, quire_page
from .step cimport page_at, table_of


cdef void load_queries(const HeadsOp *op, const Step *step, const quire_tiles *tiles, int64_t first_row,
                       int64_t first_position, int64_t queries, int64_t head, float *x,
                       const quire_rows *out) noexcept nogil:
    """Norm, rotate and scale the query heads of one KV head: out[queries * group][padded_head_dim].

    They are f32 in `x` first, which has memory for 16 floats more.
    """
    cdef int64_t d = out.width, i, g, index
    cdef const float *row
    cdef quire_head query
    for i in range(queries):
        row = heads_of(op, first_row + i)
        for g in range(op.group):
            index = head * op.group + g
            query = _head_of_row(op, &op.query, tiles, row, op.num_heads, index)
            if op.query_scales != NULL:
                query.scale *= op.query_scales[first_position + i]
            tiles.head(row + index * op.query_stride, &query, _rotary_of(op, step, first_row + i, first_position + i),
                       x + (i * op.group + g) * d)
    store_queries(step, tiles, queries * op.group, x, out)


cdef void store_queries(const Step *step, const quire_tiles *tiles, int64_t rows, const float *x,
                        const quire_rows *out) noexcept nogil:
    """Convert queries to the dtype that multiplies keys: x[rows][width]."""
    cdef int64_t d = out.width
    cdef quire_output stored
    if step.kv_dtype == QUIRE_Q8:
        stored.dtype = QUIRE_Q8
        stored.norm = NULL
        stored.rows = out[0]
        tiles.convert(x, d, rows, d, &stored, 0, 0)
    elif step.kv_dtype == QUIRE_BF16:
        tiles.to_bf16(x, rows * d, <uint16_t *>out.data)
    else:
        memcpy(out.data, x, rows * d * sizeof(float))


cdef void store_rows(const HeadsOp *op, const Step *step, const quire_tiles *tiles, int64_t sequence, int64_t page,
                     int64_t head) noexcept nogil:
    """Store the keys and values of one KV head for the rows of a sequence that lie in its page number `page`."""
    cdef int64_t first = step.first_position[sequence], row = step.row_start[sequence] - first
    cdef int64_t position = max(first, page * step.page_size)
    cdef int64_t end = min(step.row_start[sequence + 1] - row, (page + 1) * step.page_size)
    cdef quire_page kv = page_at(step, &op.slot, table_of(step, op.slot.layer_group, sequence)[page], head)
    cdef const float *heads
    cdef const float *keys
    cdef const float *value
    cdef quire_head key
    cdef float x[QUIRE_MAX_HEAD]
    if position % step.page_size == 0:
        memset(kv.k, 0, op.slot.head_bytes)    # masked lanes must read numbers: 0 * NaN is NaN
    for position in range(position, end):
        heads = heads_of(op, row + position)
        keys = heads + op.first_key
        key = _head_of_row(op, &op.key, tiles, keys, op.num_kv_heads, head)
        tiles.head(keys + head * op.head_dim, &key, _rotary_of(op, step, row + position, position), x)
        tiles.store_key(x, position % step.page_size, &kv)
        value = heads + op.first_value + head * op.head_dim
        tiles.head(value, &op.value, NULL, x)
        tiles.store_value(x, position % step.page_size, &kv)


cdef inline quire_head _head_of_row(const HeadsOp *op, const quire_head *kind, const quire_tiles *tiles,
                                    const float *row, int64_t heads, int64_t head) noexcept nogil:
    """Return the operations on one of a row's `heads`: its weights, and if rows are normed, 1 / rms of all heads."""
    cdef quire_head result = kind[0]
    if op.norms_rows:
        result.factor = tiles.inverse_rms(row, kind.eps, heads * op.head_dim)
    if op.own_norms and kind.norm != NULL:
        result.norm = kind.norm + head * op.head_dim
    return result


cdef inline const float *_rotary_of(const HeadsOp *op, const Step *step, int64_t row,
                                    int64_t position) noexcept nogil:
    """Return the cosines and sines that rotate the heads of a row."""
    if step.rotary != NULL:
        return step.rotary + row * op.query.rotary_dim
    return op.rotary + position * op.query.rotary_dim
