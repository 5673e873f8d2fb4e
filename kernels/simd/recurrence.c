// Ops with a state of each sequence, one token after another: a row's results do not depend on how rows are divided into
// steps.
#include <math.h>
#include <string.h>

#include "level.h"

#if defined QUIRE_ISA_AVX512
enum { COLUMNS = 4 };  // vectors of columns that pass over a matrix together; they are independent
#else
enum { COLUMNS = 2 };
#endif

// n columns at x, or 16 if there are more, and zeros. Nothing beyond them is read or written: they may be others' columns.
INLINE vf load_columns(const float *x, int64_t n) {
  if (n >= 16) return vf_load(x);
  float y[16] = {0};
  memcpy(y, x, (size_t)n * sizeof(float));
  return vf_load(y);
}

INLINE void store_columns(float *x, vf v, int64_t n) {
  if (n >= 16) {
    vf_store(x, v);
    return;
  }
  float y[16];
  vf_store(y, v);
  memcpy(x, y, (size_t)n * sizeof(float));
}

INLINE vf silu(vf x) { return vf_swish(x, x); }

// log(1 + exp(x)): max(x, 0) + log1p(y) with y = exp(-|x|), by the series of 2 artanh(y / (2 + y)). Relative error < 3e-7.
INLINE vf softplus(vf x) {
  const vf y = vf_exp(vf_sub(vf_zero(), vf_abs(x))), s = vf_div(y, vf_add(vf_set1(2.f), y)), z = vf_mul(s, s);
  vf p = vf_set1(1.f / 15.f);
  p = vf_fma(p, z, vf_set1(1.f / 13.f));
  p = vf_fma(p, z, vf_set1(1.f / 11.f));
  p = vf_fma(p, z, vf_set1(1.f / 9.f));
  p = vf_fma(p, z, vf_set1(1.f / 7.f));
  p = vf_fma(p, z, vf_set1(1.f / 5.f));
  p = vf_fma(p, z, vf_set1(1.f / 3.f));
  p = vf_fma(p, z, vf_set1(1.f));
  return vf_fma(vf_add(s, s), p, vf_max(vf_zero(), x));
}

// The sum of squares, or of squares of the products with silu(gate), in one fixed order.
INLINE float sum_of_squares(const float *x, const float *gate, int64_t n) {
  vf s[2] = {vf_zero(), vf_zero()};
  for (int64_t j = 0; j < n; j += 32)
    for (int i = 0; i < 2 && j + 16 * i < n; i++) {
      const int64_t at = j + 16 * i;
      vf y = load_columns(x + at, n - at);
      if (gate) y = vf_mul(y, silu(load_columns(gate + at, n - at)));
      s[i] = vf_fma(y, y, s[i]);
    }
  return vf_sum(vf_add(s[0], s[1]));
}

void ISA(convolve)(const quire_convolution *c, const float *x, int64_t position, float *out) {
  const float *before[QUIRE_MAX_TAPS];  // inputs of the tokens that the row sees, oldest first; NULL before the first token
  for (int64_t i = 0; i < c->taps; i++) {
    const int64_t at = position - c->taps + 1 + i;
    before[i] = at < 0 ? 0 : c->ring + at % c->rows * c->stride;
  }
  float *now = c->ring + position % c->rows * c->stride;
  for (int64_t j = 0; j < c->columns; j += 16) {
    const int64_t n = c->columns - j;
    vf value = load_columns(x + 2 * c->part + j, n);
    if (c->part) value = vf_mul(load_columns(x + j, n), value);
    store_columns(now + j, value, n);
    vf sum = c->bias ? load_columns(c->bias + j, n) : vf_zero();
    for (int64_t i = 0; i < c->taps; i++)
      if (before[i]) sum = vf_fma(load_columns(c->weight + i * c->stride + j, n), load_columns(before[i] + j, n), sum);
    store_columns(out + j, c->part ? vf_mul(load_columns(x + c->part + j, n), sum) : silu(sum), n);
  }
  if (!c->is_normed) return;
  const float squares = sum_of_squares(out, 0, c->columns);
  const vf factor = vf_set1(squares < INFINITY ? 1.f / sqrtf(squares + c->eps) : NAN);
  for (int64_t j = 0; j < c->columns; j += 16) {
    const int64_t n = c->columns - j;
    store_columns(out + j, vf_mul(load_columns(out + j, n), factor), n);
  }
}

void ISA(recurrent_gates)(const quire_recurrence *r, float *decay, float *rate) {
  for (int i = 0; i < QUIRE_TOKENS; i += 16) {
    vf time = softplus(vf_add(vf_load(decay + i), vf_set1(r->bias)));
    time = vf_min(vf_set1(r->high), vf_max(vf_set1(r->low), time));
    const vf exponent = vf_mul(vf_set1(r->a), time);
    float least[16];
    vf_store(least, exponent);
    vf_store(decay + i, vf_exp(exponent));
    for (int j = 0; j < 16; j++)
      if (least[j] < -64.f) decay[i + j] = 0;  // Products with it would be subnormal, which is slow; sums would not differ.
    vf_store(rate + i, r->is_delta ? vf_swish(vf_set1(r->rate_scale), vf_load(rate + i)) : time);
  }
}

INLINE vf load_state(const void *s, int64_t at, const int is_bf16) {
  return is_bf16 ? vf_load_bf16((const uint16_t *)s + at) : vf_load((const float *)s + at);
}

