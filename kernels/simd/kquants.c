// Linear layers with GGML's k-quants (Q4_K, Q5_K, Q6_K): super-blocks of 256 along K, whose blocks have integer scales.
// One body for all: a block's exact integers times d * scale, then, once per super-block, dmin times the sum of its minimums
// times the sums of activations. Products of a super-block's number and an integer are exact in f32.
#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "epilogue.h"

enum { LINE = QUIRE_LINE, BLOCKS = 8 };  // bytes with 4 of each column; blocks of 32 in a super-block

// The integers of one super-block in a panel. Minimums are pairs of 16-bit numbers: of blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7.
typedef struct {
  _Alignas(64) int8_t scales[16][16];  // scales of blocks, 8; in Q6_K, signed scales of half blocks
  uint32_t minimums[4][16];
} block_integers;

// The operations are on four bytes at a time.
INLINE void unpack_integers(const int bits, const uint8_t *super_block, block_integers *out) {
  const uint32_t *packed = (const uint32_t *)(super_block + LINE);
  uint32_t *scales = (uint32_t *)out->scales;
  if (bits == 6) {
    for (int i = 0; i < 64; i += 16) vi_store(scales + i, vi_load(packed + i));
    return;
  }
  const vi six = vi_set1(0x3f3f3f3f), four = vi_set1(0x0f0f0f0f), two = vi_set1(0x03030303), even = vi_set1(0x00ff00ff);
  const vi x = vi_load(packed), y = vi_load(packed + 16), z = vi_load(packed + 32);
  vi_store(scales, vi_and(x, six));
  vi_store(scales + 16, vi_or(vi_and(z, four), vi_shift_left(vi_and(vi_shift_right(x, 6), two), 4)));
  const vi low = vi_columns(vi_and(y, six));
  const vi high = vi_columns(vi_or(vi_and(vi_shift_right(z, 4), four), vi_shift_left(vi_and(vi_shift_right(y, 6), two), 4)));
  vi_store(out->minimums[0], vi_and(low, even));
  vi_store(out->minimums[1], vi_and(vi_shift_right(low, 8), even));
  vi_store(out->minimums[2], vi_and(high, even));
  vi_store(out->minimums[3], vi_and(vi_shift_right(high, 8), even));
}

// Not inlined: GCC vectorizes it only by itself.
static __attribute__((noinline)) void sum_super_block(const float *scales, const int32_t *sums, quire_block_sums *out) {
  static const int8_t order[BLOCKS] = {0, 2, 1, 3, 4, 6, 5, 7};
  union { float number[BLOCKS]; uint32_t bits[BLOCKS]; } x;
  union { uint32_t bits; float number; } inverse, unit;
  uint32_t exponent = 14u << 23;  // below that the inverse would overflow
  for (int j = 0; j < BLOCKS; j++) x.number[j] = scales[j] * ((float)sums[j] * 0x1p-19f);
  for (int j = 0; j < BLOCKS; j++) exponent = (x.bits[j] & 0x7f800000) > exponent ? x.bits[j] & 0x7f800000 : exponent;
  inverse.bits = ((127u + 14 + 127) << 23) - exponent;
  for (int j = 0; j < BLOCKS; j++) x.number[j] = x.number[j] * inverse.number + 0x1.8p23f;  // the low bits are the integer
  for (int j = 0; j < BLOCKS; j++) out->pairs[j / 2][j % 2] = (int16_t)(x.bits[order[j]] & 0xffff);
  unit.bits = exponent - (2u << 23);
  out->unit = unit.number;
}

// The unit is the smallest power of two with which the largest sum fits into 16 bits. A sum has at most 15 significant bits, so
// only those are rounded that are far smaller than the largest one, by 2^-16 of it at most.
void ISA(sum_blocks)(const quire_rows *a, int64_t rows, quire_block_sums *out) {
  for (int64_t i = 0; i < rows * a->width / QUIRE_SUPER_BLOCK; i++)
    sum_super_block(a->scales + i * BLOCKS, a->sums + i * BLOCKS, out + i);
}

