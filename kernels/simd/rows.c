// Row-wise arithmetic: both halves of an RMS norm, maxima, unpacked columns, and the exponentials of sampling.
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "level.h"

void ISA(rms_factors)(const float *squares, int64_t width, int64_t rows, int64_t columns, float eps, float *factors) {
  const int64_t blocks = (columns + 31) / 32;
  for (int64_t i = 0; i < rows; i++, squares += width) {
    vf sums = vf_zero();
    for (int64_t j = 0; j < blocks; j += 16) sums = vf_add(sums, columns_of(squares, j, blocks, vf_zero()));
    const float sum = vf_sum(sums);
    factors[i] = sum < INFINITY ? 1.f / sqrtf(sum / (float)columns + eps) : NAN;
  }
}

void ISA(add_norm)(const float *y, const float *weight, float eps, int64_t columns, float *x) {
  const vf factor = vf_set1(ISA(inverse_rms)(y, eps, columns));
  for (int64_t j = 0; j < columns; j += 16)
    vf_store(x + j, vf_add(vf_load(x + j), vf_mul(vf_mul(vf_load(y + j), factor), vf_load(weight + j))));
}

// The sums of x - shift and of its square, added in one fixed order.
INLINE float sum_of(const float *x, int64_t n, vf shift, const int squares) {
  vf s[2] = {vf_zero(), vf_zero()};
  for (int64_t j = 0; j < n; j += 32)
    for (int i = 0; i < 2; i++) {
      const int64_t at = j + 16 * i;
      if (at >= n) break;
      const vf y = columns_of(x, at, n, shift), z = vf_sub(y, shift);
      s[i] = squares ? vf_fma(z, z, s[i]) : vf_add(z, s[i]);
    }
  return vf_sum(vf_add(s[0], s[1]));
}

void ISA(norm_row)(int kind, const float *x, const float *weight, const float *bias, float eps, int64_t columns,
                   float *out) {
  const vf shift = vf_set1(kind == QUIRE_LAYER_NORM ? sum_of(x, columns, vf_zero(), 0) / (float)columns : 0.f);
  const float squares = sum_of(x, columns, shift, 1), length = sqrtf(squares);
  float factor = kind == QUIRE_L2_NORM ? 1.f / (length > eps ? length : eps) : 1.f / sqrtf(squares / (float)columns + eps);
  if (!(squares < INFINITY)) factor = NAN;
  int64_t j = 0;
  for (; j < columns; j += 16) {
    vf y = vf_mul(vf_sub(columns_of(x, j, columns, shift), shift), vf_set1(factor));
    if (weight) y = vf_mul(y, vf_load(weight + j));
    if (bias) y = vf_add(y, vf_load(bias + j));
    vf_store(out + j, columns - j < 16 ? vf_blend(y, vf_zero(), 0, (int)(columns - j)) : y);
  }
  if (j % 32) vf_store(out + j, vf_zero());  // the padding is zero
}

void ISA(mean_rows)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *out) {
  int64_t j = 0;
  for (; j < columns; j += 16) {
    vf sum = vf_load(x + j);
    for (int64_t row = 1; row < rows; row++) sum = vf_add(sum, vf_load(x + row * stride + j));
    vf_store(out + j, vf_div(sum, vf_set1((float)rows)));
  }
  if (j % 32) vf_store(out + j, vf_zero());  // the padding is zero
}

void ISA(activate)(int epilogue, float *x, int64_t n) {
  for (int64_t j = 0; j < n; j += 16) {
    const vf y = vf_load(x + j), positive = vf_max(vf_zero(), y);
    vf_store(x + j, epilogue == QUIRE_GELU           ? vf_gelu(y)
                    : epilogue == QUIRE_GELU_TANH    ? vf_gelu_tanh(y)
                    : epilogue == QUIRE_RELU         ? positive
                    : epilogue == QUIRE_RELU_SQUARED ? vf_mul(positive, positive) : vf_tanh(y));
  }
}

void ISA(add_columns)(float *y, int64_t rows, float *out, int64_t stride) {
  for (int64_t i = 0; i < rows; i++, y += 32, out += stride) {
    const vf a = vf_add(vf_load(out), vf_load(y)), b = vf_add(vf_load(out + 16), vf_load(y + 16));
    vf_store(y, a), vf_store(y + 16, b);
    vf_store(out, a), vf_store(out + 16, b);
  }
}

void ISA(soft_cap)(float *x, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j += 16) vf_store(x + j, vf_soft_cap(vf_load(x + j), cap));
}

void ISA(gate)(const float *gates, int64_t n, float *x) {
  for (int64_t j = 0; j < n; j += 16) vf_store(x + j, vf_swish(vf_load(x + j), columns_of(gates, j, n, vf_zero())));
}

void ISA(to_bf16)(const float *x, int64_t n, uint16_t *out) {
  for (int64_t j = 0; j < n; j += 16) vf_store_bf16(out + j, vf_load(x + j));
}

