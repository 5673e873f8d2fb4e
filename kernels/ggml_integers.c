// GGML's types of fewer than 4 bits, and IQ4_XS: a weight is an fp16 number of its block times two integers, a scale and a number.
#include <math.h>
#include <string.h>

#include "ggml.h"
#include "ggml_grids.h"
#include "simd/tiles.h"
#include "simd/vec.h"

const int8_t quire_iq4_numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static uint32_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, sizeof x); return x; }
static uint16_t load16(const uint8_t *p) { uint16_t x; memcpy(&x, p, sizeof x); return x; }

// Q3_K: 32 bytes of third bits, 64 bytes of the lower two, 12 bytes of scales, d. Bits 2s and 2s + 1 of a byte are those of
// sub-block s of 32 of its half. A scale has 4 bits in one of the first 8 bytes, and 2 in one of the last 4.
static void read_q3_k(const uint8_t *block, quire_integers *out) {
  const uint8_t *scales = block + 96;
  for (int i = 0; i < 16; i++)
    out->scales[i] = (int8_t)(((i < 8 ? scales[i] & 15 : scales[i - 8] >> 4) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
  for (int part = 0; part < 8; part++) {
    const uint8_t *low = block + 32 + part / 4 * 32;
    for (int i = 0; i < 32; i++)
      out->numbers[part * 32 + i] = (int8_t)((low[i] >> part % 4 * 2 & 3) + (block[i] >> part & 1) * 4 - 4);
  }
  out->d = f16_widen(load16(block + 108));
}

// Write the magnitudes of a point with the signs of its bits; `bits` per magnitude.
static void put_point(uint32_t point, int bits, const uint8_t *magnitudes, uint32_t signs, int count, int8_t *out) {
  for (int i = 0; i < count; i++) {
    const int8_t size = (int8_t)magnitudes[point >> bits * i & ((1u << bits) - 1)];
    out[i] = signs >> i & 1 ? (int8_t)-size : size;
  }
}

// 8 signs from 7 bits: the number of minus signs is even.
static uint32_t even_signs(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }

static const uint8_t of_iq2[4] = {8, 25, 43}, of_iq3_xxs[8] = {2, 6, 10, 14, 18, 22, 26, 31};
static const uint8_t of_iq3_s[8] = {1, 3, 5, 7, 9, 11, 13, 15};

// IQ2_XXS: d, then for each 32 weights 4 points, and a word of 4 times 7 signs and a scale.
static void read_iq2_xxs(const uint8_t *block, quire_integers *out) {
  for (int part = 0; part < 8; part++) {
    const uint8_t *points = block + 2 + part * 8;
    const uint32_t word = load32(points + 4);
    for (int i = 0; i < 4; i++)
      put_point(grid_iq2_xxs[points[i]], 2, of_iq2, even_signs(word >> 7 * i & 127), 8, out->numbers + part * 32 + i * 8);
    out->scales[2 * part] = out->scales[2 * part + 1] = (int8_t)(2 * (word >> 28) + 1);
  }
  out->d = f16_widen(load16(block)) * 0.125f;
}

// IQ2_XS: d, then 32 words of 9 bits of a point and 7 signs, then half bytes of scales of 16 weights.
static void read_iq2_xs(const uint8_t *block, quire_integers *out) {
  for (int i = 0; i < 32; i++) {
    const uint32_t word = load16(block + 2 + 2 * i);
    put_point(grid_iq2_xs[word & 511], 2, of_iq2, even_signs(word >> 9), 8, out->numbers + i * 8);
  }
  for (int i = 0; i < 16; i++) out->scales[i] = (int8_t)(2 * (block[66 + i / 2] >> i % 2 * 4 & 15) + 1);
  out->d = f16_widen(load16(block)) * 0.125f;
}

// IQ2_S: d, 32 bytes of points, 32 bytes of signs, 8 bytes of the higher two bits of points, scales as IQ2_XS.
static void read_iq2_s(const uint8_t *block, quire_integers *out) {
  for (int i = 0; i < 32; i++) {
    const uint32_t point = block[2 + i] | (uint32_t)(block[66 + i / 4] >> i % 4 * 2 & 3) << 8;
    put_point(grid_iq2_s[point], 2, of_iq2, block[34 + i], 8, out->numbers + i * 8);
  }
  for (int i = 0; i < 16; i++) out->scales[i] = (int8_t)(2 * (block[74 + i / 2] >> i % 2 * 4 & 15) + 1);
  out->d = f16_widen(load16(block)) * 0.125f;
}

// IQ3_XXS: d, 64 bytes of points, then a word of signs and a scale for each 32 weights, as IQ2_XXS. Numbers are half of GGML's.
static void read_iq3_xxs(const uint8_t *block, quire_integers *out) {
  for (int part = 0; part < 8; part++) {
    const uint32_t word = load32(block + 66 + part * 4);
    for (int i = 0; i < 8; i++)
      put_point(grid_iq3_xxs[block[2 + part * 8 + i]], 3, of_iq3_xxs, even_signs(word >> i / 2 * 7 & 127) >> i % 2 * 4, 4,
                out->numbers + part * 32 + i * 4);
    out->scales[2 * part] = out->scales[2 * part + 1] = (int8_t)(2 * (word >> 28) + 1);
  }
  out->d = f16_widen(load16(block)) * 0.5f;
}

// IQ3_S: d, 64 bytes of points, 8 bytes of their ninth bits, 32 bytes of signs, 4 bytes of scales of 32 weights.
static void read_iq3_s(const uint8_t *block, quire_integers *out) {
  for (int i = 0; i < 64; i++) {
    const uint32_t point = block[2 + i] | (uint32_t)(block[66 + i / 8] >> i % 8 & 1) << 8;
    put_point(grid_iq3_s[point], 3, of_iq3_s, (uint32_t)block[74 + i / 2] >> i % 2 * 4, 4, out->numbers + i * 4);
  }
  for (int i = 0; i < 16; i++) out->scales[i] = (int8_t)(2 * (block[106 + i / 4] >> i / 2 % 2 * 4 & 15) + 1);
  out->d = f16_widen(load16(block));
}

// IQ4_XS: d, 16 bits of the higher bits of scales, 4 bytes of their lower half bytes, then 16 bytes of codes for each 32 weights.
static void read_iq4_xs(const uint8_t *block, quire_integers *out) {
  for (int part = 0; part < 8; part++) {
    const int low = block[4 + part / 2] >> part % 2 * 4 & 15, high = load16(block + 2) >> 2 * part & 3;
    const uint8_t *codes = block + 8 + part * 16;
    out->scales[2 * part] = out->scales[2 * part + 1] = (int8_t)((low | high << 4) - 32);
    for (int i = 0; i < 16; i++) {
      out->numbers[part * 32 + i] = quire_iq4_numbers[codes[i] & 15];
      out->numbers[part * 32 + 16 + i] = quire_iq4_numbers[codes[i] >> 4];
    }
  }
  out->d = f16_widen(load16(block));
}

// A digit to base 3, from 0 to 2, of a byte that holds five of them as a fraction of 256.
static int8_t digit(uint8_t byte, int place) {
  static const uint8_t powers[5] = {1, 3, 9, 27, 81};
  return (int8_t)(((uint32_t)(uint8_t)(byte * powers[place]) * 3 >> 8) - 1);
}

// TQ1_0: 32 bytes of 5 digits each, 16 bytes of 5, 4 bytes of 4, d; a byte's digits are as far apart as there are bytes.
static void read_tq1_0(const uint8_t *block, quire_integers *out) {
  int8_t *numbers = out->numbers;
  for (int i = 0; i < 160; i++) *numbers++ = digit(block[i % 32], i / 32);
  for (int i = 0; i < 80; i++) *numbers++ = digit(block[32 + i % 16], i / 16);
  for (int i = 0; i < 16; i++) *numbers++ = digit(block[48 + i % 4], i / 4);
  memset(out->scales, 1, sizeof out->scales);
  out->d = f16_widen(load16(block + 52));
}

// TQ2_0: 64 bytes, bits 2s and 2s + 1 of a byte are those of sub-block s of 32 of its half; d.
static void read_tq2_0(const uint8_t *block, quire_integers *out) {
  for (int i = 0; i < 256; i++) out->numbers[i] = (int8_t)((block[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) - 1);
  memset(out->scales, 1, sizeof out->scales);
  out->d = f16_widen(load16(block + 64));
}

void quire_ggml_integers(int type, const uint8_t *block, quire_integers *out) {
  switch (type) {
    case QUIRE_GGML_Q3_K: read_q3_k(block, out); break;
    case QUIRE_GGML_IQ2_XXS: read_iq2_xxs(block, out); break;
    case QUIRE_GGML_IQ2_XS: read_iq2_xs(block, out); break;
    case QUIRE_GGML_IQ2_S: read_iq2_s(block, out); break;
    case QUIRE_GGML_IQ3_XXS: read_iq3_xxs(block, out); break;
    case QUIRE_GGML_IQ3_S: read_iq3_s(block, out); break;
    case QUIRE_GGML_IQ4_XS: read_iq4_xs(block, out); break;
    case QUIRE_GGML_TQ1_0: read_tq1_0(block, out); break;
    default: read_tq2_0(block, out);
  }
}

// A number from -65504 to 65504 in fp16.
static uint16_t signed_f16(float x) { return (uint16_t)(quire_round_f16(fabsf(x)) | (signbit(x) ? 0x8000 : 0)); }

void quire_integers_as_q6_k(const quire_integers *x, uint8_t *block) {
  const uint16_t d = signed_f16(x->d);
  memset(block, 0, 192);
  for (int part = 0; part < 8; part++) {
    uint8_t *low = block + part / 4 * 64 + part % 2 * 32, *high = block + 128 + part / 4 * 32;
    const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
    for (int i = 0; i < 32; i++) {
      const uint8_t q = (uint8_t)(x->numbers[part * 32 + i] + 32);
      low[i] |= (uint8_t)((q & 15) << low_shift);
      high[i] |= (uint8_t)(q >> 4 << high_shift);
    }
  }
  memcpy(block + 192, x->scales, 16);
  memcpy(block + 208, &d, sizeof d);
}

void quire_integers_as_q5_k(const quire_integers *x, uint8_t *block) {
  const uint16_t d = signed_f16(x->d), least = signed_f16(x->d * 8.f);
  uint8_t *scales = block + 4, *high = block + 16;
  memcpy(block, &d, sizeof d);
  memcpy(block + 2, &least, sizeof least);
  memset(scales, 0, 44);
  for (int part = 0; part < 8; part++) {
    const uint8_t scale = (uint8_t)x->scales[2 * part], minimum = (uint8_t)(2 * scale);
    uint8_t *low = block + 48 + part / 2 * 32;
    if (part < 4) {
      scales[part] |= scale, scales[part + 4] |= minimum;
    } else {
      scales[part + 4] = (uint8_t)((scale & 15) | (minimum & 15) << 4);
      scales[part - 4] |= (uint8_t)(scale >> 4 << 6), scales[part] |= (uint8_t)(minimum >> 4 << 6);
    }
    for (int i = 0; i < 32; i++) {
      const uint8_t q = (uint8_t)(x->numbers[part * 32 + i] + 16);
      low[i] = (uint8_t)(part % 2 ? (low[i] | (q & 15) << 4) : (q & 15));
      high[i] |= (uint8_t)(q >> 4 << part);
    }
  }
}

uint16_t quire_integers_scale(const quire_integers *x, int part) { return signed_f16(x->d * (float)x->scales[2 * part]); }
