# cython: language_level=3
"""Linear layers: workers take blocks of output columns dynamically. The tile is simd/linear.c.

An item is one span of output columns, with the whole of K, for one group of rows. A span is a block of 32 columns,
or the blocks that share a scale where `out` is q8 in groups. Where blocks of a norm share a scale, the worker that
writes the last of them reads all of them from `out` again and quantizes them. An item is computed by one worker, so the
bits depend neither on the number of threads nor on the worker. In a mixture of experts each group has the weights of
its expert.
Each worker has a share of the spans, the same in every step, and begins with that; a worker that has finished its
share takes items from the end of another share.

A worker computes an item in its scratch. If it loses its core meanwhile, another worker that has nothing left computes
that item again (`help_linear`), and the first of the two writes it, in the dtypes that the next op reads: a block has
its own scale.
"""
from libc.stdint cimport int32_t, uint16_t, uint64_t
from libc.string cimport memcpy

from .isa cimport (QUIRE_ADD, QUIRE_BF16, QUIRE_BLOCK, QUIRE_F32, QUIRE_GELU, QUIRE_Q4, QUIRE_Q8, QUIRE_STORE,
                   QUIRE_SUPER_BLOCK, QUIRE_SWIGLU, quire_block_sums, quire_itemsize, quire_linear, quire_linear_tile,
                   quire_packed_bytes, quire_row_class, quire_rows, quire_unpacked_bytes)
from .lora cimport add_adapters, has_adapters
from .pool cimport (quire_share_count, quire_share_held, quire_share_hold, quire_share_left, quire_share_release,
                    quire_share_take)
from .step cimport end_item, first_item


cdef extern from *:
    """
    // In assembly, because compilers make it a plain prefetch unless the build says that the processor has this one.
    static inline void prefetch_to_write(const void *line) {
    #if defined __x86_64__
      __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line));
    #else
      __builtin_prefetch(line, 1);
    #endif
    }

    // Return the new count; the caller sees all that was written before it was counted.
    static inline uint64_t count_block(uint64_t *count) { return __atomic_add_fetch(count, 1, __ATOMIC_ACQ_REL); }
    """
    void prefetch_to_write(const void *line) noexcept nogil
    uint64_t count_block(uint64_t *count) noexcept nogil


cdef struct Scratch:                # scratch memory of one worker
    float factors[ROWS_IN_CACHE]    # factor of each row, if the op has any
    int64_t group                   # group whose rows have the `factors` and sums of blocks here, or -1
    int64_t padding[7]              # padding to a whole cache line
    float results[ROWS_IN_CACHE * QUIRE_BLOCK]  # results of an item's first block; results of its other blocks follow


cdef struct Item:
    int64_t group, row, end         # rows [row, end)
    int64_t out_row, out_column     # place of the results
    int64_t block, blocks           # first block of the span, number of blocks
    const Weight *weight


cdef struct Pair:                   # a pair of panels
    const Panels *part              # the part that the pair belongs to
    int64_t panel                   # first panel of the pair
    char *data                      # NULL: no pair


cdef int64_t linear_scratch_bytes(int64_t width, bint has_minimums, bint has_half_blocks, list dtypes, int64_t span,
                                  int64_t group):
    """Return the bytes of one worker: `Scratch`, results of the other blocks of a span, sums of blocks, then of half
    blocks, packed rows, then an unpacked pair of panels of these dtypes. `group` is the number of blocks that share a
    scale.
    """
    return (_results_end(span) + (_block_sums_bytes(width) if has_minimums else 0)
            + (_half_sums_bytes(width) if has_half_blocks else 0)
            + max([packed_rows_bytes(dtype, width, group) for dtype in dtypes])
            + 2 * max([quire_unpacked_bytes(dtype, width) for dtype in dtypes]))


cdef int64_t packed_rows_bytes(int dtype, int64_t width, int64_t group) noexcept:
    """Return the bytes of rows that are packed for weights of a dtype, if a function packs them."""
    if dtype == QUIRE_BF16:
        return quire_packed_bytes(QUIRE_BF16, width, 1, ROWS_IN_CACHE)
    return quire_packed_bytes(QUIRE_Q8, width, group, ROWS_IN_CACHE) if dtype in (QUIRE_Q8, QUIRE_Q4) else 0


