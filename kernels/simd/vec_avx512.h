// The vector functions on AVX-512 F/BW/VL/DQ + VNNI + BF16: 16 lanes are one register.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#define ISA_NAME "avx512-vnni-bf16"
enum { LINEAR_ROWS = 6, ATTENTION_ROWS = 6 };  // 12 resp. 24 accumulators of 32 registers
enum { STREAM_ROWS_Q8 = 3, STREAM_ROWS_Q4 = 2 };  // the most that read one panel after the other
enum { LINEAR_ROWS_4_BITS = 192, UNPACKED_ROWS = 37, UNPACKED_ROWS_Q6_K = 25 };  // the rows that stay in L2, and from which on unpacking is worth it

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i wq8;   // 64 weight bytes: 16 columns x 4 of K
typedef __m512bh wbf;  // 32 bf16 weights: 16 columns x 2 of K

static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if either is NaN
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }  // b if either is NaN
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline vf vf_round(vf a) { return _mm512_roundscale_ps(a, 0); }
static inline vf vf_pow2(vf n) { return _mm512_scalef_ps(_mm512_set1_ps(1.f), n); }
static inline int vf_any_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }

// Lanes [from, to) of a, the other lanes of b.
static inline vf vf_blend(vf a, vf b, int from, int to) {
  const __mmask16 keep = (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
  return _mm512_mask_mov_ps(b, keep, a);
}

static inline vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
// fp16, rounded to nearest even; 0xffff, a NaN, for a number that would become infinite, and for a NaN.
static inline void vf_store_f16(uint16_t *p, vf x) {
  const __mmask16 lost = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(65520.f), _CMP_NLT_UQ);
  const __m512i bits = _mm512_mask_set1_epi32(_mm512_castps_si512(x), lost, -1);
  _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(_mm512_castsi512_ps(bits), 0));
}
static inline uint16_t f16_of(float x) { return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), 0)); }
static inline float f16_widen(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
static inline vf vf_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
static inline void vf_store_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

static inline vi vi_zero(void) { return _mm512_setzero_si512(); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi vi_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
static inline void vi_store(uint32_t *p, vi x) { _mm512_storeu_si512(p, x); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi vi_shift_left(vi a, int bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits)); }
static inline vi vi_shift_right(vi a, int bits) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(bits)); }
// bf16 bits in the low half of each lane
static inline vi vi_bf16(vf x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
static inline vi vi_from(vf x) { return _mm512_cvtps_epi32(x); }
static inline vf vf_from(vi x) { return _mm512_cvtepi32_ps(x); }
static inline int32_t vi_sum(vi x) { return _mm512_reduce_add_epi32(x); }
// The digits of 64 numbers below 2^14, 7 bits each, as bytes. Returns sums of the high ones, and of the low ones from bit
// 16 on, whose total over the lanes is that of all 64.
static inline vi vi_store_digits(int8_t *high, int8_t *low, const vi x[4]) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i digit = _mm512_set1_epi16(127), ones = _mm512_set1_epi8(1);
  const __m512i a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]);
  const __m512i h = _mm512_packs_epi16(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7));
  const __m512i l = _mm512_packs_epi16(_mm512_and_si512(a, digit), _mm512_and_si512(b, digit));
  _mm512_storeu_si512((void *)high, _mm512_permutexvar_epi32(order, h));
  _mm512_storeu_si512((void *)low, _mm512_permutexvar_epi32(order, l));
  const __m512i low_sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), l, ones);
  return _mm512_dpbusd_epi32(_mm512_slli_epi32(low_sums, 16), h, ones);
}
static inline void vi_store_i8(int8_t *p, vi x) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(x)); }

// Fixed reduction trees, the same at every level: halves, quarters, eighths, pairs.
// Written out: compilers may choose the order in which they reduce `_mm512_reduce_add_ps`.
static inline float vf_sum(vf x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
static inline float vf_reduce_max(vf x) { return _mm512_reduce_max_ps(x); }
// The same for four vectors at once; `all` may hold anything in the other three lanes of a quarter.
static inline void first_of_quarters(float *out, vf all) {
  const __m512i first = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, all)));
}
#define REDUCE4(OP) \
  const vf ab = OP(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee)); \
  const vf cd = OP(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee)); \
  const vf four = OP(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); \
  const vf two = OP(four, _mm512_permute_ps(four, 0x4e)), one = OP(two, _mm512_permute_ps(two, 0xb1))
