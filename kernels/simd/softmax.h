// What attention shares at all levels: the softmax of one 64-token tile, between its scores and its weighted sum, and
// prefetching the next tile. Internal to simd/.
#pragma once
#include <math.h>

#include "level.h"

// The results of the softmax that the weighted sum needs besides p.
typedef struct {
  _Alignas(64) float keep[QUIRE_TILE];  // factor of the running output: exp(old maximum - new maximum)
  float scale[QUIRE_TILE];              // int8: p = scale * (128 * high + low), each digit 0..127
  int32_t high_sum[QUIRE_TILE], low_sum[QUIRE_TILE];  // start values that make integer dots with unsigned values exact
} softmax_result;

// Decode is bound by memory: prefetch the lines [from, to) / `all` of each page of the next tile into L2. A tile's scores
// fetch the first half, its weighted sum the second half.
INLINE void fetch_pages(const quire_attention_tile *t, int64_t from, int64_t to, int64_t all) {
  const int64_t first = t->next_bytes * from / all, end = t->next_bytes * to / all;
  for (int page = 0; page < t->num_next_pages; page++)
    for (int64_t byte = first; byte < end; byte += 64) __builtin_prefetch(t->next[page] + byte, 0, 2);
}

// The columns [from, to) of 16 that row r sees in each quarter of the tile; returns whether it sees all 64.
INLINE int visible(const quire_attention_tile *t, int r, int from[4], int to[4]) {
  const int64_t first = t->oldest[r] - t->first_token, last = t->newest[r] - t->first_token;  // columns of the tile
  for (int j = 0; j < 4; j++) {
    const int64_t lo = first - 16 * j, hi = last + 1 - 16 * j;
    from[j] = (int)(lo < 0 ? 0 : lo > 16 ? 16 : lo);
    to[j] = (int)(hi < 0 ? 0 : hi > 16 ? 16 : hi);
  }
  return last >= 63 && first <= 0;
}

// Update every row's running maximum; keep[r] is the factor of its running output.
INLINE void update_row_max(int rows, const quire_attention_tile *t, float *keep) {
  for (int r = 0; r < rows; r++) {
    const float *s = t->s + r * 64;
    vf x[4] = {vf_load(s), vf_load(s + 16), vf_load(s + 32), vf_load(s + 48)};
    int from[4], to[4];
    if (!visible(t, r, from, to))
      UNROLL for (int j = 0; j < 4; j++) x[j] = vf_blend(x[j], vf_set1(-INFINITY), from[j], to[j]);
    const float here = vf_reduce_max(vf_max(vf_max(x[0], x[1]), vf_max(x[2], x[3]))), before = t->m[r];
    t->m[r] = here > before ? here : before;
    keep[r] = before == -INFINITY ? before : before - t->m[r];
  }
  for (int r = rows; r % 16; r++) keep[r] = 0.f;
  for (int r = 0; r < rows; r += 16) vf_store(keep + r, vf_exp(vf_load(keep + r)));
}

// Store p as two 7-bit digits relative to the row's largest p in the tile: exact integer dots, finer than bf16.
INLINE void store_digits(const vf x[4], const quire_attention_tile *t, int r, softmax_result *out) {
  vf p[4];
  vi high_sum = vi_zero(), low_sum = vi_zero();
  int nan = 0;
  UNROLL for (int j = 0; j < 4; j++) {
    p[j] = vf_mul(x[j], vf_load(t->v_scales[j]));
    nan |= vf_any_nan(p[j]);
  }
  const float top = vf_reduce_max(vf_max(vf_max(p[0], p[1]), vf_max(p[2], p[3])));
  const vf inverse = vf_set1(!nan && top > 1e-30f && top < INFINITY ? 16383.f / top : 0.f);
  int8_t *high = (int8_t *)t->p + r * 64, *low = high + QUIRE_TILE * 64;
  UNROLL for (int j = 0; j < 4; j++) {
    const vi n = vi_from(nan ? vf_zero() : vf_mul(p[j], inverse)), h = vi_shift_right(n, 7), l = vi_and(n, vi_set1(127));
    vi_store_i8(high + j * 16, h);
    vi_store_i8(low + j * 16, l);
    high_sum = vi_add(high_sum, h), low_sum = vi_add(low_sum, l);
  }
  out->high_sum[r] = -128 * vi_sum(high_sum);
  out->low_sum[r] = -128 * vi_sum(low_sum);
  out->scale[r] = nan ? NAN : top / 16383.f;
}

// Softmax of this tile relative to the running maximum: s becomes p, and the running sums are updated.
INLINE void softmax_tile(const int dtype, int rows, const quire_attention_tile *t, softmax_result *out) {
  if (t->softcap > 0.f)
    for (int i = 0; i < rows * 64; i += 16) vf_store(t->s + i, vf_soft_cap(vf_load(t->s + i), t->softcap));
  update_row_max(rows, t, out->keep);
  for (int r = 0; r < rows; r++) {
    const float *s = t->s + r * 64;
    const vf now = vf_set1(t->m[r]);
    vf x[4];
    UNROLL for (int j = 0; j < 4; j++) x[j] = vf_exp(vf_sub(vf_load(s + 16 * j), now));
    int from[4], to[4];
    const int all = visible(t, r, from, to);
    if (!all) UNROLL for (int j = 0; j < 4; j++) x[j] = vf_blend(x[j], vf_zero(), from[j], to[j]);
    t->l[r] = t->l[r] * out->keep[r] + vf_sum(vf_add(vf_add(x[0], x[1]), vf_add(x[2], x[3])));
    if (dtype == QUIRE_Q8) {
      store_digits(x, t, r, out);
      continue;
    }
    UNROLL for (int j = 0; j < 4; j++) {
      if (dtype == QUIRE_F32) vf_store((float *)t->p + r * 64 + 16 * j, x[j]);
      else vf_store_bf16((uint16_t *)t->p + r * 64 + 16 * j, x[j]);
    }
  }
}
