// Low-rank adapters: f32 rows times panels of 16 columns, in f32 or bf16, with the same bits at every level; and the gates of
// linear layers whose results adapters change first.
#include "epilogue.h"

#if defined QUIRE_ISA_AVX512 || defined QUIRE_ISA_NEON
enum { LORA_ROWS = 8 };
#else
enum { LORA_ROWS = 4 };
#endif

// A result is one chain over K, for any number of rows.
INLINE void multiply(const int rows, const int dtype, const float *x, int64_t stride, const void *w, int64_t k, float *y,
                     int64_t ldy) {
  vf sum[LORA_ROWS];
  UNROLL for (int i = 0; i < rows; i++) sum[i] = vf_zero();
  for (int64_t j = 0; j < k; j++) {
    const vf column = dtype == QUIRE_BF16 ? vf_load_bf16((const uint16_t *)w + j * 16) : vf_load((const float *)w + j * 16);
    UNROLL for (int i = 0; i < rows; i++) sum[i] = vf_fma(vf_set1(x[i * stride + j]), column, sum[i]);
  }
  UNROLL for (int i = 0; i < rows; i++) vf_store(y + i * ldy, vf_add(vf_load(y + i * ldy), sum[i]));
}

INLINE void multiply_all(const int dtype, int64_t rows, const float *x, int64_t stride, const void *w, int64_t k, float *y,
                         int64_t ldy) {
  for (; rows >= LORA_ROWS; rows -= LORA_ROWS, x += LORA_ROWS * stride, y += LORA_ROWS * ldy)
    multiply(LORA_ROWS, dtype, x, stride, w, k, y, ldy);
  if (rows >= 4 && LORA_ROWS > 4) {
    multiply(4, dtype, x, stride, w, k, y, ldy);
    rows -= 4, x += 4 * stride, y += 4 * ldy;
  }
  if (rows >= 2) {
    multiply(2, dtype, x, stride, w, k, y, ldy);
    rows -= 2, x += 2 * stride, y += 2 * ldy;
  }
  if (rows) multiply(1, dtype, x, stride, w, k, y, ldy);
}

void ISA(add_low_rank)(int dtype, int64_t rows, const float *x, int64_t stride, const void *w, int64_t k, float *y,
                       int64_t ldy) {
  if (dtype == QUIRE_BF16) multiply_all(QUIRE_BF16, rows, x, stride, w, k, y, ldy);
  else multiply_all(QUIRE_F32, rows, x, stride, w, k, y, ldy);
}

void ISA(gate_columns)(int epilogue, const float *x, int64_t rows, float *y, int64_t stride) {
  for (int64_t i = 0; i < rows; i++, x += 32, y += stride) vf_store(y, gated(epilogue, vf_load(x), vf_load(x + 16)));
}
