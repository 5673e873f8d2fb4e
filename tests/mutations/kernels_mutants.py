"""Bugs in `kernels/`. Each is compiled, which takes up to a minute or two."""

from mutant import Mutant

TESTS = "tests/kernels"
SAMPLING = "tests/kernels/test_sample.py"
ATTENTION, HEADS, LINEAR, SAMPLE = (f"kernels/{name}.pyx" for name in ("attention", "heads", "linear", "sample"))
SIMD_ATTENTION, ROWS, SIMD_LINEAR, SIMD_HEADS = (
    f"kernels/simd/{name}.c" for name in ("attention", "rows", "linear", "heads")
)
SOFTMAX, EPILOGUE = "kernels/simd/softmax.h", "kernels/simd/epilogue.h"
PACK, Q4, K_QUANTS, MXFP4 = "kernels/pack.pyx", *(f"kernels/simd/{name}.c" for name in ("q4", "kquants", "mxfp4"))
EXPERTS, SIMD_EXPERTS = "kernels/experts.pyx", "kernels/simd/experts.c"
BIND = "kernels/bind.pyx"
AMX_LINEAR, AMX_ATTENTION = "kernels/simd/amx_linear.c", "kernels/simd/amx_attention.c"
STEPS = "tests/kernels/test_program.py tests/kernels/test_memory.py tests/kernels/test_known_values.py"
BITS = "tests/kernels tests/system/test_same_bits.py"

