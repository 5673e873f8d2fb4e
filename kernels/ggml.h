// Rows of GGML blocks, as GGUF files have them: packed into panels of the same numbers, and widened to f32. Also GGML's
// quantization of weights. Q4_Z is not a type of GGML: it is Q4_0 with a byte for the zero point after the scale.
// A row is consecutive blocks along K. Each block has its own scales, so rows and blocks are independent.
#pragma once
#include <stdint.h>

enum { QUIRE_GGML_Q8_0, QUIRE_GGML_Q4_0, QUIRE_GGML_Q4_K, QUIRE_GGML_Q5_K, QUIRE_GGML_Q6_K, QUIRE_GGML_MXFP4, QUIRE_GGML_Q4_Z,
       QUIRE_GGML_Q4_1, QUIRE_GGML_Q5_0, QUIRE_GGML_Q5_1 };

int64_t quire_ggml_weights(int type);  // weights per block
int64_t quire_ggml_bytes(int type);    // bytes per block

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
// same numbers. `scales` are those of the panel in q8 and q4; dtypes of super-blocks have theirs in the panel. Q4_1 and Q5_1
// have no such dtype.
void quire_ggml_pack(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane, uint8_t *panel,
                     uint16_t *scales);

// The same in q8 for every type: weights are widened, then quantized, 32 along K of each column in turn.
void quire_ggml_requantize(int type, const uint8_t *blocks, int64_t stride, int64_t rows, int64_t n, int lane, uint8_t *panel,
                           uint16_t *scales);
