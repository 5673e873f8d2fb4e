# cython: language_level=3
"""Numbers in the layouts of other tools, made into rows of GGML blocks or of float32 (layouts in words.pyi)."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

cdef enum:
    ROWS_AT_ONCE = 16       # rows of words that may share a cache line
    WORDS_OF_CODES = 4      # words of a block of 32 numbers in 4 bits
    OUTPUTS_OF_WORD = 8     # outputs in a word of AWQ's layout

_BLOCK_BYTES = {"Q4_0": 18, "Q4_Z": 19, "Q8_0": 34}
cdef int[8] AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]    # the output of each 4 bits of a word


def join_blocks(const int32_t[:, :] words, const uint16_t[:, :] scales, const uint8_t[:, :] zeros,
                const int32_t[::1] groups, ggml_type):
    if ggml_type not in _BLOCK_BYTES:
        raise ValueError(f"the type of blocks must be one of {', '.join(_BLOCK_BYTES)}, not {ggml_type!r}")
    cdef bint has_bytes = ggml_type == "Q8_0", has_zero = ggml_type == "Q4_Z"
    cdef int64_t nbytes = _BLOCK_BYTES[ggml_type], tile, first, last, block, row, blocks = groups.shape[0]
    _check(words, 32 * blocks, 8 if has_bytes else 4, scales, zeros, groups)
    cdef uint8_t[:, ::1] out = np.empty((words.shape[0], blocks * nbytes), np.uint8)
    cdef uint8_t *at
    with nogil:
        for tile in range(_tiles(words.shape[0])):
            first, last = tile * ROWS_AT_ONCE, min((tile + 1) * ROWS_AT_ONCE, words.shape[0])
            for block in range(blocks):
                for row in range(first, last):
                    at = &out[row, block * nbytes]
                    memcpy(at, &scales[row, groups[block]], 2)
                    if has_bytes:
                        _copy_bytes(words, row, block, at + 2)
                        continue
                    if has_zero:
                        at[2] = zeros[row, groups[block]]
                    _join_halves(words, row, block, at + (3 if has_zero else 2))
    return np.asarray(out)


def join_mxfp4(const int32_t[:, :] words, const uint8_t[:, :] exponents):
    cdef int64_t blocks = exponents.shape[1], block, row
    if words.shape[0] != exponents.shape[0] or words.shape[1] != blocks * WORDS_OF_CODES:
        raise ValueError(f"{words.shape[0]} x {words.shape[1]} words do not fit {exponents.shape[0]} x {blocks} blocks")
    cdef uint8_t[:, ::1] out = np.empty((words.shape[0], blocks * 17), np.uint8)
    with nogil:
        for row in range(words.shape[0]):
            for block in range(blocks):
                out[row, block * 17] = exponents[row, block]
                _join_halves(words, row, block, &out[row, block * 17 + 1])
    return np.asarray(out)


cdef inline int64_t _tiles(int64_t rows) noexcept nogil:
    return (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE


cdef inline void _join_halves(const int32_t[:, :] words, int64_t row, int64_t block, uint8_t *out) noexcept nogil:
    """Write 32 numbers of 4 bits in 16 bytes: number i of the first half in the low half of byte i."""
    cdef uint64_t eight
    cdef int64_t i, word = block * WORDS_OF_CODES
    for i in range(2):
        eight = _as_bytes(words[row, word + i]) | _as_bytes(words[row, word + 2 + i]) << 4
        memcpy(out + 8 * i, &eight, 8)


cdef inline uint64_t _as_bytes(uint32_t word) noexcept nogil:
    """Return the 8 numbers of a word, least significant first, as bytes."""
    cdef uint64_t x = word
    x = (x | x << 16) & 0x0000ffff0000ffffULL
    x = (x | x << 8) & 0x00ff00ff00ff00ffULL
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0fULL


cdef inline void _copy_bytes(const int32_t[:, :] words, int64_t row, int64_t block, uint8_t *out) noexcept nogil:
    """Write 32 numbers less 128, as signed bytes."""
    cdef uint32_t word
    cdef int64_t i
    for i in range(8):
        word = <uint32_t>words[row, block * 8 + i] ^ 0x80808080U
        memcpy(out + 4 * i, &word, 4)


def widen_words(const int32_t[:, :] words, int bits, const float[:, :] scales, const uint8_t[:, :] zeros,
                const int32_t[::1] groups):
    cdef int64_t inputs = groups.shape[0], row, k
    _check(words, inputs, bits, scales, zeros, groups)
    cdef float[:, ::1] out = np.empty((words.shape[0], inputs), np.float32)
    cdef uint32_t mask = (1 << bits) - 1, number
    cdef int32_t each = 32 // bits, group
    with nogil:
        for row in range(words.shape[0]):
            for k in range(inputs):
                number = <uint32_t>words[row, k // each] >> k % each * bits & mask
                group = groups[k]
                out[row, k] = <float>(<int32_t>number - zeros[row, group]) * scales[row, group]
    return np.asarray(out)


def reorder_words(const int32_t[:, :] words, int bits, const int32_t[::1] order):
    cdef int64_t rows = words.shape[0], inputs = order.shape[0], tile, first, count, word, row, place, k
    cdef int each = 32 // bits if bits in (4, 8) else 0, shift
    if not each or inputs % each or words.shape[1] * each != inputs:
        raise ValueError(f"{words.shape[1]} words do not have {inputs} numbers of 4 or 8 bits, here {bits}")
    if inputs and not 0 <= np.min(order) <= np.max(order) < inputs:
        raise ValueError(f"an order of {inputs} numbers must not have {np.min(order)} to {np.max(order)}")
    cdef int32_t[:, ::1] out = np.empty((rows, words.shape[1]), np.int32)
    cdef uint32_t mask = (1 << bits) - 1
    cdef uint32_t[ROWS_AT_ONCE] joined
    with nogil:
        for tile in range(_tiles(rows)):
            first = tile * ROWS_AT_ONCE
            count = min(<int64_t>ROWS_AT_ONCE, rows - first)
            for word in range(words.shape[1]):
                memset(joined, 0, sizeof(joined))
                for place in range(each):
                    k = order[word * each + place]
                    shift = k % each * bits
                    for row in range(count):
                        joined[row] |= (<uint32_t>words[first + row, k // each] >> shift & mask) << place * bits
                for row in range(count):
                    out[first + row, word] = <int32_t>joined[row]
    return np.asarray(out)


def _check(words, inputs, bits, scales, zeros, groups):
    """Check that every index into the arrays lies inside of them."""
    num_groups = min(scales.shape[1], zeros.shape[1])
    of = np.asarray(groups)
    if bits not in (4, 8) or words.shape[1] * 32 < inputs * bits:
        raise ValueError(f"{words.shape[1]} words do not have {inputs} numbers of 4 or 8 bits, here {bits}")
    if scales.shape[0] != words.shape[0] or zeros.shape[0] != words.shape[0]:
        raise ValueError(f"{words.shape[0]} rows need as many of scales and zero points, not {scales.shape[0]} and "
                         f"{zeros.shape[0]}")
    if len(of) and (of.min() < 0 or of.max() >= num_groups):
        raise ValueError(f"groups must be 0 to {num_groups - 1}, not {of.min()} to {of.max()}")


def widen_codes(const uint8_t[:, ::1] codes, const float[::1] values, const float[:, :] scales, int64_t size):
    cdef int64_t columns = codes.shape[1], row, group, k
    if values.shape[0] != 256 or size < 1 or scales.shape[0] != codes.shape[0] or scales.shape[1] * size < columns:
        raise ValueError(f"{codes.shape[0]} x {columns} codes need 256 values and a scale for each {size} of a row")
    cdef float[:, ::1] out = np.empty((codes.shape[0], columns), np.float32)
    cdef float scale
    with nogil:
        for row in range(codes.shape[0]):
            for group in range((columns + size - 1) // size):
                scale = scales[row, group]
                for k in range(group * size, min(group * size + size, columns)):
                    out[row, k] = values[codes[row, k]] * scale
    return np.asarray(out)


def inputs_in_words(const int32_t[:, ::1] words):
    cdef int64_t inputs = words.shape[0], columns = words.shape[1], first, column, i
    cdef int32_t[:, ::1] out = np.empty(((inputs + 7) // 8, columns * OUTPUTS_OF_WORD), np.int32)
    cdef uint32_t[8] eight
    with nogil:
        for first in range(0, inputs, 8):
            for column in range(columns):
                for i in range(8):
                    eight[i] = <uint32_t>words[first + i, column] if first + i < inputs else 0
                _transpose(eight)
                for i in range(8):
                    out[first // 8, column * OUTPUTS_OF_WORD + AWQ_OUTPUTS[i]] = <int32_t>eight[i]
    return np.asarray(out)


cdef inline void _transpose(uint32_t *x) noexcept nogil:
    """Exchange number i of word j and number j of word i, of 8 words with 8 numbers of 4 bits."""
    _swap(x, 4, 0x0000ffffU)
    _swap(x, 2, 0x00ff00ffU)
    _swap(x, 1, 0x0f0f0f0fU)


cdef inline void _swap(uint32_t *x, int distance, uint32_t mask) noexcept nogil:
    cdef uint32_t changed
    cdef int i
    for i in range(8):
        if not i & distance:
            changed = (x[i] >> 4 * distance ^ x[i + distance]) & mask
            x[i + distance] ^= changed
            x[i] ^= changed << 4 * distance
