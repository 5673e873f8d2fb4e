# cython: language_level=3
"""Packing of weights into tiles when a model is loaded: 16 output columns in lanes, K inside (layouts in pack.pyi).

Padding is zero, so padded columns and rows contribute exactly nothing.
"""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

import numpy as np

from .isa import WEIGHT_CODES
from .isa cimport (QUIRE_BF16, QUIRE_F32, QUIRE_MXFP4, QUIRE_Q4, QUIRE_Q4_K, QUIRE_Q4_Z, QUIRE_Q8,
                   QUIRE_SUPER_BLOCK, quire_num_scales, quire_panel_bytes, quire_tiles, tiles_of)

cdef extern from "ggml.h" nogil:
    enum:
        QUIRE_GGML_Q8_0
        QUIRE_GGML_Q4_0
        QUIRE_GGML_Q4_K
        QUIRE_GGML_Q5_K
        QUIRE_GGML_Q6_K
        QUIRE_GGML_MXFP4
        QUIRE_GGML_Q4_Z
        QUIRE_GGML_Q4_1
        QUIRE_GGML_Q5_0
        QUIRE_GGML_Q5_1
        QUIRE_GGML_Q2_K
        QUIRE_GGML_IQ4_NL
        QUIRE_GGML_Q3_K
        QUIRE_GGML_IQ2_XXS
        QUIRE_GGML_IQ2_XS
        QUIRE_GGML_IQ2_S
        QUIRE_GGML_IQ3_XXS
        QUIRE_GGML_IQ3_S
        QUIRE_GGML_IQ4_XS
        QUIRE_GGML_TQ1_0
        QUIRE_GGML_TQ2_0
    int64_t quire_ggml_weights(int type)
    int64_t quire_ggml_bytes(int type)
    float quire_ggml_largest(int type, const uint8_t *blocks, int64_t n)
    void quire_ggml_widen(int type, const uint8_t *blocks, int64_t n, float *out)
    void quire_widen_f16(const uint16_t *h, int64_t n, float *out)
    float quire_top(const float *w, int64_t n)
    void quire_quantize_q8(const float *w, int64_t n, float top, uint8_t *at, uint16_t *scale)
    void quire_ggml_pack(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane,
                         uint8_t *panel, uint16_t *scales)
    void quire_ggml_requantize(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane,
                               uint8_t *panel, uint16_t *scales)

GROUPS = (0, 1, 2, 4)
GGML_DTYPES = {"Q8_0": "q8", "Q4_0": "q4", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
               "MXFP4": "mxfp4", "Q5_0": "q8", "IQ4_NL": "q8", "Q3_K": "q6_k", "IQ3_XXS": "q6_k",
               "IQ3_S": "q5_k", "TQ1_0": "q4", "TQ2_0": "q4"}
BLOCK_DTYPES = GGML_DTYPES | {"Q4_Z": "q4_z"}
_GGML_CODES = {"Q8_0": QUIRE_GGML_Q8_0, "Q4_0": QUIRE_GGML_Q4_0, "Q4_K": QUIRE_GGML_Q4_K, "Q5_K": QUIRE_GGML_Q5_K,
               "Q6_K": QUIRE_GGML_Q6_K, "MXFP4": QUIRE_GGML_MXFP4, "Q4_Z": QUIRE_GGML_Q4_Z, "Q4_1": QUIRE_GGML_Q4_1,
               "Q5_0": QUIRE_GGML_Q5_0, "Q5_1": QUIRE_GGML_Q5_1, "Q2_K": QUIRE_GGML_Q2_K, "Q3_K": QUIRE_GGML_Q3_K,
               "IQ2_XXS": QUIRE_GGML_IQ2_XXS, "IQ2_XS": QUIRE_GGML_IQ2_XS, "IQ2_S": QUIRE_GGML_IQ2_S,
               "IQ3_XXS": QUIRE_GGML_IQ3_XXS, "IQ3_S": QUIRE_GGML_IQ3_S, "IQ4_NL": QUIRE_GGML_IQ4_NL,
               "IQ4_XS": QUIRE_GGML_IQ4_XS, "TQ1_0": QUIRE_GGML_TQ1_0, "TQ2_0": QUIRE_GGML_TQ2_0}
