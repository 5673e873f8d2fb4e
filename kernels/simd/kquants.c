// Linear layers with GGML's k-quants (Q4_K, Q5_K, Q6_K): super-blocks of 256 along K, whose blocks have integer scales.
// One body for all: a block's exact integers, then w = d * scale * q - dmin * minimum for their sum. Both products of a
// super-block's number and a block's integer are exact in f32.
#include <assert.h>
#include <stddef.h>

#include "epilogue.h"

enum { LINE = 64, BLOCKS = 8 };  // bytes with 4 of each column; blocks of 32 in a super-block

// A byte for each scale and column: in Q4_K and Q5_K the scales of blocks, then their minimums; in Q6_K the signed scales of
// half blocks. The operations are on four bytes at a time.
INLINE void unpack_scales(const int bits, const uint8_t *super_block, int8_t bytes[16][16]) {
  const uint32_t *packed = (const uint32_t *)(super_block + LINE);
  uint32_t *out = (uint32_t *)bytes;
  if (bits == 6) {
    for (int i = 0; i < 64; i += 16) vi_store(out + i, vi_load(packed + i));
    return;
  }
  const vi six = vi_set1(0x3f3f3f3f), four = vi_set1(0x0f0f0f0f), two = vi_set1(0x03030303);
  const vi x = vi_load(packed), y = vi_load(packed + 16), z = vi_load(packed + 32);
  vi_store(out, vi_and(x, six));
  vi_store(out + 16, vi_or(vi_and(z, four), vi_shift_left(vi_and(vi_shift_right(x, 6), two), 4)));
  vi_store(out + 32, vi_and(y, six));
  vi_store(out + 48, vi_or(vi_and(vi_shift_right(z, 4), four), vi_shift_left(vi_and(vi_shift_right(y, 6), two), 4)));
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

// 32 * sum of 16 activations, in all lanes.
INLINE vi sum_of_16(const int8_t *a) {
  vi sum = vi_zero();
  UNROLL for (int k = 0; k < 4; k++) sum = vi_dot4(sum, wq8_set1(32), a + k * 4);
  return sum;
}

// The scales of one super-block in the pair of panels.
typedef struct {
  vf d[2], least[2];  // least, times the sums of activations, which hold -128 * sum(a), is what minimums subtract
  _Alignas(64) int8_t bytes[2][16][16];
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
    dot_q4(rows, u, v, a, width, NULL, dot);
  } else {
    UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_zero();
    dot_half(rows, bits, 0, u, v, u + 4 * LINE, v + 4 * LINE, a, width, dot);
    dot_half(rows, bits, 1, u, v, u + 4 * LINE, v + 4 * LINE, a, width, dot);
  }
  const vf p = vf_mul(s->d[0], vf_load_i8(s->bytes[0][j])), q = vf_mul(s->d[1], vf_load_i8(s->bytes[1][j]));
  const vf m = vf_mul(s->least[0], vf_load_i8(s->bytes[0][BLOCKS + j]));
  const vf n = vf_mul(s->least[1], vf_load_i8(s->bytes[1][BLOCKS + j]));
  UNROLL for (int i = 0; i < rows; i++) {
    const vf sum = vf_from(vi_set1(t->a.sums[i * blocks + b])), z = vf_set1(t->a.scales[i * blocks + b]);
    acc[i][0] = vf_fma(vf_fma(p, vf_from(dot[i][0]), vf_mul(m, sum)), z, acc[i][0]);
    acc[i][1] = vf_fma(vf_fma(q, vf_from(dot[i][1]), vf_mul(n, sum)), z, acc[i][1]);
  }
}

// The dots of one half of a block of Q6_K. q - 32 is in -32..31, so they start at -32 * sum(a) of the half; `first` are
// 32 * sum(a) of the first half.
INLINE void dot_q6(const int rows, const int half, const quire_linear_tile *t, int64_t b, const uint8_t *u,
                   const uint8_t *v, const vi first[], vi dot[][2]) {
  const int64_t width = t->a.width, blocks = width / 32;
  UNROLL for (int i = 0; i < rows; i++) {
    dot[i][0] = half ? vi_add(first[i], vi_set1(t->a.sums[i * blocks + b] >> 2)) : vi_sub(vi_zero(), first[i]);
    dot[i][1] = dot[i][0];
  }
  const int64_t high = (4 + half) * LINE;
  dot_half(rows, 6, half, u, v, u + high, v + high, (const int8_t *)t->a.data + b * 32, width, dot);
}

