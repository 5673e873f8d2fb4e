// The vector functions on AArch64 NEON + dotprod + BF16: 16 lanes are four registers.
//
// BFDOT rounds in its own way: products, their sum and the sum with the accumulator each round to odd; subnormals are
// zero. The architecture defines every bit of this (with FPCR.EBF clear, as Linux starts each thread), so promise 1
// holds as with any other instruction.
#pragma once
#include <arm_neon.h>
#include <stdint.h>

#define ISA_NAME "neon-dotprod-bf16"
enum { LINEAR_ROWS = 2, ATTENTION_ROWS = 1 };  // 16 accumulators of 32 registers

typedef struct { float32x4_t q[4]; } vf;
typedef struct { int32x4_t q[4]; } vi;
typedef struct { int8x16_t q[4]; } wq8;
typedef struct { bfloat16x8_t q[4]; } wbf;

#define FOR4 _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
#define MAP(T, expr) T r; FOR4 r.q[i] = (expr); return r

static inline vf vf_set1(float x) { MAP(vf, vdupq_n_f32(x)); }
static inline vf vf_zero(void) { return vf_set1(0.f); }
static inline vf vf_load(const float *p) { MAP(vf, vld1q_f32(p + 4 * i)); }
static inline void vf_store(float *p, vf x) { FOR4 vst1q_f32(p + 4 * i, x.q[i]); }
static inline vf vf_add(vf a, vf b) { MAP(vf, vaddq_f32(a.q[i], b.q[i])); }
static inline vf vf_sub(vf a, vf b) { MAP(vf, vsubq_f32(a.q[i], b.q[i])); }
static inline vf vf_mul(vf a, vf b) { MAP(vf, vmulq_f32(a.q[i], b.q[i])); }
static inline vf vf_div(vf a, vf b) { MAP(vf, vdivq_f32(a.q[i], b.q[i])); }
static inline vf vf_fma(vf a, vf b, vf c) { MAP(vf, vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
// b if either is NaN; FMAX and FMIN would return the NaN.
static inline vf vf_max(vf a, vf b) { MAP(vf, vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
static inline vf vf_min(vf a, vf b) { MAP(vf, vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
static inline vf vf_abs(vf a) { MAP(vf, vabsq_f32(a.q[i])); }
static inline vf vf_round(vf a) { MAP(vf, vrndnq_f32(a.q[i])); }
static inline vf vf_pow2(vf n) {
  MAP(vf, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.q[i]), vdupq_n_s32(127)), 23)));
}
static inline int vf_any_nan(vf a) {
  uint32x4_t number = vdupq_n_u32(~0u);
  FOR4 number = vandq_u32(number, vceqq_f32(a.q[i], a.q[i]));
  return vminvq_u32(number) == 0;
}
// Lanes [from, to) of a, the other lanes of b.
static inline vf vf_blend(vf a, vf b, int from, int to) {
  const int32x4_t first = {0, 1, 2, 3};
  vf r;
  FOR4 {
    const int32x4_t lane = vaddq_s32(first, vdupq_n_s32(4 * i));
    const uint32x4_t keep = vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to)));
    r.q[i] = vbslq_f32(keep, a.q[i], b.q[i]);
  }
  return r;
}