static inline void vf_sum4(const vf x[4], float *out) {
  REDUCE4(_mm512_add_ps);
  first_of_quarters(out, one);
}
static inline void vf_max4(const vf x[4], float *out) {
  REDUCE4(_mm512_max_ps);
  first_of_quarters(out, one);
}
static inline vf add_as_integers(vf a, vf b) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
static inline void vi_sum4(const vi v[4], int32_t *out) {
  const vf x[4] = {_mm512_castsi512_ps(v[0]), _mm512_castsi512_ps(v[1]), _mm512_castsi512_ps(v[2]), _mm512_castsi512_ps(v[3])};
  REDUCE4(add_as_integers);
  first_of_quarters((float *)out, one);
}
static inline float vf_first(vf x) { return _mm512_cvtss_f32(x); }

// Pairs of lanes that are 8, 4, 2 or 1 apart: (a, b) -> (a + b, a - b). A product with -1 is exact, so that is one rounding.
static inline vf signed_sum(__mmask16 minus, vf x, vf other) {
  return _mm512_fmadd_ps(x, _mm512_mask_mov_ps(vf_set1(1.f), minus, vf_set1(-1.f)), other);
}
static inline vf vf_pairs8(vf x) { return signed_sum(0xff00, x, _mm512_shuffle_f32x4(x, x, 0x4e)); }
static inline vf vf_pairs4(vf x) { return signed_sum(0xf0f0, x, _mm512_shuffle_f32x4(x, x, 0xb1)); }
static inline vf vf_pairs2(vf x) { return signed_sum(0xcccc, x, _mm512_permute_ps(x, 0x4e)); }
static inline vf vf_pairs1(vf x) { return signed_sum(0xaaaa, x, _mm512_permute_ps(x, 0xb1)); }

static inline __m512i broadcast4(const void *a) {
  int32_t quad;
  __builtin_memcpy(&quad, a, 4);
  return _mm512_set1_epi32(quad);
}
static inline wbf wbf_load(const uint16_t *p) { return (wbf)_mm512_loadu_si512(p); }
static inline vf vf_dot2(vf acc, wbf w, const uint16_t *a) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(broadcast4(a)));
  return acc;
}

// Unsigned weights times signed activations; a start value of -128 * sum(a) makes the result exact for w - 128.
static inline wq8 wq8_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline vi vi_dot4_start(int32_t sum) { return _mm512_set1_epi32(sum); }
static inline vi vi_dot4(vi acc, wq8 w, const int8_t *a) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(broadcast4(a)));
  return acc;
}

// The scales of a panel's 16 columns, to be multiplied by scales of activations. These have two bits of mantissa, so it is
// enough to choose one of four multiples and to add to its exponents, with the same bits as a multiplication: all are exact.
// On Zen, VSCALEFPS runs beside the dots, unlike a multiplication, and the multiples are worth their stores from ADDED_ROWS on.
// On Intel's processors it takes the dots' units twice: see `adds_exponents`.
typedef struct { vf times[4]; } vs;
enum { ADDED_ROWS = 4 };
#define VS_FIRST(rows) ((rows) >= ADDED_ROWS)  // the multiples are loaded from memory again: store them early
static inline vs vs_of(vf p, int rows) {
  if (rows < ADDED_ROWS) return (vs){{p}};
  const vf quarter = _mm512_scalef_ps(p, vf_set1(-2.f)), half = _mm512_add_ps(p, _mm512_scalef_ps(p, vf_set1(-1.f)));
  return (vs){{p, vf_add(p, quarter), half, vf_add(half, quarter)}};
}
static inline vf vs_mul(const vs *p, const float *z, int rows) {
  if (rows < ADDED_ROWS) return vf_mul(p->times[0], vf_set1(*z));
  vf exponent;
  __asm__("vgetexpps %1%{1to16%}, %0" : "=v"(exponent) : "m"(*z));  // GCC would load z once and broadcast it on the dots' units
  return _mm512_scalef_ps(p->times[((const uint8_t *)z)[2] >> 5 & 3], exponent);
}

