// The vector functions in portable C, on any machine: 16 lanes are four vectors of GCC and Clang, for which the compiler
// takes the registers of the baseline, or none.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define ISA_NAME "scalar"
enum { LINEAR_ROWS = 2, ATTENTION_ROWS = 1 };

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef double f64x2 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x2 __attribute__((vector_size(16)));
typedef union { f64x4 all; f64x2 half[2]; } wide;

typedef struct { f32x4 q[4]; } vf;
typedef struct { i32x4 q[4]; } vi;
typedef struct { u16x8 q[4]; } wq8;  // two signed bytes in each element
typedef struct { u32x4 q[4]; } wbf;  // two bf16 in each element

#define FOR4 _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
#define FOR16 for (int i = 0; i < 16; i++)
#define MAP(T, expr) T r; FOR4 r.q[i] = (expr); return r

static inline f32x4 set4(float x) { return (f32x4){x, x, x, x}; }
static inline f32x4 select4(i32x4 mask, f32x4 a, f32x4 b) { return (f32x4)((mask & (i32x4)a) | (~mask & (i32x4)b)); }

// a * b + c, rounded once, as the instructions of the other levels do. The product is exact in double. The sum is
// rounded to odd: if it is not exact, its last bit is set, so that rounding it to float cannot meet a false tie.
static inline f64x2 fma2(f64x2 a, f64x2 b, f64x2 c) {
  const f64x2 product = a * b, sum = product + c, part = sum - product;
  const f64x2 error = (product - (sum - part)) + (c - part);
  const i64x2 inexact = (error > 0) | (error < 0), toward_zero = (error > 0) ^ (sum > 0);
  const i64x2 step = ~(i64x2)sum & inexact & 1;
  return (f64x2)((i64x2)sum + ((step ^ toward_zero) - toward_zero));
}
// Conversions of whole vectors: lane by lane, GCC 12 leaves out the rounding to float between two of these.
static inline f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) {
  const wide x = {__builtin_convertvector(a, f64x4)}, y = {__builtin_convertvector(b, f64x4)};
  const wide z = {__builtin_convertvector(c, f64x4)};
  const wide r = {.half = {fma2(x.half[0], y.half[0], z.half[0]), fma2(x.half[1], y.half[1], z.half[1])}};
  return __builtin_convertvector(r.all, f32x4);
}

