// One head of one token between the QKV projection and attention: norm, rotation, and its slot in a page.
#include <math.h>

#include "level.h"

// 1 / rms of n elements, summed in one fixed order; NaN where the sum is not finite.
float ISA(inverse_rms)(const float *x, float eps, int64_t n) {
  vf s0 = vf_zero(), s1 = vf_zero();
  for (int64_t j = 0; j < n; j += 32) {
    const vf a = columns_of(x, j, n, vf_zero()), b = columns_of(x, j + 16, n, vf_zero());
    s0 = vf_fma(a, a, s0);
    s1 = vf_fma(b, b, s1);
  }
  const float sum = vf_sum(vf_add(s0, s1));
  return sum < INFINITY ? 1.f / sqrtf(sum / (float)n + eps) : NAN;
}

// Subtract the mean of n elements, summed in one fixed order. Elements from n on stay zero.
INLINE void center(float *x, int64_t n) {
  vf s0 = vf_zero(), s1 = vf_zero();
  for (int64_t j = 0; j < n; j += 32) {
    s0 = vf_add(columns_of(x, j, n, vf_zero()), s0);
    s1 = vf_add(columns_of(x, j + 16, n, vf_zero()), s1);
  }
  const vf mean = vf_set1(vf_sum(vf_add(s0, s1)) / (float)n);
  for (int64_t j = 0; j < n; j += 16) vf_store(x + j, vf_sub(columns_of(x, j, n, mean), mean));
}

INLINE void norm_head(float *x, const quire_head *h) {
  if (h->centered) center(x, h->head_dim);
  const vf factor = vf_set1(h->factor != 0.f ? h->factor : ISA(inverse_rms)(x, h->eps, h->head_dim));
  for (int64_t j = 0; j < h->head_dim; j += 16)
    vf_store(x + j, vf_mul(vf_mul(vf_load(x + j), factor), vf_load(h->norm + j)));
}

// Elementwise, so the vector loop and the scalar remainder give the same bits.
INLINE void rotate_head(float *restrict x, const quire_head *h, const float *restrict rotary, const float factor) {
  const int64_t half = h->rotary_dim / 2;
  float *restrict y = x + h->rotary_distance;  // the elements that are rotated with those of x
  const vf scale = vf_set1(factor);
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const vf a = vf_load(x + i), b = vf_load(y + i), c = vf_load(rotary + i), s = vf_load(rotary + half + i);
    vf_store(x + i, vf_mul(vf_sub(vf_mul(a, c), vf_mul(b, s)), scale));
    vf_store(y + i, vf_mul(vf_add(vf_mul(b, c), vf_mul(a, s)), scale));
  }
  for (; i < half; i++) {
    const float a = x[i], b = y[i], c = rotary[i], s = rotary[half + i];
    x[i] = (a * c - b * s) * factor;
    y[i] = (b * c + a * s) * factor;
  }
}

// Elementwise too, for elements that are not rotated.
INLINE void scale_between(float *x, int64_t from, int64_t end, float scale) {
  for (; from < end && from % 16; from++) x[from] *= scale;
  for (; from + 16 <= end; from += 16) vf_store(x + from, vf_mul(vf_load(x + from), vf_set1(scale)));
  for (; from < end; from++) x[from] *= scale;
}

void ISA(head)(const float *x, const quire_head *h, const float *rotary, float *out) {
  const int64_t padded = (h->head_dim + 31) / 32 * 32;
  for (int64_t j = 0; j < padded; j += 16) {
    __builtin_prefetch(x + h->ahead + j);
    __builtin_prefetch(x + h->next + j);
    vf_store(out + j, columns_of(x, j, h->head_dim, vf_zero()));
  }
  const int last = h->norm && h->norm_last;
  const int64_t half = h->rotary_dim / 2, second = half ? h->rotary_distance : 0;
  const float scale = last ? 1.f : h->scale;  // a norm would undo it
  if (h->norm && !last) norm_head(out, h);
  if (h->rotary_dim) rotate_head(out, h, rotary, scale);
  if (scale != 1.f) {
    scale_between(out, half, second, scale);
    scale_between(out, second + half, padded, scale);
  }
  if (last) {
    norm_head(out, h);
    scale_between(out, 0, padded, h->scale);
  }
}

// max|x|; NaN if one element is NaN.
INLINE float largest(const float *x, int64_t n) {
  vf top = vf_zero();
  int nan = 0;
  for (int64_t i = 0; i < n; i += 16) {
    nan |= vf_any_nan(vf_load(x + i));
    top = vf_max(top, vf_abs(vf_load(x + i)));
  }
  return nan ? NAN : vf_reduce_max(top);
}

