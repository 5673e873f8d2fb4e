// The table of one ISA level. This file is compiled once per level; amx takes most functions from avx512.
#include "level.h"

#if defined QUIRE_ISA_AMX_TWIN
#define ENDS {[QUIRE_END_OF_TWIN] = LEVEL(end)}
#elif defined QUIRE_ISA_AMX
#define ENDS {[QUIRE_END_OF_AMX] = LEVEL(end)}
#else
#define ENDS {0}
#endif

// The same for each class of row counts.
#define EACH(...) {__VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__}
#define LINEAR(function, most) EACH({function, most, 0})

#if defined QUIRE_ISA_AMX
#define ON_TILES(dtype) {LEVEL(linear_##dtype), AMX_LINEAR_ROWS, LEVEL(pack_##dtype)}
#define BF16 EACH(ON_TILES(bf16))
// Few rows fill a tile too little.
#define Q8 {{ISA(linear_q8), LINEAR_ROWS, 0}, {ISA(linear_q8), LINEAR_ROWS, 0}, ON_TILES(q8), ON_TILES(q8), ON_TILES(q8)}
#define FEW_OF_Q4 {ISA(linear_q4), LINEAR_ROWS_4_BITS, 0}
#define MANY_OF_Q4 {LEVEL(linear_q4), AMX_LINEAR_ROWS, LEVEL(pack_q8)}
#define Q4 {FEW_OF_Q4, FEW_OF_Q4, FEW_OF_Q4, MANY_OF_Q4, MANY_OF_Q4}
#define INT8 {ISA(attention_int8), ISA(attention_int8), LEVEL(attention_int8), LEVEL(attention_int8), LEVEL(attention_int8)}
#else
#define BF16 LINEAR(ISA(linear_bf16), LINEAR_ROWS)
#define Q8 LINEAR(ISA(linear_q8), LINEAR_ROWS)
#define Q4 LINEAR(ISA(linear_q4), LINEAR_ROWS_4_BITS)
#define INT8 EACH(ISA(attention_int8))
#endif

const quire_tiles LEVEL(quire_tiles) = {
    .name = LEVEL_NAME,
    .linear = {LINEAR(ISA(linear_f32), LINEAR_ROWS), BF16, Q8, Q4, LINEAR(ISA(linear_q4_k), LINEAR_ROWS_4_BITS),
               LINEAR(ISA(linear_q5_k), LINEAR_ROWS), LINEAR(ISA(linear_q6_k), LINEAR_ROWS_4_BITS),
               LINEAR(ISA(linear_mxfp4), LINEAR_ROWS), LINEAR(ISA(linear_q4_z), LINEAR_ROWS)},
    .sum_blocks = ISA(sum_blocks),
    .sum_halves = ISA(sum_halves),
    .attention = {EACH(ISA(attention_f32)), EACH(LEVEL(attention_bf16)), INT8, EACH(ISA(attention_f16))},
    .merge = ISA(merge),
    .convert = ISA(convert),
    .rotate = ISA(rotate),
    .rotate_back = ISA(rotate_back),
    .rms_factors = ISA(rms_factors),
    .inverse_rms = ISA(inverse_rms),
    .add_norm = ISA(add_norm),
    .norm_row = ISA(norm_row),
    .mean_rows = ISA(mean_rows),
    .activate = ISA(activate),
    .add_columns = ISA(add_columns),
    .soft_cap = ISA(soft_cap),
    .add_low_rank = ISA(add_low_rank),
    .gate_columns = ISA(gate_columns),
    .gate = ISA(gate),
    .head = ISA(head),
    .store_key = ISA(store_key),
    .store_value = ISA(store_value),
    .values_of_keys = ISA(values_of_keys),
    .to_bf16 = ISA(to_bf16),
    .unpack_column = ISA(unpack_column),
    .quantize_q4 = ISA(quantize_q4),
    .block_maxima = ISA(block_maxima),
    .argmax = ISA(argmax),
    .sum_exp = ISA(sum_exp),
    .exp_scaled = ISA(exp_scaled),
    .set_forbidden = ISA(set_forbidden),
    .route = ISA(route),
    .combine = ISA(combine),
    .convolve = ISA(convolve),
    .recurrent_gates = ISA(recurrent_gates),
    .recur = ISA(recur),
    .gated_norm = ISA(gated_norm),
    .stream = ISA(stream),
    .peak = LEVEL(peak),
    .ends = ENDS,
};