void ISA(sum_halves)(const quire_rows *a, int64_t rows, int32_t *out) {
  const int8_t *x = a->data;
  for (int64_t i = 0; i < rows * a->width / 32; i++, x += 32) {
    int32_t sum = 0;
    for (int k = 0; k < 16; k++) sum += x[k];
    out[i] = -32 * sum;
  }
}

// Unsigned weights, 4 of K: of the first 16 of a block or of the other 16.
INLINE wq8 weights_of(const int bits, const int half, const int k, wq4 line, wq4 high) {
  const wq8 low = half ? wq4_high(line) : wq4_low(line);
  if (bits == 5) return wq8_or(low, wq4_bits(high, half ? k : k - 4, 16));
  return wq8_or(low, wq4_bits(high, 2 * k - 4, 48));
}

// dot += one half of a block; `high` are the lines of its higher bits.
INLINE void dot_half(const int rows, const int bits, const int half, const uint8_t *u, const uint8_t *v,
                     const uint8_t *high_u, const uint8_t *high_v, const int8_t *a, int64_t width, vi dot[][2]) {
  UNROLL for (int k = 0; k < 4; k++) {
    const wq8 p = weights_of(bits, half, k, wq4_load(u + k * LINE), wq4_load(high_u));
    const wq8 q = weights_of(bits, half, k, wq4_load(v + k * LINE), wq4_load(high_v));
    UNROLL for (int i = 0; i < rows; i++) {
      const int8_t *x = a + i * width + half * 16 + k * 4;
      dot[i][0] = vi_dot4(dot[i][0], p, x);
      dot[i][1] = vi_dot4(dot[i][1], q, x);
    }
  }
}

// The scales of one super-block in the pair of panels.
typedef struct {
  vf d[2], least[2];
  block_integers of[2];
} block_scales;

INLINE void load_scales(const int bits, const uint8_t *panel, int i, block_scales *s) {
  s->d[i] = vf_load_f16((const uint16_t *)panel);
  s->least[i] = vf_load_f16((const uint16_t *)panel + 16);
  unpack_integers(bits, panel, &s->of[i]);
}

// d * scale of block j in both panels.
INLINE void block_scales_of(const block_scales *s, int j, int few, vs out[2]) {
  UNROLL for (int i = 0; i < 2; i++) out[i] = vs_of(vf_mul(s->d[i], vf_load_i8(s->of[i].scales[j])), few);
}

