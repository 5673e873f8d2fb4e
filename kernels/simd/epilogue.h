// The parts that linear layers of all levels share: one body per row count, the dots of half bytes, prefetching the
// next weights, and the epilogue. Internal to simd/.
#pragma once
#include <stddef.h>

#include "level.h"

#if defined QUIRE_ISA_AVX512
#define PER_ROW_COUNT(body, ...) \
  switch (rows) { case 1: body(1, __VA_ARGS__); break; case 2: body(2, __VA_ARGS__); break; \
                  case 3: body(3, __VA_ARGS__); break; case 4: body(4, __VA_ARGS__); break; \
                  case 5: body(5, __VA_ARGS__); break; default: body(6, __VA_ARGS__); }
#define PER_ROW_COUNT_AND_PRODUCT(body) \
  if (ISA(adds_exponents)()) { PER_ROW_COUNT(body, 1, t) } else { PER_ROW_COUNT(body, 0, t) }
#else
#define PER_ROW_COUNT(body, ...) if (rows == 1) body(1, __VA_ARGS__); else body(2, __VA_ARGS__);
#define PER_ROW_COUNT_AND_PRODUCT(body) PER_ROW_COUNT(body, 0, t)
#endif

// The rows for `vs_of` and `vs_mul`, which multiply the scales of one row.
INLINE int rows_of_product(const int rows, const int adds) { return adds ? rows : 1; }

