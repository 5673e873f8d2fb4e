# cython: language_level=3
"""Low-rank adapters of linear layers: y + B (A x), for the rows of a step that have one.

`LoraShrink` computes A x of each row in f32. The linear layer adds B (A x) to its block of columns before the epilogue
(`add_adapters`). Every product is one chain over K in f32, whatever the other rows of the step are, so a row has the
same bits with any neighbors. Matrices are in bf16 or f32, and an adapter may have none for a layer.
"""
import numpy as np

from libc.string cimport memset

from .isa cimport QUIRE_BF16, QUIRE_F32
from .pool cimport quire_next_index
from .regions import aligned_zeros

cdef enum:
    MOST_ROWS = 64                  # rows that pass over a panel together

_CODES = {"f32": QUIRE_F32, "bf16": QUIRE_BF16}
_ITEMSIZES = {"f32": 4, "bf16": 2}


cdef class LoraTable:
    """The matrices of all adapters by target, a linear layer that adapters may change, and slot.

    `widths` has the inputs, the ranks and the outputs of each target: the most columns of A's input, of its output and
    of B's.
    """

    def __init__(self, slots, widths):
        self.slots, self.widths = slots, tuple(widths)
        self.adapters = [None] * slots
        self.memory = aligned_zeros(max(1, 2 * slots * len(self.widths)) * sizeof(LoraMatrix))
        cdef char[::1] memory = self.memory
        self.first = <LoraMatrix *>&memory[0]

    cdef LoraMatrix *matrices(self, int64_t target, bint is_b) except NULL:
        """Return the matrices of a target, one per slot."""
        if not 0 <= target < len(self.widths):
            raise ValueError(f"target {target} is outside the {len(self.widths)}")
        return self.first + (2 * target + is_b) * self.slots

    def check_slot(self, slot):
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is outside the {self.slots} of this program")

    def set(self, slot, adapter):
        """Put an adapter, a pair (A, B) or None for each target, into a slot; None empties the slot.

        Each matrix is (dtype, data [rows, 16], places [panels, PLACE]).
        """
        self.check_slot(slot)
        if adapter is not None and len(adapter) != len(self.widths):
            raise ValueError(f"an adapter has a pair or None for {len(self.widths)} targets, not {len(adapter)}")
        for (inputs, ranks, outputs), pair in zip(self.widths, adapter or ()):
            if pair is not None:
                _check_matrix(pair[0], inputs, ranks)
                _check_matrix(pair[1], min(ranks, 16 * len(pair[0][2])), outputs)
        for target in range(len(self.widths)):
            pair = None if adapter is None else adapter[target]
            for is_b in (False, True):
                _set_matrix(&self.matrices(target, is_b)[slot], None if pair is None else pair[is_b])
        self.adapters[slot] = adapter       # keeps the memory of the matrices


cdef _set_matrix(LoraMatrix *out, matrix):
    cdef const char[:, ::1] data
    cdef const int32_t[:, ::1] places
    memset(out, 0, sizeof(LoraMatrix))
    if matrix is None or not len(matrix[2]):
        return
    dtype, data, places = matrix[0], matrix[1].view(np.int8), matrix[2]
    out.data, out.dtype, out.places, out.panels = &data[0, 0], _CODES[dtype], &places[0, 0], places.shape[0]


def _check_matrix(matrix, inputs, outputs):
    """Check that each panel of a matrix reads elements of K, and rows of its data, that exist."""
    dtype, data, places = matrix
    if data.ndim != 2 or data.shape[1] != 16 or data.itemsize != _ITEMSIZES[dtype] or places.dtype != np.int32:
        raise ValueError(f"panels of {dtype} are rows of 16, not {list(data.shape)} of {data.itemsize} bytes")
    if places.shape != (len(places), PLACE) or 16 * len(places) > outputs + 15:
        raise ValueError(f"{list(places.shape)} are not the places of panels with {outputs} columns")
    first, count, row = places.T.astype(np.int64)
    if (places < 0).any() or (first + count > inputs).any() or (row + count > len(data)).any():
        raise ValueError(f"a panel reads beyond {inputs} elements or {len(data)} rows of data")