static void unpack_q4_z(const uint8_t *panel, int64_t width, int lane, float *out) {
  const uint8_t *zeros = panel + width + lane, *block = panel + quire_q4_z_scale_bytes(width) + lane * 4;
  for (int64_t k = 0; k < width; k += 32, zeros += 16, block += 256) {
    const float scale = f16_widen(((const uint16_t *)panel)[k / 2 + lane]);
    for (int i = 0; i < 32; i++) *out++ = (float)((block[i % 16 / 4 * 64 + i % 4] >> i / 16 * 4 & 15) - *zeros) * scale;
  }
}

void ISA(unpack_column)(const void *panel, const uint16_t *scales, int dtype, int64_t group, int64_t width, int lane,
                        float *out) {
  if (dtype == QUIRE_Q4_Z) {
    unpack_q4_z(panel, width, lane, out);
    return;
  }
  if (dtype == QUIRE_MXFP4) {
    ISA(unpack_mxfp4)(panel, width, lane, out);
    return;
  }
  if (dtype >= QUIRE_Q4_K) {
    ISA(unpack_k)(panel, dtype, width, lane, out);
    return;
  }
  if (dtype == QUIRE_F32) {
    for (int64_t k = 0; k < width; k++) out[k] = ((const float *)panel)[k * 16 + lane];
    return;
  }
  for (int64_t k = 0; k < width; k += 16) {
    float x[16], s[16];
    if (dtype == QUIRE_BF16) {
      uint16_t h[16];
      for (int i = 0; i < 16; i++) h[i] = ((const uint16_t *)panel)[(k + i) / 2 * 32 + lane * 2 + (k + i) % 2];
      vf_store(out + k, vf_load_bf16(h));
      continue;
    }
    for (int i = 0; i < 16; i++) {
      const uint8_t *block = (const uint8_t *)panel + k / 32 * (dtype == QUIRE_Q4 ? 256 : 512);
      const int at = i / 4 * 64 + lane * 4 + i % 4;  // first 16 of K; q4 has the other 16 in the high halves
      if (dtype == QUIRE_Q4) x[i] = (float)((k % 32 ? block[at] >> 4 : block[at] & 15) - 8);
      else x[i] = (float)(block[k % 32 * 16 + at] - 128);
    }
    vf_store(s, vf_load_f16(scales + k / 32 / (group > 1 ? group : 1) * 16));
    vf_store(out + k, vf_mul(vf_load(x), vf_set1(s[lane])));
  }
}

void ISA(block_maxima)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *maxima,
                       int64_t maxima_stride) {
  for (int64_t i = 0; i < rows; i++, x += stride) {
    const vf least = vf_set1(-INFINITY), a = columns_of(x, 0, columns, least), b = columns_of(x, 16, columns, least);
    const int nan = vf_any_nan(a) | vf_any_nan(b);
    maxima[i * maxima_stride] = nan ? NAN : vf_reduce_max(vf_max(a, b));
  }
}

int64_t ISA(argmax)(const float *x, int64_t n, float *max) {
  const int64_t whole = n / 16 * 16;
  const vf low = vf_set1(-INFINITY);
  vf top = low;
  int nan = 0;
  for (int64_t j = 0; j < whole; j += 16) {
    const vf v = vf_load(x + j);
    nan |= vf_any_nan(v);
    top = vf_max(v, top);
  }
  float best = vf_reduce_max(top);
  for (int64_t j = whole; j < n; j++) {
    nan |= x[j] != x[j];
    best = x[j] > best ? x[j] : best;
  }
  *max = best;
  if (nan) return -1;
  int64_t at = 0;
  while (x[at] != best) at++;
  return at;
}

double ISA(sum_exp)(const float *x, int64_t n, float shift) {
  const int64_t whole = n / 16 * 16;
  double sum = 0;
  for (int64_t j = 0; j < whole; j += 16) sum += (double)vf_sum(vf_exp(vf_sub(vf_load(x + j), vf_set1(shift))));
  for (int64_t j = whole; j < n; j++) sum += (double)exp1(x[j] - shift);
  return sum;
}

void ISA(exp_scaled)(const float *x, float shift, float scale, int64_t n, float *out) {
  for (int64_t j = 0; j < n; j += 16)
    vf_store(out + j, vf_exp(vf_mul(vf_sub(vf_load(x + j), vf_set1(shift)), vf_set1(scale))));
}

void ISA(set_forbidden)(const int32_t *mask, int64_t words, float value, float *x) {
  static const uint32_t bit[32] = {1u << 0, 1u << 1, 1u << 2, 1u << 3, 1u << 4, 1u << 5, 1u << 6, 1u << 7,
    1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15, 1u << 16, 1u << 17, 1u << 18,
    1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23, 1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29,
    1u << 30, 1u << 31};
  for (int64_t word = 0; word < words; word++, x += 32) {
    const uint32_t allowed = (uint32_t)mask[word];
    if (allowed == UINT32_MAX) continue;
    for (int i = 0; i < 32; i++) x[i] = allowed & bit[i] ? x[i] : value;
  }
}
