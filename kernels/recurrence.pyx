# cython: language_level=3
"""Ops with a state of each sequence, which a step reads and changes in place.

An item is some columns of one sequence: its rows are computed in order, one after another, so their division into steps
changes no bit, and the columns of a state stay in cache meanwhile.
"""
import numpy as np

from .isa cimport QUIRE_MAX_TAPS, quire_convolution
from .ops import padded
from .pool cimport quire_next_index

cdef enum:
    SEGMENT = 128                   # columns of an item; whole blocks of 32, and of their groups


cdef bind_short_conv(ShortConvOp *record, op, Regions regions, max_rows):
    """Set the record of an op, having checked its sizes."""
    columns, taps = op.out.columns, len(op.weight)
    width = padded(columns)
    if op.weight.shape != (taps, columns) or not 1 <= taps <= QUIRE_MAX_TAPS:
        raise ValueError(f"a convolution of {columns} columns has weights [1..{QUIRE_MAX_TAPS}, {columns}], "
                         f"not {list(op.weight.shape)}")
    if op.ring.rows < taps or op.ring.offset < 0 or op.ring.offset % 64:
        raise ValueError(f"{op.ring!r} is not aligned or has less than {taps} rows")
    record.input = regions.value(op.input, 3 * columns, "f32", max_rows)
    record.out = regions.output(op.out, columns, max_rows)
    record.columns, record.offset = columns, op.ring.offset
    record.all.part, record.all.taps, record.all.rows, record.all.stride = columns, taps, op.ring.rows, width
    weight = np.zeros((taps, width), np.float32)
    weight[:, :columns] = op.weight
    record.all.weight = regions.vector(weight.reshape(-1), taps * width, taps * width)
    record.all.bias = NULL
    if op.bias is not None:
        record.all.bias = regions.vector(op.bias, columns, width)


cdef inline int64_t _segments(const ShortConvOp *op) noexcept nogil:
    return (op.columns + SEGMENT - 1) // SEGMENT


cdef int64_t num_recurrent_items(const ShortConvOp *op, const Step *step) noexcept nogil:
    """Return the number of items: segments of SEGMENT columns of each sequence."""
    return step.sequences * _segments(op)


cdef int64_t run_short_conv(const ShortConvOp *op, const Step *step, const quire_tiles *tiles,
                            long long *counter) noexcept nogil:
    cdef int64_t segments = _segments(op), item = quire_next_index(counter), width = op.input.rows.width, computed = 0
    cdef int64_t sequence, column, row, position
    cdef quire_convolution some = op.all
    cdef float out[SEGMENT]
    while item < step.sequences * segments:
        sequence, column = item // segments, item % segments * SEGMENT
        some.columns = min(<int64_t>SEGMENT, op.columns - column)
        some.weight = op.all.weight + column
        if op.all.bias != NULL:
            some.bias = op.all.bias + column
        some.ring = <float *>(step.states + step.state_slots[sequence] * step.state_bytes + op.offset) + column
        position = step.first_position[sequence]
        for row in range(step.row_start[sequence], step.row_start[sequence + 1]):
            tiles.convolve(&some, <const float *>op.input.rows.data + row * width + column, position, out)
            tiles.convert(out, SEGMENT, 1, some.columns, &op.out, row, column)
            position += 1
        computed += 1
        item = quire_next_index(counter)
    return computed
