// Linear layers: `rows` activations against one pair of 16-column weight panels, the whole of K in one chain.
// Each row count is compiled separately, so that accumulators stay in registers; the arithmetic per row is the same.
#include <assert.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include "epilogue.h"

INLINE void body_f32(const int rows, const quire_linear_tile *t) {
  const int64_t width = t->a.width;
  const float *w0 = t->w, *w1 = (const float *)((const char *)t->w + t->panel_bytes), *a = t->a.data;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t k = 0; k < width; k++) {
    const vf u = vf_load(w0 + k * 16), v = vf_load(w1 + k * 16);
    if (k % 32 == 0) next = fetch_next(next, t->next_lines);
    UNROLL for (int i = 0; i < rows; i++) {
      const vf x = vf_set1(a[i * width + k]);
      acc[i][0] = vf_fma(u, x, acc[i][0]);
      acc[i][1] = vf_fma(v, x, acc[i][1]);
    }
  }
  finish_f32(rows, acc, t);
}

INLINE void body_bf16(const int rows, const quire_linear_tile *t) {
  const int64_t width = t->a.width;
  const uint16_t *w0 = t->w, *w1 = (const uint16_t *)((const char *)t->w + t->panel_bytes), *a = t->a.data;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t k = 0; k < width; k += 2) {
    const wbf u = wbf_load(w0 + k * 16), v = wbf_load(w1 + k * 16);
    if (k % 32 == 0) next = fetch_next(next, t->next_lines);
    UNROLL for (int i = 0; i < rows; i++) {
      acc[i][0] = vf_dot2(acc[i][0], u, a + i * width + k);
      acc[i][1] = vf_dot2(acc[i][1], v, a + i * width + k);
    }
  }
  finish(rows, acc, t);
}

// The fp16 scales of one block in both panels, loaded before its dots if VS_FIRST, else after them. `few` is
// `rows_of_product`.
INLINE void load_scales(const uint16_t *first, const uint16_t *second, int few, vs s[2]) {
  s[0] = vs_of(vf_load_f16(first), few);
  s[1] = vs_of(vf_load_f16(second), few);
}

// Blocks of 32 along K, of which each has an exact integer dot and a scale. Those of q4 are the same integers as those of
// q8: w + 8 is in 0..15, and each dot starts at -8 * sum(a). With `wide` the pair of q4 panels goes there as one of q8.
// kquants.c has the dtypes with a minimum per block.
INLINE void body_blocks(const int rows, const int adds, const quire_linear_tile *t, const int dtype, uint8_t *wide) {
  const int few = rows_of_product(rows, adds);
  const int64_t width = t->a.width, blocks = width / 32, block_bytes = quire_panel_bytes(dtype, 32);
  const uint8_t *w0 = t->w, *w1 = w0 + t->panel_bytes;
  const uint16_t *s0 = t->scales, *s1 = s0 + blocks * 16;
  const int8_t *a = t->a.data;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t b = 0; b < blocks; b++, w0 += block_bytes, w1 += block_bytes) {
    next = fetch_next(next, t->next_lines);
    if (t->next_scales) __builtin_prefetch(t->next_scales + b * 64, 0, 2);
    vs s[2];
    if (VS_FIRST(few)) load_scales(s0 + b * 16, s1 + b * 16, few, s);
    vi dot[LINEAR_ROWS][2];
    if (dtype == QUIRE_Q8) {
      dot_q8(rows, w0, w1, a + b * 32, width, t->a.sums + b, dot);
    } else {
      uint8_t *wide_block = wide ? wide + b * quire_panel_bytes(QUIRE_Q8, 32) : NULL;
      dot_and_widen_q4(rows, w0, w1, a + b * 32, width, t->a.sums + b, wide_block, quire_panel_bytes(QUIRE_Q8, width), dot);
    }
    if (!VS_FIRST(few)) load_scales(s0 + b * 16, s1 + b * 16, few, s);
    UNROLL for (int i = 0; i < rows; i++) {
      const float *z = t->a.scales + i * blocks + b;
      acc[i][0] = vf_fma(vf_from(dot[i][0]), vs_mul(&s[0], z, few), acc[i][0]);
      acc[i][1] = vf_fma(vf_from(dot[i][1]), vs_mul(&s[1], z, few), acc[i][1]);
    }
  }
  finish(rows, acc, t);
}