BLOCK_TYPES = tuple(_GGML_CODES)
_ROWS_AT_ONCE = 64    # rows widened to f32 at a time; few, because malloc keeps memory that a thread has freed
_INTEGERS = {"q8", "q4", *BLOCK_DTYPES.values()}    # dtypes that multiply q8 activations
_ZEROS = {"q8": 0x80, "q4": 0x88}    # bytes of padding: weights are stored unsigned


def packed_nbytes(out_features, in_features, dtype, group=0):
    ranges = column_ranges(out_features, dtype)
    if group and ranges != ((out_features, "q8"),) or group not in GROUPS:
        raise ValueError(f"only a matrix in q8 has groups, of 1, 2 or 4 blocks, not {group} in {dtype!r}")
    return sum([_panels_nbytes(columns, in_features, of, group) for columns, of in ranges])


def column_ranges(out_features, dtype):
    if isinstance(dtype, str):
        return ((out_features, dtype),)
    ranges = []
    total = 0
    last = None
    for columns, of in dtype:
        if total % 32:
            raise ValueError(f"ranges of columns must be multiples of 32, but for the last one, not {dtype!r}")
        total += columns
        if ranges and last == of:
            columns += ranges.pop()[0]
        ranges.append((columns, of))
        last = of
    if total != out_features:
        raise ValueError(f"ranges of columns must add up to {out_features}, not {dtype!r}")
    if len(ranges) > MOST_RANGES or len(ranges) > 1 and not {of for _, of in ranges} <= _INTEGERS:
        raise ValueError(f"a matrix has one dtype, or up to {MOST_RANGES} ranges in {', '.join(sorted(_INTEGERS))}, "
                         f"not {dtype!r}")
    return tuple(ranges)


def _panels_nbytes(columns, in_features, dtype, group):
    """Return the bytes of one range of columns; its sizes are padded to 32."""
    if dtype not in WEIGHT_CODES:
        raise ValueError(f"weight dtype must be one of {', '.join(WEIGHT_CODES)}, not {dtype!r}")
    if columns < 1 or in_features < 1:
        raise ValueError(f"a matrix needs positive sizes, not {columns} x {in_features}")
    block = 32 if WEIGHT_CODES[dtype] in (QUIRE_MXFP4, QUIRE_Q4_Z) else QUIRE_SUPER_BLOCK
    if WEIGHT_CODES[dtype] >= QUIRE_Q4_K and in_features % block:
        raise ValueError(f"{dtype} needs in_features in multiples of {block}, not {in_features}")
    width = _padded(in_features)
    scales = quire_num_scales(width, group) * 32 if dtype in _ZEROS else 0
    return _padded(columns) // 16 * (quire_panel_bytes(WEIGHT_CODES[dtype], width) + scales)


