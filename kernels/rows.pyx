# cython: language_level=3
"""Ops that work on one row at a time: embedding, conversion, gathering, and adding the norm of a branch.

A row's result depends on that row alone, so the worker that takes a row does not change a bit. Each function
returns the number of rows that it computed.
"""
from libc.string cimport memcpy, memset

from .isa cimport QUIRE_GELU_TANH
from .pool cimport quire_next_index, quire_next_run, quire_run
from .step cimport end_item, first_item

cdef enum:
    MOST_ROWS = 16                  # most rows per item: the scales of neighboring rows share cache lines


cdef int64_t run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                       int worker, int workers) noexcept nogil:
    cdef int64_t first = first_item(step, step.rows), end = end_item(step, step.rows)
    cdef int64_t row, sequence = 0, computed = 0
    cdef quire_run run
    while quire_next_run(counter, end - first, workers, MOST_ROWS, &run):
        for row in range(first + run.first, first + run.end):
            while step.row_start[sequence + 1] <= row:
                sequence += 1
            _embed_row(op, step, tiles, row, row - step.row_start[sequence], worker)
        computed += run.end - run.first
    return computed


cdef void _embed_row(const EmbedOp *op, const Step *step, const quire_tiles *tiles, int64_t row, int64_t position,
                     int worker) noexcept nogil:
    """Embed the token of a row; `position` is the row's number in its sequence."""
    cdef int64_t width = op.out.rows.width, j
    cdef float *learned = <float *>(step.scratch + worker * step.scratch_bytes)
    cdef float *out = <float *>op.out.rows.data + row * width
    if step.given_of != NULL and step.given_of[row] >= 0:
        memcpy(out, step.given + step.given_of[row] * step.given_columns, op.out.columns * sizeof(float))
        memset(out + op.out.columns, 0, (width - op.out.columns) * sizeof(float))
    else:
        _unpack(&op.panels, op.width, tiles, step.token_ids[row], out)
        if op.scale != 1:
            for j in range(width):
                out[j] *= op.scale
    if op.has_types:
        _unpack(&op.types, op.width, tiles, step.type_ids[row] if step.type_ids != NULL else 0, learned)
        _add(learned, width, out)
    if op.has_positions:
        _unpack(&op.positions, op.width, tiles, position, learned)
        _add(learned, width, out)
    if op.is_normed:
        tiles.convert(out, width, 1, op.out.columns, &op.normed, row, 0)


cdef void _unpack(const Panels *panels, int64_t width, const quire_tiles *tiles, int64_t column,
                  float *out) noexcept nogil:
    cdef int64_t panel = column // 16
    tiles.unpack_column(panels.data + panel * panels.panel_bytes,
                        panels.scales + panel * panels.panel_scales if panels.scales != NULL else NULL, panels.dtype,
                        panels.group, width, <int>(column % 16), out)
    if panels.group:
        tiles.rotate_back(out, width, panels.group)


cdef void _add(const float *x, int64_t n, float *out) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] += x[i]


cdef int64_t run_norm(const NormOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                      int worker, int workers) noexcept nogil:
    """Norm rows. If only the converted rows are kept, the normed rows stay in scratch."""
    cdef int64_t rows = step.samples if op.sampled else step.rows
    cdef int64_t first = first_item(step, rows), end = end_item(step, rows)
    cdef int64_t width = op.input.rows.width, columns = op.input.columns, computed = 0
    cdef int64_t row
    cdef quire_run run
    cdef float *y = <float *>(step.scratch + worker * step.scratch_bytes)
    while quire_next_run(counter, end - first, workers, MOST_ROWS, &run):
        for row in range(first + run.first, first + run.end):
            if op.keeps:
                y = <float *>op.out.rows.data + row * width
            tiles.norm_row(op.kind, <const float *>op.input.rows.data + row * width, op.weight, op.bias, op.eps,
                           columns, y)
            if op.converts:
                tiles.convert(y, width, 1, columns, &op.converted, row, 0)
        computed += run.end - run.first
    return computed


