// Conversion of f32 rows to the dtypes that linear layers read, and the rotation of q8's groups.
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

// Column k of a group is negated where bit k of these words is set, the lowest bit of the first word first: the first 128
// bits of the fraction of pi. Without signs, an offset that all columns have would end in a single column.
#define SIGN(word, k) ((word) >> (k) & 1 ? -1.f : 1.f)
#define SIGNS4(word, k) SIGN(word, k), SIGN(word, k + 1), SIGN(word, k + 2), SIGN(word, k + 3)
#define SIGNS16(word, k) SIGNS4(word, k), SIGNS4(word, k + 4), SIGNS4(word, k + 8), SIGNS4(word, k + 12)
#define SIGNS32(word) SIGNS16(word, 0), SIGNS16(word, 16)
static const float signs[32 * QUIRE_MOST_GROUP] = {SIGNS32(0x243f6a88u), SIGNS32(0x85a308d3u), SIGNS32(0x13198a2eu),
                                                   SIGNS32(0x03707344u)};
enum { VECTORS = 2 * QUIRE_MOST_GROUP };  // vectors of a group

// Transform a block of 16 n columns in stages of pairs (a, b) -> (a + b, a - b), which are 8 n, 4 n, .. 1 columns apart: the
// Walsh-Hadamard transform, not divided by anything. The order of the stages decides the bits.
INLINE void transform_block(const int n, vf *y) {
  UNROLL for (int h = n / 2; h; h /= 2)
    UNROLL for (int i = 0; i < n; i++)
      if (!(i & h)) {
        const vf a = y[i], b = y[i + h];
        y[i] = vf_add(a, b);
        y[i + h] = vf_sub(a, b);
      }
  UNROLL for (int i = 0; i < n; i++) y[i] = vf_pairs1(vf_pairs2(vf_pairs4(vf_pairs8(y[i]))));
}

// Transform a group of 32 to 128 columns in blocks of the largest power of two that divides them.
INLINE void transform_group(const int64_t columns, vf *y) {
  if (columns == 128) transform_block(8, y);
  else if (columns == 64) transform_block(4, y);
  else for (int64_t i = 0; i < columns / 16; i += 2) transform_block(2, y + i);
}

// Transforms of activations and of weights multiply a product by the size of their blocks. It is divided by these powers of
// two, each nearly the square root: fp16 scales of weights stay what they are without rotation.
INLINE float activations_unit(int64_t columns) { return columns % 64 ? 0x1p-2f : 0x1p-3f; }
INLINE float weights_unit(int64_t columns) { return columns % 128 ? 0x1p-3f : 0x1p-4f; }

static int64_t group_columns(int64_t width, int64_t group, int64_t at) {
  return width - at < 32 * group ? width - at : 32 * group;
}

// 16 columns of weights from j on, 0 from column n on. Memory may end with the columns.
INLINE vf weights_at(const float *x, int64_t j, int64_t n) {
  float rest[16] = {0};
  if (j + 16 <= n) return vf_load(x + j);
  for (int64_t i = j; i < n; i++) rest[i - j] = x[i];
  return vf_load(rest);
}

void ISA(rotate)(const float *x, int64_t columns, int64_t group, float *out) {
  const int64_t width = (columns + 31) / 32 * 32;
  vf y[VECTORS];
  for (int64_t at = 0; at < width; at += 32 * group) {
    const int64_t n = group_columns(width, group, at);
    for (int64_t i = 0; i < n; i += 16) y[i / 16] = vf_mul(weights_at(x, at + i, columns), vf_load(signs + i));
    transform_group(n, y);
    for (int64_t i = 0; i < n; i += 16) vf_store(out + at + i, vf_mul(y[i / 16], vf_set1(weights_unit(n))));
  }
}

void ISA(rotate_back)(float *x, int64_t width, int64_t group) {
  vf y[VECTORS];
  for (int64_t at = 0; at < width; at += 32 * group) {
    const int64_t n = group_columns(width, group, at);
    for (int64_t i = 0; i < n; i += 16) y[i / 16] = vf_mul(vf_load(x + at + i), vf_set1(activations_unit(n)));
    transform_group(n, y);
    for (int64_t i = 0; i < n; i += 16) vf_store(x + at + i, vf_mul(y[i / 16], vf_load(signs + i)));
  }
}

// Quantize a group of 16 n columns, which are rotated, to q8 with a scale that is not rounded.
INLINE void quantize_group(const int n, const vf *y, const quire_rows *out, int64_t at) {
  vf top = vf_zero(), odd = vf_zero();  // `odd`: NaN where a column is not finite
  UNROLL for (int i = 0; i < n; i++) {
    top = vf_max(vf_abs(y[i]), top);
    odd = vf_add(odd, vf_mul(y[i], vf_zero()));
  }
  const int finite = !vf_any_nan(odd);
  const float exact = finite ? vf_reduce_max(top) / 127.f : 0.f, scale = exact < FLT_MIN ? 0.f : exact;
  const vf factor = vf_set1(scale > 0.f ? 1.f / scale : 0.f);
  vi sum = vi_zero();
  UNROLL for (int i = 0; i < n; i++) {
    const vi q = finite ? vi_from(vf_mul(y[i], factor)) : vi_zero();
    vi_store_i8((int8_t *)out->data + at + 16 * i, q);
    sum = vi_add(sum, q);
  }
  out->scales[at / 32] = finite ? scale * activations_unit(16 * n) : NAN;
  out->sums[at / 32] = -128 * vi_sum(sum);
}

// Convert a group of 16 n columns, the first of which is column `from` of x, and column `column` of a row. Squares are those
// of `convert_blocks`.
INLINE void convert_group(const int n, const float *x, int64_t from, int64_t columns, const quire_output *out, int64_t row,
                          int64_t column) {
  vf y[VECTORS];
  UNROLL for (int i = 0; i < n; i++) y[i] = columns_of(x, from + 16 * i, columns, vf_zero());
  if (out->norm)
    UNROLL for (int i = 0; i < n; i += 2) {
      out->squares[row * out->squares_width + column / 32 + i / 2] =
          vf_sum(vf_fma(y[i + 1], y[i + 1], vf_mul(y[i], y[i])));
      y[i] = vf_mul(y[i], vf_load(out->norm + column + 16 * i));
      y[i + 1] = vf_mul(y[i + 1], vf_load(out->norm + column + 16 * (i + 1)));
    }
  UNROLL for (int i = 0; i < n; i++) y[i] = vf_mul(y[i], vf_load(signs + 16 * i));
  transform_group(16 * n, y);
  quantize_group(n, y, &out->rows, row * out->rows.width + column);
}

static void convert_groups(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_output *out,
                           int64_t row, int64_t column) {
  const int64_t width = (columns + 31) / 32 * 32, most = 32 * out->rows.group;
  assert(out->dtype == QUIRE_Q8 && column % most == 0);
  for (int64_t i = 0; i < rows; i++, x += stride)
    for (int64_t j = 0; j < width; j += most) switch (group_columns(width, out->rows.group, j)) {
      case 32: convert_group(2, x, j, columns, out, row + i, column + j); break;
      case 64: convert_group(4, x, j, columns, out, row + i, column + j); break;
      case 96: convert_group(6, x, j, columns, out, row + i, column + j); break;
      default: convert_group(8, x, j, columns, out, row + i, column + j);
    }
}

void ISA(convert)(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_output *out, int64_t row,
                  int64_t column) {
  if (out->rows.group) {
    convert_groups(x, stride, rows, columns, out, row, column);
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
