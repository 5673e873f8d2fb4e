// GGML's block formats, written from their definition in llama.cpp: d is an fp16 scale, the other bytes are as commented.
#include "ggml.h"

#include <math.h>
#include <string.h>

#include "simd/tiles.h"
#include "simd/vec.h"

// A type's weights and bytes per block, the places of its fp16 numbers, one or two, and the factor that bounds its weights.
static const struct { int weights, bytes, places[2], bound; } types[] = {
    [QUIRE_GGML_Q8_0] = {32, 34, {0, 0}, 1},       [QUIRE_GGML_Q4_0] = {32, 18, {0, 0}, 1},
    [QUIRE_GGML_Q4_K] = {256, 144, {0, 2}, 1},     [QUIRE_GGML_Q5_K] = {256, 176, {0, 2}, 1},
    [QUIRE_GGML_Q6_K] = {256, 210, {208, 208}, 1},   [QUIRE_GGML_MXFP4] = {32, 17, {0, 0}, 1},
    [QUIRE_GGML_Q4_Z] = {32, 19, {0, 0}, 1},       [QUIRE_GGML_Q4_1] = {32, 20, {0, 2}, 1},
    [QUIRE_GGML_Q5_0] = {32, 22, {0, 0}, 1},       [QUIRE_GGML_Q5_1] = {32, 24, {0, 2}, 1},
    [QUIRE_GGML_Q2_K] = {256, 84, {80, 82}, 1},    [QUIRE_GGML_IQ4_NL] = {32, 18, {0, 0}, 1},
    [QUIRE_GGML_Q3_K] = {256, 110, {108, 108}, 128}, [QUIRE_GGML_IQ2_XXS] = {256, 66, {0, 0}, 167},
    [QUIRE_GGML_IQ2_XS] = {256, 74, {0, 0}, 167},  [QUIRE_GGML_IQ2_S] = {256, 82, {0, 0}, 167},
    [QUIRE_GGML_IQ3_XXS] = {256, 98, {0, 0}, 481}, [QUIRE_GGML_IQ3_S] = {256, 110, {0, 0}, 465},
    [QUIRE_GGML_IQ4_XS] = {256, 136, {0, 0}, 4064}, [QUIRE_GGML_TQ1_0] = {256, 54, {52, 52}, 1},
    [QUIRE_GGML_TQ2_0] = {256, 66, {64, 64}, 1},
};

int64_t quire_ggml_weights(int type) { return types[type].weights; }
int64_t quire_ggml_bytes(int type) { return types[type].bytes; }

float quire_ggml_largest(int type, const uint8_t *blocks, int64_t n) {
  const int64_t bytes = types[type].bytes;
  uint32_t most = 0;
  for (int64_t b = 0; b < n; b++)
    for (int i = 0; i < 2; i++) {
      uint16_t number;
      memcpy(&number, blocks + b * bytes + types[type].places[i], sizeof number);
      const uint32_t magnitude = type == QUIRE_GGML_MXFP4 ? number & 0xffu : number & 0x7fffu;  // ordered as numbers, NaN last
      most = magnitude > most ? magnitude : most;
    }
  return type == QUIRE_GGML_MXFP4 ? ldexpf(1.f, (int)most - 127) : f16_widen((uint16_t)most) * (float)types[type].bound;
}

static uint32_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, sizeof x); return x; }
static float load_f16(const uint8_t *p) { uint16_t h; memcpy(&h, p, sizeof h); return f16_widen(h); }

// Q4_K and Q5_K: 8 scales and 8 minimums of 6 bits in 12 bytes.
static void widen_sixes(const uint8_t *p, float scale, float least, float scales[8], float minimums[8]) {
  for (int j = 0; j < 4; j++) {
    scales[j] = scale * (float)(p[j] & 63);
    minimums[j] = least * (float)(p[j + 4] & 63);
    scales[j + 4] = scale * (float)((p[j + 8] & 15) | p[j] >> 6 << 4);
    minimums[j + 4] = least * (float)(p[j + 8] >> 4 | p[j + 4] >> 6 << 4);
  }
}

