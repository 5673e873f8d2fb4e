// The vector functions in portable C: 16 lanes are an array. Slow and exact; runs on any machine.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define ISA_NAME "scalar"
enum { LINEAR_ROWS = 2, ATTENTION_ROWS = 1 };

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;
typedef struct { int8_t v[64]; } wq8;
typedef struct { uint16_t v[32]; } wbf;

#define FOR16 for (int i = 0; i < 16; i++)
#define MAP(T, expr) T r; FOR16 r.v[i] = (expr); return r

static inline float widen_bf16(uint16_t h) {
  const uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t round_bf16(float f) {  // to nearest even; a NaN stays a NaN
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline float widen_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float magnitude = exponent == 0    ? ldexpf((float)mantissa, -24)
                          : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                           : ldexpf((float)(mantissa | 1024), exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

static inline vf vf_zero(void) { MAP(vf, 0); }
static inline vf vf_set1(float x) { MAP(vf, x); }
static inline vf vf_load(const float *p) { vf r; memcpy(r.v, p, sizeof r.v); return r; }
static inline void vf_store(float *p, vf x) { memcpy(p, x.v, sizeof x.v); }
static inline vf vf_add(vf a, vf b) { MAP(vf, a.v[i] + b.v[i]); }
static inline vf vf_sub(vf a, vf b) { MAP(vf, a.v[i] - b.v[i]); }
static inline vf vf_mul(vf a, vf b) { MAP(vf, a.v[i] * b.v[i]); }
static inline vf vf_div(vf a, vf b) { MAP(vf, a.v[i] / b.v[i]); }
static inline vf vf_fma(vf a, vf b, vf c) { MAP(vf, a.v[i] * b.v[i] + c.v[i]); }
static inline vf vf_max(vf a, vf b) { MAP(vf, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }  // b if either is NaN
static inline vf vf_min(vf a, vf b) { MAP(vf, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }  // b if either is NaN
static inline vf vf_abs(vf a) { MAP(vf, fabsf(a.v[i])); }
static inline vf vf_round(vf a) { MAP(vf, rintf(a.v[i])); }
static inline vf vf_pow2(vf n) {
  vf r;
  FOR16 {
    const uint32_t u = n.v[i] == n.v[i] ? (uint32_t)((int32_t)n.v[i] + 127) << 23 : 0;
    memcpy(&r.v[i], &u, 4);
  }
  return r;
}
static inline int vf_any_nan(vf a) {
  int any = 0;
  FOR16 any |= a.v[i] != a.v[i];
  return any;
}
// Lanes [from, to) of a, the other lanes of b.
static inline vf vf_blend(vf a, vf b, int from, int to) { MAP(vf, i >= from && i < to ? a.v[i] : b.v[i]); }

static inline float f16_widen(uint16_t h) { return widen_f16(h); }
static inline uint16_t f16_of(float x) {  // a non-negative number, to nearest even
  if (!(x < 65520.f)) return x == x ? 0x7c00 : 0x7e00;
  int exponent;
  frexpf(x, &exponent);
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;  // the weight of the last bit
  const int steps = (int)rintf(ldexpf(x, -unit));
  return (uint16_t)(unit == -24 ? steps : steps + ((unit + 24) << 10));
}

static inline vf vf_load_f16(const uint16_t *p) { MAP(vf, widen_f16(p[i])); }
static inline vf vf_load_bf16(const uint16_t *p) { MAP(vf, widen_bf16(p[i])); }
static inline void vf_store_bf16(uint16_t *p, vf x) { FOR16 p[i] = round_bf16(x.v[i]); }

static inline vi vi_zero(void) { MAP(vi, 0); }
static inline vi vi_set1(int32_t x) { MAP(vi, x); }
static inline vi vi_load(const uint32_t *p) { vi r; memcpy(r.v, p, sizeof r.v); return r; }
static inline void vi_store(uint32_t *p, vi x) { memcpy(p, x.v, sizeof x.v); }
static inline vi vi_add(vi a, vi b) { MAP(vi, a.v[i] + b.v[i]); }
static inline vi vi_and(vi a, vi b) { MAP(vi, a.v[i] & b.v[i]); }
static inline vi vi_or(vi a, vi b) { MAP(vi, a.v[i] | b.v[i]); }
static inline vi vi_shift_left(vi a, int bits) { MAP(vi, (int32_t)((uint32_t)a.v[i] << bits)); }
static inline vi vi_shift_right(vi a, int bits) { MAP(vi, a.v[i] >> bits); }
static inline vi vi_bf16(vf x) { MAP(vi, round_bf16(x.v[i])); }  // bf16 bits in the low half of each lane
static inline vi vi_from(vf x) { MAP(vi, (int32_t)rintf(x.v[i])); }
static inline vf vf_from(vi x) { MAP(vf, (float)x.v[i]); }
static inline int32_t vi_sum(vi x) {
  int32_t sum = 0;
  FOR16 sum += x.v[i];
  return sum;
}
static inline void vi_store_i8(int8_t *p, vi x) { FOR16 p[i] = (int8_t)x.v[i]; }

// Fixed reduction trees, the same at every level: halves, quarters, eighths, pairs.
static inline float vf_sum(vf x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
  return x.v[0];
}
static inline float vf_reduce_max(vf x) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  return x.v[0];
}
static inline float vf_first(vf x) { return x.v[0]; }

static inline wbf wbf_load(const uint16_t *p) { wbf r; memcpy(r.v, p, sizeof r.v); return r; }
static inline vf vf_dot2(vf acc, wbf w, const uint16_t *a) {
  const float first = widen_bf16(a[0]), second = widen_bf16(a[1]);
  MAP(vf, (acc.v[i] + widen_bf16(w.v[2 * i]) * first) + widen_bf16(w.v[2 * i + 1]) * second);
}

static inline wq8 wq8_load(const uint8_t *p) {
  wq8 r;
  for (int i = 0; i < 64; i++) r.v[i] = (int8_t)(p[i] ^ 0x80);
  return r;
}
static inline vi vi_dot4_start(int32_t sum) { (void)sum; return vi_zero(); }
static inline vi vi_dot4(vi acc, wq8 w, const int8_t *a) {
  MAP(vi, acc.v[i] + w.v[4 * i] * a[0] + w.v[4 * i + 1] * a[1] + w.v[4 * i + 2] * a[2] + w.v[4 * i + 3] * a[3]);
}