cdef int64_t _results_end(int64_t span) noexcept nogil:
    """Return where the results of an item end in a worker's scratch."""
    return <int64_t>sizeof(Scratch) + (span - 1) * ROWS_IN_CACHE * QUIRE_BLOCK * <int64_t>sizeof(float)


cdef quire_block_sums *_block_sums(const LinearOp *op, Scratch *scratch) noexcept nogil:
    return <quire_block_sums *>(<char *>scratch + _results_end(op.span))


cdef int32_t *_half_sums(const LinearOp *op, Scratch *scratch) noexcept nogil:
    cdef int64_t before = _block_sums_bytes(op.input.rows.width) if op.has_minimums else 0
    return <int32_t *>(<char *>_block_sums(op, scratch) + before)


cdef char *_packed_rows(const LinearOp *op, Scratch *scratch) noexcept nogil:
    cdef int64_t before = _half_sums_bytes(op.input.rows.width) if op.has_half_blocks else 0
    return <char *>_half_sums(op, scratch) + before


cdef int64_t _block_sums_bytes(int64_t width) noexcept nogil:
    return ROWS_IN_CACHE * (width // QUIRE_SUPER_BLOCK) * <int64_t>sizeof(quire_block_sums)


cdef int64_t _half_sums_bytes(int64_t width) noexcept nogil:
    return ROWS_IN_CACHE * (width // QUIRE_BLOCK) * <int64_t>sizeof(int32_t)


cdef int64_t num_items(const LinearOp *op, const Step *step) noexcept nogil:
    return _num_groups(op, step) * op.num_spans


cdef int64_t run_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, quire_share *shares,
                        uint64_t number, int worker, int workers) noexcept nogil:
    """Compute items until none is left: those of the worker's own share, then those of others. Return their number.

    `number` is that of the op in `shares`.
    """
    cdef Scratch *scratch = _scratch(step, worker)
    cdef int64_t groups = _num_groups(op, step), first, spans, taken, index, next, computed = 0
    cdef int owner = worker
    while owner >= 0:
        first = _first_span(op, owner, workers)
        spans = _first_span(op, owner + 1, workers) - first
        taken = quire_share_take(&shares[owner], number, groups * spans, owner != worker)
        if taken < 0:
            owner = _latest(op, shares, number, groups, workers)
            continue
        next = -1
        if quire_share_left(&shares[owner], number, groups * spans):
            next = _index(op, first, spans, taken + 1 if owner == worker else taken - 1)
        index = _index(op, first, spans, taken)
        quire_share_hold(&shares[worker], number, index + 1)
        _compute(op, step, tiles, index, next, scratch)
        computed += _write(op, step, tiles, index, scratch, number, &shares[worker], &shares[worker])
    return computed


cdef void help_linear(const LinearOp *op, const Step *step, const quire_tiles *tiles, quire_share *shares,
                      uint64_t number, int worker, int workers) noexcept nogil:
    """Compute again the items that other workers hold, and write each item that this worker finishes first."""
    cdef Scratch *scratch = _scratch(step, worker)
    cdef int64_t held
    cdef int other
    for other in range(workers):
        held = quire_share_held(&shares[other], number)
        if held:
            _compute(op, step, tiles, held - 1, -1, scratch)
            _write(op, step, tiles, held - 1, scratch, number, &shares[other], &shares[worker])


cdef Scratch *_scratch(const Step *step, int worker) noexcept nogil:
    cdef Scratch *scratch = <Scratch *>(step.scratch + worker * step.scratch_bytes)
    scratch.group = -1
    return scratch


cdef int64_t _first_row(const LinearOp *op, const Step *step) noexcept nogil:
    return first_item(step, step.samples if op.sampled else step.rows)


cdef int64_t _num_rows(const LinearOp *op, const Step *step) noexcept nogil:
    """Return the number of rows from the first one on that the step computes."""
    return end_item(step, step.samples if op.sampled else step.rows) - _first_row(op, step)


cdef int64_t _num_groups(const LinearOp *op, const Step *step) noexcept nogil:
    if op.groups != NULL:
        return op.groups[0]
    return op.heads * ((_num_rows(op, step) + ROWS_IN_CACHE - 1) // ROWS_IN_CACHE)


cdef int64_t _index(const LinearOp *op, int64_t first, int64_t spans, int64_t taken) noexcept nogil:
    """Return the index of an item of a share, which has `spans` spans of each group from span `first` on."""
    return taken // spans * op.num_spans + first + taken % spans


cdef Item _item(const LinearOp *op, const Step *step, int64_t index) noexcept nogil:
    cdef Item item
    cdef int64_t rows = _num_rows(op, step), groups = _num_groups(op, step) // op.heads, first = _first_row(op, step)
    cdef int64_t head
    cdef const int32_t *group
    item.group = index // op.num_spans
    item.block = index % op.num_spans * op.span
    item.weight = op.weights
    item.blocks = min(op.span, op.num_blocks - item.block)
    if op.groups == NULL:
        head = item.group // groups
        item.out_row = first + rows * (item.group % groups) // groups
        item.row = head * op.capacity + item.out_row
        item.end = head * op.capacity + first + rows * (item.group % groups + 1) // groups
        item.weight = op.weights + head
        item.out_column = head * op.head_columns + item.block * QUIRE_BLOCK
    else:
        group = op.groups + (1 + item.group) * op.groups_width
        item.weight = op.weights + group[0]
        item.row = item.out_row = group[1]
        item.end = group[2]
        item.out_column = item.block * QUIRE_BLOCK
    return item


cdef int64_t _first_span(const LinearOp *op, int worker, int workers) noexcept nogil:
    """Return where a worker's share of the spans begins."""
    return op.num_spans * worker // workers


cdef int _latest(const LinearOp *op, const quire_share *shares, uint64_t number, int64_t groups,
                 int workers) noexcept nogil:
    """Return the worker whose share has the most items left; -1 if none has any."""
    cdef int worker, latest = -1
    cdef int64_t spans, left, most = 0
    for worker in range(workers):
        spans = _first_span(op, worker + 1, workers) - _first_span(op, worker, workers)
        left = quire_share_left(&shares[worker], number, groups * spans)
        if left > most:
            latest = worker
            most = left
    return latest


cdef void _compute(const LinearOp *op, const Step *step, const quire_tiles *tiles, int64_t index, int64_t next,
                   Scratch *scratch) noexcept nogil:
    """Compute an item in scratch, and prefetch the panels of item `next` unless it is -1."""
    cdef Item item = _item(op, step, index), next_item
    cdef Pair pair, next_pair, after
    cdef int64_t per_block = 2 if op.epilogue >= QUIRE_SWIGLU else 1    # pairs of panels of a block: of gate and up
    cdef int64_t first = per_block * item.block, pairs = per_block * item.blocks, i
    cdef int64_t size = (item.end - item.row) * item.blocks * QUIRE_BLOCK
    cdef float *y = scratch.results
    cdef bint adapted = op.lora != NULL and has_adapters(step, item.row, item.end)
    after.data = NULL
    if next >= 0:
        next_item = _item(op, step, next)
        after = _pair(&next_item, per_block * next_item.block)
    if item.group != scratch.group:
        _prepare_group(op, tiles, &item, scratch)
    pair = _pair(&item, first)
    for i in range(pairs):          # a pair: 32 columns; with a gate, 16 columns of gate and 16 of up
        next_pair = _pair(&item, first + i + 1) if i + 1 < pairs else after
        if adapted:
            _multiply_adapted(op, step, tiles, &item, pair, next_pair, scratch, y + i * QUIRE_BLOCK // per_block)
        else:
            _multiply(op, tiles, &item, pair, next_pair, scratch, y + i * QUIRE_BLOCK // per_block,
                      item.blocks * QUIRE_BLOCK, op.epilogue)
        pair = next_pair
    if QUIRE_GELU <= op.epilogue < QUIRE_SWIGLU:
        tiles.activate(op.epilogue, y, size)
    if op.softcap > 0:
        tiles.soft_cap(y, size, op.softcap)


cdef void _prepare_group(const LinearOp *op, const quire_tiles *tiles, const Item *item,
                         Scratch *scratch) noexcept nogil:
    """Compute the values of a group's rows that all its items need."""
    cdef quire_rows rows
    cdef const quire_linear *linear
    cdef int part
    if op.has_factors:
        _compute_factors(op, tiles, item, scratch.factors)
    if op.has_minimums:
        rows = _input_rows(op, item.row)
        tiles.sum_blocks(&rows, item.end - item.row, _block_sums(op, scratch))
    if op.has_half_blocks:
        rows = _input_rows(op, item.row)
        tiles.sum_halves(&rows, item.end - item.row, _half_sums(op, scratch))
    for part in range(item.weight.num_parts):   # functions that read packed rows read the same ones
        linear = &tiles.linear[item.weight.parts[part].dtype][quire_row_class(item.end - item.row)]
        if linear.pack != NULL:
            rows = _input_rows(op, item.row)
            linear.pack(&rows, <int>(item.end - item.row), _packed_rows(op, scratch))
            break
    scratch.group = item.group


cdef quire_rows _input_rows(const LinearOp *op, int64_t row) noexcept nogil:
    """Return the activations from a row on."""
    cdef quire_rows rows = op.input.rows
    rows.data = <char *>rows.data + row * rows.width * quire_itemsize(op.input.dtype)
    if op.input.dtype == QUIRE_Q8:
        rows.scales += row * (rows.width // 32)
        rows.sums += row * (rows.width // 32)
    return rows


cdef void _compute_factors(const LinearOp *op, const quire_tiles *tiles, const Item *item,
                           float *factors) noexcept nogil:
    cdef int64_t row
    if op.squares != NULL:
        tiles.rms_factors(op.squares + item.row * op.squares_width, op.squares_width, item.end - item.row,
                          op.input.columns, op.eps, factors)
    for row in range(item.end - item.row):
        factors[row] = factors[row] * op.scale if op.squares != NULL else op.scale


cdef bint _write(const LinearOp *op, const Step *step, const quire_tiles *tiles, int64_t index, Scratch *scratch,
                 uint64_t number, quire_share *holder, quire_share *writer) noexcept nogil:
    """Write the results of an item, while they are in cache; return False if another worker writes them."""
    cdef Item item = _item(op, step, index)
    cdef int64_t rows = item.end - item.row, columns = item.blocks * QUIRE_BLOCK
    cdef float *y = scratch.results
    if not quire_share_release(holder, number, index + 1):
        return False
    if op.epilogue == QUIRE_ADD:
        tiles.add_columns(y, rows, _out(op, &item), op.out.rows.width)
    elif op.out.dtype == QUIRE_F32:
        _copy(y, rows, _out(op, &item), op.out.rows.width)
    if op.written != NULL:
        _norm_blocks(op, tiles, &item)
    elif op.converts:
        tiles.convert(y, columns, rows, columns, &op.converted, item.out_row, item.out_column)
    if op.maxima != NULL:
        tiles.block_maxima(y, QUIRE_BLOCK, rows, min(QUIRE_BLOCK, op.out.columns - item.block * QUIRE_BLOCK),
                           op.maxima + item.row * op.maxima_width + item.block, op.maxima_width)
    quire_share_count(writer, number)
    return True


cdef void _norm_blocks(const LinearOp *op, const quire_tiles *tiles, const Item *item) noexcept nogil:
    """Count an item's block; if it is the last one of the blocks that share a scale, write their norm.

    Each run of the op counts each block once, so the counts need no reset.
    """
    cdef int64_t share = op.converted.rows.group, shares = (op.num_blocks + share - 1) // share
    cdef int64_t first = item.block // share * share, blocks = min(share, op.num_blocks - first)
    cdef int64_t column = first * QUIRE_BLOCK, columns = min(blocks * QUIRE_BLOCK, op.out.columns - column)
    cdef int64_t width = op.out.rows.width
    if count_block(&op.written[item.group * shares + item.block // share]) % <uint64_t>blocks == 0:
        tiles.convert(<float *>op.out.rows.data + item.row * width + column, width, item.end - item.row, columns,
                      &op.converted, item.row, column)


cdef void _prefetch_out(const LinearOp *op, const Item *item, int64_t row, int64_t rows) noexcept nogil:
    """Prefetch the memory of the results of some rows: they lie far apart, and other workers have read them."""
    cdef const float *out = _out(op, item)
    cdef int64_t index
    for index in range(row - item.row, row - item.row + rows):
        prefetch_to_write(out + index * op.out.rows.width)
        prefetch_to_write(out + index * op.out.rows.width + 16)


cdef float *_out(const LinearOp *op, const Item *item) noexcept nogil:
    return <float *>op.out.rows.data + item.out_row * op.out.rows.width + item.out_column


cdef void _copy(const float *y, int64_t rows, float *out, int64_t stride) noexcept nogil:
    """Copy some rows of one block."""
    cdef int64_t row
    for row in range(rows):
        memcpy(out + row * stride, y + row * QUIRE_BLOCK, QUIRE_BLOCK * sizeof(float))


cdef Pair _pair(const Item *item, int64_t index) noexcept nogil:
    """Return a pair of panels of the item's weight."""
    cdef Pair pair
    cdef int part = item.weight.num_parts - 1
    pair.panel = 2 * index
    while item.weight.parts[part].first_panel > pair.panel:
        part -= 1
    pair.part = &item.weight.parts[part]
    pair.data = pair.part.data + (pair.panel - pair.part.first_panel) * pair.part.panel_bytes
    return pair


cdef const uint16_t *_scales(const Pair *pair) noexcept nogil:
    return pair.part.scales + (pair.panel - pair.part.first_panel) * pair.part.panel_scales


cdef void _multiply_adapted(const LinearOp *op, const Step *step, const quire_tiles *tiles, const Item *item, Pair pair,
                            Pair next, Scratch *scratch, float *y) noexcept nogil:
    """Multiply, and add the products of adapters before the gates, for which two panels give 16 columns."""
    cdef int64_t stride = item.blocks * QUIRE_BLOCK, rows = item.end - item.row
    cdef float *columns = <float *>(<char *>scratch + op.lora_scratch)
    if op.epilogue < QUIRE_SWIGLU:
        _multiply(op, tiles, item, pair, next, scratch, y, stride, op.epilogue)
        add_adapters(op.lora, &op.lora_rows, step, tiles, item.row, item.end, pair.panel, y, stride)
    else:
        _multiply(op, tiles, item, pair, next, scratch, columns, QUIRE_BLOCK, QUIRE_STORE)
        add_adapters(op.lora, &op.lora_rows, step, tiles, item.row, item.end, pair.panel, columns, QUIRE_BLOCK)
        tiles.gate_columns(op.epilogue, columns, rows, y, stride)


cdef void _multiply(const LinearOp *op, const quire_tiles *tiles, const Item *item, Pair pair, Pair next,
                    Scratch *scratch, float *y, int64_t stride, int epilogue) noexcept nogil:
    """Multiply an item's rows by one pair of panels, split evenly so that no tile is left with a single row.

    Each tile prefetches an equal share of the pair `next`, so that memory never waits for arithmetic.
    """
    cdef quire_linear_tile tile
    cdef const Panels *part = pair.part
    cdef int64_t width = op.input.rows.width, row = item.row, end = item.end
    cdef const quire_linear *linear = &tiles.linear[part.dtype][quire_row_class(end - row)]
    cdef int64_t calls = (end - row + linear.rows - 1) // linear.rows, call, n, lines = 0
    tile.w = pair.data
    tile.scales = _scales(&pair) if part.scales != NULL else NULL
    tile.panel_bytes = part.panel_bytes
    tile.next = next.data
    if next.data != NULL:
        lines = 2 * next.part.panel_bytes // (width // 32) // 64    # lines of `next` per 32 of K
    tile.block_sums = _block_sums(op, scratch) if op.has_minimums else NULL
    tile.half_sums = _half_sums(op, scratch) if op.has_half_blocks else NULL
    tile.packed = _packed_rows(op, scratch) if linear.pack != NULL else NULL
    tile.scratch = _packed_rows(op, scratch) + op.packed_bytes
    tile.factors = scratch.factors if op.has_factors else NULL
    tile.bias = item.weight.bias + 16 * pair.panel if item.weight.bias != NULL else NULL
    tile.c = y
    tile.ldc = stride
    tile.epilogue = epilogue
    tile.next_scales = NULL
    if next.data != NULL and next.part.scales != NULL:
        tile.next_scales = <char *>_scales(&next)
    for call in range(calls):
        n = (end - row) // (calls - call)
        tile.next_lines = <int>(lines * (call + 1) // calls - lines * call // calls)
        tile.a = _input_rows(op, row)
        if op.out.dtype == QUIRE_F32:
            _prefetch_out(op, item, row, n)
        linear.multiply(<int>n, &tile)
        tile.next += tile.next_lines * 64 * (width // 32)
        tile.next_scales = NULL
        tile.c += n * tile.ldc
        if tile.block_sums != NULL:
            tile.block_sums += n * (width // QUIRE_SUPER_BLOCK)
        if tile.half_sums != NULL:
            tile.half_sums += n * (width // QUIRE_BLOCK)
        if tile.factors != NULL:
            tile.factors += n
        row += n