static inline vf vf_load_f16(const uint16_t *p) {
  MAP(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
// fp16, rounded to nearest even; 0xffff, a NaN, for a number that would become infinite, and for a NaN.
static inline void vf_store_f16(uint16_t *p, vf x) {
  FOR4 {
    const uint32x4_t kept = vcltq_f32(vabsq_f32(x.q[i]), vdupq_n_f32(65520.f));
    const uint32x4_t bits = vorrq_u32(vreinterpretq_u32_f32(x.q[i]), vmvnq_u32(kept));
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(vreinterpretq_f32_u32(bits))));
  }
}
static inline uint16_t f16_of(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }
static inline float f16_widen(uint16_t h) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
static inline vf vf_load_bf16(const uint16_t *p) {
  MAP(vf, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
static inline void vf_store_bf16(uint16_t *p, vf x) {
  FOR4 vst1_u16(p + 4 * i, vreinterpret_u16_bf16(vcvt_bf16_f32(x.q[i])));
}

static inline vi vi_zero(void) { MAP(vi, vdupq_n_s32(0)); }
static inline vi vi_set1(int32_t x) { MAP(vi, vdupq_n_s32(x)); }
static inline vi vi_load(const uint32_t *p) { MAP(vi, vreinterpretq_s32_u32(vld1q_u32(p + 4 * i))); }
static inline void vi_store(uint32_t *p, vi x) {
  FOR4 vst1q_u32(p + 4 * i, vreinterpretq_u32_s32(x.q[i]));
}
static inline vi vi_add(vi a, vi b) { MAP(vi, vaddq_s32(a.q[i], b.q[i])); }
static inline vi vi_sub(vi a, vi b) { MAP(vi, vsubq_s32(a.q[i], b.q[i])); }
static inline vi vi_and(vi a, vi b) { MAP(vi, vandq_s32(a.q[i], b.q[i])); }
static inline vi vi_or(vi a, vi b) { MAP(vi, vorrq_s32(a.q[i], b.q[i])); }
static inline vi vi_shift_left(vi a, int bits) { MAP(vi, vshlq_s32(a.q[i], vdupq_n_s32(bits))); }
static inline vi vi_shift_right(vi a, int bits) { MAP(vi, vshlq_s32(a.q[i], vdupq_n_s32(-bits))); }
// bf16 bits in the low half of each lane
static inline vi vi_bf16(vf x) {
  MAP(vi, vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_bf16(vcvt_bf16_f32(x.q[i])))));
}
static inline vi vi_from(vf x) { MAP(vi, vcvtnq_s32_f32(x.q[i])); }
static inline vf vf_from(vi x) { MAP(vf, vcvtq_f32_s32(x.q[i])); }
static inline int32_t vi_sum(vi x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.q[0], x.q[1]), vaddq_s32(x.q[2], x.q[3])));
}
static inline void vi_store_i8(int8_t *p, vi x) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(x.q[0]), vmovn_s32(x.q[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(x.q[2]), vmovn_s32(x.q[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}

// Fixed reduction trees, the same at every level: halves, quarters, eighths, pairs. (FADDP would start with pairs.)
static inline float vf_sum(vf x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
static inline float vf_reduce_max(vf x) {  // the operands are not NaN, so the order does not matter
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.q[0], x.q[2]), vmaxnmq_f32(x.q[1], x.q[3])));
}
static inline float vf_first(vf x) { return vgetq_lane_f32(x.q[0], 0); }

// Pairs of lanes that are 8, 4, 2 or 1 apart: (a, b) -> (a + b, a - b). A product with -1 is exact, so that is one rounding.
static inline vf vf_pairs8(vf x) {
  return (vf){{vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]), vsubq_f32(x.q[0], x.q[2]), vsubq_f32(x.q[1], x.q[3])}};
}
static inline vf vf_pairs4(vf x) {
  return (vf){{vaddq_f32(x.q[0], x.q[1]), vsubq_f32(x.q[0], x.q[1]), vaddq_f32(x.q[2], x.q[3]), vsubq_f32(x.q[2], x.q[3])}};
}
static inline vf vf_pairs2(vf x) {
  const float32x4_t sign = {1, 1, -1, -1};
  MAP(vf, vfmaq_f32(vextq_f32(x.q[i], x.q[i], 2), x.q[i], sign));
}
static inline vf vf_pairs1(vf x) {
  const float32x4_t sign = {1, -1, 1, -1};
  MAP(vf, vfmaq_f32(vrev64q_f32(x.q[i]), x.q[i], sign));
}

// Four bytes of activations (2 bf16 or 4 int8) in every 32-bit lane.
static inline uint32x4_t broadcast4(const void *a) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, a, 4);
  return vdupq_n_u32(bytes);
}

static inline wbf wbf_load(const uint16_t *p) { MAP(wbf, vreinterpretq_bf16_u16(vld1q_u16(p + 8 * i))); }
static inline vf vf_dot2(vf acc, wbf w, const uint16_t *a) {
  const bfloat16x8_t pair = vreinterpretq_bf16_u32(broadcast4(a));
  MAP(vf, vbfdotq_f32(acc.q[i], w.q[i], pair));
}

