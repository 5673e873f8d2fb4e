# cython: language_level=3
"""Ops with a state of each sequence, which a step reads and changes in place, and the norm after a recurrence.

An item is some columns of one sequence: its rows are computed in order, one after another, so their division into steps
changes no bit, and the columns of a state stay in cache meanwhile.
"""
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

import numpy as np

from .isa cimport (QUIRE_MAX_KEY, QUIRE_MAX_TAPS, QUIRE_SEGMENT, QUIRE_TOKENS, quire_convolution, quire_recurrence,
                   quire_recurrent_token)
from .ops import SEGMENT, padded
from .pool cimport quire_next_run, quire_run

cdef extern from *:
    """
    static inline void prefetch_line(const void *line) { __builtin_prefetch(line, 1, 2); }
    """
    void prefetch_line(const void *line) noexcept nogil

cdef enum:
    LINE = 16                       # floats of a cache line
    COLUMNS = 128                   # columns of a convolution's item; whole blocks of 32, and of their groups
    MOST_SEGMENTS = 8               # most segments that a worker takes at once: it prefetches the next one of them
    MOST_ROWS = 16                  # most rows of an item of a norm

if SEGMENT != QUIRE_SEGMENT:
    raise ImportError(f"kernels are built for segments of {QUIRE_SEGMENT} columns, not {SEGMENT}")


cdef bind_short_conv(ConvolutionOp *record, op, Regions regions, max_rows):
    """Set the record of a convolution between gates, having checked its sizes."""
    record.input = regions.value(op.input, 3 * op.out.columns, "f32", max_rows)
    record.column, record.num_normed, record.head_dim = 0, 0, 0
    _bind_convolution(record, op, regions, max_rows)
    record.all.part, record.all.eps = op.out.columns, 0


cdef bind_causal_conv(ConvolutionOp *record, op, Regions regions, max_rows):
    """Set the record of a convolution without gates, having checked its sizes."""
    columns = op.out.columns
    if op.column < 0 or op.column + columns > op.input.columns or op.out.dtype != "f32":
        raise ValueError(f"{columns} columns of f32 from column {op.column} on are not in {op.input!r} and {op.out!r}")
    if op.num_normed < 0 or op.num_normed and not 1 <= op.head_dim <= columns // op.num_normed:
        raise ValueError(f"{columns} columns do not have {op.num_normed} heads of {op.head_dim}")
    record.input = regions.value(op.input, op.input.columns, "f32", max_rows)
    record.column, record.num_normed, record.head_dim = op.column, op.num_normed, op.head_dim
    _bind_convolution(record, op, regions, max_rows)
    record.all.part, record.all.eps = 0, op.eps


cdef _bind_convolution(ConvolutionOp *record, op, Regions regions, max_rows):
    columns, taps = op.out.columns, len(op.weight)
    width = padded(columns)
    if op.weight.shape != (taps, columns) or not 1 <= taps <= QUIRE_MAX_TAPS:
        raise ValueError(f"a convolution of {columns} columns has weights [1..{QUIRE_MAX_TAPS}, {columns}], "
                         f"not {list(op.weight.shape)}")
    if op.ring.rows < taps or op.ring.offset < 0 or op.ring.offset % 64:
        raise ValueError(f"{op.ring!r} is not aligned or has less than {taps} rows")
    record.out = regions.output(op.out, columns, max_rows)
    record.columns, record.offset = columns, op.ring.offset
    record.all.taps, record.all.rows, record.all.stride, record.all.is_normed = taps, op.ring.rows, width, False
    weight = np.zeros((taps, width), np.float32)
    weight[:, :columns] = op.weight
    record.all.weight = regions.vector(weight.reshape(-1), taps * width, taps * width)
    record.all.bias = NULL
    if op.bias is not None:
        record.all.bias = regions.vector(op.bias, columns, width)


