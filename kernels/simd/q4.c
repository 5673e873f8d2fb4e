// 4-bit weights: blocks of 32 are quantized when a model is loaded.
#include <math.h>

#include "level.h"

enum { STEPS = 16 };  // scales tried per sign: from largest |w| / 5 to largest |w| / 8.75

INLINE vf nearest(vf w, vf inverse) {  // -8 for a NaN
  return vf_round(vf_min(vf_set1(7.f), vf_max(vf_mul(w, inverse), vf_set1(-8.f))));
}

// The best scale for the weights that round to q: keep it if it reduces a lane's squared error further than `gain`.
INLINE void keep_better(vf product, vf square, float *gain, float *scale) {
  float reduced[16], best[16];
  vf_store(best, vf_div(product, square));
  vf_store(reduced, vf_mul(vf_load(best), product));  // sum(w^2) - sum((w - best * q)^2)
  for (int i = 0; i < 16; i++) {
    const int better = reduced[i] > gain[i];
    gain[i] = better ? reduced[i] : gain[i];
    scale[i] = better ? best[i] : scale[i];
  }
}

// Pack the block with these scales, rounded to fp16. Returns the sum of squared errors of each lane in `errors`.
INLINE void pack_block(const float *w, const float *wanted, uint16_t *scales, uint32_t *block, float *errors) {
  float inverse[16];
  for (int i = 0; i < 16; i++) {
    const float size = fminf(fabsf(wanted[i]), 65504.f);
    scales[i] = (uint16_t)(f16_of(size) | (wanted[i] < 0 ? 0x8000 : 0));
    inverse[i] = f16_widen(scales[i]) != 0 ? 1.f / f16_widen(scales[i]) : 0.f;
  }
  const vf scale = vf_load_f16(scales);
  vf error = vf_zero();
  for (int line = 0; line < 4; line++) {
    vi bytes = vi_zero();
    for (int byte = 0; byte < 8; byte++) {  // first the line in the low halves, then the line in the high halves
      const vf x = vf_load(w + (line * 4 + byte % 4 + byte / 4 * 16) * 16), q = nearest(x, vf_load(inverse));
      const vf off = vf_sub(x, vf_mul(scale, q));
      error = vf_add(error, vf_mul(off, off));
      bytes = vi_or(bytes, vi_shift_left(vi_add(vi_from(q), vi_set1(8)), byte % 4 * 8 + byte / 4 * 4));
    }
    vi_store(block + line * 16, bytes);
  }
  vf_store(errors, error);
}

// The scale may have either sign, because the range is -8..7. The result is never worse than Q4_0's scale, which maps the
// weight of largest magnitude to -8.
void ISA(quantize_q4)(const float *w, uint16_t *scales, void *block) {
  float most[16], least[16], plain[16], top[16], gain[16], scale[16], error[16], plain_error[16];
  vf high = vf_zero(), low = vf_zero();
  for (int k = 0; k < 32; k++) high = vf_max(vf_load(w + k * 16), high), low = vf_min(vf_load(w + k * 16), low);
  vf_store(most, high), vf_store(least, low);
  for (int i = 0; i < 16; i++) {
    top[i] = fmaxf(most[i], -least[i]);
    plain[i] = scale[i] = (-least[i] < most[i] ? most[i] : least[i]) / -8.f;
    gain[i] = -1.f;
  }
  for (int step = 0; step < STEPS; step++) {
    const vf inverse = vf_div(vf_set1(5.f + 0.25f * (float)step), vf_load(top));
    vf product[2] = {vf_zero(), vf_zero()}, square[2] = {vf_zero(), vf_zero()};  // sum(w * q), sum(q * q) for each sign
    for (int k = 0; k < 32; k++) {
      const vf x = vf_load(w + k * 16), q = nearest(x, inverse), r = nearest(x, vf_sub(vf_zero(), inverse));
      product[0] = vf_add(product[0], vf_mul(x, q)), square[0] = vf_add(square[0], vf_mul(q, q));
      product[1] = vf_add(product[1], vf_mul(x, r)), square[1] = vf_add(square[1], vf_mul(r, r));
    }
    keep_better(product[0], square[0], gain, scale);
    keep_better(product[1], square[1], gain, scale);
  }
  uint32_t plain_block[64];
  uint16_t plain_scales[16];
  pack_block(w, scale, scales, block, error);
  pack_block(w, plain, plain_scales, plain_block, plain_error);
  for (int i = 0; i < 16; i++) {
    if (error[i] < plain_error[i]) continue;
    scales[i] = plain_scales[i];
    for (int line = 0; line < 4; line++) ((uint32_t *)block)[line * 16 + i] = plain_block[line * 16 + i];
  }
}