// Add block b of the rows, block j of its super-block, at u and v in the two panels, without its minimums.
INLINE void add_block(const int rows, const int few, const int bits, const quire_linear_tile *t, int64_t b, int j, const uint8_t *u,
                      const uint8_t *v, block_scales *s, vf acc[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  const int8_t *a = (const int8_t *)t->a.data + b * 32;
  vs scale[2];
  vi dot[LINEAR_ROWS][2];
  if (VS_FIRST(few)) block_scales_of(s, j, few, scale);
  if (bits == 4) {
    dot_q4(rows, u, v, a, width, NULL, dot);
  } else {
    UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_zero();
    dot_half(rows, bits, 0, u, v, u + 4 * LINE, v + 4 * LINE, a, width, dot);
    dot_half(rows, bits, 1, u, v, u + 4 * LINE, v + 4 * LINE, a, width, dot);
  }
  if (!VS_FIRST(few)) block_scales_of(s, j, few, scale);
  UNROLL for (int i = 0; i < rows; i++) {
    const float *z = t->a.scales + i * blocks + b;
    UNROLL for (int p = 0; p < 2; p++) acc[i][p] = vf_fma(vf_from(dot[i][p]), vs_mul(&scale[p], z, few), acc[i][p]);
  }
}

// Subtract the minimums of super-block k of the rows.
INLINE void add_minimums(const int rows, const quire_linear_tile *t, int64_t k, const vf least[2],
                         const uint32_t (*minimums[2])[16], vf acc[][2]) {
  const quire_block_sums *sums = t->block_sums + k;
  const int64_t super_blocks = t->a.width / QUIRE_SUPER_BLOCK;
  vi dot[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_zero();
  UNROLL for (int j = 0; j < 4; j++)
    UNROLL for (int p = 0; p < 2; p++) {
      const vi pairs = vi_load(minimums[p][j]);
      UNROLL for (int i = 0; i < rows; i++) dot[i][p] = vi_dot2(dot[i][p], pairs, sums[i * super_blocks].pairs[j]);
    }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int p = 0; p < 2; p++)
      acc[i][p] = vf_fma(vf_from(dot[i][p]), vf_mul_pow2(least[p], &sums[i * super_blocks].unit), acc[i][p]);
}

// q - 32 is in -32..31, so the dots of a half of Q6_K start at -32 * sum(a) of the half. Sums in rows are of whole blocks.
INLINE vi start_q6(const quire_linear_tile *t, const int half, int64_t block) {
  const vi first = vi_set1(t->half_sums[block]);
  return half ? vi_sub(vi_shift_right(vi_set1(t->a.sums[block]), 2), first) : first;
}

// The dots of one half of a block of Q6_K. The lines of a wide block are weights without other bits.
INLINE void dot_q6(const int rows, const int is_wide, const int half, const quire_linear_tile *t, int64_t b,
                   const uint8_t *u, const uint8_t *v, vi dot[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  const int8_t *a = (const int8_t *)t->a.data + b * 32;
  UNROLL for (int i = 0; i < rows; i++) {
    dot[i][0] = dot[i][1] = start_q6(t, half, i * blocks + b);
  }
  if (!is_wide) {
    const int64_t high = (4 + half) * LINE;
    dot_half(rows, 6, half, u, v, u + high, v + high, a, width, dot);
    return;
  }
  UNROLL for (int k = half * 4; k < half * 4 + 4; k++) {
    const wq8 p = wq8_load(u + k * LINE), q = wq8_load(v + k * LINE);
    UNROLL for (int i = 0; i < rows; i++) {
      dot[i][0] = vi_dot4(dot[i][0], p, a + i * width + k * 4);
      dot[i][1] = vi_dot4(dot[i][1], q, a + i * width + k * 4);
    }
  }
}

// As add_block, for Q6_K, which has no minimums but a scale per half block, at `scales` of the first and second half in both
// panels.
INLINE void add_halves(const int rows, const int is_wide, const quire_linear_tile *t, int64_t b, const uint8_t *u,
                       const uint8_t *v, vf scales[2][2], vf acc[][2]) {
  vi dot[LINEAR_ROWS][2];
  vf part[LINEAR_ROWS][2];
  dot_q6(rows, is_wide, 0, t, b, u, v, dot);
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int p = 0; p < 2; p++) part[i][p] = vf_mul(scales[0][p], vf_from(dot[i][p]));
  dot_q6(rows, is_wide, 1, t, b, u, v, dot);
  UNROLL for (int i = 0; i < rows; i++) {
    const vf z = vf_set1(t->a.scales[i * (t->a.width / 32) + b]);
    UNROLL for (int p = 0; p < 2; p++) acc[i][p] = vf_fma(vf_fma(scales[1][p], vf_from(dot[i][p]), part[i][p]), z, acc[i][p]);
  }
}

INLINE void half_scales_of(const block_scales *s, int j, vf out[2][2]) {
  for (int half = 0; half < 2; half++)
    for (int p = 0; p < 2; p++) out[half][p] = vf_mul(s->d[p], vf_load_i8(s->of[p].scales[2 * j + half]));
}

INLINE void body_k(const int rows, const int adds, const int bits, const quire_linear_tile *t) {
  const int few = rows_of_product(rows, adds);
  const int64_t super_blocks = t->a.width / QUIRE_SUPER_BLOCK;
  const uint8_t *panel[2] = {t->w, (const uint8_t *)t->w + t->panel_bytes};
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t k = 0; k < super_blocks; k++) {
    block_scales scales;
    for (int i = 0; i < 2; i++) load_scales(bits, panel[i], i, &scales);
    for (int j = 0; j < BLOCKS; j++) {
      const int64_t line = quire_scale_lines(bits) + j * bits;
      const uint8_t *u = panel[0] + line * LINE, *v = panel[1] + line * LINE;
      next = fetch_next(next, t->next_lines);
      if (bits == 6) {
        vf halves[2][2];
        half_scales_of(&scales, j, halves);
        add_halves(rows, 0, t, k * BLOCKS + j, u, v, halves, acc);
      } else add_block(rows, few, bits, t, k * BLOCKS + j, j, u, v, &scales, acc);
    }
    if (bits < 6) {
      const uint32_t (*minimums[2])[16] = {scales.of[0].minimums, scales.of[1].minimums};
      add_minimums(rows, t, k, scales.least, minimums, acc);
    }
    for (int i = 0; i < 2; i++) panel[i] += quire_super_block_bytes(bits);
  }
  finish(rows, acc, t);
}

