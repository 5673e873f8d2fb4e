// Row-wise arithmetic: conversion of activations, both halves of an RMS norm, maxima, and the exponentials of sampling.
#include <assert.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "level.h"

// x rounded up to two bits of mantissa (see `vs`); 0 for x below the normal numbers.
INLINE float round_scale(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = x < FLT_MIN ? 0 : (bits + 0x1fffff) & ~0x1fffffu;
  memcpy(&x, &bits, 4);
  return x;
}

// Blocks of 32 columns that are converted together, and where they go.
typedef struct {
  vf y[AT_ONCE][2];
  int64_t row[AT_ONCE], column[AT_ONCE];
} some_blocks;

// Columns of one row that share a scale.
typedef struct {
  const float *x;
  int64_t columns;  // padding follows up to the next multiple of 32
  int64_t at;       // offset of the first column in a row
} column_group;

// Quantize n groups to q8; NaN as in `quantize`.
INLINE void quantize_groups(const int n, const column_group *g, const quire_rows *out) {
  vf tops[AT_ONCE];
  vi sums[AT_ONCE];
  float top[AT_ONCE];
  int32_t sum[AT_ONCE];
  int finite[AT_ONCE];
  UNROLL for (int i = 0; i < n; i++) {
    vf odd = vf_zero();  // NaN in lanes with a column that is not finite
    tops[i] = vf_zero();
    for (int64_t j = 0; j < g[i].columns; j += 16) {
      const vf y = columns_of(g[i].x, j, g[i].columns, vf_zero());
      tops[i] = vf_max(vf_abs(y), tops[i]);
      odd = vf_fma(y, vf_zero(), odd);
    }
    finite[i] = !vf_any_nan(odd);
  }
  REDUCE(vf_max4, vf_reduce_max, n, tops, top)
  UNROLL for (int i = 0; i < n; i++) {
    const float exact = finite[i] ? top[i] / 127.f : 0.f, scale = exact < FLT_MIN ? 0.f : exact;
    const vf factor = vf_set1(scale > 0.f ? 1.f / scale : 0.f);
    sums[i] = vi_zero();
    for (int64_t j = 0; j < (g[i].columns + 31) / 32 * 32; j += 16) {
      const vf y = columns_of(g[i].x, j, g[i].columns, vf_zero());
      const vi q = finite[i] ? vi_from(vf_mul(y, factor)) : vi_zero();
      vi_store_i8((int8_t *)out->data + g[i].at + j, q);
      sums[i] = vi_add(sums[i], q);
    }
    out->scales[g[i].at / 32] = finite[i] ? scale : NAN;
  }
  REDUCE(vi_sum4, vi_sum, n, sums, sum)
  UNROLL for (int i = 0; i < n; i++) out->sums[g[i].at / 32] = -128 * sum[i];
}

static void convert_groups(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_rows *out, int64_t at) {
  column_group groups[AT_ONCE];
  const int64_t most = out->group * 32;
  int n = 0;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j += most) {
      groups[n++] = (column_group){x + i * stride + j, columns - j < most ? columns - j : most, at + i * out->width + j};
      if (n == AT_ONCE) quantize_groups(AT_ONCE, groups, out), n = 0;
    }
  for (int i = 0; i < n; i++) quantize_groups(1, groups + i, out);
}

