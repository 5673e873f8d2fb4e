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

#if !defined QUIRE_ISA_AVX512
// The digits of 64 numbers below 2^14, 7 bits each, as bytes. Returns sums of the high ones, and of the low ones from bit
// 16 on, whose total over the lanes is that of all 64.
static inline vi vi_store_digits(int8_t *high, int8_t *low, const vi x[4]) {
  vi sums = vi_zero();
  for (int j = 0; j < 4; j++) {
    const vi h = vi_shift_right(x[j], 7), l = vi_and(x[j], vi_set1(127));
    vi_store_i8(high + j * 16, h);
    vi_store_i8(low + j * 16, l);
    sums = vi_add(sums, vi_add(h, vi_shift_left(l, 16)));
  }
  return sums;
}

// The scales of a panel's 16 columns, to be multiplied by scales of `rows` activations.
typedef vf vs;
#define VS_FIRST(rows) 0  // registers are scarce: load them last
static inline vs vs_of(vf p, int rows) { (void)rows; return p; }
static inline vf vs_mul(const vs *p, const float *z, int rows) { (void)rows; return vf_mul(*p, vf_set1(*z)); }

static inline vf vf_mul_pow2(vf a, const float *power) { return vf_mul(a, vf_set1(*power)); }

enum { STREAM_ROWS_Q8 = 0, STREAM_ROWS_Q4 = 1 };  // the most that read one panel after the other
enum { LINEAR_ROWS_4_BITS = LINEAR_ROWS };

// The dots of half bytes for few rows: vh_dot8 takes 4 of K from the low halves and 4 from the high ones.
typedef vn vh;
static inline vh vh_start(const int32_t *sum) { return vn_start(sum); }
static inline vh vh_dot8(vh acc, wq4 w, const int8_t *low, const int8_t *high) {
  return vn_dot4(vn_dot4(acc, wq4_low(w), low), wq4_high(w), high);
}
static inline vi vh_end(vh acc, const int32_t *sum) { return vn_end(acc, sum); }
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

// Reductions of n vectors: of AT_ONCE of them together where the level can, with the same bits.
#if defined QUIRE_ISA_AVX512
enum { AT_ONCE = 4 };
#define REDUCE(several, one, n, x, out) \
  if (n == AT_ONCE) several(x, out); \
  else UNROLL for (int i = 0; i < n; i++) (out)[i] = one((x)[i]);
#else
enum { AT_ONCE = 1 };
#define REDUCE(several, one, n, x, out) UNROLL for (int i = 0; i < n; i++) (out)[i] = one((x)[i]);
#endif

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

// gelu(x) by the error function: max(x, 0) - |x| q(|x|), where q is the tail of the normal distribution, a polynomial up
// to 5.5 and nothing beyond. Error < 4e-7; a NaN passes through.
INLINE vf vf_gelu(vf x) {
  const vf a = vf_min(vf_set1(5.5f), vf_abs(x)), t = vf_fma(a, vf_set1(2.f / 5.5f), vf_set1(-1.f));
  vf q = vf_set1(-0.00558056543f);
  q = vf_fma(q, t, vf_set1(0.00532759633f));
  q = vf_fma(q, t, vf_set1(0.0301311389f));
  q = vf_fma(q, t, vf_set1(-0.0435079411f));
  q = vf_fma(q, t, vf_set1(-0.0490752049f));
  q = vf_fma(q, t, vf_set1(0.133205444f));
  q = vf_fma(q, t, vf_set1(-0.0349251516f));
  q = vf_fma(q, t, vf_set1(-0.163058847f));
  q = vf_fma(q, t, vf_set1(0.218434811f));
  q = vf_fma(q, t, vf_set1(-0.0513972193f));
  q = vf_fma(q, t, vf_set1(-0.177165404f));
  q = vf_fma(q, t, vf_set1(0.271889746f));
  q = vf_fma(q, t, vf_set1(-0.206808046f));
  q = vf_fma(q, t, vf_set1(0.0945579335f));
  q = vf_fma(q, t, vf_set1(-0.0250080619f));
  q = vf_fma(q, t, vf_set1(0.00297977426f));
  return vf_fma(vf_sub(vf_zero(), a), q, vf_max(vf_zero(), x));
}

// silu(x) at scale 1, or x times another logistic function of `u`.
INLINE vf vf_swish(vf x, vf u) { return vf_div(x, vf_add(vf_set1(1.f), vf_exp(vf_sub(vf_zero(), u)))); }

// gelu(x) by its approximation 0.5 x (1 + tanh(u / 2)), u = 2 sqrt(2 / pi) (x + 0.044715 x^3).
INLINE vf vf_gelu_tanh(vf x) {
  return vf_swish(x, vf_mul(vf_mul(x, vf_set1(1.5957691216f)), vf_fma(vf_mul(x, x), vf_set1(0.044715f), vf_set1(1.f))));
}

// cap * tanh(x / cap): nearly x where |x| is much smaller than `cap`, and never beyond it.
INLINE vf vf_soft_cap(vf x, float cap) { return vf_mul(vf_set1(cap), vf_tanh(vf_mul(x, vf_set1(1.f / cap)))); }

INLINE float exp1(float x) { return vf_first(vf_exp(vf_set1(x))); }

// 16 columns from j on; lanes from column n on are `beyond`, whatever the memory holds there.
INLINE vf columns_of(const float *x, int64_t j, int64_t n, vf beyond) {
  const vf v = vf_load(x + j);
  return j + 16 <= n ? v : vf_blend(v, beyond, 0, n > j ? (int)(n - j) : 0);
}
