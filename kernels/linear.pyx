# cython: language_level=3
"""Linear layers: who computes which columns, and in what order. The arithmetic is one tile of simd/linear.c.

Each worker owns a fixed range of column pairs and the whole of K for them, so the thread count never changes a bit.
"""
from .isa cimport QUIRE_BF16, QUIRE_F32, QUIRE_Q8, QUIRE_SWIGLU, quire_linear_tile

cdef enum:
    ROWS_IN_CACHE = 192             # activations that stay in L2 while a worker's panels pass over them


cdef void run_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil:
    cdef int64_t rows = step.samples if op.sampled else step.rows
    cdef int64_t first = op.num_pairs * worker // workers, last = op.num_pairs * (worker + 1) // workers
    cdef int64_t pair, group, groups = (rows + ROWS_IN_CACHE - 1) // ROWS_IN_CACHE
    for group in range(groups):
        for pair in range(first, last):
            _multiply(op, tiles, pair, rows * group // groups, rows * (group + 1) // groups)


cdef void _multiply(const LinearOp *op, const quire_tiles *tiles, int64_t pair, int64_t row,
                    int64_t end) noexcept nogil:
    """Rows [row, end) against one pair of panels, split evenly so that no tile is left with a single row.

    Meanwhile the next pair is fetched, an equal share under each tile: memory never waits for arithmetic.
    """
    cdef quire_linear_tile tile
    cdef int64_t width = op.input.rows.width, out_columns = 16 if op.epilogue == QUIRE_SWIGLU else 32
    cdef int64_t calls = (end - row + tiles.linear_rows - 1) // tiles.linear_rows, call, n
    cdef int64_t lines = 2 * op.panel_bytes // (width // 32) // 64        # of the next pair, per 32 of K
    tile.w = op.panels + 2 * pair * op.panel_bytes
    tile.scales = op.scales + pair * width if op.scales != NULL else NULL    # 2 panels * width / 32 * 16
    tile.panel_bytes = op.panel_bytes
    tile.next = <const char *>tile.w + 2 * op.panel_bytes
    tile.bias = op.bias + 32 * pair if op.bias != NULL else NULL
    tile.ldc = op.out.rows.width
    tile.epilogue = op.epilogue
    tile.a.width = width
    for call in range(calls):
        n = (end - row) // (calls - call)
        tile.next_lines = <int>(lines * (call + 1) // calls - lines * call // calls)
        tile.a.data = <char *>op.input.rows.data + row * width * (4 if op.input.form == QUIRE_F32 else
                                                                  2 if op.input.form == QUIRE_BF16 else 1)
        if op.input.form == QUIRE_Q8:
            tile.a.scales = op.input.rows.scales + row * (width // 32)
            tile.a.sums = op.input.rows.sums + row * (width // 32)
        tile.c = <float *>op.out.rows.data + row * tile.ldc + pair * out_columns
        tiles.linear[op.input.form](<int>n, &tile)
        tile.next += tile.next_lines * 64 * (width // 32)
        row += n
