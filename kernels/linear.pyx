# cython: language_level=3
"""Linear layers: the partition of output columns over workers, and the loop over them. The tile is simd/linear.c.

Each worker computes a fixed range of blocks of 32 output columns with the whole of K, so the number of threads never
changes a bit. A block has its own scale, so a worker also converts its blocks to the dtype the next op reads.
"""
from .isa cimport (QUIRE_BLOCK, QUIRE_F32, QUIRE_Q8, QUIRE_SWIGLU, quire_itemsize, quire_linear_tile,
                   quire_panel_bytes)

cdef enum:
    ROWS_IN_CACHE = 192             # activations that stay in L2 while a worker's panels pass over them


cdef struct Scratch:                # of one worker
    float factors[ROWS_IN_CACHE]    # 1 / rms of each row, if the input is a `Normed`
    float block[ROWS_IN_CACHE * QUIRE_BLOCK]    # f32 results that are converted


cdef int64_t linear_scratch_bytes(int64_t q4_width) noexcept:
    """Return the bytes of one worker: its `Scratch`, then a pair of q4 panels of up to `q4_width` widened to q8."""
    return sizeof(Scratch) + 2 * quire_panel_bytes(QUIRE_Q8, q4_width)


cdef void run_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil:
    cdef Scratch *scratch = <Scratch *>(step.scratch + worker * step.scratch_bytes)
    cdef int64_t rows = step.samples if op.sampled else step.rows
    cdef int64_t first = op.num_blocks * worker // workers, last = op.num_blocks * (worker + 1) // workers
    cdef int64_t block, group, row, end, groups = (rows + ROWS_IN_CACHE - 1) // ROWS_IN_CACHE
    for group in range(groups):
        row, end = rows * group // groups, rows * (group + 1) // groups
        if op.squares != NULL:
            tiles.rms_factors(op.squares + row * op.squares_width, op.squares_width, end - row, op.input.columns,
                              op.eps, scratch.factors)
        for block in range(first, last):
            _compute_block(op, tiles, block, row, end, scratch)


cdef void _compute_block(const LinearOp *op, const quire_tiles *tiles, int64_t block, int64_t row, int64_t end,
                         Scratch *scratch) noexcept nogil:
    """Compute rows [row, end) of 32 columns of `out`, and convert them while they are in cache."""
    cdef float *y = scratch.block
    cdef int64_t stride = QUIRE_BLOCK
    if op.out.dtype == QUIRE_F32:
        stride = op.out.rows.width
        y = <float *>op.out.rows.data + row * stride + block * QUIRE_BLOCK
    if op.epilogue == QUIRE_SWIGLU:         # a pair of panels holds 16 columns of gate and 16 of up
        _multiply(op, tiles, 2 * block, row, end, scratch, y, stride)
        _multiply(op, tiles, 2 * block + 1, row, end, scratch, y + 16, stride)
    else:
        _multiply(op, tiles, block, row, end, scratch, y, stride)
    if op.converts:
        tiles.convert(y, stride, end - row, QUIRE_BLOCK, &op.converted, row, block * QUIRE_BLOCK)
    if op.maxima != NULL:
        tiles.block_maxima(y, stride, end - row, min(QUIRE_BLOCK, op.out.columns - block * QUIRE_BLOCK),
                           op.maxima + row * op.maxima_width + block, op.maxima_width)


cdef void _multiply(const LinearOp *op, const quire_tiles *tiles, int64_t pair, int64_t row, int64_t end,
                    Scratch *scratch, float *y, int64_t stride) noexcept nogil:
    """Multiply rows [row, end) by one pair of panels, split evenly so that no tile is left with a single row.

    Each tile prefetches an equal share of the next pair, so that memory never waits for arithmetic.
    """
    cdef quire_linear_tile tile
    cdef int64_t width = op.input.rows.width
    cdef int64_t most = tiles.linear_rows[op.weight_dtype], calls = (end - row + most - 1) // most, call, n
    cdef int64_t lines = 2 * op.panel_bytes // (width // 32) // 64        # of the next pair, per 32 of K
    tile.w = op.panels + 2 * pair * op.panel_bytes
    tile.scales = op.scales + pair * width if op.scales != NULL else NULL    # 2 panels * width / 32 * 16
    tile.panel_bytes = op.panel_bytes
    tile.next = <const char *>tile.w + 2 * op.panel_bytes
    tile.scratch = scratch + 1
    tile.factors = scratch.factors if op.squares != NULL else NULL
    tile.bias = op.bias + 32 * pair if op.bias != NULL else NULL
    tile.c, tile.ldc = y, stride
    tile.epilogue = op.epilogue
    tile.a.width = width
    for call in range(calls):
        n = (end - row) // (calls - call)
        tile.next_lines = <int>(lines * (call + 1) // calls - lines * call // calls)
        tile.a.data = <char *>op.input.rows.data + row * width * quire_itemsize(op.input.dtype)
        if op.input.dtype == QUIRE_Q8:
            tile.a.scales = op.input.rows.scales + row * (width // 32)
            tile.a.sums = op.input.rows.sums + row * (width // 32)
        tiles.linear[op.weight_dtype](<int>n, &tile)
        tile.next += tile.next_lines * 64 * (width // 32)
        tile.c += n * stride
        if tile.factors != NULL:
            tile.factors += n
        row += n
