# cython: language_level=3
"""Paged grouped-query attention: the loops over sequences, KV heads, query tiles, splits, tiles and pages.

Prefill and decode run the same loops. Tiles of 64 tokens and splits of 256 are anchored at absolute position 0 and
merged in ascending order, so a row's arithmetic depends neither on the worker nor on the rest of the step.

A sequence with one row stores its own key and value before it attends, so a step that only decodes needs no barrier.
Rows of a longer chunk see each other, so their keys and values are all stored first, followed by a barrier.
"""
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, uint16_t
from libc.string cimport memcpy, memset

from .heads cimport heads_of, load_queries, store_rows
from .isa cimport (QUIRE_F32, QUIRE_LANES, QUIRE_Q8, QUIRE_TILE, quire_attention_tile, quire_itemsize,
                   quire_kv_index, quire_page, quire_query_dtype, quire_row_class, quire_rows)
from .latent cimport load_latent_queries, store_latents
from .pool cimport quire_next_run, quire_run, quire_signal, quire_signal_await, quire_signal_set
from .step cimport end_item, first_item, page_at, table_of

cdef enum:
    SPLIT = 256
    SHARED_HEADS = 3                # per worker: the most KV heads that are divided into splits


# The softmax of some rows after some splits.
cdef struct State:
    float *m                        # [64] running maximum
    float *l                        # [64] running sum
    float *o                        # [64][padded_head_dim] running output


# One worker's buffers for the rows of a query tile, carved from its scratch.
cdef struct Workspace:
    quire_rows q            # [64][padded_head_dim] query dtype
    char *p                 # [64][64] query dtype; two such arrays for int8
    float *s                # [64][64]
    State split
    State total
    int64_t *oldest         # [64] the first token that a row sees
    int64_t *newest         # [64] the last token that a row sees
    char *v                 # [64][value_dim] KV dtype, if values are in keys: values of a tile
    float *v_scales         # [64] for int8 their scales


# A KV head whose splits several workers compute; they merge them into `total` in order.
cdef struct SharedHead:
    quire_signal *merged            # number of splits that are merged
    State total


# Some queries of one KV head, and the tokens to which they attend.
cdef struct Unit:
    int64_t sequence
    int64_t head
    int64_t first_row, queries
    int64_t first_position          # position of the first query
    int64_t begin, end              # tokens; `begin` is the first token of a tile
    bint decodes                    # the sequence has one row in this step


cdef int64_t _state_bytes(int64_t d) noexcept nogil:
    return QUIRE_TILE * (d + 2) * sizeof(float)


cdef int64_t _shared_head_bytes(int64_t d) noexcept nogil:
    return sizeof(quire_signal) + _state_bytes(d)


cdef int64_t attention_scratch_bytes(int64_t padded_head_dim, int64_t values_in_keys) noexcept nogil:
    """Return the bytes of one worker's `Workspace`."""
    cdef int64_t d = padded_head_dim, values = QUIRE_TILE * (values_in_keys + 1) * 4 if values_in_keys else 0
    return QUIRE_TILE * (d * 4 + 2 * QUIRE_TILE * 4 + 16) + 2 * _state_bytes(d) + values


cdef int64_t attention_shared_bytes(int64_t padded_head_dim) noexcept nogil:
    """Return the bytes at the end of each worker's scratch that hold shared heads. They must start as zeros."""
    return SHARED_HEADS * _shared_head_bytes(padded_head_dim)


cdef State _state(char *memory, int64_t d) noexcept nogil:
    cdef State state
    state.o = <float *>memory
    state.m = state.o + QUIRE_TILE * d
    state.l = state.m + QUIRE_TILE
    return state