// q8 with a scale for a group of blocks, whose integers are summed before they are scaled. Conversions and products of
// scales take few of the units' cycles, so neither side's scales are rounded.
INLINE void body_groups(const int rows, const quire_linear_tile *t) {
  const int64_t width = t->a.width, blocks = width / 32, group = t->a.group;
  const uint8_t *w0 = t->w, *w1 = w0 + t->panel_bytes;
  const uint16_t *s0 = t->scales, *s1 = s0 + quire_num_scales(width, group) * 16;
  const char *next = t->next, *next_scales = t->next_scales;
  const int8_t *a = t->a.data;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  for (int64_t b = 0; b < blocks; b += group, s0 += 16, s1 += 16) {
    if (next_scales) __builtin_prefetch(next_scales, 0, 2), next_scales += 64;  // scales of both panels: neighbors
    vi dot[LINEAR_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_dot4_start(t->a.sums[i * blocks + b]);
    const int64_t last = b + group < blocks ? b + group : blocks;
    for (int64_t j = b; j < last; j++, w0 += 512, w1 += 512, a += 32) {
      next = fetch_next(next, t->next_lines);
      add_dot_q8(rows, w0, w1, a, width, dot);
    }
    const vf x = vf_load_f16(s0), y = vf_load_f16(s1);
    UNROLL for (int i = 0; i < rows; i++) {
      const vf z = vf_set1(t->a.scales[i * blocks + b]);
      acc[i][0] = vf_fma(vf_from(dot[i][0]), vf_mul(x, z), acc[i][0]);
      acc[i][1] = vf_fma(vf_from(dot[i][1]), vf_mul(y, z), acc[i][1]);
    }
  }
  finish(rows, acc, t);
}

// The same as body_blocks for one panel of q4. `ahead` is prefetched meanwhile, as many bytes as are read.
INLINE void panel_of_q4(const int rows, const quire_linear_tile *t, const int panel, const char **ahead, vf sums[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  const uint8_t *w = (const uint8_t *)t->w + panel * t->panel_bytes;
  const uint16_t *scales = t->scales + panel * blocks * 16;
  const int8_t *a = t->a.data;
  vf acc[LINEAR_ROWS];
  UNROLL for (int i = 0; i < rows; i++) acc[i] = vf_zero();
  for (int64_t b = 0; b < blocks; b++, w += 256, a += 32) {
    *ahead = fetch_ahead(*ahead, 256, 0, t);
    vh sum[LINEAR_ROWS];
    UNROLL for (int i = 0; i < rows; i++) sum[i] = vh_start(t->a.sums + i * blocks + b);
    UNROLL for (int k = 0; k < 4; k++) {
      const wq4 u = wq4_load(w + k * 64);
      UNROLL for (int i = 0; i < rows; i++) sum[i] = vh_dot8(sum[i], u, a + i * width + k * 4, a + i * width + k * 4 + 16);
    }
    const vf s = vf_load_f16(scales + b * 16);
    UNROLL for (int i = 0; i < rows; i++)
      acc[i] = vf_fma(vf_from(vh_end(sum[i], t->a.sums + i * blocks + b)),
                      vf_mul(s, vf_set1(t->a.scales[i * blocks + b])), acc[i]);
  }
  UNROLL for (int i = 0; i < rows; i++) sums[i][panel] = acc[i];
}

// The same as body_blocks or body_groups for one panel of q8: groups of `group` blocks.
INLINE void panel_of_q8(const int64_t group, const int rows, const quire_linear_tile *t, const int panel,
                        const char **ahead, vf sums[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  const uint8_t *w = (const uint8_t *)t->w + panel * t->panel_bytes;
  const uint16_t *scales = t->scales + panel * quire_num_scales(width, group) * 16;
  const int8_t *a = t->a.data;
  vf acc[LINEAR_ROWS];
  UNROLL for (int i = 0; i < rows; i++) acc[i] = vf_zero();
  for (int64_t b = 0; b < blocks; b += group, scales += 16) {
    vi dot[LINEAR_ROWS];
    UNROLL for (int i = 0; i < rows; i++) dot[i] = vi_dot4_start(t->a.sums[i * blocks + b]);
    const int64_t last = b + group < blocks ? b + group : blocks;
    for (int64_t j = b; j < last; j++, w += 512, a += 32) {
      *ahead = fetch_ahead(*ahead, 512, 1, t);
      UNROLL for (int k = 0; k < 8; k++) {
        const wq8 u = wq8_load(w + k * 64);
        UNROLL for (int i = 0; i < rows; i++) dot[i] = vi_dot4(dot[i], u, a + i * width + k * 4);
      }
    }
    const vf s = vf_load_f16(scales);
    UNROLL for (int i = 0; i < rows; i++)
      acc[i] = vf_fma(vf_from(dot[i]), vf_mul(s, vf_set1(t->a.scales[i * blocks + b])), acc[i]);
  }
  UNROLL for (int i = 0; i < rows; i++) sums[i][panel] = acc[i];
}

// Memory limits few rows, and a single stream is read faster than two side by side: the panels follow each other.
INLINE void stream_q8(const int64_t group, const int rows, const quire_linear_tile *t) {
  const char *ahead = start_ahead(t, 2048);
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int j = 0; j < 2; j++) panel_of_q8(group, rows, t, j, &ahead, acc);
  finish(rows, acc, t);
}
INLINE void stream_q4(const int rows, const quire_linear_tile *t) {
  const char *ahead = start_ahead(t, 4096);
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int j = 0; j < 2; j++) panel_of_q4(rows, t, j, &ahead, acc);
  finish(rows, acc, t);
}
INLINE void body_q8(const int rows, const int adds, const quire_linear_tile *t) {
  if (rows <= STREAM_ROWS_Q8) stream_q8(1, rows, t);
  else body_blocks(rows, adds, t, QUIRE_Q8, NULL);
}
INLINE void body_rotated(const int rows, const quire_linear_tile *t) {
  if (rows > STREAM_ROWS_Q8) body_groups(rows, t);
  else stream_q8(t->a.group, rows, t);
}
INLINE void body_q4(const int rows, const int adds, const quire_linear_tile *t) {
  if (rows <= STREAM_ROWS_Q4) stream_q4(rows, t);
  else body_blocks(rows, adds, t, QUIRE_Q4, NULL);
}

// q4 with a zero point per block and column: dot - zero * sum(a), an integer below 2^24, is exact in f32, so the bits are
// those of q8 with the same weights.
INLINE void body_q4_z(const int rows, const int adds, const quire_linear_tile *t) {
  const int few = rows_of_product(rows, adds);
  const int64_t width = t->a.width, blocks = width / 32, head = quire_q4_z_scale_bytes(width);
  const uint8_t *h0 = t->w, *h1 = h0 + t->panel_bytes, *w0 = h0 + head, *w1 = h1 + head;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t b = 0; b < blocks; b++, w0 += 256, w1 += 256) {
    next = fetch_next(next, t->next_lines);
    vs s[2];
    if (VS_FIRST(few)) load_scales((const uint16_t *)h0 + b * 16, (const uint16_t *)h1 + b * 16, few, s);
    vi dot[LINEAR_ROWS][2];
    dot_q4(rows, w0, w1, (const int8_t *)t->a.data + b * 32, width, NULL, dot);
    if (!VS_FIRST(few)) load_scales((const uint16_t *)h0 + b * 16, (const uint16_t *)h1 + b * 16, few, s);
    const vf y = vf_mul(vf_load_i8((const int8_t *)h0 + width + b * 16), vf_set1(0x1p-7f));
    const vf z = vf_mul(vf_load_i8((const int8_t *)h1 + width + b * 16), vf_set1(0x1p-7f));
    UNROLL for (int i = 0; i < rows; i++) {
      const vf sum = vf_from(vi_set1(t->a.sums[i * blocks + b]));
      const float *scale = t->a.scales + i * blocks + b;
      acc[i][0] = vf_fma(vf_fma(y, sum, vf_from(dot[i][0])), vs_mul(&s[0], scale, few), acc[i][0]);
      acc[i][1] = vf_fma(vf_fma(z, sum, vf_from(dot[i][1])), vs_mul(&s[1], scale, few), acc[i][1]);
    }
  }
  finish(rows, acc, t);
}