MUTANTS = [
    Mutant(
        Q4,
        "    if (error[i] < plain_error[i]) continue;\n",
        "    continue;\n",
        "a block of 4-bit weights can be stored less exactly than with a plain scale",
        "tests/kernels/test_pack.py",
    ),
    Mutant(
        Q4,
        "(wanted[i] < 0 ? 0x8000 : 0)",
        "0",
        "a block of 4-bit weights whose largest weight is positive has a coarser scale",
        "tests/kernels/test_pack.py",
    ),
    Mutant(
        PACK,
        "return min(count if phase < 0 else min(count, 16 - row % 16), end - row)",
        "return min(<int64_t>16, end - row)",
        "4-bit weights of a matrix made of several tensors overwrite each other",
        "tests/kernels/test_pack.py",
    ),
    Mutant(
        SIMD_LINEAR,
        "start[i] = t->a.sums[i * blocks + b] / 16;",
        "start[i] = t->a.sums[i * blocks + b] / 8;",
        "4-bit weights are multiplied with another zero than they were stored with",
        "tests/kernels/test_linear.py tests/kernels/test_program.py",
    ),
    Mutant(
        K_QUANTS,
        "vi_add(first[i], vi_set1(t->a.sums[i * blocks + b] >> 2))",
        "vi_sub(vi_zero(), first[i])",
        "6-bit weights are multiplied with another zero than they were stored with",
        "tests/kernels/test_kquants.py",
    ),
    Mutant(
        K_QUANTS,
        "vf_load_i8(s->bytes[1][BLOCKS + j])",
        "vf_load_i8(s->bytes[0][BLOCKS + j])",
        "half of the columns of a GGUF file's matrix have the minimums of their neighbours",
        "tests/kernels/test_kquants.py",
    ),
    Mutant(
        SIMD_LINEAR,
        "vf_fma(z, sum, vf_from(dot[i][1]))",
        "vf_fma(y, sum, vf_from(dot[i][1]))",
        "half of the columns of an AWQ matrix have the zero points of their neighbours",
        "tests/kernels/test_kquants.py",
    ),
    Mutant(
        PACK,
        "if QUIRE_Q4_K <= WEIGHT_CODES[dtype] != native and",
        "if False and",
        "weights of a type that nothing quantises to are packed as another type, without an error",
        "tests/kernels/test_kquants.py",
    ),
    Mutant(
        MXFP4,
        "vi_set1((t->a.sums[i * blocks + b] >> 5) * 3)",
        "vi_set1((t->a.sums[i * blocks + b] >> 5) * 2)",
        "4-bit floating-point weights are multiplied with another zero than they were stored with",
        "tests/kernels/test_kquants.py",
    ),
    Mutant(
        MXFP4,
        "q = vs_of(load_scales(s1 + b * 16), rows);",
        "q = vs_of(load_scales(s0 + b * 16), rows);",
        "half of the columns of an expert have the scales of their neighbours",
        "tests/kernels/test_kquants.py",
    ),
    Mutant(
        MXFP4,
        "vf_max(vf_load_exponents(exponents), vf_set1(0x1p-127f))",
        "vf_load_exponents(exponents)",
        "weights with the smallest scale of MXFP4 become zero",
        "tests/kernels/test_pack_blocks.py",
    ),
    Mutant(
        ATTENTION,
        "        _add_sinks(op, tiles, state, queries * op.heads.group, head)\n",
        "        pass\n",
        "gpt-oss attends as if it had no sinks",
        "tests/kernels/test_known_values.py",
    ),
    Mutant(
        ATTENTION,
        "op.sinks[head * op.heads.group + r % op.heads.group]",
        "op.sinks[head * op.heads.group + r // op.heads.group]",
        "a head of gpt-oss has the sink of another head",
        "tests/kernels/test_known_values.py tests/kernels/test_program.py",
    ),
    Mutant(
        EPILOGUE,
        "up = vf_add(vf_min(limit, vf_max(vf_set1(-7.f), up)), vf_set1(1.f));",
        "up = vf_add(vf_min(limit, up), vf_set1(1.f));",
        "experts of gpt-oss do not limit large negative values",
        "tests/kernels/test_known_values.py",
    ),
    Mutant(
        BIND,
        "self.regions.vector(biases[index], weight.out_features, weight.panels * 16)",
        "self.regions.vector(biases[0], weight.out_features, weight.panels * 16)",
        "all experts have the bias of the first one",
        "tests/kernels/test_experts.py",
    ),
    Mutant(
        ATTENTION,
        "    memset(state.o, 0, rows * d * sizeof(float))    # an earlier step may have left NaN, and 0 * NaN is NaN\n",
        "",
        "a NaN that one request's step leaves in scratch reaches another request's next step",
    ),
    Mutant(
        HEADS,
        "        memset(kv.k, 0, step.head_bytes)    # masked lanes must read numbers: 0 * NaN is NaN\n",
        "        pass\n",
        "a NaN in a page of an earlier request reaches the next owner of the page",
    ),
    Mutant(
        ATTENTION,
        "workspace.oldest[end - 1] >= token + QUIRE_TILE",
        "workspace.oldest[end - 1] > token",
        "rows with a window miss the oldest tokens that they should see",
    ),
    Mutant(
        ATTENTION,
        "quire_signal_set(shared.merged, 0 if is_last else",
        "quire_signal_set(shared.merged,",
        "the second step of a decoding sequence with few heads hangs or merges old splits",
    ),
    Mutant(
        SAMPLE,
        "range(row.first_adjustment + row.num_adjustments - 1, row.first_adjustment - 1, -1):",
        "range(row.first_adjustment, row.first_adjustment + row.num_adjustments):",
        "logits are restored in the wrong order for an id named twice in a bias",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "        _restore(draw, row, x)\n    draw.tokens[index]",
        "        pass\n    draw.tokens[index]",
        "a request's logprobs include its bias",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "        _forbid(draw, row, x, weights)\n",
        "",
        "a token with a bias of minus infinity can be drawn",
        SAMPLING,
        equivalent="a weight of 1e-38 beside one of 1 is drawn where 53 random bits are zero: no known seed has them",
    ),
    Mutant(
        SAMPLE,
        "            if weights[i] < row.min_p:",
        "            if weights[i] <= row.min_p:",
        "min_p of 1 keeps no token",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "while candidates > 0 and (kept == 0 or (kept < most and sum < mass)):",
        "while candidates > 0 and (kept < most and sum < mass):",
        "a tiny top_p keeps no token",
        SAMPLING,
        equivalent="the loop before ends with `kept` below `most` and `sum` below `mass`, so a candidate is kept",
    ),
    Mutant(
        SAMPLE,
        "<uint32_t>(<uint64_t>position >> 32)",
        "0",
        "positions above 2**32 repeat random numbers",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "<uint32_t>seed, <uint32_t>(seed >> 32), out)",
        "<uint32_t>seed, 0, out)",
        "seeds with equal lower halves give the same text",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "            logit -= row.presence_penalty + row.frequency_penalty * <float>a.count",
        "            logit -= (row.presence_penalty + row.frequency_penalty) * <float>a.count",
        "the presence penalty grows with each occurrence",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "            logit = logit / row.repetition_penalty if logit > 0 else logit * row.repetition_penalty",
        "            logit = logit / row.repetition_penalty",
        "the repetition penalty favours tokens with negative logits",
        SAMPLING,
    ),
    Mutant(
        SAMPLE,
        "        if found == wanted and not maxima[block] > logprobs[found - 1]:",
        "        if found == wanted and not maxima[block] > logprobs[0]:",
        "top logprobs miss tokens of later blocks",
        SAMPLING,
    ),
    Mutant(
        SIMD_ATTENTION,
        "    if (total_l[r] == 0.f) {    // its first split",
        "    if (0) {    // its first split",
        "the first split of a decoding row is merged with what an earlier step left",
        "tests/kernels/test_program.py",
    ),
    Mutant(
        SIMD_ATTENTION,
        "    const float now = m[r] > total_m[r] ? m[r] : total_m[r];",
        "    const float now = total_m[r];",
        "attention over long contexts overflows",
    ),
    Mutant(
        SOFTMAX,
        "to = (int)(hi < 0 ? 0 : hi > 16 ? 16 : hi);",
        "to = (int)(hi < 0 ? 0 : hi >= 16 ? 16 : hi + (hi > 0));",
        "a row sees one token of its future",
    ),
    Mutant(
        ROWS,
        "  if (nan) return -1;\n",
        "",
        "a request with NaN logits gets a token or hangs",
    ),
    Mutant(
        ROWS,
        "  out->scales[block] = finite ? scale : NAN;",
        "  out->scales[block] = scale;",
        "an overflow in one request's activations gives wrong tokens instead of an error",
    ),
    Mutant(
        EPILOGUE,
        "    if (t->epilogue == QUIRE_ADD) y0 = vf_add(vf_load(c), y0), y1 = vf_add(vf_load(c + 16), y1);",
        "    if (t->epilogue == QUIRE_ADD) y0 = vf_add(vf_load(c), y0);",
        "half of the residual stream is lost",
    ),
    Mutant(
        LINEAR,
        "        if tile.factors != NULL:\n            tile.factors += n\n",
        "",
        "later rows of a chunk are scaled by the norm of the first ones",
    ),
    Mutant(
        SIMD_HEADS,
        "(int)(slot % 2) * 16, 16);",
        "0, 16);",
        "the values of odd tokens overwrite those of even ones",
    ),
    Mutant(
        AMX_LINEAR,
        "c[i] + (begin - first_row[i])",
        "c[i]",
        "the last rows of a prompt whose length is no multiple of 16 get the results of other rows",
    ),
    Mutant(
        AMX_LINEAR,
        "    if (part.factors) part.factors += TILE_ROWS;\n",
        "",
        "with AMX, later rows of a chunk are scaled by the norm of the first 16",
    ),
    Mutant(
        AMX_ATTENTION,
        "page < 2 * step + 2 && page < t->num_pages",
        "page < 2 * step + 1",
        "with AMX and pages of 16 tokens, every second page is ignored",
    ),
    Mutant(
        AMX_ATTENTION,
        "  for (int r = row; first < row && r < last; r++)\n",
        "  for (int r = first; first < row && r < last; r++)\n",
        "with AMX, rows of a tile that overlaps another one are accumulated twice",
    ),
    Mutant(
        SIMD_EXPERTS,
        "while (rank > 0 && logits[e] > logits[indices[rank - 1]]) rank--;",
        "while (rank > 0 && logits[e] >= logits[indices[rank - 1]]) rank--;",
        "of experts with equal logits, the last ones are chosen instead of the first",
        "tests/kernels/test_experts.py",
    ),
    Mutant(
        SIMD_EXPERTS,
        "  const float top = nan ? NAN : logits[indices[0]];",
        "  const float top = logits[indices[0]];",
        "a row whose router overflows gets the output of other experts instead of an error",
        "tests/kernels/test_experts.py",
    ),
    Mutant(
        EXPERTS,
        "        group[1] = <int32_t>(first + count * part // parts)",
        "        group[1] = <int32_t>first",
        "in a long prompt, rows of an expert are computed again by each of its groups",
        "tests/kernels/test_experts.py",
    ),
    Mutant(
        EXPERTS,
        "                memcpy(op.out.rows.sums + place * blocks, op.input.rows.sums + row * blocks, blocks * sizeof(int32_t))\n",
        "",
        "8-bit experts multiply rows with the sums of other rows",
        "tests/kernels/test_experts.py",
    ),
]
