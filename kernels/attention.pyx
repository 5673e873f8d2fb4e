# cython: language_level=3
"""Paged GQA attention: which sequence, KV head and query tile, over which splits, tiles and pages.

Prefill and decode are the same walk. Tiles of 64 tokens and splits of 256 are anchored at absolute position 0 and merged
in ascending order, so a row's arithmetic never depends on who computes it or on what else is in the step.
"""
from libc.math cimport INFINITY
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

from .isa cimport QUIRE_BF16, QUIRE_TILE, quire_attention_tile
from .pool cimport quire_take

cdef enum:
    SPLIT = 256


# One worker's buffers for the rows of a query tile, carved from its scratch.
cdef struct Desk:
    char *q                 # [64][padded_head_dim] KV dtype
    char *p                 # [64][64] KV dtype
    float *s                # [64][64]
    float *o                # [64][padded_head_dim] of the split
    float *total_o          # [64][padded_head_dim]
    float *m                # [64]
    float *l
    float *total_m
    float *total_l
    int64_t *positions      # [64]


cdef int64_t attention_scratch_bytes(int64_t padded_head_dim) noexcept nogil:
    return QUIRE_TILE * (3 * padded_head_dim * 4 + 2 * QUIRE_TILE * 4 + 4 * 4 + 8)


cdef Desk _desk(char *scratch, int64_t d) noexcept nogil:
    cdef Desk desk
    desk.q = scratch
    desk.o = <float *>(scratch + QUIRE_TILE * d * 4)
    desk.total_o = desk.o + QUIRE_TILE * d
    desk.s = desk.total_o + QUIRE_TILE * d
    desk.p = <char *>(desk.s + QUIRE_TILE * QUIRE_TILE)
    desk.m = <float *>desk.p + QUIRE_TILE * QUIRE_TILE
    desk.l = desk.m + QUIRE_TILE
    desk.total_m = desk.l + QUIRE_TILE
    desk.total_l = desk.total_m + QUIRE_TILE
    desk.positions = <int64_t *>(desk.total_l + QUIRE_TILE)
    return desk


cdef void run_attention(const AttentionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                        int worker) noexcept nogil:
    """Workers take (query tile, KV head) items as they come free; the last tiles, the longest, first."""
    cdef Desk desk = _desk(step.scratch + worker * step.scratch_bytes, op.padded_head_dim)
    cdef int64_t items = step.tile_start[step.sequences] * op.num_kv_heads, sequence = step.sequences - 1
    cdef int64_t item = items - 1 - quire_take(counter), tile
    while item >= 0:
        tile = item // op.num_kv_heads
        while step.tile_start[sequence] > tile:
            sequence -= 1
        _attend(op, step, tiles, &desk, sequence, tile - step.tile_start[sequence], item % op.num_kv_heads)
        item = items - 1 - quire_take(counter)


cdef void _attend(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Desk *desk,
                  int64_t sequence, int64_t query_tile, int64_t head) noexcept nogil:
    """All query heads of one KV head for up to `step.query_tile` queries: each KV byte is read once for all of them."""
    cdef int64_t d = op.padded_head_dim, group = op.num_heads // op.num_kv_heads, r, rows
    cdef int64_t first_row = step.row_start[sequence] + query_tile * step.query_tile
    cdef int64_t queries = min(step.query_tile, step.row_start[sequence + 1] - first_row)
    cdef int64_t first_position = step.first_position[sequence] + query_tile * step.query_tile
    cdef int64_t last = first_position + queries - 1, split
    rows = queries * group
    _take_queries(op, desk, first_row, queries, head, group)
    for r in range(rows):
        desk.positions[r] = first_position + r // group
        desk.total_m[r] = -INFINITY
        desk.total_l[r] = 0
    memset(desk.total_o, 0, rows * d * sizeof(float))
    split = max(<int64_t>0, first_position - op.window + 1) // SPLIT * SPLIT if op.window else 0
    while split <= last:
        _attend_split(op, step, tiles, desk, sequence, head, rows, split, last)
        tiles.merge(<int>rows, d, desk.m, desk.l, desk.o, desk.total_m, desk.total_l, desk.total_o)
        split += SPLIT
    _give_outputs(op, desk, first_row, queries, head, group)