// dot += the two halves of a block of q5_k or q6_k, of one row and one panel.
INLINE void dot_halves(const int bits, const uint8_t *w, const int8_t *a, vi dot[2]) {
  const wq4 first = wq4_load(w + 4 * LINE), second = bits == 6 ? wq4_load(w + 5 * LINE) : first;
  UNROLL for (int k = 0; k < 4; k++) {
    const wq4 line = wq4_load(w + k * LINE);
    dot[0] = vi_dot4(dot[0], weights_of(bits, 0, k, line, first), a + k * 4);
    dot[1] = vi_dot4(dot[1], weights_of(bits, 1, k, line, second), a + k * 4 + 16);
  }
}

// sum(q * a) of a block of q4_k or q5_k.
INLINE vi dot_row(const int bits, const uint8_t *w, const int8_t *a) {
  if (bits == 4) {
    vh sum = vh_start(NULL);
    UNROLL for (int k = 0; k < 4; k++) sum = vh_dot8(sum, wq4_load(w + k * LINE), a + k * 4, a + k * 4 + 16);
    return vh_end(sum, NULL);
  }
  vi dot[2] = {vi_zero(), vi_zero()};
  dot_halves(bits, w, a, dot);
  return vi_add(dot[0], dot[1]);
}

// The same as body_k for one row and one panel. `ahead` is prefetched meanwhile, as many bytes as are read.
INLINE vf row_of_super_blocks(const int bits, const quire_linear_tile *t, const int panel, const char **ahead) {
  const uint8_t *p = (const uint8_t *)t->w + panel * t->panel_bytes;
  const int64_t head = quire_scale_lines(bits) * LINE;
  vf acc = vf_zero();
  for (int64_t b = 0; b < t->a.width / 32; p += quire_super_block_bytes(bits)) {
    block_integers s;
    const vf d = vf_load_f16((const uint16_t *)p), least = vf_load_f16((const uint16_t *)p + 16);
    const quire_block_sums *sums = t->block_sums + b / BLOCKS;
    *ahead = fetch_ahead(*ahead, head, 0, t);
    unpack_integers(bits, p, &s);
    for (int j = 0; j < BLOCKS; j++, b++) {
      const uint8_t *w = p + head + j * bits * LINE;
      const int8_t *a = (const int8_t *)t->a.data + b * 32;
      const vf z = vf_set1(t->a.scales[b]);
      *ahead = fetch_ahead(*ahead, bits * LINE, 0, t);
      if (bits == 6) {
        vi dot[2] = {start_q6(t, 0, b), start_q6(t, 1, b)};
        dot_halves(bits, w, a, dot);
        const vf part = vf_mul(vf_mul(d, vf_load_i8(s.scales[2 * j])), vf_from(dot[0]));
        acc = vf_fma(vf_fma(vf_mul(d, vf_load_i8(s.scales[2 * j + 1])), vf_from(dot[1]), part), z, acc);
      } else {
        acc = vf_fma(vf_from(dot_row(bits, w, a)), vf_mul(vf_mul(d, vf_load_i8(s.scales[j])), z), acc);
      }
    }
    if (bits < 6) {
      vi dot = vi_zero();
      UNROLL for (int j = 0; j < 4; j++) dot = vi_dot2(dot, vi_load(s.minimums[j]), sums->pairs[j]);
      acc = vf_fma(vf_from(dot), vf_mul_pow2(least, &sums->unit), acc);
    }
  }
  return acc;
}

// One row takes the panels one after the other, as body_row in linear.c does.
INLINE void body_k_row(const int bits, const quire_linear_tile *t) {
  const char *ahead = start_ahead(t, 2 * quire_super_block_bytes(bits));
  vf acc[1][2];
  UNROLL for (int j = 0; j < 2; j++) acc[0][j] = row_of_super_blocks(bits, t, j, &ahead);
  finish(1, acc, t);
}

