// Compares what layers with states compute beside linear layers: convolutions, recurrences and gated norms. Part of
// compare_levels.c.
#pragma once

enum convolution { WITH_GATES, WITHOUT_GATES, HEAD };  // HEAD: without gates, a head that is divided by its length

// Rows of a convolution, from position 0 on, over a ring of `rows` rows.
static void compare_convolution(enum convolution kind, int64_t columns, int64_t taps, int64_t rows) {
  static const char *const names[] = {"convolve", "convolve without gates", "convolve a head"};
  static float weight[8 * MAX_WIDTH], bias[MAX_WIDTH], x[3 * MAX_WIDTH + 16], rings[2][8 * MAX_WIDTH], out[2][MAX_WIDTH];
  fill(weight, 8 * MAX_WIDTH), fill(bias, MAX_WIDTH), fill(rings[0], 8 * MAX_WIDTH), memcpy(rings[1], rings[0], sizeof rings[0]);
  quire_convolution c = {
      columns, kind == WITH_GATES ? columns : 0, taps, weight, bias, rings[0], rows, MAX_WIDTH, kind == HEAD, 1e-6f};
  quire_convolution other = c;
  other.ring = rings[1];
  for (int64_t position = 0; position < 20; position++) {
    fill(x, 3 * MAX_WIDTH);
    if (position == 15) c.bias = other.bias = NULL;
    tiles->convolve(&c, x, position, out[0]), scalar->convolve(&other, x, position, out[1]);
    expect_same(names[kind], QUIRE_F32, "other bits than scalar", out[0], out[1], columns * (int64_t)sizeof(float));
    digest(names[kind], QUIRE_F32, out[0], columns * (int64_t)sizeof(float));
  }
  expect_same(names[kind], QUIRE_F32, "another ring than scalar", rings[0], rings[1], sizeof rings[0]);
}

static void compare_recurrent_gates(int is_delta) {
  float decay[2][QUIRE_TOKENS], rate[2][QUIRE_TOKENS];
  const quire_recurrence r = {
      .is_delta = is_delta, .a = -3.7f, .bias = .3f, .low = 1e-3f, .high = INFINITY, .rate_scale = 2.f};
  for (int i = 0; i < 20; i++) {
    for (int j = 0; j < QUIRE_TOKENS; j++)
      decay[0][j] = decay[1][j] = ldexpf(next_float(), i), rate[0][j] = rate[1][j] = ldexpf(next_float(), i);
    tiles->recurrent_gates(&r, decay[0], rate[0]), scalar->recurrent_gates(&r, decay[1], rate[1]);
    expect_same("decay", QUIRE_F32, "other bits than scalar", decay[0], decay[1], sizeof decay[0]);
    expect_same("rate", QUIRE_F32, "other bits than scalar", rate[0], rate[1], sizeof rate[0]);
    digest("decay", QUIRE_F32, decay[0], sizeof decay[0]), digest("rate", QUIRE_F32, rate[0], sizeof rate[0]);
  }
}

// Tokens of a recurrence, some in place and some from one matrix to another; a token without a result is among them.
static void compare_recurrence(int64_t key_dim, int64_t columns, int is_delta, int is_bf16) {
  static float keys[5][64], queries[5][64], values[5][80], matrices[2][2][64 * 64], out[2][5][80];
  const int64_t width = (columns + 15) / 16 * 16, bytes = key_dim * width * (is_bf16 ? 2 : 4);
  quire_recurrence r = {.key_dim = key_dim, .columns = columns, .width = width, .is_delta = is_delta, .is_bf16 = is_bf16};
  r.scale = .4f, r.skip = is_delta ? 0.f : -.7f;
  quire_recurrent_token tokens[2][5];
  fill(keys[0], 5 * 64), fill(queries[0], 5 * 64), fill(values[0], 5 * 80);
  fill_dtype(matrices[0][0], is_bf16 ? QUIRE_BF16 : QUIRE_F32, 64 * 64);
  memcpy(matrices[1][0], matrices[0][0], sizeof matrices[0][0]);
  memset(out, 0, sizeof out);
  for (int level = 0; level < 2; level++)
    for (int i = 0; i < 5; i++)
      tokens[level][i] = (quire_recurrent_token){keys[i], queries[i], values[i], 1.f / (float)(i + 1), .3f * (float)i,
                                                 i == 1 ? NULL : out[level][i]};
  for (int level = 0; level < 2; level++) {
    const quire_tiles *of = level ? scalar : tiles;
    of->recur(&r, tokens[level], 3, matrices[level][0], matrices[level][0]);
    of->recur(&r, tokens[level] + 3, 2, matrices[level][0], matrices[level][1]);
  }
  expect_same("recur", QUIRE_F32, "other bits than scalar", out[0], out[1], sizeof out[0]);
  for (int i = 0; i < 2; i++)
    expect_same("recur", QUIRE_F32, "another matrix than scalar", matrices[0][i], matrices[1][i], bytes);
  digest("recur", QUIRE_F32, out[0], sizeof out[0]), digest("recur", QUIRE_F32, matrices[0][1], bytes);
}

static void compare_gated_norm(int64_t columns, int64_t group, int gate_first, int has_weight) {
  static float gate[MAX_WIDTH], weight[MAX_WIDTH], x[2][MAX_WIDTH];
  fill(gate, MAX_WIDTH), fill(weight, MAX_WIDTH), fill(x[0], MAX_WIDTH), memcpy(x[1], x[0], sizeof x[0]);
  const quire_gated_norm n = {columns, group, has_weight ? weight : NULL, 1e-5f, gate_first};
  tiles->gated_norm(&n, gate, x[0]), scalar->gated_norm(&n, gate, x[1]);
  expect_same("gated norm", QUIRE_F32, "other bits than scalar", x[0], x[1], sizeof x[0]);
  digest("gated norm", QUIRE_F32, x[0], sizeof x[0]);
}

static void compare_recurrences(void) {
  for (int64_t taps = 1; taps <= 5; taps++)
    compare_convolution(taps % 2 ? HEAD : WITHOUT_GATES, 16 * taps + 5, taps, taps + taps % 3);
  for (int kind = 0; kind < 4; kind++) {
    compare_recurrent_gates(kind & 1);
    compare_recurrence(64, 64, kind & 1, kind & 2), compare_recurrence(33, 21, kind & 1, kind & 2);
    compare_gated_norm(96, 32, kind & 1, kind & 2), compare_gated_norm(63, 21, kind & 1, kind & 2);
  }
}