// a times a power of two, beside the dots as in vs_mul.
static inline vf vf_mul_pow2(vf a, const float *power) {
  vf exponent;
  __asm__("vgetexpps %1%{1to16%}, %0" : "=v"(exponent) : "m"(*power));
  return _mm512_scalef_ps(a, exponent);
}

// Lane i: byte i of each 16.
static inline vi vi_columns(vi x) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(order, x), bytes);
}
// Pairs of 16-bit integers times two numbers at a.
static inline vi vi_dot2(vi acc, vi pairs, const int16_t *a) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(pairs), "v"(broadcast4(a)));
  return acc;
}

// 64 bytes of a q4 panel: w + 8 of one line in the low halves, of another line in the high halves. vn_start .. vn_end is
// the dot of these unsigned weights; it begins at *sum / 16, or 0 without a sum, which may be added at either end.
typedef __m512i wq4;
typedef vi vn;
static inline wq4 wq4_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline wq8 wq4_low(wq4 w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
static inline wq8 wq4_high(wq4 w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
// The two lines as those of q8, w + 128. This costs a tenth of the dots of six rows.
static inline void wq4_widen(wq4 w, uint8_t *low, uint8_t *high) {
  const __m512i difference = _mm512_set1_epi8(120);
  _mm512_storeu_si512(low, _mm512_add_epi8(wq4_low(w), difference));
  _mm512_storeu_si512(high, _mm512_add_epi8(wq4_high(w), difference));
}
static inline vn vn_start(const int32_t *sum) {  // not divided in a general register: its broadcast would run on the dots' units
  return sum ? vi_shift_right(vi_set1(*sum), 4) : vi_zero();
}
static inline vn vn_dot4(vn acc, wq8 w, const int8_t *a) { return vi_dot4(acc, w, a); }
static inline vi vn_end(vn acc, const int32_t *sum) { (void)sum; return acc; }

// The same for few rows: vh_dot8 takes 4 of K from the low halves and 4 from the high ones. These
// stay where they are, since a shift of their sum costs less than one of each line; the two sums do not wait for each other.
typedef struct { vi low, high; } vh;
static inline vh vh_start(const int32_t *sum) { return (vh){vi_zero(), sum ? vi_set1(*sum) : vi_zero()}; }
static inline vh vh_dot8(vh acc, wq4 w, const int8_t *low, const int8_t *high) {
  __asm__("" : "+v"(w));  // GCC would load it twice, and loads are what limits one row in cache
  return (vh){vi_dot4(acc.low, wq4_low(w), low), vi_dot4(acc.high, _mm512_and_si512(w, _mm512_set1_epi8(-16)), high)};
}
static inline vi vh_end(vh acc, const int32_t *sum) { (void)sum; return vi_add(acc.low, vi_shift_right(acc.high, 4)); }

// The higher bits of k-quants: bytes of w >> shift (or << -shift) under a mask, and their union with the low 4 bits; and their scales. Sums of
// these unsigned weights need no start value.
typedef uint32_t u32x16 __attribute__((vector_size(64)));
static inline wq8 wq4_bits(wq4 w, int shift, int mask) {
  const u32x16 x = shift < 0 ? (u32x16)w << -shift : (u32x16)w >> shift;
  return _mm512_and_si512((__m512i)x, _mm512_set1_epi8((char)mask));
}
static inline wq8 wq8_or(wq8 a, wq8 b) { return _mm512_or_si512(a, b); }
// table[i] for bytes i below 16.
static inline wq8 wq8_pick(const uint8_t *table, wq8 indices) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table)), indices);
}
static inline vf vf_load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
// 2^(e - 127) for bytes e; 0 for 0, infinite for 255.
static inline vf vf_load_exponents(const uint8_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)), 23));
}
