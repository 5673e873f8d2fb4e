# cython: language_level=3
"""Ops that work on one row at a time: embedding, conversion, gathering, and adding the norm of a branch.

A row's result depends on that row alone, so the worker that takes a row does not change a bit. Each function
returns the number of rows that it computed.
"""
from libc.string cimport memcpy

from .pool cimport quire_next_index


cdef int64_t run_embed(const EmbedOp *op, const Step *step, const quire_tiles *tiles,
                       long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), token, width = op.out.rows.width, computed = 0, j
    cdef float *out
    while row < step.rows:
        token = step.token_ids[row]
        out = <float *>op.out.rows.data + row * width
        tiles.unpack_column(op.panels.data + token // 16 * op.panels.panel_bytes,
                            op.panels.scales + token // 16 * (op.width // 2) if op.panels.scales != NULL else NULL,
                            op.panels.dtype, op.width, <int>(token % 16), out)
        if op.scale != 1:
            for j in range(width):
                out[j] *= op.scale
        if op.is_normed:
            tiles.convert(out, width, 1, op.out.columns, &op.normed, row, 0)
        computed += 1
        row = quire_next_index(counter)
    return computed


cdef int64_t run_convert(const ConvertOp *op, const Step *step, const quire_tiles *tiles,
                         long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), width = op.input.rows.width, computed = 0
    while row < (step.samples if op.sampled else step.rows):
        tiles.convert(<const float *>op.input.rows.data + row * width, width, 1, op.input.columns, &op.out, row, 0)
        computed += 1
        row = quire_next_index(counter)
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


cdef int64_t run_add_norm(const AddNormOp *op, const Step *step, const quire_tiles *tiles,
                          long long *counter) noexcept nogil:
    cdef int64_t row = quire_next_index(counter), width = op.out.rows.width, columns = op.out.columns, computed = 0
    cdef float *out
    while row < step.rows:
        out = <float *>op.out.rows.data + row * width
        tiles.add_norm(<const float *>op.input.rows.data + row * width, op.weight, op.eps, columns, out)
        if op.is_normed:
            tiles.convert(out, width, 1, columns, &op.normed, row, 0)
        computed += 1
        row = quire_next_index(counter)
    return computed
