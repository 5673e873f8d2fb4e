// Attention at all levels: the softmax of one 64-token tile, between its scores and its weighted sum, and the prefetch of
// the next tile. Internal to simd/.
#pragma once
#include <math.h>

#include "level.h"

// The results of the softmax that the weighted sum needs besides p.
typedef struct {
  _Alignas(64) float keep[QUIRE_TILE];  // factor of the running output: exp(old maximum - new maximum)
  float scale[QUIRE_TILE];              // int8: p = scale * (128 * high + low), each digit 0..127
  int32_t high_sum[QUIRE_TILE], low_sum[QUIRE_TILE];  // start values that make integer dots with unsigned values exact
} softmax_result;

// Decode is bound by memory: prefetch the lines [from, to) / `all` of the pages of the next tile into L2, one page after the
// other, because a single stream is read faster than several. A tile's scores fetch the first half, its weighted sum the second.
INLINE void fetch_pages(const quire_attention_tile *t, int64_t from, int64_t to, int64_t all) {
  const int64_t of_page = (t->next_bytes + QUIRE_LINE - 1) / QUIRE_LINE, lines = of_page * t->num_next_pages;
  int64_t first = lines * from / all, end = lines * to / all;
  for (int page = 0; page < t->num_next_pages; page++, first -= of_page, end -= of_page)
    for (int64_t line = first < 0 ? 0 : first; line < end && line < of_page; line++)
      __builtin_prefetch(t->next[page] + line * QUIRE_LINE, 0, 2);
}

// Replace the columns of row r that it does not see; x are the quarters of the tile.
INLINE void mask_row(const quire_attention_tile *t, int r, vf x[4], float hidden) {
  const int64_t first = t->oldest[r] - t->first_token, last = t->newest[r] - t->first_token;  // columns of the tile
  if (last >= QUIRE_TILE - 1 && first <= 0) return;
  UNROLL for (int j = 0; j < 4; j++) {
    const int64_t lo = first - 16 * j, hi = last + 1 - 16 * j;
    const int from = (int)(lo < 0 ? 0 : lo > 16 ? 16 : lo), to = (int)(hi < 0 ? 0 : hi > 16 ? 16 : hi);
    x[j] = vf_blend(x[j], vf_set1(hidden), from, to);
  }
}

// CALL(number of rows, first row) for groups of the rows [first, end) that are reduced at once.
#define IN_ROWS_AT_ONCE(first, end, CALL) { \
    int r = first; \
    for (; r + AT_ONCE <= end; r += AT_ONCE) CALL(AT_ONCE, r); \
    for (; r < end; r++) CALL(1, r); \
  }

// Update the running maximum of rows [r, r + n); keep[r] is the logarithm of the factor of a row's running output.
INLINE void update_row_max(const int n, const quire_attention_tile *t, int r, float *keep) {
  vf top[AT_ONCE];
  float here[AT_ONCE];
  UNROLL for (int i = 0; i < n; i++) {
    const float *s = t->s + (r + i) * QUIRE_TILE;
    vf x[4] = {vf_load(s), vf_load(s + 16), vf_load(s + 32), vf_load(s + 48)};
    mask_row(t, r + i, x, -INFINITY);
    top[i] = vf_max(vf_max(x[0], x[1]), vf_max(x[2], x[3]));
  }
  REDUCE(vf_max4, vf_reduce_max, n, top, here)
  UNROLL for (int i = 0; i < n; i++) {
    const float before = t->m[r + i];
    t->m[r + i] = here[i] > before ? here[i] : before;
    keep[r + i] = before == -INFINITY ? before : before - t->m[r + i];
  }
}

