// The vector functions on AVX2 + FMA + F16C: 16 lanes are two registers.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define ISA_NAME "avx2"
enum { LINEAR_ROWS = 2, ATTENTION_ROWS = 1 };  // 8 accumulators of 16 registers

typedef struct { __m256 lo, hi; } vf;
typedef struct { __m256i lo, hi; } vi;
typedef struct { __m256i lo, hi; } wq8;
typedef struct { __m256i lo, hi; } wbf;

static inline vf vf_zero(void) { return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline vf vf_set1(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline vf vf_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.lo); _mm256_storeu_ps(p + 8, x.hi); }
static inline vf vf_add(vf a, vf b) { return (vf){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline vf vf_sub(vf a, vf b) { return (vf){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline vf vf_mul(vf a, vf b) { return (vf){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline vf vf_div(vf a, vf b) { return (vf){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline vf vf_fma(vf a, vf b, vf c) {
  return (vf){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline vf vf_max(vf a, vf b) { return (vf){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }  // b if NaN
static inline vf vf_min(vf a, vf b) { return (vf){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }  // b if NaN
static inline vf vf_abs(vf a) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return (vf){_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline vf vf_round(vf a) { return (vf){_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
static inline __m256 pow2_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline vf vf_pow2(vf n) { return (vf){pow2_half(n.lo), pow2_half(n.hi)}; }
static inline int vf_any_nan(vf a) {
  const __m256 lo = _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), hi = _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(lo, hi));
}

static inline __m256 blend_half(__m256 a, __m256 b, int from, int to, int base) {
  const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i keep = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1)),
                                        _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(keep));
}
// Lanes [from, to) of a, the other lanes of b.
static inline vf vf_blend(vf a, vf b, int from, int to) {
  return (vf){blend_half(a.lo, b.lo, from, to, 0), blend_half(a.hi, b.hi, from, to, 8)};
}

static inline vf vf_load_f16(const uint16_t *p) {
  const __m128i lo = _mm_loadu_si128((const void *)p), hi = _mm_loadu_si128((const void *)(p + 8));
  return (vf){_mm256_cvtph_ps(lo), _mm256_cvtph_ps(hi)};
}
// fp16, rounded to nearest even; 0xffff, a NaN, for a number that would become infinite, and for a NaN.
static inline __m128i round_f16_half(__m256 x) {
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.f), x);
  return _mm256_cvtps_ph(_mm256_or_ps(x, _mm256_cmp_ps(size, _mm256_set1_ps(65520.f), _CMP_NLT_UQ)), 0);
}
static inline void vf_store_f16(uint16_t *p, vf x) {
  _mm_storeu_si128((void *)p, round_f16_half(x.lo));
  _mm_storeu_si128((void *)(p + 8), round_f16_half(x.hi));
}
static inline uint16_t f16_of(float x) { return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), 0)); }
static inline float f16_widen(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
static inline __m256 bf16_half(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}
static inline vf vf_load_bf16(const uint16_t *p) { return (vf){bf16_half(p), bf16_half(p + 8)}; }
// Round to nearest even. A NaN stays a NaN: the low half of its mantissa must not carry into the exponent.
static inline __m256i round_bf16_half(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
static inline void vf_store_bf16(uint16_t *p, vf x) {
  const __m256i packed = _mm256_packus_epi32(round_bf16_half(x.lo), round_bf16_half(x.hi));
  _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline vi vi_zero(void) { return (vi){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline vi vi_set1(int32_t x) { return (vi){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline vi vi_load(const uint32_t *p) {
  return (vi){_mm256_loadu_si256((const void *)p), _mm256_loadu_si256((const void *)(p + 8))};
}
static inline void vi_store(uint32_t *p, vi x) {
  _mm256_storeu_si256((void *)p, x.lo);
  _mm256_storeu_si256((void *)(p + 8), x.hi);
}
static inline vi vi_and(vi a, vi b) { return (vi){_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
static inline vi vi_or(vi a, vi b) { return (vi){_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
static inline vi vi_shift_left(vi a, int bits) {
  const __m128i n = _mm_cvtsi32_si128(bits);
  return (vi){_mm256_sll_epi32(a.lo, n), _mm256_sll_epi32(a.hi, n)};
}
static inline vi vi_shift_right(vi a, int bits) {
  const __m128i n = _mm_cvtsi32_si128(bits);
  return (vi){_mm256_sra_epi32(a.lo, n), _mm256_sra_epi32(a.hi, n)};
}
// bf16 bits in the low half of each lane
static inline vi vi_bf16(vf x) { return (vi){round_bf16_half(x.lo), round_bf16_half(x.hi)}; }
static inline vi vi_add(vi a, vi b) { return (vi){_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
static inline vi vi_sub(vi a, vi b) { return (vi){_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
static inline vi vi_from(vf x) { return (vi){_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
static inline vf vf_from(vi x) { return (vf){_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
static inline int32_t vi_sum(vi x) {
  int32_t lane[8], sum = 0;
  _mm256_storeu_si256((void *)lane, _mm256_add_epi32(x.lo, x.hi));
  for (int i = 0; i < 8; i++) sum += lane[i];
  return sum;
}
static inline void vi_store_i8(int8_t *p, vi x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xd8);
  _mm_storeu_si128((void *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Fixed reduction trees, the same at every level: halves, quarters, eighths, pairs.
static inline float vf_sum(vf x) {
  const __m256 eight = _mm256_add_ps(x.lo, x.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float vf_reduce_max(vf x) {
  const __m256 eight = _mm256_max_ps(x.lo, x.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float vf_first(vf x) { return _mm256_cvtss_f32(x.lo); }

// Pairs of lanes that are 8, 4, 2 or 1 apart: (a, b) -> (a + b, a - b). A product with -1 is exact, so that is one rounding.
static inline vf vf_pairs8(vf x) { return (vf){_mm256_add_ps(x.lo, x.hi), _mm256_sub_ps(x.lo, x.hi)}; }
static inline __m256 pairs4_half(__m256 x) {
  return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}
static inline vf vf_pairs4(vf x) { return (vf){pairs4_half(x.lo), pairs4_half(x.hi)}; }
static inline __m256 pairs2_half(__m256 x) {
  return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
}
static inline vf vf_pairs2(vf x) { return (vf){pairs2_half(x.lo), pairs2_half(x.hi)}; }
static inline __m256 pairs1_half(__m256 x) {
  return _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
}
static inline vf vf_pairs1(vf x) { return (vf){pairs1_half(x.lo), pairs1_half(x.hi)}; }

static inline wbf wbf_load(const uint16_t *p) {
  return (wbf){_mm256_loadu_si256((const void *)p), _mm256_loadu_si256((const void *)(p + 16))};
}
static inline __m256 dot2_half(__m256 acc, __m256i w, __m256 first, __m256 second) {
  const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  const __m256 high = _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000)));
  return _mm256_fmadd_ps(high, second, _mm256_fmadd_ps(low, first, acc));
}
static inline vf vf_dot2(vf acc, wbf w, const uint16_t *a) {
  const __m256 first = _mm256_castsi256_ps(_mm256_set1_epi32((int)((uint32_t)a[0] << 16)));
  const __m256 second = _mm256_castsi256_ps(_mm256_set1_epi32((int)((uint32_t)a[1] << 16)));
  return (vf){dot2_half(acc.lo, w.lo, first, second), dot2_half(acc.hi, w.hi, first, second)};
}

// maddubs saturates on full-range unsigned weights, so the weight's sign moves to the activation: |w| * (sign(w) a) is
// exact.
static inline wq8 wq8_load(const uint8_t *p) {
  const __m256i offset = _mm256_set1_epi8((char)0x80);
  return (wq8){_mm256_xor_si256(_mm256_loadu_si256((const void *)p), offset),
               _mm256_xor_si256(_mm256_loadu_si256((const void *)(p + 32)), offset)};
}
static inline __m256i broadcast4(const void *a) {
  int32_t quad;
  __builtin_memcpy(&quad, a, 4);
  return _mm256_set1_epi32(quad);
}
static inline vi vi_dot4_start(int32_t sum) { (void)sum; return vi_zero(); }
static inline __m256i dot4_half(__m256i acc, __m256i w, __m256i a) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline vi vi_dot4(vi acc, wq8 w, const int8_t *a) {
  const __m256i x = broadcast4(a);
  return (vi){dot4_half(acc.lo, w.lo, x), dot4_half(acc.hi, w.hi, x)};
}

// Lane i: byte i of each 16.
static inline vi vi_columns(vi x) {
  const __m128i a = _mm256_castsi256_si128(x.lo), b = _mm256_extracti128_si256(x.lo, 1);
  const __m128i c = _mm256_castsi256_si128(x.hi), d = _mm256_extracti128_si256(x.hi, 1);
  const __m128i ab = _mm_unpacklo_epi8(a, b), cd = _mm_unpacklo_epi8(c, d);
  const __m128i ab2 = _mm_unpackhi_epi8(a, b), cd2 = _mm_unpackhi_epi8(c, d);
  return (vi){_mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd)),
              _mm256_set_m128i(_mm_unpackhi_epi16(ab2, cd2), _mm_unpacklo_epi16(ab2, cd2))};
}
// Pairs of 16-bit integers times two numbers at a.
static inline vi vi_dot2(vi acc, vi pairs, const int16_t *a) {
  const __m256i x = broadcast4(a);
  return (vi){_mm256_add_epi32(acc.lo, _mm256_madd_epi16(pairs.lo, x)),
              _mm256_add_epi32(acc.hi, _mm256_madd_epi16(pairs.hi, x))};
}

// 64 bytes of a q4 panel: w + 8 of one line in the low halves, of another line in the high halves. vn_start .. vn_end is
// the dot of these unsigned weights; it begins at *sum / 16, or 0 without a sum, which may be added at either end.
// maddubs cannot saturate here: 32 products of at most 15 * 128 in two sums each fit into 16 bits.
typedef struct { __m256i lo, hi; } wq4;
typedef struct { __m256i lo, hi; } vn;  // 16-bit sums
static inline wq4 wq4_load(const uint8_t *p) {
  return (wq4){_mm256_loadu_si256((const void *)p), _mm256_loadu_si256((const void *)(p + 32))};
}
static inline wq8 wq4_low(wq4 w) {
  const __m256i mask = _mm256_set1_epi8(15);
  return (wq8){_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
static inline wq8 wq4_high(wq4 w) {
  return wq4_low((wq4){_mm256_srli_epi16(w.lo, 4), _mm256_srli_epi16(w.hi, 4)});
}
static inline vn vn_start(const int32_t *sum) { (void)sum; return (vn){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline vn vn_dot4(vn acc, wq8 w, const int8_t *a) {
  const __m256i x = broadcast4(a);
  return (vn){_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, x)),
              _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, x))};
}
static inline vi vn_end(vn acc, const int32_t *sum) {
  const __m256i one = _mm256_set1_epi16(1), x = _mm256_set1_epi32(sum ? *sum / 16 : 0);
  return (vi){_mm256_add_epi32(_mm256_madd_epi16(acc.lo, one), x),
              _mm256_add_epi32(_mm256_madd_epi16(acc.hi, one), x)};
}

// The higher bits of k-quants: bytes of w >> shift (or << -shift) under a mask, and their union with the low 4 bits; and their scales. Sums of
// these unsigned weights need no start value.
typedef uint32_t u32x8 __attribute__((vector_size(32)));
static inline __m256i bits_half(__m256i w, int shift, int mask) {
  const u32x8 x = shift < 0 ? (u32x8)w << -shift : (u32x8)w >> shift;
  return _mm256_and_si256((__m256i)x, _mm256_set1_epi8((char)mask));
}
static inline wq8 wq4_bits(wq4 w, int shift, int mask) {
  return (wq8){bits_half(w.lo, shift, mask), bits_half(w.hi, shift, mask)};
}
static inline wq8 wq8_or(wq8 a, wq8 b) { return (wq8){_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
// table[i] for bytes i below 16.
static inline wq8 wq8_pick(const uint8_t *table, wq8 indices) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)table));
  return (wq8){_mm256_shuffle_epi8(both, indices.lo), _mm256_shuffle_epi8(both, indices.hi)};
}
static inline vf vf_load_i8(const int8_t *p) {
  const __m128i lo = _mm_loadl_epi64((const void *)p), hi = _mm_loadl_epi64((const void *)(p + 8));
  return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(lo)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(hi))};
}
// 2^(e - 127) for bytes e; 0 for 0, infinite for 255.
static inline __m256 exponents_half(const uint8_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)), 23));
}
static inline vf vf_load_exponents(const uint8_t *p) { return (vf){exponents_half(p), exponents_half(p + 8)}; }
