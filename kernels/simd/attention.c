// Attention over pages that are packed weights: scores, softmax and weighted sum of one 64-token tile, and the merge of
// 256-token splits. Prefill and decode rows run the same sequence: a row never touches a tile it cannot see, and masked
// lanes contribute exactly 0.
#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "level.h"

// c[rows][16 panels] (+)= a[rows][depth] · w: each panel is a packed weight of 16 columns, one chain per output.
// Up to two rows are bound by memory, so `next` bytes are fetched under the arithmetic, as many as are read here.
INLINE void dots(const int bf16, const int rows, const int panels, const void *a, int64_t lda, const void *const *w,
                 int64_t depth, const char *next, float *c, int64_t ldc, const int add) {
  vf s[ATTENTION_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < panels; j++) s[i][j] = add ? vf_load(c + i * ldc + j * 16) : vf_zero();
  for (int64_t e = 0, step = 0; e < depth; e += bf16 ? 2 : 1, step++) {
    if (rows <= 2 && next) UNROLL for (int j = 0; j < panels; j++) __builtin_prefetch(next + (step * panels + j) * 64, 0, 3);
    if (bf16) {
      wbf b[4];
      UNROLL for (int j = 0; j < panels; j++) b[j] = wbf_load((const uint16_t *)w[j] + e * 16);
      UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < panels; j++) s[i][j] = vf_dot2(s[i][j], b[j], (const uint16_t *)a + i * lda + e);
    } else {
      vf b[4];
      UNROLL for (int j = 0; j < panels; j++) b[j] = vf_load((const float *)w[j] + e * 16);
      UNROLL for (int i = 0; i < rows; i++) {
        const vf x = vf_set1(((const float *)a)[i * lda + e]);
        UNROLL for (int j = 0; j < panels; j++) s[i][j] = vf_fma(b[j], x, s[i][j]);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < panels; j++) vf_store(c + i * ldc + j * 16, s[i][j]);
}

// Any number of rows, split evenly into instances of at most ATTENTION_ROWS.
INLINE void dots_rows(const int bf16, int rows, const int panels, const void *a, int64_t lda, const void *const *w,
                      int64_t depth, const char *next, float *c, int64_t ldc, const int add) {
  for (int left = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, n; left > 0; left--, rows -= n) {
    n = rows / left;
    switch (n) {
      case 1: dots(bf16, 1, panels, a, lda, w, depth, next, c, ldc, add); break;
#if defined QUIRE_ISA_AVX512
      case 2: dots(bf16, 2, panels, a, lda, w, depth, next, c, ldc, add); break;
      case 3: dots(bf16, 3, panels, a, lda, w, depth, next, c, ldc, add); break;
      case 4: dots(bf16, 4, panels, a, lda, w, depth, next, c, ldc, add); break;
      case 5: dots(bf16, 5, panels, a, lda, w, depth, next, c, ldc, add); break;
      case 6: dots(bf16, 6, panels, a, lda, w, depth, next, c, ldc, add); break;
#endif
      default: assert(0);
    }
    a = (const char *)a + n * lda * (bf16 ? 2 : 4);
    c += n * ldc;
  }
}

// s[rows][64] = q · K. With few rows it goes in as many pieces of head_dim as the tile has pages: under each piece, one
// page's V is fetched.
INLINE void scores(const int bf16, int rows, const quire_attention_tile *t) {
  const int64_t d = t->head_dim;
  const int pieces = rows <= 2 ? 64 / t->page_size : 1;
  for (int g = 0; g < pieces; g++) {
    const int64_t from = g * d / pieces, offset = from * (bf16 ? 2 : 4);
    const void *w[4];
    for (int j = 0; j < 4; j++) w[j] = (const char *)t->k[j] + offset * 16;
    dots_rows(bf16, rows, 4, (const char *)t->q + offset, d, w, d / pieces, g < t->num_pages ? t->v[g] : NULL, t->s, 64, g > 0);
  }
}

// o[rows][head_dim] += p · V, page by page; under each page's V, that page's K of the next tile is fetched.
INLINE void values(const int bf16, int rows, const quire_attention_tile *t) {
  const int64_t d = t->head_dim, size = bf16 ? 2 : 4;
  for (int g = 0; g < t->num_pages; g++) {
    const void *p = (const char *)t->p + g * t->page_size * size;
    for (int64_t n = 0; n < d; n += n + 64 <= d ? 64 : 16) {
      const void *w[4];
      for (int j = 0; j < 4; j++) w[j] = (const char *)t->v[g] + (n + 16 * j) * t->page_size * size;
      const char *next = t->next_k[g] ? (const char *)t->next_k[g] + n * t->page_size * size : NULL;
      if (n + 64 <= d) dots_rows(bf16, rows, 4, p, 64, w, t->page_size, next, t->o + n, d, 1);
      else dots_rows(bf16, rows, 1, p, 64, w, t->page_size, next, t->o + n, d, 1);
    }
  }
}

// Running softmax of one row over this tile: s -> p, and m, l, o brought to the new maximum.
INLINE void soften(const int bf16, const quire_attention_tile *t, int r) {
  const float *s = t->s + r * 64;
  const int64_t behind = t->positions[r] - t->first_token;        // the row sees tile columns <= behind ...
  const int64_t oldest = t->window ? behind - t->window + 1 : 0;  // ... and >= oldest
  vf x[4], top = vf_set1(-INFINITY);
  int from[4], to[4];
  for (int j = 0; j < 4; j++) {
    const int64_t lo = oldest - 16 * j, hi = behind + 1 - 16 * j;
    from[j] = (int)(lo < 0 ? 0 : lo > 16 ? 16 : lo);
    to[j] = (int)(hi < 0 ? 0 : hi > 16 ? 16 : hi);
    x[j] = vf_pick(vf_load(s + 16 * j), vf_set1(-INFINITY), from[j], to[j]);
    top = vf_max(top, x[j]);
  }
  const float here = vf_top(top), before = t->m[r], now = here > before ? here : before;
  for (int j = 0; j < 4; j++) {
    x[j] = vf_pick(vf_exp(vf_sub(x[j], vf_set1(now))), vf_zero(), from[j], to[j]);
    if (bf16) vf_store_bf16((uint16_t *)t->p + r * 64 + 16 * j, x[j]);
    else vf_store((float *)t->p + r * 64 + 16 * j, x[j]);
  }
  const float keep = before == -INFINITY ? 0.f : exp1(before - now);
  t->l[r] = t->l[r] * keep + vf_sum(vf_add(vf_add(x[0], x[1]), vf_add(x[2], x[3])));
  t->m[r] = now;
  if (keep == 1.f) return;
  float *o = t->o + r * t->head_dim;
  for (int64_t j = 0; j < t->head_dim; j += 16) vf_store(o + j, vf_mul(vf_load(o + j), vf_set1(keep)));
}

INLINE void attend(const int bf16, int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  scores(bf16, rows, t);
  for (int r = 0; r < rows; r++) soften(bf16, t, r);
  values(bf16, rows, t);
}

void ISA(attention_f32)(int rows, const quire_attention_tile *t) { attend(0, rows, t); }
void ISA(attention_bf16)(int rows, const quire_attention_tile *t) { attend(1, rows, t); }

void ISA(merge)(int rows, int64_t head_dim, const float *m, const float *l, const float *o,
                float *total_m, float *total_l, float *total_o) {
  for (int r = 0; r < rows; r++) {
    if (l[r] == 0.f) continue;  // the row saw nothing of this split
    const float now = m[r] > total_m[r] ? m[r] : total_m[r];
    const float old = total_m[r] == -INFINITY ? 0.f : exp1(total_m[r] - now), add = exp1(m[r] - now);
    for (int64_t j = r * head_dim; j < (r + 1) * head_dim; j += 16)
      vf_store(total_o + j, vf_fma(vf_set1(old), vf_load(total_o + j), vf_mul(vf_set1(add), vf_load(o + j))));
    total_l[r] = total_l[r] * old + l[r] * add;
    total_m[r] = now;
  }
}
