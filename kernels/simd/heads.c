// One head of one token on its way from the QKV projection to the attention: norm, rotation, and its place in a page.
#include <math.h>
#include <string.h>

#include "level.h"

INLINE void norm_head(float *x, const quire_head *h) {
  vf s0 = vf_zero(), s1 = vf_zero();
  for (int64_t j = 0; j < h->head_dim; j += 32) {
    const vf a = vf_load(x + j), b = vf_load(x + j + 16);
    s0 = vf_fma(a, a, s0);
    s1 = vf_fma(b, b, s1);
  }
  const vf factor = vf_set1(1.f / sqrtf(vf_sum(vf_add(s0, s1)) / (float)h->head_dim + h->eps));
  for (int64_t j = 0; j < h->head_dim; j += 16) vf_store(x + j, vf_mul(vf_mul(vf_load(x + j), factor), vf_load(h->norm + j)));
}

// Elementwise, so lanes and leftovers give the same bits.
INLINE void rotate_head(float *restrict x, const quire_head *h, const float *restrict rotary) {
  const int64_t half = h->head_dim / 2;
  const vf scale = vf_set1(h->scale);
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(rotary + i), s = vf_load(rotary + half + i);
    vf_store(x + i, vf_mul(vf_sub(vf_mul(a, c), vf_mul(b, s)), scale));
    vf_store(x + half + i, vf_mul(vf_add(vf_mul(b, c), vf_mul(a, s)), scale));
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[half + i], c = rotary[i], s = rotary[half + i];
    x[i] = (a * c - b * s) * h->scale;
    x[half + i] = (b * c + a * s) * h->scale;
  }
}

void ISA(head)(const float *x, const quire_head *h, const float *rotary, float *out) {
  const int64_t padded = (h->head_dim + 31) / 32 * 32;
  memcpy(out, x, (size_t)h->head_dim * sizeof *out);
  memset(out + h->head_dim, 0, (size_t)(padded - h->head_dim) * sizeof *out);
  if (h->norm) norm_head(out, h);
  if (rotary) rotate_head(out, h, rotary);
}

void ISA(store_key)(const float *x, int64_t d, int64_t slot, int form, void *page) {
  if (form == QUIRE_F32) {
    float *k = (float *)page + slot / 16 * 16 * d + slot % 16;
    for (int64_t i = 0; i < d; i++) k[i * 16] = x[i];
    return;
  }
  uint32_t *k = (uint32_t *)page + slot / 16 * 8 * d + slot % 16;  // pairs of d
  for (int64_t i = 0; i < d; i += 16) {
    uint32_t pairs[8];
    vf_store_bf16((uint16_t *)pairs, vf_load(x + i));
    for (int j = 0; j < 8; j++) k[(i / 2 + j) * 16] = pairs[j];
  }
}

void ISA(store_value)(const float *x, int64_t d, int64_t slot, int64_t page_size, int form, void *page) {
  for (int64_t i = 0; i < d; i += 16) {
    if (form == QUIRE_F32) {
      vf_store((float *)page + i * page_size + slot * 16, vf_load(x + i));
      continue;
    }
    uint16_t h[16], *v = (uint16_t *)page + i * page_size + slot / 2 * 32 + slot % 2;
    vf_store_bf16(h, vf_load(x + i));
    for (int j = 0; j < 16; j++) v[j * 2] = h[j];
  }
}
