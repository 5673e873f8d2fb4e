// Attention over pages that are packed weights: scores, softmax and weighted sum of one 64-token tile, and the merge of
// 256-token splits. Prefill and decode rows run the same sequence: a row never touches a tile it cannot see, and masked
// lanes contribute exactly 0.
#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "level.h"

INLINE void fetch_lines(const char *next, int64_t first, const int lines) {
  if (next) UNROLL for (int j = 0; j < lines; j++) __builtin_prefetch(next + (first + j) * 64, 0, 3);
}

// c[rows][16 panels] (+)= a[rows][depth] · w: each panel is a packed weight of 16 columns, one chain per output.
// `form` is of w; a is f32 for f32, else bf16. Up to two rows are bound by memory, so `next` bytes are fetched under the
// arithmetic, as many as are read here.
INLINE void dots(const int form, const int rows, const int panels, const void *a, int64_t lda, const void *const *w,
                 int64_t depth, const char *next, float *c, int64_t ldc, const int add) {
  const int per_line = form == QUIRE_F32 ? 1 : form == QUIRE_BF16 ? 2 : 4;  // of depth, in 64 bytes of a panel
  vf s[ATTENTION_ROWS][4];
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < panels; j++) s[i][j] = add ? vf_load(c + i * ldc + j * 16) : vf_zero();
  for (int64_t e = 0, line = 0; e < depth; e += per_line, line++) {
    if (rows <= 2) fetch_lines(next, line * panels, panels);
    UNROLL for (int j = 0; j < panels; j++) {
      const char *bytes = (const char *)w[j] + line * 64;
      if (form == QUIRE_F32) {
        const vf b = vf_load((const float *)bytes);
        UNROLL for (int i = 0; i < rows; i++) s[i][j] = vf_fma(b, vf_set1(((const float *)a)[i * lda + e]), s[i][j]);
        continue;
      }
      wbf b[2];
      if (form == QUIRE_BF16) b[0] = wbf_load((const uint16_t *)bytes);
      else wbf_widen((const int8_t *)bytes, b);
      UNROLL for (int i = 0; i < rows; i++) {
        s[i][j] = vf_dot2(s[i][j], b[0], (const uint16_t *)a + i * lda + e);
        if (form == QUIRE_Q8) s[i][j] = vf_dot2(s[i][j], b[1], (const uint16_t *)a + i * lda + e + 2);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < panels; j++) vf_store(c + i * ldc + j * 16, s[i][j]);
}

// Any number of rows, split evenly into instances of at most ATTENTION_ROWS.
#if defined QUIRE_ISA_AVX512
#define PER_ROW_COUNT(n, CALL) \
  switch (n) { case 1: CALL(1); break; case 2: CALL(2); break; case 3: CALL(3); break; \
               case 4: CALL(4); break; case 5: CALL(5); break; default: CALL(6); }
#else
#define PER_ROW_COUNT(n, CALL) CALL(1);
#endif

INLINE void dots_rows(const int form, int rows, const int panels, const void *a, int64_t lda, const void *const *w,
                      int64_t depth, const char *next, float *c, int64_t ldc, const int add) {
  for (int left = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, n; left > 0; left--, rows -= n) {
    n = rows / left;
#define CALL(N) dots(form, N, panels, a, lda, w, depth, next, c, ldc, add)
    PER_ROW_COUNT(n, CALL)
#undef CALL
    a = (const char *)a + n * lda * (form == QUIRE_F32 ? 4 : 2);
    c += n * ldc;
  }
}

// s[rows][64] = q · K. With few rows it goes in as many pieces of head_dim as the tile has pages: under each piece, one
// page's V is fetched.
INLINE void scores(const int form, int rows, const quire_attention_tile *t) {
  const int64_t d = t->head_dim;
  const int pieces = rows <= 2 ? 64 / t->page_size : 1;
  for (int g = 0; g < pieces; g++) {
    const int64_t from = g * d / pieces, offset = from * (form == QUIRE_F32 ? 4 : 2);
    const void *w[4];
    for (int j = 0; j < 4; j++) w[j] = (const char *)t->k[j] + offset * 16;
    const char *v = g < t->num_pages ? t->v[g] : NULL;
    dots_rows(form, rows, 4, (const char *)t->q.data + offset, d, w, d / pieces, v, t->s, 64, g > 0);
  }
}

// The same for int8: two panels at a time as in a q8 linear layer, an exact integer dot per 32 of head_dim and both
// sides' scales on it. Meanwhile as many bytes of V as of K are fetched.
INLINE void scores_int8(const int rows, const quire_attention_tile *t, int first_row, int pair) {
  const int64_t d = t->head_dim, blocks = d / 32;
  const uint8_t *w[2] = {t->k[2 * pair], t->k[2 * pair + 1]};
  const int8_t *q = (const int8_t *)t->q.data + first_row * d;
  const int page = 32 * pair / t->page_size;
  const char *next = rows <= 2 && page < t->num_pages && t->page_size >= 32
                         ? (const char *)t->v[page] + 32 * pair % t->page_size * d : NULL;
  vf s[ATTENTION_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = vf_zero();
  for (int64_t b = 0; b < blocks; b++) {
    vi dot[ATTENTION_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++)
      dot[i][0] = dot[i][1] = vi_dot4_start(t->q.sums[(first_row + i) * blocks + b]);
    UNROLL for (int k = 0; k < 8; k++) {
      if (rows <= 2) fetch_lines(next, (b * 8 + k) * 2, 2);
      UNROLL for (int j = 0; j < 2; j++) {
        const wq8 u = wq8_load(w[j] + (b * 8 + k) * 64);
        UNROLL for (int i = 0; i < rows; i++) dot[i][j] = vi_dot4(dot[i][j], u, q + i * d + b * 32 + k * 4);
      }
    }
    UNROLL for (int j = 0; j < 2; j++) {
      const vf scale = vf_load_f16(t->k_scales[2 * pair + j] + b * 16);
      UNROLL for (int i = 0; i < rows; i++) {
        const vf z = vf_set1(t->q.scales[(first_row + i) * blocks + b]);
        s[i][j] = vf_fma(vf_from(dot[i][j]), vf_mul(scale, z), s[i][j]);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < 2; j++) vf_store(t->s + (first_row + i) * 64 + (2 * pair + j) * 16, s[i][j]);
}

INLINE void scores_int8_rows(int rows, const quire_attention_tile *t) {
  for (int pair = 0; pair < 2; pair++)
    for (int left = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, row = 0, n; left > 0; left--, row += n) {
      n = (rows - row) / left;
#define CALL(N) scores_int8(N, t, row, pair)
      PER_ROW_COUNT(n, CALL)
#undef CALL
    }
}

// o[rows][head_dim] += p · V, page by page; under each page's V, that page's K of the next tile is fetched.
INLINE void values(const int form, int rows, const quire_attention_tile *t) {
  const int64_t d = t->head_dim, size = form == QUIRE_F32 ? 4 : form == QUIRE_BF16 ? 2 : 1;
  for (int g = 0; g < t->num_pages; g++) {
    const void *p = (const char *)t->p + g * t->page_size * (form == QUIRE_F32 ? 4 : 2);
    for (int64_t n = 0; n < d; n += n + 64 <= d ? 64 : 16) {
      const void *w[4];
      for (int j = 0; j < 4; j++) w[j] = (const char *)t->v[g] + (n + 16 * j) * t->page_size * size;
      const char *next = t->next_k[g] ? (const char *)t->next_k[g] + n * t->page_size * size : NULL;
      if (n + 64 <= d) dots_rows(form, rows, 4, p, 64, w, t->page_size, next, t->o + n, d, 1);
      else dots_rows(form, rows, 1, p, 64, w, t->page_size, next, t->o + n, d, 1);
    }
  }
}

// Running softmax of one row over this tile: s -> p, and m, l, o brought to the new maximum.
INLINE void soften(const int form, const quire_attention_tile *t, int r) {
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
    vf p = x[j];  // for int8, V's scale per token goes here: then one chain serves all tokens
    if (form == QUIRE_Q8) p = vf_pick(vf_mul(p, vf_load(t->v_scales[j])), vf_zero(), from[j], to[j]);
    if (form == QUIRE_F32) vf_store((float *)t->p + r * 64 + 16 * j, p);
    else vf_store_bf16((uint16_t *)t->p + r * 64 + 16 * j, p);
  }
  const float keep = before == -INFINITY ? 0.f : exp1(before - now);
  t->l[r] = t->l[r] * keep + vf_sum(vf_add(vf_add(x[0], x[1]), vf_add(x[2], x[3])));
  t->m[r] = now;
  if (keep == 1.f) return;
  float *o = t->o + r * t->head_dim;
  for (int64_t j = 0; j < t->head_dim; j += 16) vf_store(o + j, vf_mul(vf_load(o + j), vf_set1(keep)));
}

INLINE void attend(const int form, int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  if (form == QUIRE_Q8) scores_int8_rows(rows, t);
  else scores(form, rows, t);
  for (int r = 0; r < rows; r++) soften(form, t, r);
  values(form, rows, t);
}

void ISA(attention_f32)(int rows, const quire_attention_tile *t) { attend(QUIRE_F32, rows, t); }
void ISA(attention_bf16)(int rows, const quire_attention_tile *t) { attend(QUIRE_BF16, rows, t); }
void ISA(attention_int8)(int rows, const quire_attention_tile *t) { attend(QUIRE_Q8, rows, t); }

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
