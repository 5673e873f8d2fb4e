// Attention over pages, which are laid out as packed weights: scores, softmax and weighted sum of one 64-token tile,
// and the merge of 256-token splits. Prefill and decode rows run the same steps. A row never reads a tile of which it
// sees nothing, and masked lanes contribute exactly 0.
#include <assert.h>
#include <stddef.h>

#include "softmax.h"

// Split the rows evenly into groups of at most ATTENTION_ROWS: CALL(number of rows, first row).
#if defined QUIRE_ISA_AVX512
#define PER_ROW_COUNT(n, CALL, row) \
  switch (n) { case 1: CALL(1, row); break; case 2: CALL(2, row); break; case 3: CALL(3, row); break; \
               case 4: CALL(4, row); break; case 5: CALL(5, row); break; default: CALL(6, row); }
#else
#define PER_ROW_COUNT(n, CALL, row) CALL(1, row);
#endif
#define IN_GROUPS(rows, CALL) \
  for (int row = 0, left = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, take; left > 0; left--, row += take) { \
    take = (rows - row) / left; \
    PER_ROW_COUNT(take, CALL, row) \
  }

// s[rows][panels] += a[rows] · one line of each panel; a line is one element of K in f32 and f16, two in bf16.
INLINE void multiply_line(const int dtype, const int rows, const int panels, const char *const *w, int64_t line,
                          const char *a, int64_t lda, vf s[][4]) {
  UNROLL for (int j = 0; j < panels; j++) {
    const char *bytes = w[j] + line * (dtype == QUIRE_F16 ? QUIRE_LINE / 2 : QUIRE_LINE);
    if (dtype != QUIRE_BF16) {
      const vf b = dtype == QUIRE_F16 ? vf_load_f16((const uint16_t *)bytes) : vf_load((const float *)bytes);
      UNROLL for (int i = 0; i < rows; i++) s[i][j] = vf_fma(b, vf_set1(((const float *)a)[i * lda + line]), s[i][j]);
    } else {
      const wbf b = wbf_load((const uint16_t *)bytes);
      UNROLL for (int i = 0; i < rows; i++)
        s[i][j] = vf_dot2(s[i][j], b, (const uint16_t *)a + i * lda + 2 * line);
    }
  }
}

// s[rows][QUIRE_TILE] = q · K
INLINE void scores(const int dtype, const int rows, const quire_attention_tile *t, int row) {
  const int64_t d = t->head_dim, lines = dtype == QUIRE_BF16 ? d / 2 : d;
  const char *q = (const char *)t->q.data + row * d * quire_itemsize(quire_query_dtype(dtype));
  const char *const w[4] = {t->k[0], t->k[1], t->k[2], t->k[3]};
  vf s[ATTENTION_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 4; j++) s[i][j] = vf_zero();
  for (int64_t line = 0; line < lines; line++) {
    if (row == 0 && line % 8 == 0) fetch_pages(t, line, line + 8, 2 * lines);
    multiply_line(dtype, rows, 4, w, line, q, d, s);
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < 4; j++) vf_store(t->s + (row + i) * QUIRE_TILE + j * 16, s[i][j]);
}

