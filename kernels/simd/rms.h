// The RMS of a row or a head, in one fixed order: what rows.c and heads.c share.
#pragma once
#include <math.h>

#include "vec.h"

// 16 columns from j; what lies beyond n counts as zero, whatever an earlier value left there.
INLINE vf columns_of(const float *x, int64_t j, int64_t n) {
  const vf v = vf_load(x + j);
  return j + 16 <= n ? v : vf_pick(v, vf_zero(), 0, n > j ? (int)(n - j) : 0);
}

INLINE float inverse_rms(const float *x, float eps, int64_t n) {
  vf s0 = vf_zero(), s1 = vf_zero();
  for (int64_t j = 0; j < n; j += 32) {
    const vf a = columns_of(x, j, n), b = columns_of(x, j + 16, n);
    s0 = vf_fma(a, a, s0);
    s1 = vf_fma(b, b, s1);
  }
  return 1.f / sqrtf(vf_sum(vf_add(s0, s1)) / (float)n + eps);
}
