# cython: language_level=3
"""Latent attention: the queries and the keys of its heads, and the columns of heads for their own matrices.

The loops over pages and tiles are those of all attention, in attention.pyx.
"""
from libc.string cimport memset

from .heads cimport store_queries
from .isa cimport QUIRE_MAX_HEAD, quire_page
from .ops import BLOCK, padded
from .pool cimport quire_next_run, quire_run
from .step cimport page_at, table_of

cdef enum:
    MOST_ROWS = 16                  # most rows per item: the scales of neighboring rows share cache lines


cdef bind_latent_heads(LatentHeads *heads, op, Regions regions, max_rows):
    """Set the heads of latent attention, having checked their sizes."""
    cdef const float[:, ::1] rotary = op.rotary
    rank, rotary_dim = op.rank, op.rotary_dim
    if rank < BLOCK or rank % BLOCK or not 2 <= rotary_dim <= op.stride or rotary_dim % 2:
        raise ValueError(f"latents of {rank} elements must fill blocks of {BLOCK}, and {rotary_dim} rotated elements "
                         f"must be even and in heads of {op.stride}")
    for first, columns, region in ((0, op.num_heads * op.stride, op.queries),
                                   (op.first_key, rank + rotary_dim, op.keys)):
        if first < 0 or first + columns > region.columns:
            raise ValueError(f"{region!r} has no {columns} columns from {first} on")
    heads.rank, heads.stride, heads.rotated = rank, op.stride, op.stride - rotary_dim
    heads.queries = regions.value(op.queries, op.queries.columns, "f32", max_rows)
    heads.absorbed = regions.value(op.absorbed, op.num_heads * rank, "f32", max_rows)
    heads.keys = regions.value(op.keys, op.keys.columns, "f32", max_rows)
    heads.first_key, heads.capacity = op.first_key, op.out.rows // op.num_heads
    regions.keep_alive.append(op.rotary)
    heads.rotary = &rotary[0, 0]
    heads.query_latent = _head(rank, 0, op.scale)
    heads.query_rotated = _head(rotary_dim, rotary_dim, op.scale)
    heads.key_latent, heads.key_rotated = _head(rank, 0, 1), _head(rotary_dim, rotary_dim, 1)
    heads.key_latent.norm = regions.vector(op.norm, rank, padded(rank + 16))
    heads.key_latent.eps = op.eps


cdef quire_head _head(head_dim, rotary_dim, scale) except *:
    cdef quire_head head
    head.head_dim, head.rotary_dim, head.rotary_distance, head.scale = head_dim, rotary_dim, rotary_dim // 2, scale
    head.norm, head.eps, head.factor, head.ahead, head.next = NULL, 0, 0, 0, head_dim
    head.centered = head.norm_last = False
    return head


cdef bind_split(SplitOp *record, op, Regions regions, max_rows):
    """Set the record of the columns of heads, having checked its sizes."""
    record.capacity = max_rows
    record.num_heads, rest = divmod(op.out.rows, max_rows)
    record.stride, record.columns = op.stride, op.out.columns
    if rest or record.num_heads * op.stride > op.input.columns or not 1 <= op.out.columns <= op.stride:
        raise ValueError(f"{op.input!r} has no heads of {op.stride} columns for {op.out!r}, {max_rows} rows each")
    record.input = regions.value(op.input, op.input.columns, "f32", max_rows)
    record.out = regions.output(op.out, op.out.columns, op.out.rows)


cdef int64_t run_split(const SplitOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                       int workers) noexcept nogil:
    """Convert the columns of the heads of rows until none is left; return the number of rows."""
    cdef int64_t computed = 0, width = op.input.rows.width, head
    cdef const float *rows
    cdef quire_run run
    while quire_next_run(counter, step.rows, workers, MOST_ROWS, &run):
        rows = <const float *>op.input.rows.data + run.first * width
        for head in range(op.num_heads):
            tiles.convert(rows + head * op.stride, width, run.end - run.first, op.columns, &op.out,
                          head * op.capacity + run.first, 0)
        computed += run.end - run.first
    return computed


cdef void load_latent_queries(const LatentHeads *op, const Step *step, const quire_tiles *tiles, int64_t first_row,
                              int64_t first_position, int64_t queries, int64_t first_head, int64_t heads, float *x,
                              const quire_rows *out) noexcept nogil:
    """Rotate and scale `heads` query heads of each row: out[queries * heads][padded_head_dim]."""
    cdef int64_t i, g
    cdef const float *absorbed
    cdef const float *rotated
    cdef float *to = x
    for i in range(queries):
        absorbed = (<const float *>op.absorbed.rows.data + (first_row + i) * op.absorbed.rows.width
                    + first_head * op.rank)
        rotated = (<const float *>op.queries.rows.data + (first_row + i) * op.queries.rows.width
                   + first_head * op.stride + op.rotated)
        for g in range(heads):
            tiles.head(absorbed + g * op.rank, &op.query_latent, NULL, to)
            tiles.head(rotated + g * op.stride, &op.query_rotated, _rotary_of(op, step, first_row + i,
                                                                              first_position + i), to + op.rank)
            to += out.width
    store_queries(step, tiles, queries * heads, x, out)


cdef void store_latents(const LatentHeads *op, const Slot *slot, const Step *step, const quire_tiles *tiles,
                        int64_t sequence, int64_t page) noexcept nogil:
    """Store the latents and the rotated parts of the rows of a sequence that lie in its page number `page`."""
    cdef int64_t first = step.first_position[sequence], row = step.row_start[sequence] - first
    cdef int64_t position = max(first, page * step.page_size)
    cdef int64_t end = min(step.row_start[sequence + 1] - row, (page + 1) * step.page_size)
    cdef quire_page kv = page_at(step, slot, table_of(step, slot.layer_group, sequence)[page], 0)
    cdef const float *key
    cdef float x[QUIRE_MAX_HEAD + 32]
    if position % step.page_size == 0:
        memset(kv.k, 0, slot.head_bytes)    # masked lanes must read numbers: 0 * NaN is NaN
    for position in range(position, end):
        key = <const float *>op.keys.rows.data + (row + position) * op.keys.rows.width + op.first_key
        tiles.head(key, &op.key_latent, NULL, x)
        tiles.head(key + op.rank, &op.key_rotated, _rotary_of(op, step, row + position, position), x + op.rank)
        tiles.store_key(x, position % step.page_size, &kv)


cdef inline const float *_rotary_of(const LatentHeads *op, const Step *step, int64_t row,
                                    int64_t position) noexcept nogil:
    """Return the cosines and sines that rotate the heads of a row."""
    if step.rotary != NULL:
        return step.rotary + row * op.key_rotated.rotary_dim
    return op.rotary + position * op.key_rotated.rotary_dim