void ISA(linear_f32)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT(body_f32, t)
}
void ISA(linear_bf16)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT(body_bf16, t)
}
void ISA(linear_q8)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  if (t->a.group) {
    PER_ROW_COUNT(body_rotated, t)
  } else {
    PER_ROW_COUNT_AND_PRODUCT(body_q8)
  }
}

#if defined QUIRE_ISA_AVX512
// The time of a small product of q8 in L1, in nanoseconds.
static int64_t time_of(void (*multiply)(const quire_linear_tile *), const quire_linear_tile *t) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < 4; i++) {
    multiply(t);
    __asm__ volatile("" : : "r"(t) : "memory");  // The compiler keeps products whose results are not read.
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec;
}
static void multiply_adding(const quire_linear_tile *t) { body_blocks(LINEAR_ROWS, 1, t, QUIRE_Q8, NULL); }
static void multiply_scales(const quire_linear_tile *t) { body_blocks(LINEAR_ROWS, 0, t, QUIRE_Q8, NULL); }

// The best of many short times, in turns: the result does not depend on what else runs.
static int measure_adding(void) {
  enum { WIDTH = 256, ROUNDS = 32 };
  uint8_t w[WIDTH * 32];
  int8_t a[LINEAR_ROWS * WIDTH];
  uint16_t scales[WIDTH];
  float row_scales[LINEAR_ROWS * WIDTH / 32], c[LINEAR_ROWS * 32];
  int32_t sums[LINEAR_ROWS * WIDTH / 32];
  memset(w, 1, sizeof w), memset(a, 1, sizeof a), memset(sums, 0, sizeof sums);
  for (int i = 0; i < WIDTH; i++) scales[i] = 0x3c00;  // 1
  for (int i = 0; i < LINEAR_ROWS * WIDTH / 32; i++) row_scales[i] = 1.f;
  const quire_linear_tile t = {.w = w, .scales = scales, .panel_bytes = WIDTH * 16, .c = c, .ldc = 32,
                               .a = {.data = a, .scales = row_scales, .sums = sums, .width = WIDTH}};
  int64_t adding = INT64_MAX, multiplying = INT64_MAX;
  for (int i = 0; i < ROUNDS; i++) {
    const int64_t x = time_of(multiply_adding, &t), y = time_of(multiply_scales, &t);
    adding = x < adding ? x : adding;
    multiplying = y < multiplying ? y : multiplying;
  }
  return adding < multiplying;
}