cdef int64_t run_pool(const PoolOp *op, const Step *step, const quire_tiles *tiles,
                      long long *counter) noexcept nogil:
    cdef int64_t first_text = first_item(step, step.samples), end_text = end_item(step, step.samples)
    cdef int64_t text = first_text + quire_next_index(counter), width = op.input.rows.width, first, end, computed = 0
    cdef const float *rows = <const float *>op.input.rows.data
    cdef float *out
    while text < end_text:
        first, end = step.row_start[text], step.row_start[text + 1]
        out = <float *>op.out.rows.data + text * width
        if op.pooling == MEAN:
            tiles.mean_rows(rows + first * width, width, end - first, width, out)
        else:
            memcpy(out, rows + (first if op.pooling == FIRST else end - 1) * width, width * sizeof(float))
        computed += 1
        text = first_text + quire_next_index(counter)
    return computed


cdef int64_t run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                         int worker, int workers) noexcept nogil:
    """Convert rows. Rows with another order of columns are first reordered in scratch."""
    cdef int64_t rows = step.samples if op.sampled else step.rows
    cdef int64_t first = first_item(step, rows), end = end_item(step, rows)
    cdef int64_t row, width = op.input.rows.width, computed = 0, i
    cdef float *sorted = <float *>(step.scratch + worker * step.scratch_bytes)
    cdef const float *x
    cdef quire_run run
    while quire_next_run(counter, end - first, workers, MOST_ROWS, &run):
        for row in range(first + run.first, first + run.end):
            x = <const float *>op.input.rows.data + row * width
            if op.order != NULL:
                for i in range(op.input.columns):
                    sorted[i] = x[op.order[i]]
                x = sorted
            tiles.convert(x, width, 1, op.input.columns, &op.out, row, 0)
        computed += run.end - run.first
    return computed


cdef int64_t run_gather(const GatherOp *op, const Step *step, const quire_tiles *tiles,
                        long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), width = op.input.rows.width, computed = 0
    cdef float *out
    while row < step.samples:
        out = <float *>op.out.rows.data + row * width
        memcpy(out, <const float *>op.input.rows.data + step.sample_rows[row] * width, width * sizeof(float))
        if op.is_normed:
            tiles.convert(out, width, 1, op.out.columns, &op.normed, row, 0)
        computed += 1
        row = quire_next_index(counter)
    return computed


cdef int64_t run_gate_rows(const GateRowsOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                           int workers) noexcept nogil:
    """Gate rows. The results overwrite the input before they are converted."""
    cdef int64_t width = op.input.rows.width, columns = op.input.columns, row, j, computed = 0
    cdef float *x
    cdef const float *a
    cdef const float *b
    cdef float factor
    cdef quire_run run
    while quire_next_run(counter, step.rows, workers, MOST_ROWS, &run):
        for row in range(run.first, run.end):
            x = <float *>op.input.rows.data + row * width
            a = <const float *>op.a.rows.data + row * op.a.rows.width + op.column
            b = <const float *>op.b.rows.data + row * op.b.rows.width + op.column
            factor = tiles.inverse_rms(a, op.eps, columns)
            tiles.activate(QUIRE_GELU_TANH, x, width)
            for j in range(columns):
                x[j] = x[j] * ((a[j] * factor * op.weight[j] + b[j]) * op.scale)
            tiles.convert(x, width, 1, columns, &op.out, row, 0)
        computed += run.end - run.first
    return computed


cdef int64_t run_add_norm(const AddNormOp *op, const Step *step, const quire_tiles *tiles,
                          long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), width = op.out.rows.width, columns = op.out.columns, computed = 0, j
    cdef float *out
    while row < step.rows:
        out = <float *>op.out.rows.data + row * width
        tiles.add_norm(<const float *>op.input.rows.data + row * width, op.weight, op.eps, columns, out)
        if op.scale != 1:
            for j in range(columns):
                out[j] *= op.scale
        if op.is_normed:
            tiles.convert(out, width, 1, columns, &op.normed, row, 0)
        computed += 1
        row = quire_next_index(counter)
    return computed


cdef int64_t run_add_given(const AddGivenOp *op, const Step *step, const quire_tiles *tiles,
                           long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), width = op.out.rows.width, columns = op.out.columns, computed = 0
    cdef float *out
    while row < step.rows:
        out = <float *>op.out.rows.data + row * width
        if step.given_of != NULL and step.given_of[row] >= 0:
            _add(step.given + step.given_of[row] * step.given_columns + op.first, columns, out)
        if op.is_normed:
            tiles.convert(out, width, 1, columns, &op.normed, row, 0)
        computed += 1
        row = quire_next_index(counter)
    return computed