cdef bind_recurrence(RecurrenceOp *record, op, Regions regions, max_rows):
    """Set the record of a recurrence, having checked its sizes."""
    state, keys = op.state, op.num_key_heads
    heads = state.num_heads
    if not 1 <= state.key_dim <= QUIRE_MAX_KEY or state.value_dim < 1 or state.rollback < 1:
        raise ValueError(f"{state!r} needs keys of 1 to {QUIRE_MAX_KEY} columns, values and a rollback")
    if state.offset < 0 or state.offset % 64 or keys < 1 or heads < 1 or heads % keys:
        raise ValueError(f"{state!r} is not aligned, or {keys} key heads do not divide its heads")
    for first, columns, region in ((op.query, keys * state.key_dim, op.input), (op.key, keys * state.key_dim, op.input),
                                   (op.value, heads * state.value_dim, op.input), (op.decay, heads, op.gates),
                                   (op.rate or 0, heads, op.gates)):
        if first < 0 or first + columns > region.columns:
            raise ValueError(f"{region!r} has no {columns} columns from {first} on")
    record.input = regions.value(op.input, op.input.columns, "f32", max_rows)
    record.gates = regions.value(op.gates, op.gates.columns, "f32", max_rows)
    record.out = regions.value(op.out, heads * state.value_dim, "f32", max_rows)
    record.query, record.key, record.value, record.decay = op.query, op.key, op.value, op.decay
    record.rate = -1 if op.rate is None else op.rate
    record.heads, record.keys, record.group, record.tiled = heads, keys, heads // keys, op.tiled
    record.value_dim = state.value_dim
    record.segments, record.rollback, record.offset = state.segments, state.rollback, state.offset
    record.segment_bytes, record.matrix_bytes = state.segment_bytes, state.matrix_bytes
    record.input_columns = state.input_columns
    record.a, record.bias = regions.vector(op.a, heads, heads), regions.vector(op.bias, heads, heads)
    record.skip = NULL
    if op.skip is not None:
        record.skip = regions.vector(op.skip, heads, heads)
    record.all.key_dim, record.all.width = state.key_dim, state.width
    record.all.is_delta, record.all.is_bf16 = op.rate is not None, state.dtype == "bf16"
    record.all.low, record.all.high = op.time_limits
    record.all.rate_scale, record.all.scale = op.rate_scale, op.scale


cdef bind_gated_norm(GatedNormOp *record, op, Regions regions, max_rows):
    """Set the record of a gated norm, having checked its sizes."""
    columns = op.input.columns
    if op.group < 1 or columns % op.group or op.column < 0 or op.column + columns > op.gate.columns:
        raise ValueError(f"groups of {op.group} do not divide {columns} columns, or {op.gate!r} has fewer than these "
                         f"from {op.column} on")
    record.input = regions.value(op.input, columns, "f32", max_rows)
    record.gate = regions.value(op.gate, op.gate.columns, "f32", max_rows)
    record.column = op.column
    record.out = regions.output(op.out, columns, max_rows)
    record.norm.columns, record.norm.group, record.norm.eps = columns, op.group, op.eps
    record.norm.gate_first, record.norm.weight = op.gate_first, NULL
    if op.weight is not None:
        record.norm.weight = regions.vector(op.weight, columns, columns)


cdef inline char *_state(const Step *step, int64_t sequence, int64_t offset) noexcept nogil:
    return step.states + step.state_slots[sequence] * step.state_bytes + offset


cdef inline int64_t _convolved_segments(const ConvolutionOp *op) noexcept nogil:
    return op.num_normed + (op.columns - op.num_normed * op.head_dim + COLUMNS - 1) // COLUMNS


cdef int64_t num_convolved_items(const ConvolutionOp *op, const Step *step) noexcept nogil:
    """Return the number of items: of each sequence the normed heads, and segments of the other columns."""
    return step.sequences * _convolved_segments(op)


