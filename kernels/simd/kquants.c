// Linear layers with GGML's k-quants (Q4_K, Q5_K, Q6_K): super-blocks of 256 along K, whose blocks have integer scales.
// One body for all: a block's exact integers, then w = d * scale * q - dmin * minimum for their sum. Both products of a
// super-block's number and a block's integer are exact in f32.
#include <assert.h>
#include <stddef.h>

#include "epilogue.h"

enum { LINE = 64, BLOCKS = 8 };  // bytes with 4 of each column; blocks of 32 in a super-block

// One byte per scale and column, four to a number: in Q4_K and Q5_K the scales of blocks, then their minimums; in Q6_K the
// signed scales of half blocks.
INLINE void unpack_scales(const int bits, const uint8_t *super_block, uint32_t bytes[4][16]) {
  const uint32_t *packed = (const uint32_t *)(super_block + LINE);
  if (bits == 6) {
    for (int i = 0; i < 4; i++) vi_store(bytes[i], vi_load(packed + i * 16));
    return;
  }
  const vi six = vi_set1(0x3f3f3f3f), four = vi_set1(0x0f0f0f0f), two = vi_set1(0x03030303);
  const vi x = vi_load(packed), y = vi_load(packed + 16), z = vi_load(packed + 32);
  vi_store(bytes[0], vi_and(x, six));
  vi_store(bytes[1], vi_or(vi_and(z, four), vi_shift_left(vi_and(vi_shift_right(x, 6), two), 4)));
  vi_store(bytes[2], vi_and(y, six));
  vi_store(bytes[3], vi_or(vi_and(vi_shift_right(z, 4), four), vi_shift_left(vi_and(vi_shift_right(y, 6), two), 4)));
}

INLINE vf unsigned_byte(uint32_t bytes[4][16], int at) {
  return vf_from(vi_and(vi_shift_right(vi_load(bytes[at / 4]), at % 4 * 8), vi_set1(255)));
}
INLINE vf signed_byte(uint32_t bytes[4][16], int at) {
  return vf_from(vi_shift_right(vi_shift_left(vi_load(bytes[at / 4]), 24 - at % 4 * 8), 24));
}

// Unsigned weights, 4 of K: of the first 16 of a block or of the other 16.
INLINE wq8 weights_of(const int bits, const int half, const int k, wq4 line, wq4 high) {
  const wq8 low = half ? wq4_high(line) : wq4_low(line);
  if (bits == 5) return wq8_or(low, wq4_bits(high, half ? k : k - 4, 16));
  return wq8_or(low, wq4_bits(high, 2 * k - 4, 48));
}