// Q8_0: d, then 32 signed bytes.
static void widen_q8_0(const uint8_t *block, float *out) {
  const float d = load_f16(block);
  const int8_t *q = (const int8_t *)block + 2;
  for (int i = 0; i < 32; i++) out[i] = d * (float)q[i];
}

// Q4_0: d, then 16 bytes; the low halves are w + 8 of the first 16 of K, the high halves of the others.
static void widen_q4_0(const uint8_t *block, float *out) {
  const float d = load_f16(block);
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)((block[2 + i] & 15) - 8);
    out[16 + i] = d * (float)((block[2 + i] >> 4) - 8);
  }
}

// Numbers 4 · line to 4 · line + 3 of a block of 32: half bytes at `q` in the order of Q4_0, and a fifth bit of each in `high`.
static uint32_t four_of(const uint8_t *q, uint32_t high, int line) {
  const uint32_t halves = load32(q + line % 4 * 4) >> line / 4 * 4 & 0x0f0f0f0f;
  return halves | ((high >> line * 4 & 15) * 0x00204081 & 0x01010101) << 4;
}

// Q4_1: d, the minimum m, then 16 bytes in the order of Q4_0; a weight is d · q + m.
static void widen_q4_1(const uint8_t *block, float *out) {
  const float d = load_f16(block), least = load_f16(block + 2);
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)(block[4 + i] & 15) + least;
    out[16 + i] = d * (float)(block[4 + i] >> 4) + least;
  }
}

// Q5_0: as Q4_0, with the fifth bits of w + 16 in four bytes before the halves.
static void widen_q5_0(const uint8_t *block, float *out) {
  const float d = load_f16(block);
  for (int line = 0; line < 8; line++) {
    const uint32_t four = four_of(block + 6, load32(block + 2), line);
    for (int i = 0; i < 4; i++) out[line * 4 + i] = d * (float)((int)(four >> i * 8 & 31) - 16);
  }
}

// Q5_1: as Q4_1, with four bytes of fifth bits before the halves.
static void widen_q5_1(const uint8_t *block, float *out) {
  const float d = load_f16(block), least = load_f16(block + 2);
  for (int line = 0; line < 8; line++) {
    const uint32_t four = four_of(block + 8, load32(block + 4), line);
    for (int i = 0; i < 4; i++) out[line * 4 + i] = d * (float)(four >> i * 8 & 31) + least;
  }
}

// Q4_K: d, the scale of minimums, 12 bytes of scales and minimums, then 32 bytes for each pair of sub-blocks of 32: the
// low halves are the first one's, the high halves the second one's.
static void widen_q4_k(const uint8_t *block, float *out) {
  float scales[8], minimums[8];
  widen_sixes(block + 4, load_f16(block), load_f16(block + 2), scales, minimums);
  const uint8_t *q = block + 16;
  for (int pair = 0; pair < 8; pair += 2, q += 32, out += 64)
    for (int i = 0; i < 32; i++) {
      out[i] = scales[pair] * (float)(q[i] & 15) - minimums[pair];
      out[32 + i] = scales[pair + 1] * (float)(q[i] >> 4) - minimums[pair + 1];
    }
}

// Q5_K: as Q4_K, with 32 bytes before the halves: bit s of byte i is the fifth bit of weight i of sub-block s.
static void widen_q5_k(const uint8_t *block, float *out) {
  float scales[8], minimums[8];
  widen_sixes(block + 4, load_f16(block), load_f16(block + 2), scales, minimums);
  const uint8_t *high = block + 16, *q = block + 48;
  for (int pair = 0; pair < 8; pair += 2, q += 32, out += 64)
    for (int i = 0; i < 32; i++) {
      out[i] = scales[pair] * (float)((q[i] & 15) | (high[i] >> pair & 1) << 4) - minimums[pair];
      out[32 + i] = scales[pair + 1] * (float)(q[i] >> 4 | (high[i] >> (pair + 1) & 1) << 4) - minimums[pair + 1];
    }
}