// Store p of rows [r, r + n) as two 7-bit digits relative to the row's largest p in the tile: exact integer dots, finer
// than bf16.
INLINE void store_digits(const int n, vf x[][4], const quire_attention_tile *t, int r, softmax_result *out) {
  vf tops[AT_ONCE];
  vi sums[AT_ONCE];
  float top[AT_ONCE], inverse[AT_ONCE];
  int32_t sum[AT_ONCE];
  int nan[AT_ONCE];
  UNROLL for (int i = 0; i < n; i++) {
    UNROLL for (int j = 0; j < 4; j++) x[i][j] = vf_mul(x[i][j], vf_load(t->v_scales[j]));
    nan[i] = vf_any_nan(vf_add(vf_add(x[i][0], x[i][1]), vf_add(x[i][2], x[i][3])));  // p is not negative
    tops[i] = vf_max(vf_max(x[i][0], x[i][1]), vf_max(x[i][2], x[i][3]));
  }
  REDUCE(vf_max4, vf_reduce_max, n, tops, top)
  UNROLL for (int i = 0; i < n; i++) {
    inverse[i] = !nan[i] && top[i] > 1e-30f && top[i] < INFINITY ? 16383.f / top[i] : 0.f;
    out->scale[r + i] = nan[i] ? NAN : top[i] / 16383.f;
  }
  UNROLL for (int i = 0; i < n; i++) {
    int8_t *high = (int8_t *)t->p + (r + i) * QUIRE_TILE;
    vi digits[4];
    UNROLL for (int j = 0; j < 4; j++)
      digits[j] = vi_from(nan[i] ? vf_zero() : vf_mul(x[i][j], vf_set1(inverse[i])));
    sums[i] = vi_store_digits(high, high + QUIRE_TILE * QUIRE_TILE, digits);
  }
  REDUCE(vi_sum4, vi_sum, n, sums, sum)
  UNROLL for (int i = 0; i < n; i++) {
    out->high_sum[r + i] = -128 * (sum[i] & 0xffff);
    out->low_sum[r + i] = -128 * (sum[i] >> 16);
  }
}

// Softmax of rows [r, r + n) of this tile relative to their running maximum: s becomes p, and the running sums are updated.
INLINE void softmax_rows(const int dtype, const int n, const quire_attention_tile *t, int r, softmax_result *out) {
  vf x[AT_ONCE][4], sums[AT_ONCE];
  float sum[AT_ONCE];
  UNROLL for (int i = 0; i < n; i++) {
    const vf now = vf_set1(t->m[r + i]);
    UNROLL for (int j = 0; j < 4; j++) x[i][j] = vf_exp(vf_sub(vf_load(t->s + (r + i) * QUIRE_TILE + 16 * j), now));
    mask_row(t, r + i, x[i], 0.f);
    sums[i] = vf_add(vf_add(x[i][0], x[i][1]), vf_add(x[i][2], x[i][3]));
  }
  REDUCE(vf_sum4, vf_sum, n, sums, sum)
  UNROLL for (int i = 0; i < n; i++) t->l[r + i] = t->l[r + i] * out->keep[r + i] + sum[i];
  if (dtype == QUIRE_Q8) {
    store_digits(n, x, t, r, out);
    return;
  }
  UNROLL for (int i = 0; i < n; i++)
    UNROLL for (int j = 0; j < 4; j++) {
      if (dtype == QUIRE_F32) vf_store((float *)t->p + (r + i) * QUIRE_TILE + 16 * j, x[i][j]);
      else vf_store_bf16((uint16_t *)t->p + (r + i) * QUIRE_TILE + 16 * j, x[i][j]);
    }
}

// The softmax of rows [first, end) of this tile; `first` is a multiple of 16.
INLINE void softmax_range(const int dtype, int first, int end, const quire_attention_tile *t, softmax_result *out) {
  if (t->softcap > 0.f)
    for (int i = first * QUIRE_TILE; i < end * QUIRE_TILE; i += 16) vf_store(t->s + i, vf_soft_cap(vf_load(t->s + i), t->softcap));
  if (t->bias)
    for (int i = first * QUIRE_TILE; i < end * QUIRE_TILE; i += 16)
      vf_store(t->s + i, vf_add(vf_load(t->s + i), vf_load(t->bias[i / QUIRE_TILE] + i % QUIRE_TILE)));
#define UPDATE_ROW_MAX(N, row) update_row_max(N, t, row, out->keep)
  IN_ROWS_AT_ONCE(first, end, UPDATE_ROW_MAX)
  for (int r = end; r % 16; r++) out->keep[r] = 0.f;
  for (int r = first; r < end; r += 16) vf_store(out->keep + r, vf_exp(vf_load(out->keep + r)));
#define SOFTMAX(N, row) softmax_rows(dtype, N, t, row, out)
  IN_ROWS_AT_ONCE(first, end, SOFTMAX)
}

// The softmax of all rows of this tile.
INLINE void softmax_tile(const int dtype, int rows, const quire_attention_tile *t, softmax_result *out) {
  softmax_range(dtype, 0, rows, t, out);
}