def _padded(n):
    return -(-n // 32) * 32


def widen_blocks(const uint8_t[:, ::1] blocks, ggml_type):
    cdef int code = _ggml_code(ggml_type)
    cdef int64_t count = _blocks_in_row(blocks, code, ggml_type), row
    cdef float[:, ::1] out = np.empty((blocks.shape[0], count * quire_ggml_weights(code)), np.float32)
    if out.shape[1]:
        with nogil:
            for row in range(blocks.shape[0]):
                quire_ggml_widen(code, &blocks[row, 0], count, &out[row, 0])
    return np.asarray(out)


def largest_number(const uint8_t[:, ::1] blocks, ggml_type):
    cdef int code = _ggml_code(ggml_type)
    cdef int64_t count = blocks.shape[0] * <int64_t>_blocks_in_row(blocks, code, ggml_type)
    cdef float largest = 0
    if count:
        with nogil:
            largest = quire_ggml_largest(code, &blocks[0, 0], count)
    return largest


def _blocks_in_row(const uint8_t[:, ::1] blocks, int code, ggml_type):
    if blocks.shape[1] % quire_ggml_bytes(code):
        raise ValueError(f"rows of {ggml_type} are whole blocks of {quire_ggml_bytes(code)} bytes, "
                         f"not {blocks.shape[1]} bytes")
    return blocks.shape[1] // quire_ggml_bytes(code)


def _ggml_code(ggml_type):
    if ggml_type not in _GGML_CODES:
        raise ValueError(f"the type of blocks must be one of {', '.join(_GGML_CODES)}, not {ggml_type!r}")
    return _GGML_CODES[ggml_type]


cdef class PackedMatrix:
    def __init__(self, out_features, in_features, dtype, memory, input_order=None, group=0, has_padding=True):
        self.nbytes = packed_nbytes(out_features, in_features, dtype, group)
        self.group = group
        cdef uint8_t[::1] view = memory
        if view.shape[0] < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes are needed, the memory given has {view.shape[0]}")
        if <size_t>&view[0] % 64:
            raise ValueError("packed weights need memory aligned to 64 bytes")
        self.memory = memory
        self.input_order = input_order
        self.out_features = out_features
        self.in_features = in_features
        self.ranges = column_ranges(out_features, dtype)
        self.dtype, self.tiles = self.ranges[0][1], tiles_of(None)
        self.width = _padded(in_features)
        self.panels, self.num_parts = 0, len(self.ranges)
        cdef int64_t offset = 0
        for index, (columns, of) in enumerate(self.ranges):
            self._add_part(&self.parts[index], &view[0] + offset, columns, of, has_padding)
            offset += _panels_nbytes(columns, in_features, of, group)

    cdef _add_part(self, Panels *part, uint8_t *memory, columns, dtype, has_padding):
        cdef int64_t panels = _padded(columns) // 16
        part.dtype = WEIGHT_CODES[dtype]
        part.first_panel = self.panels
        part.data = <char *>memory
        part.panel_bytes = quire_panel_bytes(part.dtype, self.width)
        part.group = self.group
        part.scales = <uint16_t *>(memory + panels * part.panel_bytes) if dtype in _ZEROS else NULL
        part.panel_scales = 16 * quire_num_scales(self.width, self.group)
        if dtype in _ZEROS and has_padding:
            memset(memory, <int>_ZEROS[dtype], panels * part.panel_bytes)
        self.panels += panels

    cdef const Panels *_part(self, int64_t panel) noexcept nogil:
        """Return the part of the matrix that a panel belongs to."""
        cdef int part = self.num_parts - 1
        while self.parts[part].first_panel > panel:
            part -= 1
        return &self.parts[part]

    def fill(self, source, start=0, interleave=None):
        if source.ndim != 2 or source.shape[1] != self.in_features:
            raise ValueError(f"source must be [n, {self.in_features}], not {list(source.shape)}")
        cdef int phase = self._check_columns(start, source.shape[0], interleave, -1)
        for base in range(0, source.shape[0], _ROWS_AT_ONCE):
            self._fill_rows(_widened(source[base:base + _ROWS_AT_ONCE]), start, base, phase)

    def fill_blocks(self, const uint8_t[:, ::1] blocks, ggml_type, start=0, interleave=None):
        cdef int code = _ggml_code(ggml_type)
        cdef int native = WEIGHT_CODES[BLOCK_DTYPES[ggml_type]] if ggml_type in BLOCK_DTYPES else -1
        cdef int phase = self._check_columns(start, blocks.shape[0], interleave, native)
        cdef int64_t first = start, num_blocks = self.in_features // quire_ggml_weights(code), row = 0, column, count, i
        if self.in_features % quire_ggml_weights(code) or blocks.shape[1] != num_blocks * quire_ggml_bytes(code):
            raise ValueError(f"rows of {blocks.shape[1]} bytes are not {self.in_features} weights in {ggml_type}, "
                             f"{quire_ggml_weights(code)} in {quire_ggml_bytes(code)} bytes")
        cdef float[:, ::1] widened = np.empty((16, self.in_features), np.float32)
        cdef float[::1] rotated = np.empty(self.width, np.float32)
        cdef const Panels *part
        with nogil:
            while row < blocks.shape[0]:
                column = _column(first, row, phase)
                count = _columns_in_panel(first, row, phase, blocks.shape[0])
                part = self._part(column // 16)
                if part.dtype == native and not self.group:
                    quire_ggml_pack(code, &blocks[row, 0], blocks.shape[1], count, num_blocks, <int>(column % 16),
                                    <uint8_t *>_panel(part, column), _scales(part, column))
                elif part.dtype == QUIRE_Q8 and not self.group:
                    quire_ggml_requantize(code, &blocks[row, 0], blocks.shape[1], count, num_blocks, <int>(column % 16),
                                          <uint8_t *>_panel(part, column), _scales(part, column))
                else:
                    for i in range(count):
                        quire_ggml_widen(code, &blocks[row + i, 0], num_blocks, &widened[i, 0])
                    self._fill_columns(part, &widened[0, 0], column, count, &rotated[0])
                row += count

    cdef int _check_columns(self, int64_t start, int64_t n, interleave, int native) except -2:
        """Check that `n` rows of a source fit from column `start` on; return the phase, -1 without interleaving.

        `native`: the dtype that holds the numbers of the source exactly. Columns in k-quants, mxfp4 and q4_z must have
        this dtype, because nothing is rounded to them.
        """
        if interleave not in (None, 0, 1):
            raise ValueError(f"interleave must be None, 0 or 1, not {interleave!r}")
        cdef int phase = -1 if interleave is None else interleave
        cdef int64_t last = _column(start, n - 1, phase) if n else start - 1, begin = 0
        if start < 0 or last >= self.panels * 16:
            raise ValueError(f"columns up to {last} do not fit a matrix of {self.out_features}")
        for columns, dtype in self.ranges:
            if QUIRE_Q4_K <= WEIGHT_CODES[dtype] != native and begin <= last and start < begin + columns:
                raise ValueError(f"{dtype} is filled from GGML blocks of the same type only")
            begin += columns
        return phase

    cdef _fill_rows(self, const float[:, ::1] rows, int64_t first, int64_t base, int phase):
        """Pack rows of a source, beginning with row `base` of the source."""
        cdef int64_t row = 0, column, count
        cdef float[::1] rotated = np.empty(self.width, np.float32)
        with nogil:
            while row < rows.shape[0]:
                column = _column(first, base + row, phase)
                count = _columns_in_panel(first, base + row, phase, base + rows.shape[0])
                self._fill_columns(self._part(column // 16), &rows[row, 0], column, count, &rotated[0])
                row += count

    cdef void _fill_columns(self, const Panels *part, const float *rows, int64_t column, int64_t count,
                            float *rotated) noexcept nogil:
        """Pack `count` rows as columns of one panel from `column` on; `rotated` has memory for one of them."""
        cdef int64_t row
        cdef const float *inputs
        if part.dtype == QUIRE_Q4:
            self._fill_q4(part, rows, column, count)
            return
        if part.dtype == QUIRE_BF16:
            self._fill_bf16(part, rows, column, count)
            return
        for row in range(count):
            inputs = rows + row * self.in_features
            if part.dtype == QUIRE_F32:
                self._fill_f32(part, inputs, column + row)
            elif part.group:
                self.tiles.rotate(inputs, self.in_features, part.group, rotated)
                self._fill_q8(part, rotated, self.width, column + row)
            else:
                self._fill_q8(part, inputs, self.in_features, column + row)

    cdef void _fill_f32(self, const Panels *part, const float *row, int64_t column) noexcept nogil:
        cdef float *lane = <float *>_panel(part, column) + column % 16
        cdef int64_t k
        for k in range(self.in_features):
            lane[k * 16] = row[k]

    cdef void _fill_q8(self, const Panels *part, const float *row, int64_t inputs, int64_t column) noexcept nogil:
        cdef uint8_t *lane = <uint8_t *>_panel(part, column) + column % 16 * 4
        cdef uint16_t *scales = _scales(part, column) + column % 16
        cdef int64_t columns = 32 * max(<int64_t>1, part.group), k
        cdef float top = 0
        for k in range(0, inputs, 32):
            if k % columns == 0:
                top = quire_top(row + k, min(columns, inputs - k))
            quire_quantize_q8(row + k, min(<int64_t>32, inputs - k), top, lane + k * 16, scales + k // columns * 16)

    cdef void _fill_bf16(self, const Panels *part, const float *rows, int64_t column, int64_t count) noexcept nogil:
        """Round `count` columns of one panel from `column` on, in blocks of 32 along K: columns share cache lines."""
        cdef uint16_t[33] rounded
        cdef char *lane = _panel(part, column) + column % 16 * 4
        cdef int64_t row, k, i, n
        for k in range(0, self.in_features, 32):
            n = min(<int64_t>32, self.in_features - k)
            rounded[n] = 0
            for row in range(count):
                for i in range(n):
                    rounded[i] = _round_bf16(rows[row * self.in_features + k + i])
                for i in range(0, n, 2):
                    memcpy(lane + (k + i) // 2 * 64 + row * 4, &rounded[i], 4)

    cdef void _fill_q4(self, const Panels *part, const float *rows, int64_t column, int64_t count) noexcept nogil:
        """Quantize `count` columns of one panel from `column` on, in blocks of 32 along K of all columns."""
        cdef float w[32 * 16]
        cdef uint8_t packed[256]
        cdef uint16_t fitted[16]
        cdef char *block = _panel(part, column)
        cdef uint16_t *scales = _scales(part, column)
        cdef int64_t lane = column % 16, row, k, i, line
        memset(w, 0, sizeof(w))
        for k in range(0, self.in_features, 32):
            for row in range(count):
                for i in range(32):
                    w[i * 16 + lane + row] = rows[row * self.in_features + k + i] if k + i < self.in_features else 0
            self.tiles.quantize_q4(w, fitted, packed)
            memcpy(scales + lane, fitted + lane, count * 2)
            for line in range(4):
                memcpy(block + line * 64 + lane * 4, packed + line * 64 + lane * 4, count * 4)
            block += 256
            scales += 16

    def unpack(self):
        """Return the matrix as the kernels see it, f32 [out_features, in_features]."""
        cdef const quire_tiles *tiles = tiles_of("scalar")
        cdef float[:, ::1] out = np.empty((self.out_features, self.width), np.float32)
        cdef const Panels *part
        cdef int64_t column
        for column in range(self.out_features):
            part = self._part(column // 16)
            tiles.unpack_column(_panel(part, column), _scales(part, column), part.dtype, part.group, self.width,
                                column % 16, &out[column, 0])
            if part.group:
                tiles.rotate_back(&out[column, 0], self.width, part.group)
        return np.asarray(out)[:, : self.in_features]


cdef char *_panel(const Panels *part, int64_t column) noexcept nogil:
    return part.data + (column // 16 - part.first_panel) * part.panel_bytes


cdef uint16_t *_scales(const Panels *part, int64_t column) noexcept nogil:
    """Return the scales of a column's panel, or NULL."""
    return part.scales + (column // 16 - part.first_panel) * part.panel_scales if part.scales != NULL else NULL


cdef int64_t _column(int64_t start, int64_t row, int phase) noexcept nogil:
    """Return the column for row `row` of a source: consecutive, or groups of 16 that alternate with another source."""
    return start + row if phase < 0 else start + row // 16 * 32 + 16 * phase + row % 16


cdef int64_t _columns_in_panel(int64_t start, int64_t row, int phase, int64_t end) noexcept nogil:
    """Return how many rows from `row` on, before `end`, are consecutive columns of one panel."""
    cdef int64_t count = 16 - _column(start, row, phase) % 16
    return min(count if phase < 0 else min(count, 16 - row % 16), end - row)


def _widened(rows):
    """Return the rows of a supported source as float32; bf16 is given as its bits in uint16."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    if rows.dtype == np.float16:
        return _widened_f16(np.ascontiguousarray(rows).view(np.uint16))
    if rows.dtype == np.float32:
        return np.ascontiguousarray(rows)
    raise ValueError(f"weights must be float32, float16 or bf16 bits in uint16, not {rows.dtype}")


def _widened_f16(const uint16_t[:, ::1] rows):
    """Return fp16, given as its bits, as float32; numpy widens one number at a time."""
    cdef float[:, ::1] out = np.empty((rows.shape[0], rows.shape[1]), np.float32)
    if rows.shape[0]:
        with nogil:
            quire_widen_f16(&rows[0, 0], rows.shape[0] * rows.shape[1], &out[0, 0])
    return np.asarray(out)


cdef inline uint16_t _round_bf16(float x) noexcept nogil:
    cdef uint32_t u
    memcpy(&u, &x, 4)
    if x != x:
        return <uint16_t>(u >> 16 | 0x40)
    return <uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)