// Q6_K: for each 128 weights 64 bytes of low halves, then for each 128 weights 32 bytes of high pairs of bits, then 16
// signed scales of 16 weights each, then d. Low halves: sub-blocks 0 and 1 of 32 in the low ones, 2 and 3 in the high ones;
// bits 2s and 2s + 1 of a byte of pairs are those of sub-block s.
static void widen_q6_k(const uint8_t *block, float *out) {
  const float d = load_f16(block + 208);
  const int8_t *scales = (const int8_t *)block + 192;
  for (int part = 0; part < 8; part++) {
    const uint8_t *low = block + part / 4 * 64 + part % 2 * 32, *high = block + 128 + part / 4 * 32;
    const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
    for (int half = 0; half < 2; half++, low += 16, high += 16, out += 16) {
      const float scale = d * (float)scales[2 * part + half];
      for (int i = 0; i < 16; i++)
        out[i] = scale * (float)(((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
    }
  }
}

// MXFP4: an exponent e, then 16 bytes of codes in the order of Q4_0; a weight is half of the code's number times 2^(e - 127).
static void widen_mxfp4(const uint8_t *block, float *out) {
  static const int8_t numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const uint32_t bits = block[0] ? (uint32_t)block[0] << 23 : 1u << 22;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  for (int i = 0; i < 16; i++) {
    out[i] = (float)numbers[block[1 + i] & 15] * (scale * 0.5f);
    out[16 + i] = (float)numbers[block[1 + i] >> 4] * (scale * 0.5f);
  }
}

// IQ4_NL: d, then 16 bytes of codes in the order of Q4_0.
static void widen_iq4_nl(const uint8_t *block, float *out) {
  const float d = load_f16(block);
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)quire_iq4_numbers[block[2 + i] & 15];
    out[16 + i] = d * (float)quire_iq4_numbers[block[2 + i] >> 4];
  }
}

// Q2_K: for each 16 weights a byte with the scale in the low half and the minimum in the high half; 64 bytes, of which bits 2s
// and 2s + 1 are those of sub-block s of 32 of a half; d, and the scale of minimums.
static void widen_q2_k(const uint8_t *block, float *out) {
  const float d = load_f16(block + 80), least = load_f16(block + 82);
  for (int i = 0; i < 16; i++) {
    const float scale = d * (float)(block[i] & 15), minimum = least * (float)(block[i] >> 4);
    const uint8_t *q = block + 16 + i / 8 * 32 + i % 2 * 16;
    for (int j = 0; j < 16; j++) *out++ = scale * (float)(q[j] >> i % 8 / 2 * 2 & 3) - minimum;
  }
}

// Q4_Z: d, a zero point, then 16 bytes as Q4_0 has them.
static void widen_q4_z(const uint8_t *block, float *out) {
  const float d = load_f16(block);
  for (int i = 0; i < 16; i++) {
    out[i] = d * (float)((block[3 + i] & 15) - block[2]);
    out[16 + i] = d * (float)((block[3 + i] >> 4) - block[2]);
  }
}

void quire_ggml_widen(int type, const uint8_t *blocks, int64_t n, float *out) {
  static void (*const widen[])(const uint8_t *, float *) = {widen_q8_0, widen_q4_0, widen_q4_k, widen_q5_k, widen_q6_k,
                                                            widen_mxfp4, widen_q4_z, widen_q4_1, widen_q5_0,
                                                            widen_q5_1, widen_q2_k, widen_iq4_nl};
  for (int64_t b = 0; b < n; b++) {
    const uint8_t *block = blocks + b * quire_ggml_bytes(type);
    float *w = out + b * quire_ggml_weights(type);
    if (type < QUIRE_GGML_Q3_K) {
      widen[type](block, w);
      continue;
    }
    quire_integers x;
    quire_ggml_integers(type, block, &x);
    for (int i = 0; i < 256; i++) w[i] = x.d * (float)x.scales[i / 16] * (float)x.numbers[i];
  }
}

void quire_widen_f16(const uint16_t *h, int64_t n, float *out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) vf_store(out + i, vf_load_f16(h + i));
  for (; i < n; i++) out[i] = f16_widen(h[i]);
}