cdef Workspace _workspace(char *scratch, int64_t d) noexcept nogil:
    cdef Workspace workspace
    workspace.q.data = scratch
    workspace.q.width, workspace.q.group = d, 0
    workspace.q.scales = <float *>(scratch + QUIRE_TILE * d)                     # int8 scales, after the data
    workspace.q.sums = <int32_t *>(workspace.q.scales + QUIRE_TILE * d // 32)
    workspace.s = <float *>(scratch + QUIRE_TILE * d * 4)
    workspace.p = <char *>(workspace.s + QUIRE_TILE * QUIRE_TILE)
    workspace.oldest = <int64_t *>(workspace.p + QUIRE_TILE * QUIRE_TILE * 4)
    workspace.newest = workspace.oldest + QUIRE_TILE
    workspace.split = _state(<char *>(workspace.newest + QUIRE_TILE), d)
    workspace.total = _state(<char *>(workspace.newest + QUIRE_TILE) + _state_bytes(d), d)
    workspace.v_scales = <float *>(<char *>(workspace.newest + QUIRE_TILE) + 2 * _state_bytes(d))
    workspace.v = <char *>(workspace.v_scales + QUIRE_TILE)
    return workspace


cdef SharedHead _shared_head(const Step *step, int64_t index, int64_t d, int workers) noexcept nogil:
    cdef SharedHead shared
    cdef int64_t bytes = _shared_head_bytes(step.padded_head_dim)
    cdef char *end = step.scratch + (index % workers + 1) * step.scratch_bytes
    cdef char *memory = end - (index // workers + 1) * bytes
    shared.merged = <quire_signal *>memory
    shared.total = _state(memory + sizeof(quire_signal), d)
    return shared


cdef bint partitions_by_split(const Step *step, int64_t num_kv_heads, int workers) noexcept nogil:
    """Return whether the heads are too few for the workers, so that splits of decoding sequences are units of work."""
    return workers > 1 and step.sequences * num_kv_heads <= SHARED_HEADS * workers


cdef int64_t num_units(const Step *step, int64_t sequence, const Partition *partition) noexcept nogil:
    """Return a sequence's units of work: query tiles, or splits of a decoding sequence, times KV heads."""
    cdef int64_t rows = step.row_start[sequence + 1] - step.row_start[sequence]
    if rows > 1:
        return (rows + partition.query_tile - 1) // partition.query_tile * partition.num_kv_heads
    if partition.by_split:
        return (step.first_position[sequence] // SPLIT + 1) * partition.num_kv_heads
    return partition.num_kv_heads


cdef int64_t run_attention(const AttentionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                           int worker, int workers) noexcept nogil:
    """Compute the step's units of work until none is left, and return their number.

    A free worker takes the next unit: the last query tiles first, because they take longest; splits in ascending order.
    For query tiles it takes adjacent heads of the same rows.
    """
    cdef Workspace workspace = _workspace(step.scratch + worker * step.scratch_bytes, op.heads.slot.padded_head_dim)
    cdef int64_t chunk_units = num_chunk_units(op, step), items = num_attention_items(op, step), index, computed = 0
    cdef int64_t first_index = max(<int64_t>0, first_item(step, items) - chunk_units)
    cdef int64_t end_index = max(<int64_t>0, end_item(step, items) - chunk_units)
    cdef bint by_split = op.partition.by_split
    cdef int64_t most = op.heads.num_kv_heads if chunk_units and not by_split else 1, next_index
    cdef Unit unit, next_unit
    cdef quire_run run
    unit.sequence = step.sequences - 1
    while quire_next_run(counter, end_index - first_index, workers, most, &run):
        for index in range(end_index - 1 - run.first, end_index - 1 - run.end, -1):
            next_index = index - 1
            if index == end_index - run.end:    # last unit of the run; the other workers took a run each
                next_index -= (workers - 1) * (run.end - run.first)
            unit = _unit(op, step, index, unit.sequence)
            next_unit = _unit(op, step, max(first_index, next_index), unit.sequence)
            if (op.heads.stores and unit.decodes and not step.stores_first
                    and unit.end > step.first_position[unit.sequence]):
                _store(op, step, tiles, unit.sequence, step.first_position[unit.sequence] // step.page_size, unit.head)
            if unit.decodes and by_split:
                _attend_shared_split(op, step, tiles, &workspace, &unit, &next_unit, workers)
            else:
                _attend_tile(op, step, tiles, &workspace, &unit, &next_unit)
        computed += run.end - run.first
    return computed


cdef Unit _unit(const AttentionOp *op, const Step *step, int64_t index, int64_t sequence) noexcept nogil:
    """Return a unit of work, which belongs to `sequence` or an earlier one."""
    cdef Unit unit
    cdef const int64_t *unit_start = op.partition.unit_start
    cdef int64_t heads = op.heads.num_kv_heads, count, skipped = 0, split, tile = op.partition.query_tile
    cdef bint by_split = op.partition.by_split
    while unit_start[sequence] > index:
        sequence -= 1
    count = unit_start[sequence + 1] - unit_start[sequence]
    index -= unit_start[sequence]
    unit.sequence, unit.first_row = sequence, step.row_start[sequence]
    unit.queries = step.row_start[sequence + 1] - unit.first_row
    unit.decodes = unit.queries == 1
    if unit.decodes and by_split:
        index = count - 1 - index
    unit.head = index % heads
    if not unit.decodes:
        skipped = index // heads * tile
        unit.queries = min(tile, unit.queries - skipped)
    unit.first_row += skipped
    unit.first_position = step.first_position[sequence] + skipped
    unit.begin = _oldest(op, unit.first_position) // QUIRE_TILE * QUIRE_TILE
    unit.end = _newest(op, step, sequence, unit.first_position + unit.queries - 1) + 1
    if unit.decodes and by_split:
        split = index // heads * SPLIT
        unit.begin, unit.end = max(unit.begin, split), min(unit.end, split + SPLIT)
    return unit


cdef int64_t num_chunk_units(const AttentionOp *op, const Step *step) noexcept nogil:
    return step.block_start[step.sequences] * op.stored_heads if op.heads.stores else 0


cdef int64_t num_attention_items(const AttentionOp *op, const Step *step) noexcept nogil:
    """Return the number of items of the whole op: units that store, then units that attend."""
    return num_chunk_units(op, step) + op.partition.unit_start[step.sequences]


cdef int64_t store_chunks(const AttentionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                          int workers) noexcept nogil:
    """Store keys and values of chunks of several rows until no unit of the step is left; return the number of units.

    A unit is one KV head of one page, so each head of a page is written by one worker.
    """
    cdef int64_t heads = op.stored_heads, items = num_attention_items(op, step)
    cdef int64_t first = first_item(step, items), end = min(num_chunk_units(op, step), end_item(step, items))
    cdef int64_t unit, block, sequence = 0, stored = 0
    cdef quire_run run
    while quire_next_run(counter, end - first, workers, heads, &run):
        for unit in range(first + run.first, first + run.end):
            block = unit // heads
            while step.block_start[sequence + 1] <= block:
                sequence += 1
            block += step.first_position[sequence] // step.page_size - step.block_start[sequence]
            _store(op, step, tiles, sequence, block, unit % heads)
        stored += run.end - run.first
    return stored


cdef void _store(const AttentionOp *op, const Step *step, const quire_tiles *tiles, int64_t sequence, int64_t page,
                 int64_t head) noexcept nogil:
    """Store the keys and values of one KV head for the rows of a sequence that lie in its page number `page`."""
    if op.latent.rank:
        store_latents(&op.latent, &op.heads.slot, step, tiles, sequence, page)
    else:
        store_rows(&op.heads, step, tiles, sequence, page, head)


cdef void _attend_tile(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Workspace *workspace,
                       const Unit *unit, const Unit *next_unit) noexcept nogil:
    """Attend with all query heads of one KV head for up to `query_tile` queries; each KV byte is read once."""
    cdef int64_t split = unit.begin // SPLIT * SPLIT + SPLIT
    _load_queries(op, step, tiles, workspace, unit)
    _attend_split(op, step, tiles, workspace, &workspace.total, unit, unit.begin, next_unit)
    while split < unit.end:
        _attend_split(op, step, tiles, workspace, &workspace.split, unit, split, next_unit)
        _merge(tiles, unit.queries * op.heads.group, op.value_dim, &workspace.split, &workspace.total)
        split += SPLIT
    _write_output(op, tiles, workspace, &workspace.total, unit)


cdef void _attend_shared_split(const AttentionOp *op, const Step *step, const quire_tiles *tiles,
                               const Workspace *workspace, const Unit *unit, const Unit *next_unit,
                               int workers) noexcept nogil:
    """Attend to one split of a decoding row and merge it after all earlier splits. The last split writes the output."""
    cdef SharedHead shared = _shared_head(step, unit.sequence * op.heads.num_kv_heads + unit.head, workspace.q.width,
                                          workers)
    cdef int64_t first_split = _oldest(op, unit.first_position) // SPLIT, split = unit.begin // SPLIT
    cdef bint is_last = unit.end > unit.first_position
    cdef State total = shared.total
    if unit.begin >= unit.end:      # the row sees no token of the split
        return
    _load_queries(op, step, tiles, workspace, unit)
    _attend_split(op, step, tiles, workspace, &workspace.split, unit, unit.begin, next_unit)
    quire_signal_await(shared.merged, <unsigned>(split - first_split))
    if split == first_split:
        memset(total.l, 0, op.heads.group * sizeof(float))      # 0: `merge` reads no values of an earlier step
    _merge(tiles, op.heads.group, op.value_dim, &workspace.split, &total)
    if is_last:
        _write_output(op, tiles, workspace, &total, unit)
    quire_signal_set(shared.merged, 0 if is_last else <unsigned>(split - first_split) + 1)


cdef int64_t _oldest(const AttentionOp *op, int64_t position) noexcept nogil:
    """Return the first token that a query sees; a causal window includes the query."""
    return max(<int64_t>0, position - op.window + op.causal) if op.window else 0


cdef int64_t _newest(const AttentionOp *op, const Step *step, int64_t sequence, int64_t position) noexcept nogil:
    """Return the last token that a query of `sequence` sees."""
    cdef int64_t last = step.first_position[sequence] + step.row_start[sequence + 1] - step.row_start[sequence] - 1
    if op.causal:
        if step.last_seen == NULL:
            return position
        return step.last_seen[step.row_start[sequence] + position - step.first_position[sequence]]
    return min(last, position + op.window) if op.window else last


cdef void _load_queries(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Workspace *workspace,
                        const Unit *unit) noexcept nogil:
    cdef int64_t r, position
    cdef float *unused = workspace.split.o      # scratch
    if op.latent.rank:
        load_latent_queries(&op.latent, step, tiles, unit.first_row, unit.first_position, unit.queries,
                            unit.head * op.heads.group, op.heads.group, unused, &workspace.q)
    else:
        load_queries(&op.heads, step, tiles, unit.first_row, unit.first_position, unit.queries, unit.head, unused,
                     &workspace.q)
    for r in range(unit.queries * op.heads.group):
        position = unit.first_position + r // op.heads.group
        workspace.oldest[r], workspace.newest[r] = _oldest(op, position), _newest(op, step, unit.sequence, position)


cdef void _merge(const quire_tiles *tiles, int64_t rows, int64_t d, const State *split,
                 const State *total) noexcept nogil:
    tiles.merge(<int>rows, d, split.m, split.l, split.o, total.m, total.l, total.o)


cdef void _attend_split(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Workspace *workspace,
                        const State *state, const Unit *unit, int64_t token, const Unit *next_unit) noexcept nogil:
    """Compute the rows' softmax over the tokens from `token` to the end of its split, by tiles.

    A call computes each tile only for the rows that see it, and prefetches the tile that follows: the unit's next
    tile, or the first tile of `next_unit`.
    """
    cdef quire_attention_tile tile
    cdef const float *bias[64]      # bias of each row
    cdef int64_t d = workspace.q.width, rows = unit.queries * op.heads.group, r, begin = 0, end
    cdef int64_t split_end = min(token // SPLIT * SPLIT + SPLIT, unit.end)
    for r in range(rows):
        state.m[r] = -INFINITY
        state.l[r] = 0
    memset(state.o, 0, rows * op.value_dim * sizeof(float))     # an earlier step may have left NaN, and 0 * NaN is NaN
    tile.softcap = op.softcap
    tile.bias = NULL
    if op.bias != NULL:
        tile.bias = &bias[0]
    tile.head_dim, tile.value_dim = d, op.value_dim
    tile.page_size = step.page_size
    tile.s = workspace.s
    tile.p = workspace.p
    while token < split_end:
        while workspace.newest[begin] < token:
            begin += 1
        end = rows
        while end > begin and workspace.oldest[end - 1] >= token + QUIRE_TILE:
            end -= 1
        tile.first_token = token
        if op.bias != NULL:
            for r in range(begin, end):
                bias[r - begin] = _bias(op, unit, r, token)
        _point_at_pages(op, step, tiles, workspace, unit, &tile)
        if token + QUIRE_TILE < unit.end:
            _prefetch_pages(op, step, unit, token + QUIRE_TILE, &tile)
        else:
            _prefetch_pages(op, step, next_unit, next_unit.begin, &tile)
        tile.q.data = <char *>workspace.q.data + begin * d * quire_itemsize(quire_query_dtype(step.kv_dtype))
        tile.q.scales = workspace.q.scales + begin * (d // 32)
        tile.q.sums = workspace.q.sums + begin * (d // 32)
        tile.oldest = workspace.oldest + begin
        tile.newest = workspace.newest + begin
        tile.m = state.m + begin
        tile.l = state.l + begin
        tile.o = state.o + begin * op.value_dim
        tiles.attention[quire_kv_index(step.kv_dtype)][quire_row_class(end - begin)](<int>(end - begin), &tile)
        token += QUIRE_TILE


cdef const float *_bias(const AttentionOp *op, const Unit *unit, int64_t row, int64_t token) noexcept nogil:
    """Return the biases of a row's scores for the tokens from `token` on."""
    cdef int64_t head = unit.head * op.heads.group + row % op.heads.group
    cdef int64_t position = unit.first_position + row // op.heads.group
    return op.bias + head * op.bias_columns + op.bias_origin + token - position


cdef void _point_at_pages(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Workspace *workspace,
                          const Unit *unit, quire_attention_tile *tile) noexcept nogil:
    """Look up the pages of one tile. Beyond the unit's end, masked columns point at its last page.

    Values that are in keys are laid out as values in the workspace.
    """
    cdef int64_t page = tile.first_token // step.page_size, last_page = (unit.end - 1) // step.page_size, slot, j
    cdef int64_t panel = 16 * op.heads.slot.padded_head_dim
    cdef const int32_t *table = table_of(step, op.heads.slot.layer_group, unit.sequence)
    cdef quire_page kv
    tile.num_pages = <int>min(QUIRE_TILE // step.page_size, last_page - page + 1)
    for j in range(4):
        kv = page_at(step, &op.heads.slot, table[min(page + 16 * j // step.page_size, last_page)],
                     unit.head % op.stored_heads)
        slot = 16 * j % step.page_size
        tile.k[j] = <char *>kv.k + slot // 16 * panel * quire_itemsize(step.kv_dtype)
        if step.kv_dtype == QUIRE_Q8:
            tile.k_scales[j] = kv.k_scales + slot // 16 * (panel // 32)
            tile.v_scales[j] = kv.v_scales + slot
        tile.v[16 * j // step.page_size] = kv.v
        if op.latent.rank:
            _lay_out_values(op, step, tiles, workspace, j, slot, &kv, tile)


cdef void _lay_out_values(const AttentionOp *op, const Step *step, const quire_tiles *tiles, const Workspace *workspace,
                          int64_t panel, int64_t slot, quire_page *kv, quire_attention_tile *tile) noexcept nogil:
    """Lay out the values of 16 tokens of a tile, which are in the keys of its panel."""
    cdef int64_t page = 16 * panel // step.page_size, size = quire_itemsize(step.kv_dtype)
    cdef char *v = workspace.v + page * step.page_size * op.value_dim * size
    kv.k = <void *>tile.k[panel]
    if step.kv_dtype == QUIRE_Q8:
        kv.k_scales = <uint16_t *>tile.k_scales[panel]
        tile.v_scales[panel] = workspace.v_scales + 16 * panel
    tile.v[page] = v
    if page < tile.num_pages:
        tiles.values_of_keys(kv, op.value_dim, step.page_size, v + slot * 16 * size, workspace.v_scales + 16 * panel)


cdef void _prefetch_pages(const AttentionOp *op, const Step *step, const Unit *unit, int64_t token,
                          quire_attention_tile *tile) noexcept nogil:
    """Let `tile` prefetch the pages of the unit's tile from `token` on; none if the unit ends before."""
    cdef const int32_t *table = table_of(step, op.heads.slot.layer_group, unit.sequence)
    cdef int64_t page = token // step.page_size
    tile.num_next_pages, tile.next_bytes = 0, op.heads.slot.head_bytes
    while tile.num_next_pages < QUIRE_TILE // step.page_size and page * step.page_size < unit.end:
        tile.next[tile.num_next_pages] = <char *>page_at(step, &op.heads.slot, table[page],
                                                         unit.head % op.stored_heads).k
        tile.num_next_pages += 1
        page += 1


cdef void _write_output(const AttentionOp *op, const quire_tiles *tiles, const Workspace *workspace, const State *state,
                        const Unit *unit) noexcept nogil:
    """Write each query's heads side by side, in the dtype that the next linear layer reads."""
    cdef int64_t d = op.value_dim, head_dim = op.heads.head_dim, columns = op.heads.group * head_dim, i, g, r, j
    cdef int64_t queries = unit.queries, first_row = unit.first_row, head = unit.head
    cdef const float *gate
    cdef float *row
    cdef float total
    if op.sinks != NULL:
        _add_sinks(op, tiles, state, queries * op.heads.group, head)
    for i in range(queries):
        row = workspace.split.o + i * columns        # no longer needed
        for g in range(op.heads.group):
            r = i * op.heads.group + g
            total = state.l[r]
            for j in range(head_dim):
                row[g * head_dim + j] = state.o[r * d + j] / total
            if op.gated:        # the elements that follow a head's are written later
                gate = heads_of(&op.heads, first_row + i) + (head * op.heads.group + g) * op.heads.query_stride
                tiles.gate(gate + head_dim, head_dim, row + g * head_dim)
    if op.latent.rank:
        _write_latents(op, tiles, workspace.split.o, unit)
    elif op.out.dtype == QUIRE_F32:
        for i in range(queries):
            row = <float *>op.out.rows.data + (first_row + i) * op.out.rows.width
            memcpy(row + head * columns, workspace.split.o + i * columns, columns * sizeof(float))
            if head + 1 == op.heads.num_kv_heads:       # padding, which may hold other values
                memset(row + (head + 1) * columns, 0, (op.out.rows.width - (head + 1) * columns) * sizeof(float))
    else:
        tiles.convert(workspace.split.o, columns, queries, columns, &op.out, first_row, head * columns)


cdef void _write_latents(const AttentionOp *op, const quire_tiles *tiles, const float *rows,
                         const Unit *unit) noexcept nogil:
    """Write the weighted sums of latents of a unit's heads, each head in its own rows."""
    cdef int64_t rank = op.latent.rank, stride = op.heads.group * rank, g, i, row
    for g in range(op.heads.group):
        row = (unit.head * op.heads.group + g) * op.latent.capacity + unit.first_row
        if op.out.dtype == QUIRE_F32:
            for i in range(unit.queries):
                memcpy(<float *>op.out.rows.data + (row + i) * rank, rows + i * stride + g * rank, rank * sizeof(float))
        else:
            tiles.convert(rows + g * rank, stride, unit.queries, rank, &op.out, row, 0)


cdef void _add_sinks(const AttentionOp *op, const quire_tiles *tiles, const State *state, int64_t rows,
                     int64_t head) noexcept nogil:
    """Add the exponentials of the heads' sinks, relative to each row's maximum, to the sums of the softmax."""
    cdef float x[QUIRE_TILE]
    cdef int64_t padded = (rows + QUIRE_LANES - 1) // QUIRE_LANES * QUIRE_LANES, r
    for r in range(padded):
        x[r] = op.sinks[head * op.heads.group + r % op.heads.group] - state.m[r] if r < rows else 0
    tiles.exp_scaled(x, 0, 1, padded, x)
    for r in range(rows):
        state.l[r] += x[r]