cdef int64_t _rows_of(const Step *step, int workers) noexcept nogil:
    """Return the rows of an item: few enough that all workers have items."""
    return max(<int64_t>1, min(<int64_t>MOST_ROWS, step.rows // (2 * workers)))


cdef int64_t num_lora_items(const LoraOp *op, const Step *step, int workers) noexcept nogil:
    """Return the number of items: some rows and a panel each."""
    cdef int64_t rows = _rows_of(step, workers)
    return 0 if step.adapters == NULL else (step.rows + rows - 1) // rows * op.panels


cdef int64_t run_lora(const LoraOp *op, const Step *step, const quire_tiles *tiles, long long *counter,
                      int workers) noexcept nogil:
    """Compute items until none is left; return their number."""
    cdef int64_t items = num_lora_items(op, step, workers), rows = _rows_of(step, workers), computed = 0
    cdef int64_t item = quire_next_index(counter), row, end, next
    while item < items:
        row = item // op.panels * rows
        end = min(step.rows, row + rows)
        while row < end:
            next = _end_of_run(step, row, end)
            if step.adapters[row] >= 0:
                _shrink(op, tiles, &op.matrices[step.adapters[row]], row, next, item % op.panels)
            row = next
        computed += 1
        item = quire_next_index(counter)
    return computed


cdef void _shrink(const LoraOp *op, const quire_tiles *tiles, const LoraMatrix *a, int64_t row, int64_t end,
                  int64_t panel) noexcept nogil:
    """Compute one panel of A x for rows with the same adapter."""
    cdef const int32_t *place = a.places + panel * PLACE
    cdef int64_t width = op.input.rows.width, stride = op.out.rows.width, i, j
    cdef const float *x = <const float *>op.input.rows.data + row * width
    cdef float *y = <float *>op.out.rows.data + row * stride + 16 * panel
    cdef float factor = op.scale
    if panel >= a.panels:
        return
    for i in range(end - row):
        memset(y + i * stride, 0, 16 * sizeof(float))
    tiles.add_low_rank(a.dtype, end - row, x + place[0], width,
                       a.data + place[2] * 16 * (2 if a.dtype == QUIRE_BF16 else 4), place[1], y, stride)
    for i in range(end - row):
        if op.squares != NULL:
            tiles.rms_factors(op.squares + (row + i) * op.squares_width, op.squares_width, 1, op.input.columns, op.eps,
                              &factor)
            factor *= op.scale
        for j in range(16):
            y[i * stride + j] *= factor


cdef int64_t _end_of_run(const Step *step, int64_t row, int64_t end) noexcept nogil:
    """Return the end of the rows from `row` on that have the same adapter."""
    cdef int32_t slot = step.adapters[row]
    while row < end and step.adapters[row] == slot:
        row += 1
    return row


cdef bint has_adapters(const Step *step, int64_t row, int64_t end) noexcept nogil:
    """Return whether any of the rows [row, end) has an adapter."""
    if step.adapters == NULL:
        return False
    while row < end and step.adapters[row] < 0:
        row += 1
    return row < end


cdef void add_adapters(const LoraMatrix *matrices, const Value *rows, const Step *step, const quire_tiles *tiles,
                       int64_t row, int64_t end, int64_t panel, float *y, int64_t stride) noexcept nogil:
    """Add B (A x) to 32 columns, two panels from `panel` on, of the rows [row, end), which begin at y."""
    cdef int64_t width = rows.rows.width, next, each
    cdef const float *x
    cdef const LoraMatrix *b
    cdef const int32_t *place
    while row < end:
        next = _end_of_run(step, row, end)
        if step.adapters[row] >= 0:
            b = &matrices[step.adapters[row]]
            for each in range(panel, min(panel + 2, b.panels)):
                place = b.places + each * PLACE
                if place[1]:
                    x = <const float *>rows.rows.data + row * width + place[0]
                    tiles.add_low_rank(b.dtype, next - row, x, width,
                                       b.data + place[2] * 16 * (2 if b.dtype == QUIRE_BF16 else 4), place[1],
                                       y + 16 * (each - panel), stride)
        y += (next - row) * stride
        row = next