// 4 bytes of one column: `line` lines of 64 bytes after `at`.
static void put(uint8_t *at, int64_t line, uint32_t bytes) { memcpy(at + line * 64, &bytes, sizeof bytes); }

uint16_t quire_round_f16(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  const int exponent = (int)(u >> 23) - 127;
  if (exponent < -25) return 0;
  const uint32_t mantissa = (u & 0x7fffff) | 0x800000, shift = exponent >= -14 ? 13 : (uint32_t)(-1 - exponent);
  uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  if (rest + (kept & 1) > 1u << (shift - 1)) kept++;
  return (uint16_t)(exponent >= -14 ? kept + ((uint32_t)(exponent + 14) << 10) : kept);
}

float quire_top(const float *w, int64_t n) {
  vf top = vf_zero();
  for (int64_t i = 0; i < n; i += 16) {
    float x[16] = {0};
    memcpy(x, w + i, (size_t)(n - i < 16 ? n - i : 16) * sizeof *w);
    top = vf_max(vf_abs(vf_load(x)), top);
  }
  return vf_reduce_max(top);
}

void quire_quantize_q8(const float *w, int64_t n, float top, uint8_t *at, uint16_t *scale) {
  float x[32] = {0};
  memcpy(x, w, (size_t)n * sizeof *w);
  const vf half[2] = {vf_load(x), vf_load(x + 16)};
  const float step = top / 127.f;
  const float exact = step < 65504.f ? step : 65504.f;
  *scale = quire_round_f16(exact);
  const vf inverse = vf_set1(exact > 0.f ? 1.f / exact : 0.f);
  for (int i = 0; i < 2; i++) {
    vf_store(x + 16 * i, vf_min(vf_set1(127.f), vf_max(vf_mul(half[i], inverse), vf_set1(-127.f))));
  }
  uint8_t q[32];
  // Truncated after adding the largest number below a half: rounds halves away from zero.
  for (int i = 0; i < 32; i++) q[i] = (uint8_t)(int32_t)(x[i] + copysignf(0x1.fffffep-2f, x[i]));
  for (int line = 0; line < 8; line++) put(at, line, load32(q + line * 4) ^ 0x80808080);
}

static void pack_q8_0(const uint8_t *block, uint8_t *at, uint16_t *scale) {
  memcpy(scale, block, sizeof *scale);
  for (int line = 0; line < 8; line++) put(at, line, load32(block + 2 + line * 4) ^ 0x80808080);
}

static void pack_q5_0(const uint8_t *block, uint8_t *at, uint16_t *scale) {
  memcpy(scale, block, sizeof *scale);
  for (int line = 0; line < 8; line++) put(at, line, four_of(block + 6, load32(block + 2), line) + 0x70707070);
}

static void pack_q4_0(const uint8_t *block, uint8_t *at, uint16_t *scale) {
  memcpy(scale, block, sizeof *scale);
  for (int line = 0; line < 4; line++) put(at, line, load32(block + 2 + line * 4));
}

static uint32_t four_numbers(const int8_t *numbers, uint32_t flipped) { return load32((const uint8_t *)numbers) ^ flipped; }

static void pack_iq4_nl(const uint8_t *block, uint8_t *at, uint16_t *scale) {
  int8_t numbers[32];
  for (int i = 0; i < 16; i++) {
    numbers[i] = quire_iq4_numbers[block[2 + i] & 15];
    numbers[16 + i] = quire_iq4_numbers[block[2 + i] >> 4];
  }
  memcpy(scale, block, sizeof *scale);
  for (int line = 0; line < 8; line++) put(at, line, four_numbers(numbers + line * 4, 0x80808080));
}