INLINE void dot_q4(const int rows, const uint8_t *u, const uint8_t *v, const int8_t *a, int64_t width, vi dot[][2]) {
  vn sums[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = vn_start(0);
  UNROLL for (int k = 0; k < 4; k++) {
    const wq4 p = wq4_load(u + k * LINE), q = wq4_load(v + k * LINE);
    UNROLL for (int i = 0; i < rows; i++) {
      const int8_t *x = a + i * width + k * 4;
      sums[i][0] = vn_dot4(vn_dot4(sums[i][0], wq4_low(p), x), wq4_high(p), x + 16);
      sums[i][1] = vn_dot4(vn_dot4(sums[i][1], wq4_low(q), x), wq4_high(q), x + 16);
    }
  }
  UNROLL for (int i = 0; i < rows; i++) dot[i][0] = vn_end(sums[i][0], 0), dot[i][1] = vn_end(sums[i][1], 0);
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

// 32 * sum of 16 activations, in all lanes.
INLINE vi sum_of_16(const int8_t *a) {
  vi sum = vi_zero();
  UNROLL for (int k = 0; k < 4; k++) sum = vi_dot4(sum, wq8_set1(32), a + k * 4);
  return sum;
}

// The scales of one super-block in the pair of panels.
typedef struct {
  vf d[2], least[2];  // least, times the sums of activations, which hold -128 * sum(a), is what minimums subtract
  uint32_t bytes[2][4][16];
} block_scales;

INLINE void load_scales(const int bits, const uint8_t *panel, int i, block_scales *s) {
  s->d[i] = vf_load_f16((const uint16_t *)panel);
  s->least[i] = vf_mul(vf_load_f16((const uint16_t *)panel + 16), vf_set1(0x1p-7f));
  unpack_scales(bits, panel, s->bytes[i]);
}

// Add block b of the rows, block j of its super-block, at u and v in the two panels.
INLINE void add_block(const int rows, const int bits, const quire_linear_tile *t, int64_t b, int j, const uint8_t *u,
                      const uint8_t *v, block_scales *s, vf acc[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  const int8_t *a = (const int8_t *)t->a.data + b * 32;
  vi dot[LINEAR_ROWS][2];
  if (bits == 4) {
    dot_q4(rows, u, v, a, width, dot);
  } else {
    UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_zero();
    dot_half(rows, bits, 0, u, v, u + 4 * LINE, v + 4 * LINE, a, width, dot);
    dot_half(rows, bits, 1, u, v, u + 4 * LINE, v + 4 * LINE, a, width, dot);
  }
  const vf p = vf_mul(s->d[0], unsigned_byte(s->bytes[0], j)), q = vf_mul(s->d[1], unsigned_byte(s->bytes[1], j));
  const vf m = vf_mul(s->least[0], unsigned_byte(s->bytes[0], BLOCKS + j));
  const vf n = vf_mul(s->least[1], unsigned_byte(s->bytes[1], BLOCKS + j));
  UNROLL for (int i = 0; i < rows; i++) {
    const vf sum = vf_from(vi_set1(t->a.sums[i * blocks + b])), z = vf_set1(t->a.scales[i * blocks + b]);
    acc[i][0] = vf_fma(vf_fma(p, vf_from(dot[i][0]), vf_mul(m, sum)), z, acc[i][0]);
    acc[i][1] = vf_fma(vf_fma(q, vf_from(dot[i][1]), vf_mul(n, sum)), z, acc[i][1]);
  }
}

// One half of a block of Q6_K. q - 32 is in -32..31, so a dot starts at -32 * sum(a) of its half; `first` are 32 * sum(a) of
// the first halves.
INLINE void add_half(const int rows, const int half, const quire_linear_tile *t, int64_t b, int j, const uint8_t *u,
                     const uint8_t *v, block_scales *s, const vi first[], vf acc[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  const int8_t *a = (const int8_t *)t->a.data + b * 32;
  vi dot[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) {
    dot[i][0] = half ? vi_add(first[i], vi_set1(t->a.sums[i * blocks + b] >> 2)) : vi_sub(vi_zero(), first[i]);
    dot[i][1] = dot[i][0];
  }
  dot_half(rows, 6, half, u, v, u + (4 + half) * LINE, v + (4 + half) * LINE, a, width, dot);
  const vf p = vf_mul(s->d[0], signed_byte(s->bytes[0], 2 * j + half));
  const vf q = vf_mul(s->d[1], signed_byte(s->bytes[1], 2 * j + half));
  UNROLL for (int i = 0; i < rows; i++) {
    const vf z = vf_set1(t->a.scales[i * blocks + b]);
    acc[i][0] = vf_fma(vf_from(dot[i][0]), vf_mul(p, z), acc[i][0]);
    acc[i][1] = vf_fma(vf_from(dot[i][1]), vf_mul(q, z), acc[i][1]);
  }
}

// As add_block, for Q6_K, which has a scale per half block. Its activations' sums are of whole blocks.
INLINE void add_halves(const int rows, const quire_linear_tile *t, int64_t b, int j, const uint8_t *u, const uint8_t *v,
                       block_scales *s, vf acc[][2]) {
  vi first[LINEAR_ROWS];
  UNROLL for (int i = 0; i < rows; i++) first[i] = sum_of_16((const int8_t *)t->a.data + i * t->a.width + b * 32);
  add_half(rows, 0, t, b, j, u, v, s, first, acc);
  add_half(rows, 1, t, b, j, u, v, s, first, acc);
}

INLINE void body_k(const int rows, const int bits, const quire_linear_tile *t) {
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
      if (bits == 6) add_halves(rows, t, k * BLOCKS + j, j, u, v, &scales, acc);
      else add_block(rows, bits, t, k * BLOCKS + j, j, u, v, &scales, acc);
    }
    for (int i = 0; i < 2; i++) panel[i] += quire_super_block_bytes(bits);
  }
  finish(rows, acc, t);
}

#define body_q4_k(rows, t) body_k(rows, QUIRE_Q4_K, t)
#define body_q5_k(rows, t) body_k(rows, QUIRE_Q5_K, t)
#define body_q6_k(rows, t) body_k(rows, QUIRE_Q6_K, t)

void ISA(linear_q4_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT(body_q4_k)
}
void ISA(linear_q5_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT(body_q5_k)
}
void ISA(linear_q6_k)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT(body_q6_k)
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
    uint32_t bytes[4][16];
    unpack_scales(bits, p, bytes);
    const float d = f16_widen(((const uint16_t *)p)[lane]), least = f16_widen(((const uint16_t *)p)[16 + lane]);
    for (int j = 0; j < BLOCKS; j++)
      for (int i = 0; i < 32; i++) {
        const int q = weight_of(bits, p + (quire_scale_lines(bits) + j * bits) * LINE, lane, i), at = 2 * j + i / 16;
        if (bits == 6) *out++ = d * (float)(int8_t)(bytes[at / 4][lane] >> at % 4 * 8) * (float)(q - 32);
        else *out++ = d * (float)(bytes[j / 4][lane] >> j % 4 * 8 & 255) * (float)q
                      - least * (float)(bytes[2 + j / 4][lane] >> j % 4 * 8 & 255);
      }
  }
}