static inline vf vf_set1(float x) { MAP(vf, set4(x)); }
static inline vf vf_zero(void) { return vf_set1(0.f); }
static inline vf vf_load(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
static inline void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
static inline vf vf_add(vf a, vf b) { MAP(vf, a.q[i] + b.q[i]); }
static inline vf vf_sub(vf a, vf b) { MAP(vf, a.q[i] - b.q[i]); }
static inline vf vf_mul(vf a, vf b) { MAP(vf, a.q[i] * b.q[i]); }
static inline vf vf_div(vf a, vf b) { MAP(vf, a.q[i] / b.q[i]); }
static inline vf vf_fma(vf a, vf b, vf c) { MAP(vf, fma4(a.q[i], b.q[i], c.q[i])); }
static inline vf vf_max(vf a, vf b) { MAP(vf, select4(a.q[i] > b.q[i], a.q[i], b.q[i])); }  // b if either is NaN
static inline vf vf_min(vf a, vf b) { MAP(vf, select4(a.q[i] < b.q[i], a.q[i], b.q[i])); }  // b if either is NaN
static inline vf vf_abs(vf a) { MAP(vf, (f32x4)((i32x4)a.q[i] & INT32_MAX)); }
// To nearest even, for |a| < 2^22: 1.5 * 2^23 has no bits for a fraction.
static inline vf vf_round(vf a) { MAP(vf, (a.q[i] + 12582912.f) - 12582912.f); }
static inline vi vi_from(vf a) { MAP(vi, (i32x4)(a.q[i] + 12582912.f) - 0x4b400000); }
static inline vf vf_pow2(vf n) {
  const vi exponent = vi_from(n);
  MAP(vf, (f32x4)((u32x4)(exponent.q[i] + 127) << 23));
}
static inline int vf_any_nan(vf a) {
  i32x4 any = a.q[0] != a.q[0];
  for (int i = 1; i < 4; i++) any |= a.q[i] != a.q[i];
  return (any[0] | any[1] | any[2] | any[3]) != 0;
}
// Lanes [from, to) of a, the other lanes of b.
static inline vf vf_blend(vf a, vf b, int from, int to) {
  const i32x4 lane = {0, 1, 2, 3};
  MAP(vf, select4((lane >= from - 4 * i) & (lane < to - 4 * i), a.q[i], b.q[i]));
}

static inline vi vi_set1(int32_t x) { MAP(vi, ((i32x4){x, x, x, x})); }
static inline vi vi_zero(void) { return vi_set1(0); }
static inline vi vi_load(const uint32_t *p) { vi r; memcpy(&r, p, sizeof r); return r; }
static inline void vi_store(uint32_t *p, vi x) { memcpy(p, &x, sizeof x); }
static inline vi vi_add(vi a, vi b) { MAP(vi, a.q[i] + b.q[i]); }
static inline vi vi_sub(vi a, vi b) { MAP(vi, a.q[i] - b.q[i]); }
static inline vi vi_and(vi a, vi b) { MAP(vi, a.q[i] & b.q[i]); }
static inline vi vi_or(vi a, vi b) { MAP(vi, a.q[i] | b.q[i]); }
static inline vi vi_shift_left(vi a, int bits) { MAP(vi, (i32x4)((u32x4)a.q[i] << bits)); }
static inline vi vi_shift_right(vi a, int bits) { MAP(vi, a.q[i] >> bits); }
static inline vf vf_from(vi x) { MAP(vf, __builtin_convertvector(x.q[i], f32x4)); }
static inline int32_t vi_sum(vi x) {
  const i32x4 four = (x.q[0] + x.q[1]) + (x.q[2] + x.q[3]);
  return four[0] + four[1] + four[2] + four[3];
}
static inline void vi_store_i8(int8_t *p, vi x) { FOR16 p[i] = (int8_t)x.q[i / 4][i % 4]; }

// bf16 bits in the low half of each lane, rounded to nearest even; a NaN stays a NaN.
static inline vi vi_bf16(vf x) {
  vi r;
  FOR4 {
    const u32x4 u = (u32x4)x.q[i], nan = (u32x4)(x.q[i] != x.q[i]);
    r.q[i] = (i32x4)((nan & (u >> 16 | 0x40)) | (~nan & (u + 0x7fff + (u >> 16 & 1)) >> 16));
  }
  return r;
}
static inline void vf_store_bf16(uint16_t *p, vf x) {
  const vi bits = vi_bf16(x);
  FOR16 p[i] = (uint16_t)bits.q[i / 4][i % 4];
}
static inline u32x4 load_u16(const uint16_t *p) { return (u32x4){p[0], p[1], p[2], p[3]}; }
static inline vf vf_load_bf16(const uint16_t *p) { MAP(vf, (f32x4)(load_u16(p + 4 * i) << 16)); }

// fp16 to f32: the product with 2^112 moves the exponent, of subnormal numbers too.
static inline f32x4 widen_f16(u32x4 h) {
  const u32x4 infinite = (u32x4)((h & 0x7c00) == 0x7c00) & 0x7f800000, sign = (h & 0x8000) << 16;
  return (f32x4)((u32x4)((f32x4)((h & 0x7fff) << 13) * 0x1p112f) | infinite | sign);
}
static inline vf vf_load_f16(const uint16_t *p) { MAP(vf, widen_f16(load_u16(p + 4 * i))); }
static inline float f16_widen(uint16_t h) { return widen_f16((u32x4){h})[0]; }
static inline uint16_t f16_of(float x) {  // a non-negative number, to nearest even
  if (!(x < 65520.f)) return x == x ? 0x7c00 : 0x7e00;
  int exponent;
  frexpf(x, &exponent);
  const int unit = x < 0x1p-14f ? -24 : exponent - 11;  // the weight of the last bit
  const int steps = (int)rintf(ldexpf(x, -unit));
  return (uint16_t)(unit == -24 ? steps : steps + ((unit + 24) << 10));
}
// fp16, rounded to nearest even; 0xffff, a NaN, for a number that would become infinite, and for a NaN.
static inline void vf_store_f16(uint16_t *p, vf x) {
  FOR16 {
    const float a = fabsf(x.q[i / 4][i % 4]);
    p[i] = a < 65520.f ? (uint16_t)(f16_of(a) | (signbit(x.q[i / 4][i % 4]) ? 0x8000 : 0)) : 0xffff;
  }
}
// Fixed reduction trees, the same at every level: halves, quarters, eighths, pairs.
static inline float vf_sum(vf x) {
  const f32x4 four = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
static inline float vf_reduce_max(vf x) {
  const vf halves = vf_max(x, (vf){{x.q[2], x.q[3], x.q[2], x.q[3]}});
  const f32x4 four = select4(halves.q[0] > halves.q[1], halves.q[0], halves.q[1]);
  const float even = four[0] > four[2] ? four[0] : four[2], odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}
static inline float vf_first(vf x) { return x.q[0][0]; }

// Pairs of lanes that are 8, 4, 2 or 1 apart: (a, b) -> (a + b, a - b).
static inline vf vf_pairs8(vf x) { return (vf){{x.q[0] + x.q[2], x.q[1] + x.q[3], x.q[0] - x.q[2], x.q[1] - x.q[3]}}; }
static inline vf vf_pairs4(vf x) { return (vf){{x.q[0] + x.q[1], x.q[0] - x.q[1], x.q[2] + x.q[3], x.q[2] - x.q[3]}}; }
static inline vf vf_pairs2(vf x) {
  const i32x4 minus = {0, 0, INT32_MIN, INT32_MIN};
  MAP(vf, ((f32x4){x.q[i][2], x.q[i][3], x.q[i][0], x.q[i][1]} + (f32x4)((i32x4)x.q[i] ^ minus)));
}
static inline vf vf_pairs1(vf x) {
  const i32x4 minus = {0, INT32_MIN, 0, INT32_MIN};
  MAP(vf, ((f32x4){x.q[i][1], x.q[i][0], x.q[i][3], x.q[i][2]} + (f32x4)((i32x4)x.q[i] ^ minus)));
}

static inline wbf wbf_load(const uint16_t *p) { wbf r; memcpy(&r, p, sizeof r); return r; }
static inline vf vf_dot2(vf acc, wbf w, const uint16_t *a) {
  const f32x4 x = (f32x4)((u32x4){a[0], a[1]} << 16), first = set4(x[0]), second = set4(x[1]);
  MAP(vf, (acc.q[i] + (f32x4)(w.q[i] << 16) * first) + (f32x4)(w.q[i] & 0xffff0000) * second);
}

// |w * a| <= 128 * 127, so the sum of two products fits into 16 bits.
static inline wq8 wq8_load(const uint8_t *p) {
  wq8 r;
  memcpy(&r, p, sizeof r);
  FOR4 r.q[i] ^= 0x8080;
  return r;
}
static inline vi vi_dot4_start(int32_t sum) { (void)sum; return vi_zero(); }
static inline vi vi_dot4(vi acc, wq8 w, const int8_t *a) {
  const i16x8 even = {a[0], a[2], a[0], a[2], a[0], a[2], a[0], a[2]};
  const i16x8 odd = {a[1], a[3], a[1], a[3], a[1], a[3], a[1], a[3]};
  FOR4 {
    const i16x8 pairs = ((i16x8)(w.q[i] << 8) >> 8) * even + ((i16x8)w.q[i] >> 8) * odd;
    acc.q[i] += ((i32x4)((u32x4)pairs << 16) >> 16) + ((i32x4)pairs >> 16);
  }
  return acc;
}

// Lane i: byte i of each 16.
static inline vi vi_columns(vi x) {
  int8_t from[64], to[64];
  memcpy(from, &x, sizeof from);
  for (int i = 0; i < 64; i++) to[i % 16 * 4 + i / 16] = from[i];
  memcpy(&x, to, sizeof x);
  return x;
}
// Pairs of 16-bit integers times two numbers at a.
static inline vi vi_dot2(vi acc, vi pairs, const int16_t *a) {
  const i32x4 first = {a[0], a[0], a[0], a[0]}, second = {a[1], a[1], a[1], a[1]};
  MAP(vi, acc.q[i] + (pairs.q[i] & 0xffff) * first + (pairs.q[i] >> 16) * second);
}

// 64 bytes of a q4 panel: w + 8 of one line in the low halves, of another line in the high halves. vn_start .. vn_end is
// the dot of these unsigned weights; it begins at *sum / 16, or 0 without a sum, which may be added at either end.
typedef wq8 wq4;
typedef vi vn;
static inline wq4 wq4_load(const uint8_t *p) { wq4 r; memcpy(&r, p, sizeof r); return r; }
static inline wq8 wq4_low(wq4 w) { MAP(wq8, w.q[i] & 0x0f0f); }
static inline wq8 wq4_high(wq4 w) { MAP(wq8, w.q[i] >> 4 & 0x0f0f); }
static inline vn vn_start(const int32_t *sum) { return vi_set1(sum ? *sum / 16 : 0); }
static inline vn vn_dot4(vn acc, wq8 w, const int8_t *a) { return vi_dot4(acc, w, a); }
static inline vi vn_end(vn acc, const int32_t *sum) { (void)sum; return acc; }

// The higher bits of k-quants: bytes of w >> shift (or << -shift) under a mask, and their union with the low 4 bits; and their scales. Sums of
// these unsigned weights need no start value.
static inline wq8 wq4_bits(wq4 w, int shift, int mask) {
  const uint16_t both = (uint16_t)(mask * 0x101);
  MAP(wq8, (u16x8)(shift < 0 ? (u32x4)w.q[i] << -shift : (u32x4)w.q[i] >> shift) & both);
}
static inline wq8 wq8_or(wq8 a, wq8 b) { MAP(wq8, a.q[i] | b.q[i]); }
// table[i] for bytes i below 16.
static inline wq8 wq8_pick(const uint8_t *table, wq8 indices) {
  uint8_t bytes[64];
  memcpy(bytes, &indices, sizeof bytes);
  for (int i = 0; i < 64; i++) bytes[i] = table[bytes[i]];
  memcpy(&indices, bytes, sizeof bytes);
  return indices;
}
static inline vf vf_load_i8(const int8_t *p) {
  MAP(vf, ((f32x4){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}));
}
// 2^(e - 127) for bytes e; 0 for 0, infinite for 255.
static inline vf vf_load_exponents(const uint8_t *p) {
  MAP(vf, (f32x4)((u32x4){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]} << 23));
}