INLINE void body_any_k(const int rows, const int adds, const int bits, const quire_linear_tile *t) {
  if (rows == 1) body_k_row(bits, t);
  else body_k(rows, adds, bits, t);
}
#define body_q4_k(rows, adds, t) body_any_k(rows, adds, QUIRE_Q4_K, t)
// The higher bits take the units that would compute multiples of scales.
#define body_q5_k(rows, t) body_any_k(rows, 0, QUIRE_Q5_K, t)
#define body_q6_k(rows, t) body_any_k(rows, 0, QUIRE_Q6_K, t)

#if defined QUIRE_ISA_AVX512
static void few_rows_of_q4_k(int rows, const quire_linear_tile *t) { PER_ROW_COUNT_AND_PRODUCT(body_q4_k) }

INLINE void unpack_super_blocks(const int bits, const uint8_t *panel, int64_t super_blocks, quire_unpacked *out) {
  for (; super_blocks; super_blocks--, panel += quire_super_block_bytes(bits), out++) {
    const uint8_t *w = panel + quire_scale_lines(bits) * LINE;
    const vf d = vf_load_f16((const uint16_t *)panel);
    block_integers integers;
    unpack_integers(bits, panel, &integers);
    for (int j = 0; j < (bits == 6 ? 2 : 1) * BLOCKS; j++) vf_store(out->scales[j], vf_mul(d, vf_load_i8(integers.scales[j])));
    for (int j = 0; j < BLOCKS; j++, w += bits * LINE)
      for (int k = 0; k < 4; k++) {
        const wq4 line = wq4_load(w + k * LINE);
        const wq4 first = bits == 6 ? wq4_load(w + 4 * LINE) : line, second = bits == 6 ? wq4_load(w + 5 * LINE) : line;
        vi_store((uint32_t *)(out->weights[j] + k * LINE), bits == 6 ? weights_of(bits, 0, k, line, first) : wq4_low(line));
        vi_store((uint32_t *)(out->weights[j] + (k + 4) * LINE), bits == 6 ? weights_of(bits, 1, k, line, second) : wq4_high(line));
      }
    if (bits == 6) continue;
    memcpy(out->minimums, integers.minimums, sizeof out->minimums);
    vf_store(out->least, vf_load_f16((const uint16_t *)panel + 16));
  }
}

// Let the tile's weights be its panels unpacked in scratch.
INLINE void unpack_panels(const int bits, quire_linear_tile *t) {
  const int64_t super_blocks = t->a.width / QUIRE_SUPER_BLOCK;
  for (int p = 0; p < 2; p++)
    unpack_super_blocks(bits, (const uint8_t *)t->w + p * t->panel_bytes, super_blocks, (quire_unpacked *)t->scratch + p * super_blocks);
  t->w = t->scratch;
}

// As body_k, for unpacked panels.
INLINE void body_unpacked(const int rows, const int adds, const quire_linear_tile *t) {
  const int few = rows_of_product(rows, adds);
  const int64_t blocks = t->a.width / 32, super_blocks = t->a.width / QUIRE_SUPER_BLOCK;
  const quire_unpacked *u = t->w, *v = u + super_blocks;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t k = 0; k < super_blocks; k++, u++, v++) {
    for (int j = 0; j < BLOCKS; j++) {
      const int64_t b = k * BLOCKS + j;
      const vs scale[2] = {vs_of(vf_load(u->scales[j]), few), vs_of(vf_load(v->scales[j]), few)};
      vi dot[LINEAR_ROWS][2];
      next = fetch_next(next, t->next_lines);
      dot_q8(rows, u->weights[j], v->weights[j], (const int8_t *)t->a.data + b * 32, t->a.width, NULL, dot);
      UNROLL for (int i = 0; i < rows; i++) {
        const float *z = t->a.scales + i * blocks + b;
        UNROLL for (int p = 0; p < 2; p++) acc[i][p] = vf_fma(vf_from(dot[i][p]), vs_mul(&scale[p], z, few), acc[i][p]);
      }
    }
    const vf least[2] = {vf_load(u->least), vf_load(v->least)};
    const uint32_t (*minimums[2])[16] = {u->minimums, v->minimums};
    add_minimums(rows, t, k, least, minimums, acc);
  }
  finish(rows, acc, t);
}