// 256 weights as blocks of q8, whose scales are rounded to fp16.
static void pack_as_q8(const quire_integers *x, uint8_t *at, uint16_t *scales) {
  for (int part = 0; part < 8; part++) {
    scales[part * 16] = quire_integers_scale(x, part);
    for (int line = 0; line < 8; line++) put(at, part * 8 + line, four_numbers(x->numbers + part * 32 + line * 4, 0x80808080));
  }
}

// 256 weights with numbers from -1 to 1 as blocks of q4, whose scale is d.
static void pack_as_q4(const quire_integers *x, uint8_t *at, uint16_t *scales) {
  for (int part = 0; part < 8; part++) {
    scales[part * 16] = quire_integers_scale(x, part);
    for (int line = 0; line < 4; line++) {
      const int8_t *numbers = x->numbers + part * 32 + line * 4;
      uint8_t pairs[4];
      for (int i = 0; i < 4; i++) pairs[i] = (uint8_t)((numbers[i] + 8) | (numbers[16 + i] + 8) << 4);
      put(at, part * 4 + line, load32(pairs));
    }
  }
}

// Block b of n, whose exponent and codes have places of their own in the panel.
static void pack_mxfp4(const uint8_t *block, uint8_t *panel, int64_t b, int64_t n, int64_t column) {
  panel[b * 16 + column] = block[0];
  uint8_t *at = panel + quire_mxfp4_scale_bytes(n * 32) + b * 256 + column * 4;
  for (int line = 0; line < 4; line++) put(at, line, load32(block + 1 + line * 4));
}

// As pack_mxfp4, with a scale and a zero point.
static void pack_q4_z(const uint8_t *block, uint8_t *panel, int64_t b, int64_t n, int64_t column) {
  memcpy(panel + (b * 16 + column) * 2, block, 2);
  panel[n * 32 + b * 16 + column] = block[2];
  uint8_t *at = panel + quire_q4_z_scale_bytes(n * 32) + b * 256 + column * 4;
  for (int line = 0; line < 4; line++) put(at, line, load32(block + 3 + line * 4));
}

// A k-quant's super-block as one column of a panel's super-block, whose layout is in simd/tiles.h.
static inline __attribute__((always_inline)) void pack_k(int dtype, const uint8_t *block, uint8_t *super_block, int64_t column) {
  const uint8_t *scales = dtype == QUIRE_Q6_K ? block + 192 : block + 4;
  const int64_t scale_lines = quire_scale_lines(dtype);
  uint8_t *at = super_block + column * 4;
  memcpy(super_block + column * 2, dtype == QUIRE_Q6_K ? block + 208 : block, 2);
  if (dtype != QUIRE_Q6_K) memcpy(super_block + 32 + column * 2, block + 2, 2);
  for (int64_t byte = 0; byte < (scale_lines - 1) * 4; byte++) super_block[64 + byte * 16 + column] = scales[byte];
  for (int j = 0; j < 8; j++) {
    const int64_t pair = (dtype == QUIRE_Q5_K ? 48 : 16) + j / 2 * 32;
    const uint8_t *low = block + (dtype == QUIRE_Q6_K ? j / 4 * 64 + j % 2 * 32 : pair);
    const int shift = dtype == QUIRE_Q6_K ? j % 4 / 2 * 4 : j % 2 * 4;
    uint8_t *lines = at + (scale_lines + j * dtype) * 64;
    for (int k = 0; k < 4; k++)
      put(lines, k, (load32(low + k * 4) >> shift & 0x0f0f0f0f) | (load32(low + 16 + k * 4) >> shift & 0x0f0f0f0f) << 4);
    uint32_t high[2] = {0, 0};
    for (int half = 0; half < 2; half++)
      for (int k = 0; k < 4 && dtype != QUIRE_Q4_K; k++) {
        const uint32_t bits = load32(block + (dtype == QUIRE_Q5_K ? 16 : 128 + j / 4 * 32) + half * 16 + k * 4);
        if (dtype == QUIRE_Q5_K) high[0] |= (bits >> j & 0x01010101) << (half * 4 + k);
        else high[half] |= (bits >> j % 4 * 2 & 0x03030303) << 2 * k;
      }
    for (int line = 0; line < dtype - 4; line++) put(lines, 4 + line, high[line]);
  }
}