// 16 numbers as int8 with the given scale, one per lane; all zero if the scale is not positive and finite.
INLINE vi quantized(const float *x, float scale) {
  const vf y = scale > 0.f && scale < INFINITY ? vf_mul(vf_load(x), vf_set1(1.f / scale)) : vf_zero();
  return vi_from(vf_max(vf_set1(-127.f), vf_min(vf_set1(127.f), y)));
}

INLINE void store_key_int8(const float *x, int64_t slot, const quire_page *page) {
  uint32_t *k = (uint32_t *)page->k + slot / 16 * 4 * page->d + slot % 16;  // quads of d
  uint16_t *scales = page->k_scales + slot / 16 * (page->d / 32) * 16 + slot % 16;
  const uint16_t shared = page->shared ? f16_of(largest(x, page->shared) / 127.f) : 0;
  for (int64_t i = 0; i < page->d; i += 32) {
    const uint16_t scale = i < page->shared ? shared : f16_of(largest(x + i, 32) / 127.f);
    uint32_t quads[8];
    vi_store_i8((int8_t *)quads, quantized(x + i, f16_widen(scale)));
    vi_store_i8((int8_t *)quads + 16, quantized(x + i + 16, f16_widen(scale)));
    for (int j = 0; j < 8; j++) k[(i / 4 + j) * 16] = quads[j] ^ 0x80808080u;  // unsigned, as q8 weights are
    scales[i / 32 * 16] = scale;
  }
}

void ISA(store_key)(const float *x, int64_t slot, const quire_page *page) {
  if (page->dtype == QUIRE_Q8) {
    store_key_int8(x, slot, page);
    return;
  }
  if (page->dtype == QUIRE_F32) {
    float *k = (float *)page->k + slot / 16 * 16 * page->d + slot % 16;
    for (int64_t i = 0; i < page->d; i++) k[i * 16] = x[i];
    return;
  }
  if (page->dtype == QUIRE_F16) {
    uint16_t *k = (uint16_t *)page->k + slot / 16 * 16 * page->d + slot % 16;
    for (int64_t i = 0; i < page->d; i += 16) {
      uint16_t rounded[16];
      vf_store_f16(rounded, vf_load(x + i));
      for (int j = 0; j < 16; j++) k[(i + j) * 16] = rounded[j];
    }
    return;
  }
  uint32_t *k = (uint32_t *)page->k + slot / 16 * 8 * page->d + slot % 16;  // pairs of d
  for (int64_t i = 0; i < page->d; i += 16) {
    uint32_t pairs[8];
    vf_store_bf16((uint16_t *)pairs, vf_load(x + i));
    for (int j = 0; j < 8; j++) k[(i / 2 + j) * 16] = pairs[j];
  }
}

// Write x into `bits` bits of each lane's word, from bit `at` on; the bits of other tokens stay.
INLINE void insert(uint32_t *words, vi x, int at, int bits) {
  const vi others = vi_set1(~(int32_t)(((1u << bits) - 1) << at));
  vi_store(words, vi_or(vi_and(vi_load(words), others), vi_shift_left(x, at)));
}

void ISA(store_value)(const float *x, int64_t slot, const quire_page *page) {
  const float scale = page->dtype == QUIRE_Q8 ? largest(x, page->d) / 127.f : 0.f;
  for (int64_t i = 0; i < page->d; i += 16) {
    if (page->dtype == QUIRE_F32) {
      vf_store((float *)page->v + i * page->size + slot * 16, vf_load(x + i));
    } else if (page->dtype == QUIRE_F16) {
      vf_store_f16((uint16_t *)page->v + i * page->size + slot * 16, vf_load(x + i));
    } else if (page->dtype == QUIRE_BF16) {
      uint32_t *pairs = (uint32_t *)page->v + i * page->size / 2 + slot / 2 * 16;  // pairs of tokens
      insert(pairs, vi_bf16(vf_load(x + i)), (int)(slot % 2) * 16, 16);
    } else {
      uint32_t *quads = (uint32_t *)page->v + i * page->size / 4 + slot / 4 * 16;
      insert(quads, vi_add(quantized(x + i, scale), vi_set1(128)), (int)(slot % 4) * 8, 8);  // unsigned, as keys are
    }
  }
  if (page->dtype == QUIRE_Q8) page->v_scales[slot] = scale;
}