INLINE void body_unpacked_q6_k(const int rows, const quire_linear_tile *t) {
  const int64_t super_blocks = t->a.width / QUIRE_SUPER_BLOCK;
  const quire_unpacked *u = t->w, *v = u + super_blocks;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t k = 0; k < super_blocks; k++, u++, v++)
    for (int j = 0; j < BLOCKS; j++) {
      vf halves[2][2];
      for (int half = 0; half < 2; half++)
        halves[half][0] = vf_load(u->scales[2 * j + half]), halves[half][1] = vf_load(v->scales[2 * j + half]);
      next = fetch_next(next, t->next_lines);
      add_halves(rows, 1, t, k * BLOCKS + j, u->weights[j], v->weights[j], halves, acc);
    }
  finish(rows, acc, t);
}

static void few_rows_of_q6_k(int rows, const quire_linear_tile *t) { PER_ROW_COUNT(body_q6_k, t) }
static void unpacked_rows_of_q6_k(int rows, const quire_linear_tile *t) { PER_ROW_COUNT(body_unpacked_q6_k, t) }
static void unpacked_rows(int rows, const quire_linear_tile *t) { PER_ROW_COUNT_AND_PRODUCT(body_unpacked) }

void ISA(linear_q4_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS_4_BITS);
  if (rows < UNPACKED_ROWS) {
    multiply_in_calls(few_rows_of_q4_k, rows, *t);
    return;
  }
  quire_linear_tile unpacked = *t;
  unpack_panels(QUIRE_Q4_K, &unpacked);
  multiply_in_calls(unpacked_rows, rows, unpacked);
}
void ISA(linear_q6_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS_4_BITS);
  if (rows < UNPACKED_ROWS_Q6_K) {
    multiply_in_calls(few_rows_of_q6_k, rows, *t);
    return;
  }
  quire_linear_tile unpacked = *t;
  unpack_panels(QUIRE_Q6_K, &unpacked);
  multiply_in_calls(unpacked_rows_of_q6_k, rows, unpacked);
}
#else
void ISA(linear_q4_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS_4_BITS);
  PER_ROW_COUNT_AND_PRODUCT(body_q4_k)
}
void ISA(linear_q6_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS_4_BITS);
  PER_ROW_COUNT(body_q6_k, t)
}
#endif
void ISA(linear_q5_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT(body_q5_k, t)
}

// Weight i of a block at `lines`, unsigned.
static int weight_of(int bits, const uint8_t *lines, int lane, int i) {
  const int half = i / 16, k = i % 16 / 4;
  const uint8_t *at = lines + lane * 4 + i % 4, *high = at + 4 * LINE;
  const int low = at[k * LINE] >> half * 4 & 15;
  if (bits == 5) return low | (high[0] >> (half * 4 + k) & 1) << 4;
  if (bits == 6) return low | (high[half * LINE] >> 2 * k & 3) << 4;
  return low;
}

void ISA(unpack_k)(const void *panel, int bits, int64_t width, int lane, float *out) {
  for (const uint8_t *p = panel; width; p += quire_super_block_bytes(bits), width -= QUIRE_SUPER_BLOCK) {
    block_integers s;
    unpack_integers(bits, p, &s);
    const float d = f16_widen(((const uint16_t *)p)[lane]), least = f16_widen(((const uint16_t *)p)[16 + lane]);
    for (int j = 0; j < BLOCKS; j++)
      for (int i = 0; i < 32; i++) {
        const int q = weight_of(bits, p + (quire_scale_lines(bits) + j * bits) * LINE, lane, i);
        if (bits == 6) {
          *out++ = d * (float)s.scales[2 * j + i / 16][lane] * (float)(q - 32);
          continue;
        }
        const uint32_t minimum = s.minimums[j / 4 * 2 + j % 2][lane] >> j % 4 / 2 * 16 & 63;
        *out++ = d * (float)s.scales[j][lane] * (float)q - least * (float)minimum;
      }
  }
}
