// The peak rates of this level, for a benchmark to compare the kernels with: reading from memory, and the level's dot
// products with operands in registers or L1. Every result goes to the caller and operands are read again in every step,
// so that the compiler cannot leave out a load or an operation.
#include "level.h"

// As many chains as the widest linear tile has. They start with different values, or a compiler would merge them.
#define EACH_CHAIN UNROLL for (int i = 0; i < LINEAR_ROWS; i++) UNROLL for (int j = 0; j < 2; j++)

// Four sums hide the latency of an addition; `ahead` bytes of prefetch, none for 0.
float ISA(stream)(const char *p, int64_t bytes, int64_t ahead) {
  vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
  for (int64_t i = 0; i < bytes; i += 256)
    UNROLL for (int j = 0; j < 4; j++) {
      if (ahead) __builtin_prefetch(p + i + j * 64 + ahead, 0, 3);
      sum[j] = vf_add(sum[j], vf_load((const float *)(p + i + j * 64)));
    }
  return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

#define READ_AGAIN() __asm__ volatile("" ::: "memory")

static float peak_f32(int64_t steps, const void *w, const void *a) {
  vf acc[LINEAR_ROWS][2];
  EACH_CHAIN acc[i][j] = vf_set1((float)(2 * i + j));
  for (int64_t step = 0; step < steps; step++) {
    READ_AGAIN();
    const vf u = vf_load(w), x = vf_set1(*(const float *)a);
    EACH_CHAIN acc[i][j] = vf_fma(u, x, acc[i][j]);
  }
  vf sum = vf_zero();
  EACH_CHAIN sum = vf_add(sum, acc[i][j]);
  return vf_sum(sum);
}

static float peak_bf16(int64_t steps, const void *w, const void *a) {
  vf acc[LINEAR_ROWS][2];
  EACH_CHAIN acc[i][j] = vf_set1((float)(2 * i + j));
  for (int64_t step = 0; step < steps; step++) {
    READ_AGAIN();
    const wbf u = wbf_load(w);
    EACH_CHAIN acc[i][j] = vf_dot2(acc[i][j], u, a);
  }
  vf sum = vf_zero();
  EACH_CHAIN sum = vf_add(sum, acc[i][j]);
  return vf_sum(sum);
}

static float peak_q8(int64_t steps, const void *w, const void *a) {
  vi acc[LINEAR_ROWS][2];
  EACH_CHAIN acc[i][j] = vi_from(vf_set1((float)(2 * i + j)));
  for (int64_t step = 0; step < steps; step++) {
    READ_AGAIN();
    const wq8 u = wq8_load(w);
    EACH_CHAIN acc[i][j] = vi_dot4(acc[i][j], u, a);
  }
  vi sum = vi_zero();
  EACH_CHAIN sum = vi_add(sum, acc[i][j]);
  return (float)vi_sum(sum);
}

int64_t ISA(peak)(int dtype, int64_t steps, const void *w, const void *a, float *result) {
  *result = dtype == QUIRE_F32    ? peak_f32(steps, w, a)
            : dtype == QUIRE_BF16 ? peak_bf16(steps, w, a)
                                 : peak_q8(steps, w, a);
  const int of_k = dtype == QUIRE_F32 ? 1 : dtype == QUIRE_BF16 ? 2 : 4;
  return steps * 2 * LINEAR_ROWS * QUIRE_LANES * of_k * 2;
}