// Measured once, at the first product of a process. Both ways have the same bits, so it does not matter which threads see it.
int quire_adds_exponents = -1;
int ISA(adds_exponents)(void) {
  int adds = __atomic_load_n(&quire_adds_exponents, __ATOMIC_RELAXED);
  if (adds < 0) {
    adds = measure_adding();
    __atomic_store_n(&quire_adds_exponents, adds, __ATOMIC_RELAXED);
  }
  return adds;
}

static void few_rows_of_q4(int rows, const quire_linear_tile *t) { PER_ROW_COUNT_AND_PRODUCT(body_q4) }

INLINE void widen_rows(const int rows, const int adds, const quire_linear_tile *t) {
  if (rows == LINEAR_ROWS) body_blocks(LINEAR_ROWS, adds, t, QUIRE_Q4, t->scratch);
  else body_blocks(LINEAR_ROWS - 1, adds, t, QUIRE_Q4, t->scratch);
}

// Many rows: the first ones, 5 or 6, widen the pair of panels to q8 in cache beside their dots; the others are
// multiplied as q8, the same integers, without unpacking.
static void many_rows_of_q4(int rows, const quire_linear_tile *t) {
  const int calls = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, n = rows / calls;
  quire_linear_tile first = *t, rest = *t;
  skip_rows(&rest, n);
  first.next_lines = t->next_lines / calls;
  if (ISA(adds_exponents)()) widen_rows(n, 1, &first);
  else widen_rows(n, 0, &first);
  rest.w = t->scratch;
  rest.panel_bytes = quire_panel_bytes(QUIRE_Q8, t->a.width);
  rest.next_lines -= first.next_lines;
  rest.next += first.next_lines * 64 * (t->a.width / 32);
  rest.next_scales = NULL;
  multiply_in_calls(ISA(linear_q8), rows - n, rest);
}

void ISA(linear_q4)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS_4_BITS);
  if (rows <= LINEAR_ROWS) few_rows_of_q4(rows, t);
  else if (rows < UNPACKED_ROWS) multiply_in_calls(few_rows_of_q4, rows, *t);
  else many_rows_of_q4(rows, t);
}
#else
void ISA(linear_q4)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS_4_BITS);
  PER_ROW_COUNT_AND_PRODUCT(body_q4)
}
#endif

void ISA(linear_q4_z)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT_AND_PRODUCT(body_q4_z)
}