// The same for int8, 32 tokens at a time: as in a q8 linear layer, an exact integer dot per 32 of head_dim, multiplied
// by the scales of both sides.
INLINE void scores_int8(const int rows, const quire_attention_tile *t, int row, int pair) {
  const int64_t d = t->head_dim, blocks = d / 32;
  const uint8_t *w[2] = {t->k[2 * pair], t->k[2 * pair + 1]};
  const int8_t *q = (const int8_t *)t->q.data + row * d;
  vf s[ATTENTION_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = vf_zero();
  for (int64_t b = 0; b < blocks; b++) {
    vi dot[ATTENTION_ROWS][2];
    if (row == 0) fetch_pages(t, pair * blocks + b, pair * blocks + b + 1, 4 * blocks);
    UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_dot4_start(t->q.sums[(row + i) * blocks + b]);
    UNROLL for (int k = 0; k < 8; k++) {
      const wq8 u = wq8_load(w[0] + (b * 8 + k) * QUIRE_LINE), v = wq8_load(w[1] + (b * 8 + k) * QUIRE_LINE);
      UNROLL for (int i = 0; i < rows; i++) {
        dot[i][0] = vi_dot4(dot[i][0], u, q + i * d + b * 32 + k * 4);
        dot[i][1] = vi_dot4(dot[i][1], v, q + i * d + b * 32 + k * 4);
      }
    }
    UNROLL for (int j = 0; j < 2; j++) {
      const vf scale = vf_load_f16(t->k_scales[2 * pair + j] + b * 16);
      UNROLL for (int i = 0; i < rows; i++) {
        const vf z = vf_set1(t->q.scales[(row + i) * blocks + b]);
        s[i][j] = vf_fma(vf_from(dot[i][j]), vf_mul(scale, z), s[i][j]);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < 2; j++) vf_store(t->s + (row + i) * QUIRE_TILE + (2 * pair + j) * 16, s[i][j]);
}

// o[rows][n ...] = o * keep + p · V, all pages of the tile in one chain
INLINE void values(const int dtype, const int rows, const int panels, const quire_attention_tile *t, int row,
                   const softmax_result *soft, int64_t n) {
  const int64_t d = t->value_dim, size = quire_itemsize(dtype), size_of_p = quire_itemsize(quire_query_dtype(dtype));
  const int64_t lines = dtype == QUIRE_BF16 ? t->page_size / 2 : t->page_size;
  float *o = t->o + row * d + n;
  vf s[ATTENTION_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < panels; j++)
      s[i][j] = vf_mul(vf_load(o + i * d + j * 16), vf_set1(soft->keep[row + i]));
  if (row == 0) fetch_pages(t, d + n, d + n + 16 * panels, 2 * d);
  for (int g = 0; g < t->num_pages; g++) {
    const char *w[4];
    UNROLL for (int j = 0; j < panels; j++) w[j] = (const char *)t->v[g] + (n + 16 * j) * t->page_size * size;
    const char *p = (const char *)t->p + (row * QUIRE_TILE + g * t->page_size) * size_of_p;
    for (int64_t line = 0; line < lines; line++) multiply_line(dtype, rows, panels, w, line, p, QUIRE_TILE, s);
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < panels; j++) vf_store(o + i * d + j * 16, s[i][j]);
}

// The same for int8, 32 columns at a time: two exact integer dots over the tile, one per digit of p.
INLINE void values_int8(const int rows, const quire_attention_tile *t, int row, const softmax_result *soft, int64_t n) {
  const int8_t *high = (const int8_t *)t->p + row * QUIRE_TILE, *low = high + QUIRE_TILE * QUIRE_TILE;
  vi a[ATTENTION_ROWS][2], b[ATTENTION_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) {
    a[i][0] = a[i][1] = vi_dot4_start(soft->high_sum[row + i]);
    b[i][0] = b[i][1] = vi_dot4_start(soft->low_sum[row + i]);
  }
  if (row == 0) fetch_pages(t, t->value_dim + n, t->value_dim + n + 32, 2 * t->value_dim);
  for (int g = 0; g < t->num_pages; g++) {
    const uint8_t *w = (const uint8_t *)t->v[g] + n * t->page_size;
    for (int64_t token = 0; token < t->page_size; token += 4) {
      const wq8 u = wq8_load(w + token * 16), v = wq8_load(w + (t->page_size + token) * 16);
      UNROLL for (int i = 0; i < rows; i++) {
        a[i][0] = vi_dot4(a[i][0], u, high + i * QUIRE_TILE + g * t->page_size + token);
        a[i][1] = vi_dot4(a[i][1], v, high + i * QUIRE_TILE + g * t->page_size + token);
        b[i][0] = vi_dot4(b[i][0], u, low + i * QUIRE_TILE + g * t->page_size + token);
        b[i][1] = vi_dot4(b[i][1], v, low + i * QUIRE_TILE + g * t->page_size + token);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < 2; j++) {
      float *o = t->o + (row + i) * t->value_dim + n + j * 16;
      const vf kept = vf_mul(vf_load(o), vf_set1(soft->keep[row + i]));
      const vf sum = vf_fma(vf_from(a[i][j]), vf_set1(128.f), vf_from(b[i][j]));
      vf_store(o, vf_fma(sum, vf_set1(soft->scale[row + i]), kept));
    }
}

INLINE void attend(const int dtype, int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  softmax_result soft;
#define SCORES(N, row) scores(dtype, N, t, row)
  IN_GROUPS(rows, SCORES)
  softmax_tile(quire_query_dtype(dtype), rows, t, &soft);
  int64_t n = 0;
#define VALUES_4(N, row) values(dtype, N, 4, t, row, &soft, n)
  for (; n + 4 * QUIRE_LANES <= t->value_dim; n += 4 * QUIRE_LANES) IN_GROUPS(rows, VALUES_4)
#define VALUES_2(N, row) values(dtype, N, 2, t, row, &soft, n)
  for (; n + 2 * QUIRE_LANES <= t->value_dim; n += 2 * QUIRE_LANES) IN_GROUPS(rows, VALUES_2)
#define VALUES_1(N, row) values(dtype, N, 1, t, row, &soft, n)
  for (; n < t->value_dim; n += QUIRE_LANES) IN_GROUPS(rows, VALUES_1)
}

void ISA(attention_f32)(int rows, const quire_attention_tile *t) { attend(QUIRE_F32, rows, t); }
void ISA(attention_bf16)(int rows, const quire_attention_tile *t) { attend(QUIRE_BF16, rows, t); }
void ISA(attention_f16)(int rows, const quire_attention_tile *t) { attend(QUIRE_F16, rows, t); }

void ISA(attention_int8)(int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  softmax_result soft;
#define SCORES_INT8(N, row) scores_int8(N, t, row, pair)
  for (int pair = 0; pair < 2; pair++) IN_GROUPS(rows, SCORES_INT8)
  softmax_tile(QUIRE_Q8, rows, t, &soft);
#define VALUES_INT8(N, row) values_int8(N, t, row, &soft, n)
  for (int64_t n = 0; n < t->value_dim; n += 32) IN_GROUPS(rows, VALUES_INT8)
}

void ISA(merge)(int rows, int64_t head_dim, const float *m, const float *l, const float *o,
                float *total_m, float *total_l, float *total_o) {
  for (int r = 0; r < rows; r++) {
    if (l[r] == 0.f) continue;  // the row sees no token of this split
    if (total_l[r] == 0.f) {    // the row's first split
      for (int64_t j = r * head_dim; j < (r + 1) * head_dim; j += 16) vf_store(total_o + j, vf_load(o + j));
      total_m[r] = m[r], total_l[r] = l[r];
      continue;
    }
    const float now = m[r] > total_m[r] ? m[r] : total_m[r];
    const float old = exp1(total_m[r] - now), add = exp1(m[r] - now);
    for (int64_t j = r * head_dim; j < (r + 1) * head_dim; j += 16)
      vf_store(total_o + j, vf_fma(vf_set1(old), vf_load(total_o + j), vf_mul(vf_set1(add), vf_load(o + j))));
    total_l[r] = total_l[r] * old + l[r] * add;
    total_m[r] = now;
  }
}