// SDOT takes signed weights: w - 128 is formed on loading, so the dot needs no compensation.
static inline wq8 wq8_load(const uint8_t *p) {
  MAP(wq8, vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(0x80))));
}
static inline vi vi_dot4_start(int32_t sum) { (void)sum; return vi_zero(); }
static inline vi vi_dot4(vi acc, wq8 w, const int8_t *a) {
  const int8x16_t quad = vreinterpretq_s8_u32(broadcast4(a));
  MAP(vi, vdotq_s32(acc.q[i], w.q[i], quad));
}

// Lane i: byte i of each 16.
static inline vi vi_columns(vi x) {
  int8_t bytes[64];
  vst4q_s8(bytes, ((int8x16x4_t){{vreinterpretq_s8_s32(x.q[0]), vreinterpretq_s8_s32(x.q[1]), vreinterpretq_s8_s32(x.q[2]),
                                  vreinterpretq_s8_s32(x.q[3])}}));
  MAP(vi, vreinterpretq_s32_s8(vld1q_s8(bytes + 16 * i)));
}
// Pairs of 16-bit integers times two numbers at a.
static inline vi vi_dot2(vi acc, vi pairs, const int16_t *a) {
  const int16x8_t x = vreinterpretq_s16_u32(broadcast4(a));
  FOR4 {
    const int16x8_t p = vreinterpretq_s16_s32(pairs.q[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(p), vget_low_s16(x)), high = vmull_high_s16(p, x);
    acc.q[i] = vaddq_s32(acc.q[i], vpaddq_s32(low, high));
  }
  return acc;
}

// 64 bytes of a q4 panel: w + 8 of one line in the low halves, of another line in the high halves. vn_start .. vn_end is
// the dot of these unsigned weights; it begins at *sum / 16, or 0 without a sum, which may be added at either end.
typedef struct { uint8x16_t q[4]; } wq4;
typedef vi vn;
static inline wq4 wq4_load(const uint8_t *p) { MAP(wq4, vld1q_u8(p + 16 * i)); }
static inline wq8 wq4_low(wq4 w) { MAP(wq8, vreinterpretq_s8_u8(vandq_u8(w.q[i], vdupq_n_u8(15)))); }
static inline wq8 wq4_high(wq4 w) { MAP(wq8, vreinterpretq_s8_u8(vshrq_n_u8(w.q[i], 4))); }
static inline vn vn_start(const int32_t *sum) { return vi_set1(sum ? *sum / 16 : 0); }
static inline vn vn_dot4(vn acc, wq8 w, const int8_t *a) { return vi_dot4(acc, w, a); }
static inline vi vn_end(vn acc, const int32_t *sum) { (void)sum; return acc; }

// The higher bits of k-quants: bytes of w >> shift (or << -shift) under a mask, and their union with the low 4 bits; and their scales. Sums of
// these unsigned weights need no start value.
static inline wq8 wq4_bits(wq4 w, int shift, int mask) {
  const int8x16_t left = vdupq_n_s8((int8_t)-shift);
  MAP(wq8, vreinterpretq_s8_u8(vandq_u8(vshlq_u8(w.q[i], left), vdupq_n_u8((uint8_t)mask))));
}
static inline wq8 wq8_or(wq8 a, wq8 b) { MAP(wq8, vorrq_s8(a.q[i], b.q[i])); }
// table[i] for bytes i below 16.
static inline wq8 wq8_pick(const uint8_t *table, wq8 indices) {
  const uint8x16_t entries = vld1q_u8(table);
  MAP(wq8, vreinterpretq_s8_u8(vqtbl1q_u8(entries, vreinterpretq_u8_s8(indices.q[i]))));
}
static inline vf vf_load_i8(const int8_t *p) {
  const int16x8_t half[2] = {vmovl_s8(vld1_s8(p)), vmovl_s8(vld1_s8(p + 8))};
  MAP(vf, vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(half[i / 2]) : vget_low_s16(half[i / 2]))));
}
// 2^(e - 127) for bytes e; 0 for 0, infinite for 255.
static inline vf vf_load_exponents(const uint8_t *p) {
  const uint16x8_t half[2] = {vmovl_u8(vld1_u8(p)), vmovl_u8(vld1_u8(p + 8))};
  MAP(vf, vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(i % 2 ? vget_high_u16(half[i / 2]) : vget_low_u16(half[i / 2])), 23)));
}
