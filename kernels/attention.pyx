# cython: language_level=3
"""Paged GQA attention: which sequence, KV head and query tile, over which splits, tiles and pages.

Prefill and decode are the same walk. Tiles of 64 tokens and splits of 256 are anchored at absolute position 0 and
merged in ascending order, so a row's arithmetic never depends on who computes it or on what else is in the step.
"""
from libc.math cimport INFINITY
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset

from .isa cimport (QUIRE_BF16, QUIRE_F32, QUIRE_Q8, QUIRE_TILE, quire_attention_tile, quire_page, quire_rows)
from .pool cimport quire_take
from .step cimport page_at

cdef enum:
    SPLIT = 256


# One worker's buffers for the rows of a query tile, carved from its scratch.
cdef struct Desk:
    quire_rows q            # [64][padded_head_dim] KV dtype
    char *p                 # [64][64] KV dtype, bf16 for int8
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
    desk.q.data = scratch
    desk.q.width = d
    desk.q.scales = <float *>(scratch + QUIRE_TILE * d)                     # for int8, behind its data
    desk.q.sums = <int32_t *>(desk.q.scales + QUIRE_TILE * d // 32)
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
    cdef int64_t d = op.padded_head_dim, i, r, token, begin = 0, end
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
        _point_at_pages(op, step, sequence, head, token, last, &tile)
        tile.q.data = <char *>desk.q.data + begin * d * _itemsize(step.kv_form)
        tile.q.scales = desk.q.scales + begin * (d // 32)
        tile.q.sums = desk.q.sums + begin * (d // 32)
        tile.positions = desk.positions + begin
        tile.m = desk.m + begin
        tile.l = desk.l + begin
        tile.o = desk.o + begin * d
        tiles.attention[step.kv_form](<int>(end - begin), &tile)


cdef void _point_at_pages(const AttentionOp *op, const Step *step, int64_t sequence, int64_t head, int64_t token,
                          int64_t last, quire_attention_tile *tile) noexcept nogil:
    """K panels and V pages of one tile by page table, and the next tile's K to fetch: pages are scattered, so nothing
    can be guessed from addresses. Beyond the sequence's end, masked columns point at its last page."""
    cdef int64_t page = token // step.page_size, last_page = last // step.page_size, slot, j
    cdef int64_t per_tile = QUIRE_TILE // step.page_size, panel = 16 * op.padded_head_dim
    cdef const int32_t *table = step.page_ids + step.page_start[sequence]
    cdef quire_page kv
    tile.num_pages = <int>min(per_tile, last_page - page + 1)
    for j in range(4):
        kv = page_at(step, op.layer, table[min(page + 16 * j // step.page_size, last_page)], head)
        slot = 16 * j % step.page_size
        tile.k[j] = <char *>kv.k + slot // 16 * panel * _itemsize(step.kv_form)
        if step.kv_form == QUIRE_Q8:
            tile.k_scales[j] = kv.k_scales + slot // 16 * (panel // 32)
            tile.v_scales[j] = kv.v_scales + slot
        tile.v[16 * j // step.page_size] = kv.v
    for j in range(per_tile):
        tile.next_k[j] = NULL
        if page + per_tile + j <= last_page:
            tile.next_k[j] = page_at(step, op.layer, table[page + per_tile + j], head).k


cdef int64_t _itemsize(int form) noexcept nogil:
    return 4 if form == QUIRE_F32 else 2 if form == QUIRE_BF16 else 1


cdef void _take_queries(const AttentionOp *op, const Desk *desk, int64_t first_row, int64_t queries, int64_t head,
                        int64_t group) noexcept nogil:
    """q rows of a KV head's group lie side by side in the arena; gather them as [queries * group][d]."""
    cdef int64_t columns = group * op.padded_head_dim, bytes = columns * _itemsize(op.q.form), i, at
    for i in range(queries):
        at = (first_row + i) * op.q.rows.width + head * columns
        memcpy(<char *>desk.q.data + i * bytes, <const char *>op.q.rows.data + at * _itemsize(op.q.form), bytes)
        if op.q.form == QUIRE_Q8:
            memcpy(desk.q.scales + i * columns // 32, op.q.rows.scales + at // 32, columns // 32 * sizeof(float))
            memcpy(desk.q.sums + i * columns // 32, op.q.rows.sums + at // 32, columns // 32 * sizeof(int32_t))


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