// dot = a block of 32 in half bytes of the two panels, at u and v, times the rows at a; less 8 for each, if `sums` points at
// -128 * sum(a) of the first row. With `wide` the block goes there as one of q8 panels, which are `panel_bytes` apart.
INLINE void dot_and_widen_q4(const int rows, const uint8_t *u, const uint8_t *v, const int8_t *a, int64_t width,
                             const int32_t *sums, uint8_t *wide, int64_t panel_bytes, vi dot[][2]) {
  vn sum[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = vn_start(sums ? sums + i * (width / 32) : NULL);
  UNROLL for (int k = 0; k < 4; k++) {
    const wq4 p = wq4_load(u + k * 64), q = wq4_load(v + k * 64);
#if defined QUIRE_ISA_AVX512
    if (wide) {
      wq4_widen(p, wide + k * 64, wide + k * 64 + 256);
      wq4_widen(q, wide + panel_bytes + k * 64, wide + panel_bytes + k * 64 + 256);
    }
#else
    (void)wide, (void)panel_bytes;  // only avx512 widens
#endif
    UNROLL for (int i = 0; i < rows; i++) {
      const int8_t *x = a + i * width + k * 4;
      sum[i][0] = vn_dot4(vn_dot4(sum[i][0], wq4_low(p), x), wq4_high(p), x + 16);
      sum[i][1] = vn_dot4(vn_dot4(sum[i][1], wq4_low(q), x), wq4_high(q), x + 16);
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int j = 0; j < 2; j++) dot[i][j] = vn_end(sum[i][j], sums ? sums + i * (width / 32) : NULL);
}
INLINE void dot_q4(const int rows, const uint8_t *u, const uint8_t *v, const int8_t *a, int64_t width,
                   const int32_t *sums, vi dot[][2]) {
  dot_and_widen_q4(rows, u, v, a, width, sums, NULL, 0, dot);
}

// dot += a block of 32 of the two panels, at u and v, times the rows at a.
INLINE void add_dot_q8(const int rows, const uint8_t *u, const uint8_t *v, const int8_t *a, int64_t width, vi dot[][2]) {
  UNROLL for (int k = 0; k < 8; k++) {
    const wq8 p = wq8_load(u + k * 64), q = wq8_load(v + k * 64);
    UNROLL for (int i = 0; i < rows; i++) {
      dot[i][0] = vi_dot4(dot[i][0], p, a + i * width + k * 4);
      dot[i][1] = vi_dot4(dot[i][1], q, a + i * width + k * 4);
    }
  }
}

// dot = the same product; `sums` as above, or NULL if weights are not w + 128.
INLINE void dot_q8(const int rows, const uint8_t *u, const uint8_t *v, const int8_t *a, int64_t width, const int32_t *sums,
                   vi dot[][2]) {
  UNROLL for (int i = 0; i < rows; i++)
    dot[i][0] = dot[i][1] = sums ? vi_dot4_start(sums[i * (width / 32)]) : vi_zero();
  add_dot_q8(rows, u, v, a, width, dot);
}

// Prefetch this call's share of the next weights, so that memory streams evenly for any number of calls per panel.
INLINE const char *fetch_next(const char *next, int lines) {
  for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * 64, 0, 2);
  return next + lines * 64;
}

// Leave out the first `rows` rows of q8.
static inline void skip_rows(quire_linear_tile *t, int rows) {
  t->a.data = (char *)t->a.data + rows * t->a.width;
  t->a.scales += rows * (t->a.width / 32);
  t->a.sums += rows * (t->a.width / 32);
  t->c += rows * t->ldc;
  if (t->block_sums) t->block_sums += rows * (t->a.width / QUIRE_SUPER_BLOCK);
  if (t->half_sums) t->half_sums += rows * (t->a.width / 32);
  if (t->factors) t->factors += rows;
}

// Multiply q8 rows in even calls of at most LINEAR_ROWS, each with an equal share of the prefetching.
static inline void multiply_in_calls(void (*linear)(int rows, const quire_linear_tile *t), int rows, quire_linear_tile t) {
  const int calls = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, lines = t.next_lines;
  for (int call = 0; call < calls; call++) {
    const int n = rows / (calls - call);
    t.next_lines = lines * (call + 1) / calls - lines * call / calls;
    linear(n, &t);
    skip_rows(&t, n);
    t.next += t.next_lines * 64 * (t.a.width / 32);
    t.next_scales = NULL;
    rows -= n;
  }
}

// Few rows read their pair of panels as one stream, which is prefetched `bytes` ahead: the rest of the pair, then the next
// pair. q8 comes faster through L2; dtypes that compute more per byte, through L1.
INLINE const char *start_ahead(const quire_linear_tile *t, const int64_t bytes) {
  return (const char *)t->w + (bytes < 2 * t->panel_bytes ? bytes : 2 * t->panel_bytes);
}
INLINE const char *fetch_ahead(const char *ahead, const int64_t bytes, const int to_l2, const quire_linear_tile *t) {
  if (ahead == (const char *)t->w + 2 * t->panel_bytes && t->next) ahead = t->next;
  UNROLL for (int i = 0; i < bytes; i += 64) {
    if (to_l2) __builtin_prefetch(ahead + i, 0, 2);
    else __builtin_prefetch(ahead + i, 0, 3);
  }
  return ahead + bytes;
}

// Not inlined: its polynomial would be in every body once per row.
static __attribute__((noinline)) vf gelu_exact(vf x) { return vf_gelu(x); }

// activation(gate) * up: silu, gelu, or gate sigmoid(1.702 gate). CLAMPED limits both to 7 and adds 1 to up; a NaN passes through.
INLINE vf gated(const int epilogue, vf gate, vf up) {
  if (epilogue == QUIRE_CLAMPED) {
    const vf limit = vf_set1(7.f);
    gate = vf_min(limit, gate);
    up = vf_add(vf_min(limit, vf_max(vf_set1(-7.f), up)), vf_set1(1.f));
  }
  if (epilogue == QUIRE_GEGLU_EXACT) return vf_mul(gelu_exact(gate), up);
  if (epilogue == QUIRE_GEGLU) return vf_mul(vf_gelu_tanh(gate), up);
  return vf_mul(vf_swish(gate, epilogue == QUIRE_CLAMPED ? vf_mul(gate, vf_set1(1.702f)) : gate), up);
}

// The epilogue. acc[row] holds the pair's two panels. Epilogues are elementwise, so the chains stay as they are.
INLINE void finish(const int rows, vf acc[][2], const quire_linear_tile *t) {
  const vf bias0 = t->bias ? vf_load(t->bias) : vf_zero(), bias1 = t->bias ? vf_load(t->bias + 16) : vf_zero();
  UNROLL for (int i = 0; i < rows; i++) {
    float *c = t->c + i * t->ldc;
    vf y0 = acc[i][0], y1 = acc[i][1];
    if (t->factors) y0 = vf_mul(y0, vf_set1(t->factors[i])), y1 = vf_mul(y1, vf_set1(t->factors[i]));
    if (t->bias) y0 = vf_add(y0, bias0), y1 = vf_add(y1, bias1);
    if (t->epilogue >= QUIRE_SWIGLU) {
      vf_store(c, gated(t->epilogue, y0, y1));
      continue;
    }
    vf_store(c, y0);
    vf_store(c + 16, y1);
  }
}

// The same for f32. With 16 registers, sums of two rows that outlast the calls of an inlined epilogue would be in memory at
// each step of K.
#if defined QUIRE_ISA_AVX2
static __attribute__((noinline)) void finish_two_rows(vf sums[2][2], const quire_linear_tile *t) { finish(2, sums, t); }
INLINE void finish_f32(const int rows, vf acc[][2], const quire_linear_tile *t) {
  if (rows == 1) {
    finish(1, acc, t);
  } else {
    vf sums[2][2] = {{acc[0][0], acc[0][1]}, {acc[1][0], acc[1][1]}};
    finish_two_rows(sums, t);
  }
}
#else
INLINE void finish_f32(const int rows, vf acc[][2], const quire_linear_tile *t) { finish(rows, acc, t); }
#endif