// Block b, of Q3_K, IQ3 or TQ.
static void pack_integers(int type, const uint8_t *block, uint8_t *panel, uint16_t *scales, int64_t b, int64_t column) {
  uint8_t same[210];  // the block in a type with the same weights
  quire_integers x;
  quire_ggml_integers(type, block, &x);
  if (type == QUIRE_GGML_TQ1_0 || type == QUIRE_GGML_TQ2_0) {
    pack_as_q4(&x, panel + b * 2048 + column * 4, scales + b * 128 + column);
  } else if (type == QUIRE_GGML_IQ3_S) {
    quire_integers_as_q5_k(&x, same);
    pack_k(QUIRE_Q5_K, same, panel + b * quire_super_block_bytes(QUIRE_Q5_K), column);
  } else {
    quire_integers_as_q6_k(&x, same);
    pack_k(QUIRE_Q6_K, same, panel + b * quire_super_block_bytes(QUIRE_Q6_K), column);
  }
}

void quire_ggml_pack(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane, uint8_t *panel,
                     uint16_t *scales) {
  for (int64_t b = 0; b < n; b++)
    for (int64_t row = 0; row < rows; row++) {
      const uint8_t *block = blocks + row * stride + b * quire_ggml_bytes(type);
      const int64_t column = lane + row;
      switch (type) {
        case QUIRE_GGML_Q8_0: pack_q8_0(block, panel + b * 512 + column * 4, scales + b * 16 + column); break;
        case QUIRE_GGML_Q5_0: pack_q5_0(block, panel + b * 512 + column * 4, scales + b * 16 + column); break;
        case QUIRE_GGML_IQ4_NL: pack_iq4_nl(block, panel + b * 512 + column * 4, scales + b * 16 + column); break;
        case QUIRE_GGML_Q4_0: pack_q4_0(block, panel + b * 256 + column * 4, scales + b * 16 + column); break;
        case QUIRE_GGML_MXFP4: pack_mxfp4(block, panel, b, n, column); break;
        case QUIRE_GGML_Q4_Z: pack_q4_z(block, panel, b, n, column); break;
        case QUIRE_GGML_Q4_K: pack_k(QUIRE_Q4_K, block, panel + b * quire_super_block_bytes(QUIRE_Q4_K), column); break;
        case QUIRE_GGML_Q5_K: pack_k(QUIRE_Q5_K, block, panel + b * quire_super_block_bytes(QUIRE_Q5_K), column); break;
        case QUIRE_GGML_Q6_K: pack_k(QUIRE_Q6_K, block, panel + b * quire_super_block_bytes(QUIRE_Q6_K), column); break;
        default: pack_integers(type, block, panel, scales, b, column);
      }
    }
}

void quire_ggml_requantize(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane, uint8_t *panel,
                           uint16_t *scales) {
  const int64_t weights = quire_ggml_weights(type), nbytes = quire_ggml_bytes(type);
  float w[256];
  for (int64_t b = 0; b < n; b++)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t column = lane + row;
      if (type == QUIRE_GGML_IQ4_XS || type == QUIRE_GGML_IQ2_XXS) {
        quire_integers x;
        quire_ggml_integers(type, blocks + row * stride + b * nbytes, &x);
        pack_as_q8(&x, panel + b * 4096 + column * 4, scales + b * 128 + column);
        continue;
      }
      quire_ggml_widen(type, blocks + row * stride + b * nbytes, 1, w);
      for (int64_t k = 0; k < weights; k += 32) {
        const int64_t at = (b * weights + k) * 16;
        quire_quantize_q8(w + k, 32, quire_top(w + k, 32), panel + at + column * 4, scales + at / 32 + column);
      }
    }
}
