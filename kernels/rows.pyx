# cython: language_level=3
"""Ops that work on one row at a time: embedding, conversion and gathering.

A row's result depends on that row alone, so any partition of rows over workers gives the same bits.
"""
from libc.string cimport memcpy


cdef void run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles, int worker,
                    int workers) noexcept nogil:
    cdef int64_t row, token, width = op.out.rows.width
    cdef float *out
    for row in range(step.rows * worker // workers, step.rows * (worker + 1) // workers):
        token = step.token_ids[row]
        out = <float *>op.out.rows.data + row * width
        tiles.unpack_column(op.panels + token // 16 * op.panel_bytes,
                            op.scales + token // 16 * (op.width // 2) if op.scales != NULL else NULL,
                            op.dtype, op.width, <int>(token % 16), out)
        if op.is_normed:
            tiles.convert(out, width, 1, op.out.columns, &op.normed, row, 0)


cdef void run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles, int worker,
                      int workers) noexcept nogil:
    cdef int64_t width = op.input.rows.width, rows = step.samples if op.sampled else step.rows
    cdef int64_t first = rows * worker // workers, last = rows * (worker + 1) // workers
    tiles.convert(<const float *>op.input.rows.data + first * width, width, last - first, op.input.columns, &op.out,
                  first, 0)


cdef void run_gather(const GatherOp *op, const Step *step, const quire_tiles *tiles, int worker,
                     int workers) noexcept nogil:
    cdef int64_t i, width = op.input.rows.width
    cdef float *out
    for i in range(step.samples * worker // workers, step.samples * (worker + 1) // workers):
        out = <float *>op.out.rows.data + i * width
        memcpy(out, <const float *>op.input.rows.data + step.sample_rows[i] * width, width * sizeof(float))
        if op.is_normed:
            tiles.convert(out, width, 1, op.out.columns, &op.normed, i, 0)