// Store x, and return it as it is stored.
INLINE vf store_state(void *s, int64_t at, vf x, const int is_bf16) {
  if (!is_bf16) {
    vf_store((float *)s + at, x);
    return x;
  }
  vf_store_bf16((uint16_t *)s + at, x);
  return vf_load_bf16((const uint16_t *)s + at);
}

// The matrix of a segment from column j on, 16 n columns of it, and memory that the next segment will read.
typedef struct {
  const void *from;
  void *to;
  int64_t rows, width, j;
  const char *ahead, *ahead_end;
} matrix;

// Apply a token, whose key is multiplied with `update`; multiply the result by its query and by the next token's key.
INLINE void pass(matrix *m, const float *keys, const float *queries, const float *next, vf decay, const vf *update,
                 vf *out, vf *seen, const int n, const int is_bf16, const int is_delta, const int has_out) {
  UNROLL for (int c = 0; c < n; c++) out[c] = seen[c] = vf_zero();
  for (int64_t i = 0; i < m->rows; i++) {
    const vf key = vf_set1(keys[i]);
    UNROLL for (int c = 0; c < n; c++) {
      const int64_t at = i * m->width + m->j + 16 * c;
      vf x = vf_fma(key, update[c], vf_mul(decay, load_state(m->from, at, is_bf16)));
      x = store_state(m->to, at, x, is_bf16);
      if (has_out) out[c] = vf_fma(vf_set1(queries[i]), x, out[c]);
      if (is_delta) seen[c] = vf_fma(vf_set1(next[i]), x, seen[c]);
    }
    if (m->ahead < m->ahead_end) {
      __builtin_prefetch(m->ahead, 1, 2), __builtin_prefetch(m->ahead + 64, 1, 2);
      m->ahead += 128;
    }
  }
}

INLINE void recur_columns(const quire_recurrence *r, const quire_recurrent_token *t, int64_t tokens, matrix *m,
                          const int n, const int is_bf16, const int is_delta) {
  vf seen[COLUMNS];  // the matrix times the key
  UNROLL for (int c = 0; c < n; c++) seen[c] = vf_zero();
  if (is_delta)
    for (int64_t i = 0; i < m->rows; i++) {
      const vf key = vf_set1(t->key[i]);
      UNROLL for (int c = 0; c < n; c++)
        seen[c] = vf_fma(key, load_state(m->from, i * m->width + m->j + 16 * c, is_bf16), seen[c]);
    }
  for (const quire_recurrent_token *end = t + tokens; t < end; t++, m->from = m->to) {
    const float *next = t + 1 < end ? t[1].key : t->key;
    const vf decay = vf_set1(t->decay), rate = vf_set1(t->rate), minus = vf_set1(-t->decay);
    vf value[COLUMNS], update[COLUMNS], out[COLUMNS];
    UNROLL for (int c = 0; c < n; c++) {
      value[c] = load_columns(t->value + m->j + 16 * c, r->columns - m->j - 16 * c);
      update[c] = vf_mul(rate, is_delta ? vf_fma(minus, seen[c], value[c]) : value[c]);
    }
    if (!t->out) {
      pass(m, t->key, 0, next, decay, update, out, seen, n, is_bf16, is_delta, 0);
      continue;
    }
    pass(m, t->key, t->query, next, decay, update, out, seen, n, is_bf16, is_delta, 1);
    UNROLL for (int c = 0; c < n; c++) {
      vf y = vf_mul(vf_set1(r->scale), out[c]);
      if (r->skip != 0) y = vf_fma(vf_set1(r->skip), value[c], y);
      store_columns(t->out + m->j + 16 * c, y, r->columns - m->j - 16 * c);
    }
  }
}

INLINE void recur_all(const quire_recurrence *r, const quire_recurrent_token *t, int64_t tokens, const void *from, void *to,
                      const int is_bf16, const int is_delta) {
  const int64_t end = (r->columns + 15) / 16 * 16;
  matrix m = {from, to, r->key_dim, r->width, 0, r->ahead, r->ahead + r->ahead_bytes};
  for (; m.j + 16 * COLUMNS <= end; m.j += 16 * COLUMNS, m.from = from)
    recur_columns(r, t, tokens, &m, COLUMNS, is_bf16, is_delta);
  for (; m.j < end; m.j += 16, m.from = from) recur_columns(r, t, tokens, &m, 1, is_bf16, is_delta);
}

void ISA(recur)(const quire_recurrence *r, const quire_recurrent_token *t, int64_t tokens, const void *from, void *to) {
  if (r->is_bf16) r->is_delta ? recur_all(r, t, tokens, from, to, 1, 1) : recur_all(r, t, tokens, from, to, 1, 0);
  else r->is_delta ? recur_all(r, t, tokens, from, to, 0, 1) : recur_all(r, t, tokens, from, to, 0, 0);
}

void ISA(gated_norm)(const quire_gated_norm *g, const float *gate, float *x) {
  for (int64_t first = 0; first < g->columns; first += g->group) {
    float factor = 1.f;
    if (g->weight) {
      const float squares = sum_of_squares(x + first, g->gate_first ? gate + first : 0, g->group);
      factor = squares < INFINITY ? 1.f / sqrtf(squares / (float)g->group + g->eps) : NAN;
    }
    for (int64_t j = first; j < first + g->group; j += 16) {
      const int64_t n = first + g->group - j;
      const vf open = silu(load_columns(gate + j, n));
      vf y = load_columns(x + j, n);
      if (g->gate_first) y = vf_mul(y, open);
      if (g->weight) y = vf_mul(vf_mul(y, vf_set1(factor)), load_columns(g->weight + j, n));
      store_columns(x + j, g->gate_first ? y : vf_mul(y, open), n);
    }
  }
}