// As add_block, for Q6_K, which has no minimums but a scale per half block. Its activations' sums are of whole blocks.
INLINE void add_halves(const int rows, const quire_linear_tile *t, int64_t b, int j, const uint8_t *u, const uint8_t *v,
                       block_scales *s, vf acc[][2]) {
  vi first[LINEAR_ROWS], dot[LINEAR_ROWS][2];
  vf part[LINEAR_ROWS][2];
  vf p[2], q[2];  // of each half
  for (int half = 0; half < 2; half++) {
    p[half] = vf_mul(s->d[0], vf_load_i8(s->bytes[0][2 * j + half]));
    q[half] = vf_mul(s->d[1], vf_load_i8(s->bytes[1][2 * j + half]));
  }
  UNROLL for (int i = 0; i < rows; i++) first[i] = sum_of_16((const int8_t *)t->a.data + i * t->a.width + b * 32);
  dot_q6(rows, 0, t, b, u, v, first, dot);
  UNROLL for (int i = 0; i < rows; i++) {
    part[i][0] = vf_mul(p[0], vf_from(dot[i][0]));
    part[i][1] = vf_mul(q[0], vf_from(dot[i][1]));
  }
  dot_q6(rows, 1, t, b, u, v, first, dot);
  UNROLL for (int i = 0; i < rows; i++) {
    const vf z = vf_set1(t->a.scales[i * (t->a.width / 32) + b]);
    acc[i][0] = vf_fma(vf_fma(p[1], vf_from(dot[i][0]), part[i][0]), z, acc[i][0]);
    acc[i][1] = vf_fma(vf_fma(q[1], vf_from(dot[i][1]), part[i][1]), z, acc[i][1]);
  }
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
    _Alignas(64) int8_t bytes[16][16];
    const vf d = vf_load_f16((const uint16_t *)p);
    const vf least = vf_mul(vf_load_f16((const uint16_t *)p + 16), vf_set1(0x1p-7f));
    *ahead = fetch_ahead(*ahead, head, 0, t);
    unpack_scales(bits, p, bytes);
    for (int j = 0; j < BLOCKS; j++, b++) {
      const uint8_t *w = p + head + j * bits * LINE;
      const int8_t *a = (const int8_t *)t->a.data + b * 32;
      const vf z = vf_set1(t->a.scales[b]);
      *ahead = fetch_ahead(*ahead, bits * LINE, 0, t);
      if (bits == 6) {
        const vi first = sum_of_16(a);
        vi dot[2] = {vi_sub(vi_zero(), first), vi_add(first, vi_set1(t->a.sums[b] >> 2))};  // -32 * sum(a) of each half
        dot_halves(bits, w, a, dot);
        const vf part = vf_mul(vf_mul(d, vf_load_i8(bytes[2 * j])), vf_from(dot[0]));
        acc = vf_fma(vf_fma(vf_mul(d, vf_load_i8(bytes[2 * j + 1])), vf_from(dot[1]), part), z, acc);
      } else {
        const vf sum = vf_from(vi_set1(t->a.sums[b])), least_sum = vf_mul(vf_mul(least, vf_load_i8(bytes[BLOCKS + j])), sum);
        acc = vf_fma(vf_fma(vf_mul(d, vf_load_i8(bytes[j])), vf_from(dot_row(bits, w, a)), least_sum), z, acc);
      }
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

INLINE void body_any_k(const int rows, const int bits, const quire_linear_tile *t) {
  if (rows == 1) body_k_row(bits, t);
  else body_k(rows, bits, t);
}
#define body_q4_k(rows, t) body_any_k(rows, QUIRE_Q4_K, t)
#define body_q5_k(rows, t) body_any_k(rows, QUIRE_Q5_K, t)
#define body_q6_k(rows, t) body_any_k(rows, QUIRE_Q6_K, t)

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
    _Alignas(64) int8_t bytes[16][16];
    unpack_scales(bits, p, bytes);
    const float d = f16_widen(((const uint16_t *)p)[lane]), least = f16_widen(((const uint16_t *)p)[16 + lane]);
    for (int j = 0; j < BLOCKS; j++)
      for (int i = 0; i < 32; i++) {
        const int q = weight_of(bits, p + (quire_scale_lines(bits) + j * bits) * LINE, lane, i);
        if (bits == 6) *out++ = d * (float)bytes[2 * j + i / 16][lane] * (float)(q - 32);
        else *out++ = d * (float)bytes[j][lane] * (float)q - least * (float)bytes[BLOCKS + j][lane];
      }
  }
}
