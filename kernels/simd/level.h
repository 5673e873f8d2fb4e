// The functions of one ISA level, declared for its table in tiles.c. Internal to simd/.
#pragma once
#include "tiles.h"
#include "vec.h"

// The amx level replaces some functions of avx512 and takes the others from it. LEVEL(name) is a name of the level's own.
#if defined QUIRE_ISA_AMX_TWIN
#define LEVEL(name) name##_amx_twin
#define LEVEL_NAME "amx-twin"
#elif defined QUIRE_ISA_AMX
#define LEVEL(name) name##_amx
#define LEVEL_NAME "amx"
#else
#define LEVEL(name) ISA(name)
#define LEVEL_NAME ISA_NAME
#endif

void ISA(linear_f32)(int rows, const quire_linear_tile *t);
void ISA(linear_bf16)(int rows, const quire_linear_tile *t);
void ISA(linear_q8)(int rows, const quire_linear_tile *t);
#if defined QUIRE_ISA_AVX512
int ISA(adds_exponents)(void);  // whether that is faster here than a product of scales, see `vs_mul`
#endif
void ISA(linear_q4)(int rows, const quire_linear_tile *t);
void ISA(linear_q4_k)(int rows, const quire_linear_tile *t);
void ISA(linear_q5_k)(int rows, const quire_linear_tile *t);
void ISA(linear_q6_k)(int rows, const quire_linear_tile *t);
void ISA(sum_blocks)(const quire_rows *a, int64_t rows, quire_block_sums *out);
void ISA(sum_halves)(const quire_rows *a, int64_t rows, int32_t *out);
void ISA(linear_mxfp4)(int rows, const quire_linear_tile *t);
void ISA(linear_q4_z)(int rows, const quire_linear_tile *t);
void ISA(attention_f32)(int rows, const quire_attention_tile *t);
void ISA(attention_bf16)(int rows, const quire_attention_tile *t);
void ISA(attention_int8)(int rows, const quire_attention_tile *t);
void ISA(attention_f16)(int rows, const quire_attention_tile *t);
void ISA(merge)(int rows, int64_t head_dim, const float *m, const float *l, const float *o,
                float *total_m, float *total_l, float *total_o);
void ISA(convert)(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_output *out, int64_t row,
                  int64_t column);
void ISA(rotate)(const float *x, int64_t columns, int64_t group, float *out);
void ISA(rotate_back)(float *x, int64_t width, int64_t group);
void ISA(rms_factors)(const float *squares, int64_t width, int64_t rows, int64_t columns, float eps, float *factors);
float ISA(inverse_rms)(const float *x, float eps, int64_t n);
void ISA(add_norm)(const float *y, const float *weight, float eps, int64_t columns, float *x);
void ISA(norm_row)(int kind, const float *x, const float *weight, const float *bias, float eps, int64_t columns,
                   float *out);
void ISA(mean_rows)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *out);
void ISA(activate)(int epilogue, float *x, int64_t n);
void ISA(add_columns)(float *y, int64_t rows, float *out, int64_t stride);
void ISA(soft_cap)(float *x, int64_t n, float cap);
void ISA(add_low_rank)(int dtype, int64_t rows, const float *x, int64_t stride, const void *w, int64_t k, float *y,
                       int64_t ldy);
void ISA(gate_columns)(int epilogue, const float *x, int64_t rows, float *y, int64_t stride);
void ISA(gate)(const float *gates, int64_t n, float *x);
void ISA(head)(const float *x, const quire_head *h, const float *rotary, float *out);
void ISA(store_key)(const float *x, int64_t slot, const quire_page *page);
void ISA(store_value)(const float *x, int64_t slot, const quire_page *page);
void ISA(values_of_keys)(const quire_page *page, int64_t columns, int64_t tokens, void *v, float *scales);
void ISA(to_bf16)(const float *x, int64_t n, uint16_t *out);
void ISA(unpack_column)(const void *panel, const uint16_t *scales, int dtype, int64_t group, int64_t width, int lane,
                        float *out);
void ISA(unpack_k)(const void *panel, int bits, int64_t width, int lane, float *out);
void ISA(unpack_mxfp4)(const void *panel, int64_t width, int lane, float *out);
void ISA(quantize_q4)(const float *w, uint16_t *scales, void *block);
void ISA(block_maxima)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *maxima,
                       int64_t maxima_stride);
int64_t ISA(argmax)(const float *x, int64_t n, float *max);
double ISA(sum_exp)(const float *x, int64_t n, float shift);
void ISA(exp_scaled)(const float *x, float shift, float scale, int64_t n, float *out);
void ISA(set_forbidden)(const int32_t *mask, int64_t words, float value, float *x);
void ISA(route)(const quire_router *r, const float *logits, int32_t *indices, float *weights);
void ISA(combine)(const float *y, int64_t stride, const int32_t *places, const float *weights, int64_t chosen,
                  int64_t columns, float *out);
void ISA(convolve)(const quire_convolution *c, const float *x, int64_t position, float *out);
void ISA(recurrent_gates)(const quire_recurrence *r, float *decay, float *rate);
void ISA(recur)(const quire_recurrence *r, const quire_recurrent_token *t, int64_t tokens, const void *from, void *to);
void ISA(gated_norm)(const quire_gated_norm *n, const float *gate, float *x);
float ISA(stream)(const char *p, int64_t bytes, int64_t ahead);
int64_t ISA(peak)(int dtype, int64_t steps, const void *w, const void *a, float *result);

#if defined QUIRE_ISA_AMX
enum { AMX_LINEAR_ROWS = LINEAR_ROWS_4_BITS };  // the rows that stay in L2, ROWS_IN_CACHE in ../linear.pyx
void LEVEL(pack_bf16)(const quire_rows *a, int rows, void *out);
void LEVEL(pack_q8)(const quire_rows *a, int rows, void *out);
void LEVEL(linear_bf16)(int rows, const quire_linear_tile *t);
void LEVEL(linear_q8)(int rows, const quire_linear_tile *t);
void LEVEL(linear_q4)(int rows, const quire_linear_tile *t);
void LEVEL(attention_bf16)(int rows, const quire_attention_tile *t);
void LEVEL(attention_int8)(int rows, const quire_attention_tile *t);
int64_t LEVEL(peak)(int dtype, int64_t steps, const void *w, const void *a, float *result);
void LEVEL(end)(void);
#endif