cdef int64_t run_convolution(const ConvolutionOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                             int workers) noexcept nogil:
    cdef int64_t segments = _convolved_segments(op), width = op.input.rows.width, computed = 0
    cdef int64_t item, sequence, segment, column, row, position
    cdef const float *x
    cdef quire_convolution some = op.all
    cdef float out[COLUMNS]
    cdef quire_run run
    while quire_next_run(counter, step.sequences * segments, workers, MOST_SEGMENTS, &run):
        for item in range(run.first, run.end):
            if item + 1 < run.end:
                _prefetch_inputs(op, step, (item + 1) // segments, (item + 1) % segments)
            sequence, segment = item // segments, item % segments
            column, some.columns = _first_column(op, segment), _num_columns(op, segment)
            some.is_normed = segment < op.num_normed
            some.weight = op.all.weight + column
            if op.all.bias != NULL:
                some.bias = op.all.bias + column
            some.ring = <float *>_state(step, sequence, op.offset) + column
            position = step.first_position[sequence]
            for row in range(step.row_start[sequence], step.row_start[sequence + 1]):
                x = <const float *>op.input.rows.data + row * width + op.column + column
                if op.all.part:
                    tiles.convolve(&some, x, position, out)
                    tiles.convert(out, COLUMNS, 1, some.columns, &op.out, row, column)
                else:
                    tiles.convolve(&some, x, position, <float *>op.out.rows.data + row * op.out.rows.width + column)
                position += 1
        computed += run.end - run.first
    return computed


cdef inline int64_t _first_column(const ConvolutionOp *op, int64_t segment) noexcept nogil:
    if segment < op.num_normed:
        return segment * op.head_dim
    return op.num_normed * op.head_dim + (segment - op.num_normed) * COLUMNS


cdef inline int64_t _num_columns(const ConvolutionOp *op, int64_t segment) noexcept nogil:
    if segment < op.num_normed:
        return op.head_dim
    return min(<int64_t>COLUMNS, op.columns - _first_column(op, segment))


cdef void _prefetch_inputs(const ConvolutionOp *op, const Step *step, int64_t sequence,
                           int64_t segment) noexcept nogil:
    """Prefetch the inputs of a segment that the first row of a sequence reads from the ring, and the place of its own.

    These rows lie far apart: without this, their lines would come one after another.
    """
    cdef int64_t first = step.first_position[sequence], position, line
    cdef int64_t lines = (_num_columns(op, segment) + LINE - 1) // LINE
    cdef const float *ring = <const float *>_state(step, sequence, op.offset) + _first_column(op, segment)
    for position in range(max(<int64_t>0, first - op.all.taps + 1), first + 1):
        for line in range(lines):
            prefetch_line(ring + position % op.all.rows * op.all.stride + line * LINE)


cdef int64_t num_recurrent_items(const RecurrenceOp *op, const Step *step) noexcept nogil:
    """Return the number of items: segments of a head's value columns, of each sequence."""
    return step.sequences * op.heads * op.segments


cdef int64_t run_recurrence(const RecurrenceOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                            int workers) noexcept nogil:
    cdef int64_t segments = op.heads * op.segments, computed = 0
    cdef quire_recurrence some = op.all
    cdef int64_t item, head, column
    cdef quire_run run
    while quire_next_run(counter, step.sequences * segments, workers, MOST_SEGMENTS, &run):
        for item in range(run.first, run.end):
            head, column = item % segments // op.segments, item % op.segments * QUIRE_SEGMENT
            some.columns = min(<int64_t>QUIRE_SEGMENT, op.value_dim - column)
            some.a, some.bias = op.a[head], op.bias[head]
            some.skip = op.skip[head] if op.skip != NULL else 0
            some.ahead, some.ahead_bytes = NULL, 0
            if item + 1 < run.end:
                some.ahead = _segment(op, step, item + 1)
                some.ahead_bytes = op.segment_bytes & ~127
            _run_segment(op, step, tiles, &some, item // segments, head, column, _segment(op, step, item))
        computed += run.end - run.first
    return computed


cdef inline char *_segment(const RecurrenceOp *op, const Step *step, int64_t item) noexcept nogil:
    """Return the part of an item in the state of its sequence."""
    cdef int64_t segments = op.heads * op.segments
    return _state(step, item // segments, op.offset) + item % segments * op.segment_bytes


cdef void _run_segment(const RecurrenceOp *op, const Step *step, const quire_tiles *tiles, quire_recurrence *some,
                       int64_t sequence, int64_t head, int64_t column, char *state) noexcept nogil:
    """Compute the rows of a sequence in a segment, and leave in its state the matrix of `rollback` tokens ago.

    The state is read and written once. The matrix of the last tokens is local: those may be rejected.
    """
    cdef float memory[QUIRE_MAX_KEY * QUIRE_SEGMENT + 16]
    cdef char *local = <char *>((<size_t>memory + 63) & ~<size_t>63)
    cdef char *matrix = state + 64
    cdef char *source = matrix
    cdef float *inputs = <float *>(matrix + op.matrix_bytes)
    cdef int64_t first = step.first_position[sequence], row_start = step.row_start[sequence]
    cdef int64_t end = first + step.row_start[sequence + 1] - row_start, position, kept, some_end
    cdef int64_t ahead_bytes = some.ahead_bytes     # prefetched with the last tokens
    cdef quire_recurrent_token tokens[QUIRE_TOKENS]
    if first == 0:
        position = 0
        memset(matrix, 0, op.matrix_bytes)
    else:
        position = max(min((<int64_t *>state)[0], first), first - op.rollback)
    kept = max(position, end - op.rollback)
    (<int64_t *>state)[0] = kept
    while position < end:
        some_end = min(kept if position < kept else end, position + QUIRE_TOKENS)
        _set_tokens(op, step, tiles, some, row_start - first, first, position, some_end, head, column, inputs, tokens)
        if position >= kept:
            _keep_inputs(op, some, position, max(position, first), some_end, tokens, inputs)
        some.ahead_bytes = 0 if some_end < end else ahead_bytes
        tiles.recur(some, tokens, some_end - position, source, matrix if position < kept else local)
        source = matrix if position < kept else local
        position = some_end


cdef void _set_tokens(const RecurrenceOp *op, const Step *step, const quire_tiles *tiles, const quire_recurrence *some,
                      int64_t row_start, int64_t first, int64_t position, int64_t end, int64_t head, int64_t column,
                      const float *inputs, quire_recurrent_token *tokens) noexcept nogil:
    """Set the tokens from `position` on: tokens before `first` from the inputs in the state, others from their rows.

    The row of a position is `row_start` + position.
    """
    cdef float decays[QUIRE_TOKENS]
    cdef float rates[QUIRE_TOKENS]
    cdef int64_t key_dim = op.all.key_dim, key_head = head % op.keys if op.tiled else head // op.group, at, i
    cdef const float *row
    cdef const float *gates
    memset(decays, 0, sizeof(decays))
    memset(rates, 0, sizeof(rates))
    for at in range(max(position, first), end):
        gates = <const float *>op.gates.rows.data + (row_start + at) * op.gates.rows.width + head
        decays[at - position] = gates[op.decay]
        if op.rate >= 0:
            rates[at - position] = gates[op.rate]
    if end > first:
        tiles.recurrent_gates(some, decays, rates)
    for at in range(position, end):
        i = at - position
        if at < first:
            row = inputs + at % op.rollback * op.input_columns
            tokens[i].key, tokens[i].query, tokens[i].out = row, NULL, NULL
            tokens[i].value = row + (key_dim + 15) // 16 * 16
            tokens[i].decay, tokens[i].rate = tokens[i].value[op.all.width], tokens[i].value[op.all.width + 1]
        else:
            row = <const float *>op.input.rows.data + (row_start + at) * op.input.rows.width
            tokens[i].key, tokens[i].query = row + op.key + key_head * key_dim, row + op.query + key_head * key_dim
            tokens[i].value = row + op.value + head * op.value_dim + column
            tokens[i].decay, tokens[i].rate = decays[i], rates[i]
            tokens[i].out = (<float *>op.out.rows.data + (row_start + at) * op.out.rows.width
                             + head * op.value_dim + column)


cdef void _keep_inputs(const RecurrenceOp *op, const quire_recurrence *some, int64_t position, int64_t first,
                       int64_t end, const quire_recurrent_token *tokens, float *inputs) noexcept nogil:
    """Keep the inputs of the tokens [first, end) in the state; `tokens` begins at `position`."""
    cdef int64_t at
    cdef float *row
    cdef float *value
    for at in range(first, end):
        row = inputs + at % op.rollback * op.input_columns
        value = row + (op.all.key_dim + 15) // 16 * 16
        memcpy(row, tokens[at - position].key, op.all.key_dim * sizeof(float))
        memcpy(value, tokens[at - position].value, some.columns * sizeof(float))
        value[op.all.width], value[op.all.width + 1] = tokens[at - position].decay, tokens[at - position].rate


cdef int64_t run_gated_norm(const GatedNormOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                            int workers) noexcept nogil:
    cdef int64_t width = op.input.rows.width, row, computed = 0
    cdef float *x
    cdef quire_run run
    while quire_next_run(counter, step.rows, workers, MOST_ROWS, &run):
        for row in range(run.first, run.end):
            x = <float *>op.input.rows.data + row * width
            tiles.gated_norm(&op.norm, <const float *>op.gate.rows.data + row * op.gate.rows.width + op.column, x)
            tiles.convert(x, width, 1, op.norm.columns, &op.out, row, 0)
        computed += run.end - run.first
    return computed
