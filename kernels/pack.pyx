# cython: language_level=3
"""Packing of weights into tiles when a model is loaded: 16 output columns in lanes, K inside (layouts in pack.pyi).

Padding is zero, so padded columns and rows contribute exactly nothing.
"""
from libc.math cimport fabsf, isfinite, rintf
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

import numpy as np

from .isa import WEIGHT_CODES
from .isa cimport QUIRE_BF16, QUIRE_F32, QUIRE_Q4, quire_panel_bytes, quire_tiles, tiles_of

_ROWS_AT_ONCE = 64    # rows of the source that are widened to f32 at a time: malloc keeps what a thread has freed
_ZEROS = {"q8": 0x80, "q4": 0x88}    # bytes of padding: weights are stored unsigned


def packed_nbytes(out_features, in_features, dtype):
    columns, width = _padded(out_features), _padded(in_features)
    scales = columns * width // 32 * 2 if dtype in _ZEROS else 0
    return columns // 16 * quire_panel_bytes(WEIGHT_CODES[dtype], width) + scales


def _padded(n):
    return -(-n // 32) * 32


cdef class PackedMatrix:
    def __init__(self, out_features, in_features, dtype, memory):
        if dtype not in WEIGHT_CODES:
            raise ValueError(f"weight dtype must be one of {', '.join(WEIGHT_CODES)}, not {dtype!r}")
        if out_features < 1 or in_features < 1:
            raise ValueError(f"a matrix needs positive sizes, not {out_features} x {in_features}")
        self.nbytes = packed_nbytes(out_features, in_features, dtype)
        cdef uint8_t[::1] view = memory
        if view.shape[0] < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes are needed, the memory given has {view.shape[0]}")
        if <size_t>&view[0] % 64:
            raise ValueError("packed weights need memory aligned to 64 bytes")
        self.memory = memory
        self.data = <char *>&view[0]
        self.out_features, self.in_features, self.dtype = out_features, in_features, dtype
        self.dtype_code, self.tiles = WEIGHT_CODES[dtype], tiles_of(None)
        self.width = _padded(in_features)
        self.panels = _padded(out_features) // 16
        self.panel_bytes = quire_panel_bytes(self.dtype_code, self.width)
        self.scales = <uint16_t *>(self.data + self.panels * self.panel_bytes) if dtype in _ZEROS else NULL
        if dtype in _ZEROS:
            memory[: self.panels * self.panel_bytes] = _ZEROS[dtype]

    def fill(self, source, start=0, interleave=None):
        if source.ndim != 2 or source.shape[1] != self.in_features:
            raise ValueError(f"source must be [n, {self.in_features}], not {list(source.shape)}")
        if interleave not in (None, 0, 1):
            raise ValueError(f"interleave must be None, 0 or 1, not {interleave!r}")
        cdef int64_t first = start, n = source.shape[0]
        if n == 0:
            return
        cdef int64_t last = _column(first, n - 1, -1 if interleave is None else interleave)
        if first < 0 or last >= self.panels * 16:
            raise ValueError(f"columns up to {last} do not fit a matrix of {self.out_features}")
        cdef const float[:, ::1] rows
        cdef int64_t row, base, column, count
        cdef int phase = -1 if interleave is None else interleave
        for base in range(0, n, _ROWS_AT_ONCE):
            rows = _widened(source[base:base + _ROWS_AT_ONCE])
            row = 0
            with nogil:
                while row < rows.shape[0]:
                    column, count = _column(first, base + row, phase), 1
                    if self.dtype_code == QUIRE_Q4:
                        # rows that are consecutive columns of one panel
                        count = min(16 - column % 16, 16 - row % 16, rows.shape[0] - row)
                        self._fill_q4(&rows[row, 0], column, count)
                    else:
                        self._fill_column(&rows[row, 0], column)
                    row += count

    cdef void _fill_column(self, const float *row, int64_t column) noexcept nogil:
        cdef char *panel = self.data + column // 16 * self.panel_bytes
        cdef int64_t lane = column % 16, k
        if self.dtype_code == QUIRE_F32:
            for k in range(self.in_features):
                (<float *>panel)[k * 16 + lane] = row[k]
        elif self.dtype_code == QUIRE_BF16:
            for k in range(self.in_features):
                (<uint16_t *>panel)[k // 2 * 32 + lane * 2 + k % 2] = _round_bf16(row[k])
        else:
            for k in range(0, self.in_features, 32):
                self._quantise(row + k, min(32, self.in_features - k), <uint8_t *>panel + k * 16 + lane * 4,
                               self.scales + (column // 16 * self.width + k) // 2 + lane)

    cdef void _fill_q4(self, const float *rows, int64_t column, int64_t count) noexcept nogil:
        """Quantise `count` columns of one panel from `column` on, a block of 32 along K of all of them at a time."""
        cdef float w[32 * 16]
        cdef uint8_t packed[256]
        cdef uint16_t fitted[16]
        cdef char *block = self.data + column // 16 * self.panel_bytes
        cdef uint16_t *scales = self.scales + column // 16 * self.width // 2
        cdef int64_t lane = column % 16, row, k, i, line
        memset(w, 0, sizeof(w))
        for k in range(0, self.in_features, 32):
            for row in range(count):
                for i in range(32):
                    w[i * 16 + lane + row] = rows[row * self.in_features + k + i] if k + i < self.in_features else 0
            self.tiles.quantise_q4(w, fitted, packed)
            memcpy(scales + lane, fitted + lane, count * 2)
            for line in range(4):
                memcpy(block + line * 64 + lane * 4, packed + line * 64 + lane * 4, count * 4)
            block, scales = block + 256, scales + 16

    cdef void _quantise(self, const float *w, int64_t n, uint8_t *tile, uint16_t *scale) noexcept nogil:
        """Quantise one block of at most 32 along K as Q8_0 does: the scale is max|w| / 127 in fp16."""
        cdef float top = 0, step, q
        cdef int64_t k
        for k in range(n):
            top = max(top, fabsf(w[k]))
        scale[0] = _round_f16(top / 127)
        step = _widen_f16(scale[0])
        for k in range(n):
            q = rintf(w[k] / step) if step > 0 else 0
            tile[k // 4 * 64 + k % 4] = <uint8_t>(<int>min(<float>127, max(<float>-127, q)) + 128)

    def unpack(self):
        """Return the matrix as the kernels see it, f32 [out_features, in_features]."""
        cdef const quire_tiles *tiles = tiles_of("scalar")
        cdef float[:, ::1] out = np.empty((self.out_features, self.width), np.float32)
        cdef int64_t column
        for column in range(self.out_features):
            tiles.unpack_column(self.data + column // 16 * self.panel_bytes,
                                self.scales + column // 16 * self.width // 2 if self.scales != NULL else NULL,
                                self.dtype_code, self.width, column % 16, &out[column, 0])
        return np.asarray(out)[:, : self.in_features]


cdef int64_t _column(int64_t start, int64_t row, int phase) noexcept nogil:
    """Return the column for row `row` of a source: consecutive, or groups of 16 that alternate with another source."""
    return start + row if phase < 0 else start + row // 16 * 32 + 16 * phase + row % 16


def _widened(rows):
    """Return the rows of a supported source as float32; bf16 is given as its bits in uint16."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    if rows.dtype in (np.float32, np.float16):
        return np.ascontiguousarray(rows, np.float32)
    raise ValueError(f"weights must be float32, float16 or bf16 bits in uint16, not {rows.dtype}")


cdef uint16_t _round_bf16(float x) noexcept nogil:
    cdef uint32_t u
    memcpy(&u, &x, 4)
    if x != x:
        return <uint16_t>(u >> 16 | 0x40)
    return <uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)


cdef uint16_t _round_f16(float x) noexcept nogil:
    """Round a non-negative float to the nearest fp16 (ties to even), at most the largest finite one."""
    cdef uint32_t u, shift, kept, rest
    if not isfinite(x) or x >= 65504:
        return 0x7bff
    memcpy(&u, &x, 4)
    cdef int exponent = <int>(u >> 23) - 127
    if exponent < -25:
        return 0
    cdef uint32_t mantissa = (u & 0x7fffff) | 0x800000
    shift = 13 if exponent >= -14 else <uint32_t>(-1 - exponent)
    kept = mantissa >> shift
    rest = mantissa & ((<uint32_t>1 << shift) - 1)
    if rest + (kept & 1) > <uint32_t>1 << (shift - 1):
        kept += 1
    return <uint16_t>(kept + (<uint32_t>(exponent + 14) << 10) if exponent >= -14 else kept)


cdef float _widen_f16(uint16_t h) noexcept nogil:
    """Return a non-negative fp16 as float, exactly."""
    cdef int exponent = h >> 10
    cdef float x = <float>(h & 1023) if exponent == 0 else <float>(h & 1023 | 1024)
    cdef int power = -24 if exponent == 0 else exponent - 25
    while power > 0:
        x *= 2
        power -= 1
    while power < 0:
        x *= 0.5
        power += 1
    return x