cdef void _attend_split(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Desk *desk,
                        int64_t sequence, int64_t head, int64_t rows, int64_t split, int64_t last) noexcept nogil:
    """The rows' softmax over tokens [split, split + 256), by tiles; each tile only for the rows that see it."""
    cdef quire_attention_tile tile
    cdef int64_t d = op.padded_head_dim, size = 2 if step.kv_form == QUIRE_BF16 else 4, i, r, token, begin = 0, end
    for r in range(rows):
        desk.m[r] = -INFINITY
        desk.l[r] = 0
    memset(desk.o, 0, rows * d * sizeof(float))
    tile.window = op.window
    tile.head_dim = d
    tile.page_size = step.page_size
    tile.s = desk.s
    tile.p = desk.p
    for i in range(min(SPLIT, last + 1 - split + QUIRE_TILE - 1) // QUIRE_TILE):
        token = split + i * QUIRE_TILE
        while begin < rows and desk.positions[begin] < token:
            begin += 1
        end = rows
        while op.window and end > begin and desk.positions[end - 1] - op.window + 1 >= token + QUIRE_TILE:
            end -= 1
        if begin == end:
            continue
        tile.first_token = token
        _point_at_pages(op, step, sequence, head, token, last, size, &tile)
        tile.q = desk.q + begin * d * size
        tile.positions = desk.positions + begin
        tile.m = desk.m + begin
        tile.l = desk.l + begin
        tile.o = desk.o + begin * d
        tiles.attention[step.kv_form](<int>(end - begin), &tile)


cdef void _point_at_pages(const AttentionOp *op, const Step *step, int64_t sequence, int64_t head, int64_t token,
                          int64_t last, int64_t size, quire_attention_tile *tile) noexcept nogil:
    """K panels and V pages of one tile by page table, and the next tile's K to fetch: pages are scattered, so nothing
    can be guessed from addresses. Beyond the sequence's end, masked columns point at its last page."""
    cdef int64_t d = op.padded_head_dim, page = token // step.page_size, last_page = last // step.page_size
    cdef int64_t per_tile = QUIRE_TILE // step.page_size, panel_bytes = 16 * d * size, j
    cdef const int32_t *table = step.page_ids + step.page_start[sequence]
    cdef const char *base = step.kv + op.layer * step.layer_bytes + head * step.head_bytes
    tile.num_pages = <int>min(per_tile, last_page - page + 1)
    for j in range(4):
        tile.k[j] = (base + table[min(page + 16 * j // step.page_size, last_page)] * step.page_bytes
                     + 16 * j % step.page_size // 16 * panel_bytes)
    for j in range(per_tile):
        tile.v[j] = base + table[min(page + j, last_page)] * step.page_bytes + step.head_bytes // 2
        tile.next_k[j] = (base + table[page + per_tile + j] * step.page_bytes if page + per_tile + j <= last_page
                          else NULL)


cdef void _take_queries(const AttentionOp *op, const Desk *desk, int64_t first_row, int64_t queries, int64_t head,
                        int64_t group) noexcept nogil:
    """q rows of a KV head's group lie side by side in the arena; gather them as [queries * group][d]."""
    cdef int64_t size = 2 if op.q.form == QUIRE_BF16 else 4, bytes = group * op.padded_head_dim * size, i
    for i in range(queries):
        memcpy(desk.q + i * bytes,
               <const char *>op.q.rows.data + (first_row + i) * op.q.rows.width * size + head * bytes, bytes)


cdef void _give_outputs(const AttentionOp *op, const Desk *desk, int64_t first_row, int64_t queries, int64_t head,
                        int64_t group) noexcept nogil:
    cdef int64_t r, i
    cdef float *out
    cdef const float *o
    for r in range(queries * group):
        out = (<float *>op.out.rows.data + (first_row + r // group) * op.out.rows.width
               + (head * group + r % group) * op.head_dim)
        o = desk.total_o + r * op.padded_head_dim
        for i in range(op.head_dim):
            out[i] = o[i] / desk.total_l[r]
