// The vector functions of the level this file is compiled for, and those that are the same for all levels.
#pragma once
#if defined QUIRE_ISA_AVX512
#include "vec_avx512.h"
#define ISA(name) name##_avx512
#elif defined QUIRE_ISA_AVX2
#include "vec_avx2.h"
#define ISA(name) name##_avx2
#elif defined QUIRE_ISA_NEON
#include "vec_neon.h"
#define ISA(name) name##_neon
#else
#include "vec_scalar.h"
#define ISA(name) name##_scalar
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

// The only exp of the runtime: Cephes' polynomial, <= 2 ulp, on [-87.3, 88]; a NaN passes through.
INLINE vf vf_exp(vf x) {
  x = vf_min(vf_set1(88.f), vf_max(vf_set1(-87.3f), x));
  const vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
  vf r = vf_fma(n, vf_set1(-0.693359375f), x);
  r = vf_fma(n, vf_set1(2.12194440e-4f), r);
  vf p = vf_set1(1.9875691500e-4f);
  p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
  p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
  p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
  p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
  p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
  p = vf_fma(vf_mul(p, r), r, vf_add(r, vf_set1(1.f)));
  return vf_mul(p, vf_pow2(n));
}

// The only tanh: x times a rational function of x^2, relative error < 3e-7, never beyond 1; a NaN passes through.
INLINE vf vf_tanh(vf x) {
  x = vf_min(vf_set1(7.9053111f), vf_max(vf_set1(-7.9053111f), x));
  const vf z = vf_mul(x, x);
  vf p = vf_set1(-2.76076847742355e-16f);
  p = vf_fma(p, z, vf_set1(2.00018790482477e-13f));
  p = vf_fma(p, z, vf_set1(-8.60467152213735e-11f));
  p = vf_fma(p, z, vf_set1(5.12229709037114e-08f));
  p = vf_fma(p, z, vf_set1(1.48572235717979e-05f));
  p = vf_fma(p, z, vf_set1(6.37261928875436e-04f));
  p = vf_fma(p, z, vf_set1(4.89352455891786e-03f));
  vf q = vf_set1(1.19825839466702e-06f);
  q = vf_fma(q, z, vf_set1(1.18534705686654e-04f));
  q = vf_fma(q, z, vf_set1(2.26843463243900e-03f));
  q = vf_fma(q, z, vf_set1(4.89352518554385e-03f));
  return vf_div(vf_mul(x, p), q);
}

// cap * tanh(x / cap): nearly x where |x| is much smaller than `cap`, and never beyond it.
INLINE vf vf_soft_cap(vf x, float cap) { return vf_mul(vf_set1(cap), vf_tanh(vf_mul(x, vf_set1(1.f / cap)))); }

INLINE float exp1(float x) { return vf_first(vf_exp(vf_set1(x))); }

// 16 columns from j on; lanes from column n on are `beyond`, whatever the memory holds there.
INLINE vf columns_of(const float *x, int64_t j, int64_t n, vf beyond) {
  const vf v = vf_load(x + j);
  return j + 16 <= n ? v : vf_blend(v, beyond, 0, n > j ? (int)(n - j) : 0);
}
