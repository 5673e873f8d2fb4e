# cython: language_level=3
"""Mixtures of experts: choosing the experts of each row, grouping the rows by expert, and adding up the results.

The linear layers of the experts are in linear.pyx. A row's results depend on that row alone: its experts are summed in
the order of their ranks, whichever other rows chose them. Each function returns the number of items that it computed.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

from .isa cimport QUIRE_BLOCK, QUIRE_Q8, quire_itemsize
from .linear cimport ROWS_IN_CACHE
from .pool cimport quire_next_index

cdef enum:
    SEGMENT = 512                   # columns of a row that are combined at a time


cdef int64_t run_route(const RouteOp *op, const Step *step, const quire_tiles *tiles,
                       long long *counter) noexcept nogil:
    """Choose the experts of each row. Write their indices to `places`, where `group_places` replaces them."""
    cdef int64_t row = quire_next_index(counter), computed = 0, rank
    cdef const RoutingTables *to = &op.routing
    while row < step.rows:
        tiles.route(&op.router, <const float *>op.logits.rows.data + row * op.logits.rows.width,
                    to.places + row * to.places_width, to.weights + row * to.weights_width)
        if op.scales != NULL:
            for rank in range(to.top_k):
                to.weights[row * to.weights_width + rank] *= op.scales[to.places[row * to.places_width + rank]]
        computed += 1
        row = quire_next_index(counter)
    return computed


cdef int64_t grouping_scratch_bytes(int64_t num_experts) noexcept:
    return num_experts * sizeof(int32_t)


cdef void group_places(const RouteOp *op, const Step *step, int worker) noexcept nogil:
    """Give each choice its place, and write the groups. One worker does it, when the experts of all rows are chosen."""
    cdef const RoutingTables *to = &op.routing
    cdef int32_t *next = <int32_t *>(step.scratch + worker * step.scratch_bytes)    # [num_experts]
    cdef int32_t *choice
    cdef int64_t row, rank, expert, count, first = 0, groups = 0
    memset(next, 0, to.num_experts * sizeof(int32_t))
    for row in range(step.rows):
        for rank in range(to.top_k):
            next[to.places[row * to.places_width + rank]] += 1
    for expert in range(to.num_experts):
        count = next[expert]
        next[expert] = <int32_t>first
        groups = _add_groups(to, groups, expert, first, count)
        first += count
    to.groups[0] = <int32_t>groups
    for row in range(step.rows):
        for rank in range(to.top_k):
            choice = to.places + row * to.places_width + rank
            expert = choice[0]
            choice[0] = next[expert]
            next[expert] += 1


cdef int64_t _add_groups(const RoutingTables *to, int64_t groups, int64_t expert, int64_t first,
                         int64_t count) noexcept nogil:
    """Write the groups of an expert after the first `groups` groups; return the new number of groups."""
    cdef int64_t parts = (count + ROWS_IN_CACHE - 1) // ROWS_IN_CACHE, part
    cdef int32_t *group
    for part in range(parts):
        group = to.groups + (1 + groups + part) * to.groups_width
        group[0] = <int32_t>expert
        group[1] = <int32_t>(first + count * part // parts)
        group[2] = <int32_t>(first + count * (part + 1) // parts)
    return groups + parts


cdef int64_t run_dispatch(const DispatchOp *op, const Step *step, long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), width = op.input.rows.width, computed = 0, rank, place
    cdef int64_t row_bytes = width * quire_itemsize(op.input.dtype), blocks = width // QUIRE_BLOCK
    cdef int64_t sums_bytes = op.squares_width * sizeof(float)
    while row < step.rows:
        for rank in range(op.routing.top_k):
            place = op.routing.places[row * op.routing.places_width + rank]
            memcpy(<char *>op.out.rows.data + place * row_bytes, <char *>op.input.rows.data + row * row_bytes,
                   row_bytes)
            memcpy(op.out_squares + place * op.squares_width, op.squares + row * op.squares_width, sums_bytes)
            if op.input.dtype == QUIRE_Q8:
                memcpy(op.out.rows.scales + place * blocks, op.input.rows.scales + row * blocks, blocks * sizeof(float))
                memcpy(op.out.rows.sums + place * blocks, op.input.rows.sums + row * blocks, blocks * sizeof(int32_t))
        computed += 1
        row = quire_next_index(counter)
    return computed


cdef int64_t num_segments(const CombineOp *op, const Step *step) noexcept nogil:
    """Return the number of items: segments of SEGMENT columns of each row."""
    return step.rows * _segments(op)


cdef int64_t _segments(const CombineOp *op) noexcept nogil:
    return (op.out.columns + SEGMENT - 1) // SEGMENT


cdef int64_t run_combine(const CombineOp *op, const Step *step, const quire_tiles *tiles,
                         long long *counter) noexcept nogil:
    cdef const RoutingTables *of = &op.routing
    cdef int64_t segments = _segments(op), item = quire_next_index(counter), width = op.out.rows.width, computed = 0
    cdef int64_t row, column
    cdef float *out
    while item < step.rows * segments:
        row, column = item // segments, item % segments * SEGMENT
        out = <float *>op.out.rows.data + row * width + column
        if not op.adds:
            memset(out, 0, min(<int64_t>SEGMENT, width - column) * sizeof(float))
        if op.has_shared:
            _add_shared(op, tiles, row, column, out)
        tiles.combine(<const float *>op.input.rows.data + column, width, of.places + row * of.places_width,
                      of.weights + row * of.weights_width, of.top_k, min(<int64_t>SEGMENT, width - column), out)
        if op.is_normed:
            tiles.convert(out, width, 1, min(<int64_t>SEGMENT, op.out.columns - column), &op.normed, row, column)
        computed += 1
        item = quire_next_index(counter)
    return computed


cdef void _add_shared(const CombineOp *op, const quire_tiles *tiles, int64_t row, int64_t column,
                      float *out) noexcept nogil:
    """Add a segment of the shared expert's row, times the sigmoid of its logit."""
    cdef float weight[16]
    cdef float logit[16]
    cdef int32_t place = 0
    cdef int64_t width = op.out.rows.width
    memset(weight, 0, sizeof(weight))
    memset(logit, 0, sizeof(logit))
    weight[0] = 1
    logit[0] = (<const float *>op.logits.rows.data)[row * op.logits.rows.width + op.routing.num_experts]
    tiles.gate(logit, 1, weight)
    tiles.combine(<const float *>op.shared.rows.data + row * width + column, width, &place, weight, 1,
                  min(<int64_t>SEGMENT, width - column), out)