// Quantize n blocks to q8; a block's scale depends on its columns only. A column that is not finite makes its block's scale
// NaN, which reaches the logits of this row and ends this request only.
INLINE void quantize(const int n, some_blocks *b, const quire_rows *out) {
  vf tops[AT_ONCE];
  vi sums[AT_ONCE];
  float top[AT_ONCE];
  int32_t sum[AT_ONCE];
  UNROLL for (int i = 0; i < n; i++) tops[i] = vf_max(vf_abs(b->y[i][0]), vf_abs(b->y[i][1]));
  REDUCE(vf_max4, vf_reduce_max, n, tops, top)
  UNROLL for (int i = 0; i < n; i++) {
    const int64_t at = b->row[i] * out->width + b->column[i];
    const int finite = !vf_any_nan(vf_add(b->y[i][0], b->y[i][1])) && top[i] < INFINITY;
    const float scale = round_scale(top[i] / 127.f);
    const vf limit = vf_set1(127.f), factor = vf_set1(scale > 0.f ? 1.f / scale : 0.f);
    vi q0 = vi_zero(), q1 = vi_zero();
    if (finite) {
      q0 = vi_from(vf_min(limit, vf_mul(b->y[i][0], factor)));
      q1 = vi_from(vf_min(limit, vf_mul(b->y[i][1], factor)));
    }
    vi_store_i8((int8_t *)out->data + at, q0);
    vi_store_i8((int8_t *)out->data + at + 16, q1);
    out->scales[at / 32] = finite ? scale : NAN;
    sums[i] = vi_add(q0, q1);
  }
  REDUCE(vi_sum4, vi_sum, n, sums, sum)
  UNROLL for (int i = 0; i < n; i++) out->sums[(b->row[i] * out->width + b->column[i]) / 32] = -128 * sum[i];
}

INLINE void convert_blocks(const int n, some_blocks *b, const quire_output *out) {
  if (out->norm) {
    vf squares[AT_ONCE];
    float sum[AT_ONCE];
    UNROLL for (int i = 0; i < n; i++) squares[i] = vf_fma(b->y[i][1], b->y[i][1], vf_mul(b->y[i][0], b->y[i][0]));
    REDUCE(vf_sum4, vf_sum, n, squares, sum)
    UNROLL for (int i = 0; i < n; i++) {
      out->squares[b->row[i] * out->squares_width + b->column[i] / 32] = sum[i];
      b->y[i][0] = vf_mul(b->y[i][0], vf_load(out->norm + b->column[i]));
      b->y[i][1] = vf_mul(b->y[i][1], vf_load(out->norm + b->column[i] + 16));
    }
  }
  if (out->dtype == QUIRE_Q8) {
    quantize(n, b, &out->rows);
    return;
  }
  UNROLL for (int i = 0; i < n; i++) {
    const int64_t at = b->row[i] * out->rows.width + b->column[i];
    UNROLL for (int j = 0; j < 2; j++) {
      if (out->dtype == QUIRE_BF16) vf_store_bf16((uint16_t *)out->rows.data + at + 16 * j, b->y[i][j]);
      else vf_store((float *)out->rows.data + at + 16 * j, b->y[i][j]);
    }
  }
}

void ISA(convert)(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_output *out, int64_t row,
                  int64_t column) {
  if (out->rows.group > 1) {
    assert(out->dtype == QUIRE_Q8 && !out->norm && column % (32 * out->rows.group) == 0);
    convert_groups(x, stride, rows, columns, &out->rows, row * out->rows.width + column);
    return;
  }
  int64_t i = 0, j = 0;  // the next block
  some_blocks blocks;
#define CONVERT(N) { \
    UNROLL for (int k = 0; k < N; k++) { \
      const float *of_row = x + i * stride; \
      blocks.y[k][0] = columns_of(of_row, j, columns, vf_zero()); \
      blocks.y[k][1] = columns_of(of_row, j + 16, columns, vf_zero()); \
      blocks.row[k] = row + i, blocks.column[k] = column + j; \
      j += 32; \
      if (j >= columns) j = 0, i++; \
    } \
    convert_blocks(N, &blocks, out); \
  }
  int64_t left = rows * ((columns + 31) / 32);
  for (; left >= AT_ONCE; left -= AT_ONCE) CONVERT(AT_ONCE)
  for (; left > 0; left--) CONVERT(1)
}

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
    const vf y = vf_load(x + j);
    vf_store(x + j, epilogue == QUIRE_GELU        ? vf_gelu(y)
                    : epilogue == QUIRE_GELU_TANH ? vf_gelu_tanh(y)
                    : epilogue == QUIRE_RELU      ? vf_max(vf_zero(), y) : vf_tanh(y));
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

void ISA(unpack_column)(const void *panel, const uint16_t *scales, int dtype, int64_t width, int lane, float *out) {
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
    vf_store(s, vf_load_f16(scales + k / 32 * 16));
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
