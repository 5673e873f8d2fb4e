// Latent attention: the values of a panel of keys, in the layout of values. A latent is stored once, as a key; its tile of
// values is made when it is read, once for all heads. The numbers do not change.
#include "level.h"

#if defined QUIRE_ISA_AVX512
// Words of four tokens and one line -> bytes (or pairs) of each element, in the order of values.
INLINE __m512i in_order(const int dtype, __m512i x) {
  const __m128i bytes = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i pairs = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  if (dtype != QUIRE_Q8 && dtype != QUIRE_BF16) return x;
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(dtype == QUIRE_Q8 ? bytes : pairs));
}

// The quarters of four vectors, transposed.
INLINE void transpose_quarters(const __m512i x[4], __m512i *y, int stride) {
  const __m512i ab = _mm512_shuffle_i32x4(x[0], x[1], 0x44), ab_high = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
  const __m512i cd = _mm512_shuffle_i32x4(x[2], x[3], 0x44), cd_high = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
  y[0] = _mm512_shuffle_i32x4(ab, cd, 0x88);
  y[stride] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
  y[2 * stride] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
  y[3 * stride] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// A line of a panel; the 16 elements of one of f16 as words.
INLINE __m512i load_line(const int dtype, const char *line) {
  if (dtype == QUIRE_F16) return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)line));
  return in_order(dtype, _mm512_loadu_si512(line));
}
INLINE void store_line(const int dtype, char *line, __m512i x) {
  if (dtype == QUIRE_F16) _mm256_storeu_si256((void *)line, _mm512_cvtepi32_epi16(x));
  else _mm512_storeu_si512(line, x);
}

// 16 elements of 16 tokens: lines of int8 have four elements of each token, lines of bf16 two, the others one.
INLINE void transpose_block(const int dtype, const char *k, char *v) {
  const int lines = dtype == QUIRE_Q8 ? 4 : dtype == QUIRE_BF16 ? 8 : 16;
  const int64_t line_bytes = dtype == QUIRE_F16 ? QUIRE_LINE / 2 : QUIRE_LINE;
  __m512i x[16], y[16];
  UNROLL for (int i = 0; i < lines; i++) x[i] = load_line(dtype, k + i * line_bytes);
  if (dtype == QUIRE_Q8) {
    transpose_quarters(x, y, 1);
  } else if (dtype == QUIRE_BF16) {
    __m512i even[4], odd[4];  // quarters of lines 2i and 2i + 1: the first pair of tokens, the second pair
    UNROLL for (int i = 0; i < 4; i++) {
      even[i] = _mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]);
      odd[i] = _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]);
    }
    transpose_quarters(even, y, 2);
    transpose_quarters(odd, y + 1, 2);
  } else {
    __m512i rows[4][4];  // [token of a quarter][lines 4i ..]
    UNROLL for (int i = 0; i < 4; i++) {
      const __m512i a = _mm512_unpacklo_epi32(x[4 * i], x[4 * i + 1]), b = _mm512_unpackhi_epi32(x[4 * i], x[4 * i + 1]);
      const __m512i c = _mm512_unpacklo_epi32(x[4 * i + 2], x[4 * i + 3]);
      const __m512i d = _mm512_unpackhi_epi32(x[4 * i + 2], x[4 * i + 3]);
      rows[0][i] = _mm512_unpacklo_epi64(a, c);
      rows[1][i] = _mm512_unpackhi_epi64(a, c);
      rows[2][i] = _mm512_unpacklo_epi64(b, d);
      rows[3][i] = _mm512_unpackhi_epi64(b, d);
    }
    UNROLL for (int token = 0; token < 4; token++) transpose_quarters(rows[token], y + token, 4);
  }
  UNROLL for (int i = 0; i < lines; i++) store_line(dtype, v + i * line_bytes, y[i]);
}
#else
INLINE void transpose_block(const int dtype, const char *k, char *v) {
  const int each = dtype == QUIRE_Q8 ? 4 : dtype == QUIRE_BF16 ? 2 : 1;  // elements of a token in a line, and the reverse
  for (int token = 0; token < 16; token++)
    for (int i = 0; i < 16; i++) {
      const int from = (i / each * 16 + token) * each + i % each, to = (token / each * 16 + i) * each + token % each;
      if (dtype == QUIRE_F32) ((uint32_t *)v)[to] = ((const uint32_t *)k)[from];
      else if (dtype != QUIRE_Q8) ((uint16_t *)v)[to] = ((const uint16_t *)k)[from];
      else v[to] = k[from];
    }
}
#endif

INLINE void transpose_panel(const int dtype, const char *k, int64_t columns, int64_t tokens, char *v) {
  const int64_t size = quire_itemsize(dtype);
  for (int64_t n = 0; n < columns; n += QUIRE_LANES) transpose_block(dtype, k + n * 16 * size, v + n * tokens * size);
}

void ISA(values_of_keys)(const quire_page *page, int64_t columns, int64_t tokens, void *v, float *scales) {
  if (page->dtype == QUIRE_F32) transpose_panel(QUIRE_F32, page->k, columns, tokens, v);
  else if (page->dtype == QUIRE_BF16) transpose_panel(QUIRE_BF16, page->k, columns, tokens, v);
  else if (page->dtype == QUIRE_F16) transpose_panel(QUIRE_F16, page->k, columns, tokens, v);
  else {
    transpose_panel(QUIRE_Q8, page->k, columns, tokens, v);
    vf_store(scales, vf_load_f16(page->k_scales));
  }
}
