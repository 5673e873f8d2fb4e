// The table of one ISA level. This file is compiled once per level.
#include "level.h"

const quire_tiles ISA(quire_tiles) = {
    .name = ISA_NAME,
    .linear_rows = LINEAR_ROWS,
    .linear = {ISA(linear_f32), ISA(linear_bf16), ISA(linear_q8)},
    .attention = {ISA(attention_f32), ISA(attention_bf16), ISA(attention_int8)},
    .merge = ISA(merge),
    .convert = ISA(convert),
    .rms_factors = ISA(rms_factors),
    .head = ISA(head),
    .store_key = ISA(store_key),
    .store_value = ISA(store_value),
    .to_bf16 = ISA(to_bf16),
    .unpack_column = ISA(unpack_column),
    .block_maxima = ISA(block_maxima),
    .argmax = ISA(argmax),
    .sum_exp = ISA(sum_exp),
    .exp_scaled = ISA(exp_scaled),
    .stream = ISA(stream),
    .peak = ISA(peak),
};
