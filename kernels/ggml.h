// Rows of GGML blocks, as GGUF files have them: packed into panels of the same numbers, and widened to f32. Also GGML's
// quantization of weights. Q4_Z is not a type of GGML: it is Q4_0 with a byte for the zero point after the scale.
// A row is consecutive blocks along K. Each block has its own scales, so rows and blocks are independent.
#pragma once
#include <stdint.h>

enum { QUIRE_GGML_Q8_0, QUIRE_GGML_Q4_0, QUIRE_GGML_Q4_K, QUIRE_GGML_Q5_K, QUIRE_GGML_Q6_K, QUIRE_GGML_MXFP4, QUIRE_GGML_Q4_Z,
       QUIRE_GGML_Q4_1, QUIRE_GGML_Q5_0, QUIRE_GGML_Q5_1, QUIRE_GGML_Q2_K, QUIRE_GGML_IQ4_NL,
       QUIRE_GGML_Q3_K, QUIRE_GGML_IQ2_XXS, QUIRE_GGML_IQ2_XS, QUIRE_GGML_IQ2_S, QUIRE_GGML_IQ3_XXS, QUIRE_GGML_IQ3_S,
       QUIRE_GGML_IQ4_XS, QUIRE_GGML_TQ1_0, QUIRE_GGML_TQ2_0 };

int64_t quire_ggml_weights(int type);  // weights per block
int64_t quire_ggml_bytes(int type);    // bytes per block

// The largest scale of `n` blocks, or NaN. From Q3_K on, times the largest product of a scale and a number: a bound of weights.
float quire_ggml_largest(int type, const uint8_t *blocks, int64_t n);

// A block from Q3_K on: weight i is d * scales[i / 16] * numbers[i].
typedef struct {
  float d;
  int8_t scales[16];
  int8_t numbers[256];
} quire_integers;

void quire_ggml_integers(int type, const uint8_t *block, quire_integers *out);

// Blocks of Q6_K, with numbers from -32 to 31, and of Q5_K, with numbers from -15 to 15 and scales from 1 to 31 of 32 weights
// each, have the same weights if fp16 has d, or 8 * d.
void quire_integers_as_q6_k(const quire_integers *x, uint8_t *block);
void quire_integers_as_q5_k(const quire_integers *x, uint8_t *block);
uint16_t quire_integers_scale(const quire_integers *x, int part);  // d * scale of a part of 32 weights, rounded to fp16

extern const int8_t quire_iq4_numbers[16];  // the numbers of IQ4_NL and IQ4_XS
uint16_t quire_round_f16(float x);          // a number from 0 to 65504, the largest of fp16, to nearest even

// Widen `n` blocks to f32 with GGML's formula.
void quire_ggml_widen(int type, const uint8_t *blocks, int64_t n, float *out);

// Widen `n` numbers of fp16 to f32, exactly.
void quire_widen_f16(const uint16_t *h, int64_t n, float *out);

// max|w| of n weights; a NaN counts as 0.
float quire_top(const float *w, int64_t n);

// Quantize n <= 32 weights of one column; with `top` their max|w|, to the bits that llama.cpp gives them in Q8_0: the numbers
// are rounded with the exact scale top / 127, halves away from zero, and the scale is stored in fp16. A NaN becomes the least
// number. Writes 4 bytes of each of 8 lines of 64 bytes from `at` on; weights from n on are zero.
void quire_quantize_q8(const float *w, int64_t n, float top, uint8_t *at, uint16_t *scale);

// Write `rows` rows of `n` blocks, `stride` bytes apart, as columns [lane, lane + rows) of one panel of the dtype with the
// same numbers. `scales` are those of the panel in q8 and q4; dtypes of super-blocks have theirs in the panel. Only the types of
// BLOCK_DTYPES in pack.pyx have such a dtype.
void quire_ggml_pack(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane, uint8_t *panel,
                     uint16_t *scales);

// The same in q8 for every type: weights are widened, then quantized, 32 along K of each column in turn. IQ4_XS and IQ2_XXS keep
// their numbers, and their scales are rounded to fp16.
void quire_ggml_requantize(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane, uint8_t *panel,
                           uint16_t *scales);
