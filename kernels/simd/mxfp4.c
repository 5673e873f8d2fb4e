// Linear layers with MXFP4: blocks of 32 along K of 4-bit floating-point numbers (E2M1) that share a power of two (E8M0).
// Twice such a number is an integer from -12 to 12, so the dot of a block is exact.
#include <assert.h>
#include <stddef.h>

#include "epilogue.h"

// Twice the number of each code, plus 12: the dots of these unsigned weights start at -12 * sum(a).
static const uint8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// 2^(e - 128) of 16 columns, exactly, for twice the numbers; infinite for 255, which is no number in E8M0.
INLINE vf load_scales(const uint8_t *exponents) {
  return vf_mul(vf_max(vf_load_exponents(exponents), vf_set1(0x1p-127f)), vf_set1(0.5f));
}

INLINE void body_mxfp4(const int rows, const int adds, const quire_linear_tile *t) {
  const int few = rows_of_product(rows, adds);
  const int64_t width = t->a.width, blocks = width / 32;
  const uint8_t *s0 = t->w, *s1 = s0 + t->panel_bytes, *w0 = s0 + quire_mxfp4_scale_bytes(width), *w1 = w0 + t->panel_bytes;
  vf acc[LINEAR_ROWS][2];
  UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = vf_zero();
  const char *next = t->next;
  for (int64_t b = 0; b < blocks; b++, w0 += 256, w1 += 256) {
    next = fetch_next(next, t->next_lines);
    vi dot[LINEAR_ROWS][2];
    UNROLL for (int i = 0; i < rows; i++) dot[i][0] = dot[i][1] = vi_set1((t->a.sums[i * blocks + b] >> 5) * 3);
    UNROLL for (int k = 0; k < 4; k++) {
      const wq4 c = wq4_load(w0 + k * 64), d = wq4_load(w1 + k * 64);
      const wq8 u[2] = {wq8_pick(NUMBERS, wq4_low(c)), wq8_pick(NUMBERS, wq4_high(c))};
      const wq8 v[2] = {wq8_pick(NUMBERS, wq4_low(d)), wq8_pick(NUMBERS, wq4_high(d))};
      UNROLL for (int i = 0; i < rows; i++) {
        const int8_t *x = (const int8_t *)t->a.data + i * width + b * 32 + k * 4;
        dot[i][0] = vi_dot4(vi_dot4(dot[i][0], u[0], x), u[1], x + 16);
        dot[i][1] = vi_dot4(vi_dot4(dot[i][1], v[0], x), v[1], x + 16);
      }
    }
    const vs p = vs_of(load_scales(s0 + b * 16), few), q = vs_of(load_scales(s1 + b * 16), few);
    UNROLL for (int i = 0; i < rows; i++) {
      const float *z = t->a.scales + i * blocks + b;
      acc[i][0] = vf_fma(vf_from(dot[i][0]), vs_mul(&p, z, few), acc[i][0]);
      acc[i][1] = vf_fma(vf_from(dot[i][1]), vs_mul(&q, z, few), acc[i][1]);
    }
  }
  finish(rows, acc, t);
}

void ISA(linear_mxfp4)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= LINEAR_ROWS);
  PER_ROW_COUNT_AND_PRODUCT(body_mxfp4)
}

void ISA(unpack_mxfp4)(const void *panel, int64_t width, int lane, float *out) {
  const uint8_t *exponents = panel, *w = exponents + quire_mxfp4_scale_bytes(width);
  for (int64_t b = 0; b < width / 32; b++, exponents += 16, w += 256) {
    float scales[16];
    vf_store(scales, load_scales(exponents));
    for (int i = 0; i < 32; i++) {
      const int byte = w[i % 16 / 4 * 64 + lane * 4 + i % 4];
      *out++ = (float)(NUMBERS[i < 16 ? byte & 15 : byte >> 4] - 12) * scales[lane];
    }
  }
}
