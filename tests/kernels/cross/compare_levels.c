// Compares every tile of every ISA level that this machine can run: with the scalar level's on random numbers, and each
// row of a call with the same row alone, bit for bit. In bf16, whose instructions round differently, results need only be
// close to the scalar level's; in f32 and q8 they are the same bits, also as those in golden_bits.txt, the argument.
// Without an argument the lines of that file are printed. Plain C over kernels/simd/, so that a level can be tried
// without Python, for instance under emulation with Debian's packages:
//
//   apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static
//   meson setup build/aarch64 --cross-file tests/kernels/cross/aarch64.ini
//   meson test -C build/aarch64 --verbose
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "simd/tiles.h"

enum { MAX_ROWS = 64, MAX_WIDTH = 512, PAGES = 8, PAGE_BYTES = 64 * MAX_WIDTH * 4 };

static const quire_tiles *scalar, *tiles;
static int failures;

static uint64_t state;
static uint32_t next_bits(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}
static float next_float(void) { return (float)(int32_t)next_bits() / 2147483648.f; }  // [-1, 1)
static uint16_t next_scale(void) { return (uint16_t)(0x2000 + next_bits() % 0x800); }  // fp16, 2^-7 to 2^-5

static float next_row_scale(void) {  // two bits of mantissa, 2^-9 to 2^-6; or 0
  const uint32_t bits = next_bits();
  return bits >> 28 ? ldexpf((float)(4 + bits % 4), -9 - (int)(bits / 4 % 3)) : 0.f;
}

// The digest (FNV-1a) of all results of an op and dtype, in order.
typedef struct { const char *op; int dtype; uint64_t digest; } record;
static record records[96];
static int num_records;

static record *record_of(const char *op, int dtype) {
  for (int i = 0; i < num_records; i++)
    if (records[i].dtype == dtype && strcmp(records[i].op, op) == 0) return &records[i];
  record *added = &records[num_records++];
  *added = (record){op, dtype, 14695981039346656037u};
  return added;
}

static void digest(const char *op, int dtype, const void *bytes, int64_t n) {
  if (dtype == QUIRE_BF16) return;
  record *r = record_of(op, dtype);
  for (int64_t i = 0; i < n; i++) r->digest = (r->digest ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
}

static void fill(float *x, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] = next_float(); }

// `n` elements of one dtype, n a multiple of 16.
static void fill_dtype(void *out, int dtype, int64_t n) {
  float x[16];
  for (int64_t i = 0; i < n; i += 16) {
    fill(x, 16);
    if (dtype == QUIRE_F32) memcpy((float *)out + i, x, sizeof x);
    else if (dtype == QUIRE_BF16) scalar->to_bf16(x, 16, (uint16_t *)out + i);
    else for (int j = 0; j < 16; j++) ((int8_t *)out)[i + j] = (int8_t)(x[j] * 128.f);
  }
}

// Random panels; the fp16 numbers of super-blocks are finite, the scales of mxfp4 are 2^-7 to 1, and zero points below 16.
static void fill_panels(char *panels, int dtype, int64_t width, int count) {
  const int64_t panel = quire_panel_bytes(dtype, width), bytes = count * panel;
  fill_dtype(panels, dtype, bytes / quire_itemsize(dtype));
  for (int64_t at = 0; dtype == QUIRE_MXFP4 && at < bytes; at += panel)
    for (int64_t i = 0; i < width / 2; i++) panels[at + i] = (char)(120 + next_bits() % 8);
  for (int64_t at = 0; dtype == QUIRE_Q4_Z && at < bytes; at += panel) {
    for (int64_t i = 0; i < width / 2; i++) ((uint16_t *)(panels + at))[i] = next_scale();
    for (int64_t i = width; i < width * 3 / 2; i++) panels[at + i] = (char)(next_bits() % 16);
  }
  for (int64_t at = 0; dtype >= QUIRE_Q4_K && dtype <= QUIRE_Q6_K && at < bytes; at += quire_super_block_bytes(dtype))
    for (int i = 0; i < 32; i++) ((uint16_t *)(panels + at))[i] = next_scale();
}

static const char *const dtype_names[] = {"f32", "bf16", "q8", "q4", "q4_k", "q5_k", "q6_k", "mxfp4", "q4_z", "f16"};

static void verdict(const char *op, int dtype, const char *what, double error, double allowed) {
  if (error <= allowed) return;
  printf("%s: %s %s: %s by %g, allowed %g\n", tiles->name, op, dtype_names[dtype], what, error, allowed);
  failures++;
}

static void expect_same(const char *op, int dtype, const char *what, const void *got, const void *want, int64_t bytes) {
  if (memcmp(got, want, (size_t)bytes)) verdict(op, dtype, what, 1, 0);
}

// Compare with the scalar level: the same bits, or in bf16 the largest difference relative to the largest number,
// infinite where one side is NaN.
static void expect_scalar(const char *op, int dtype, const float *got, const float *want, int64_t n, double allowed) {
  if (dtype != QUIRE_BF16) {
    expect_same(op, dtype, "other bits than scalar", got, want, n * (int64_t)sizeof *got);
    return;
  }
  double top = 0, off = 0;
  for (int64_t i = 0; i < n; i++) {
    const double difference = fabs((double)got[i] - want[i]);
    top = fmax(top, fabs(want[i]));
    off = difference <= HUGE_VAL ? fmax(off, difference) : HUGE_VAL;
  }
  verdict(op, dtype, "off scalar", off / top, allowed);
}

static quire_rows rows_of(int dtype, int64_t width) {
  quire_rows r = {.data = calloc(MAX_ROWS * MAX_WIDTH, 4), .width = width};
  r.scales = calloc(MAX_ROWS * MAX_WIDTH / 32, sizeof *r.scales);
  r.sums = calloc(MAX_ROWS * MAX_WIDTH / 32, sizeof *r.sums);
  fill_dtype(r.data, dtype, MAX_ROWS * width);
  for (int64_t block = 0; dtype == QUIRE_Q8 && block < MAX_ROWS * width / 32; block++) {
    r.scales[block] = next_row_scale();
    for (int i = 0; i < 32; i++) r.sums[block] -= 128 * ((int8_t *)r.data)[block * 32 + i];
  }
  return r;
}
static void free_rows(quire_rows *r) { free(r->data), free(r->scales), free(r->sums); }

static quire_rows from_row(quire_rows r, int dtype, int64_t row) {
  r.data = (char *)r.data + row * r.width * quire_itemsize(dtype);
  r.scales += row * (r.width / 32);
  r.sums += row * (r.width / 32);
  return r;
}

static int input_dtype(int dtype) { return dtype >= QUIRE_Q4 ? QUIRE_Q8 : dtype; }

static void run_linear(const quire_tiles *level, int dtype, int per_call, int rows, quire_linear_tile t) {
  const quire_rows a = t.a;
  const float *factors = t.factors;
  float *c = t.c;
  float y[MAX_ROWS * 32];  // results that are not added yet: the walker adds when it writes them
  const int adds = t.epilogue == QUIRE_ADD;
  static _Alignas(64) char packed[MAX_ROWS * MAX_WIDTH * 4];
  static quire_block_sums sums[MAX_ROWS * MAX_WIDTH / QUIRE_SUPER_BLOCK];
  static int32_t halves[MAX_ROWS * MAX_WIDTH / 32];
  if (dtype == QUIRE_Q4_K || dtype == QUIRE_Q5_K) level->sum_blocks(&a, rows, sums);
  if (dtype == QUIRE_Q6_K) level->sum_halves(&a, rows, halves);
  for (int row = 0; row < rows; row += per_call) {
    t.block_sums = sums + row * (a.width / QUIRE_SUPER_BLOCK), t.half_sums = halves + row * (a.width / 32);
    const quire_linear *linear = &level->linear[dtype][quire_row_class(rows)];
    t.a = from_row(a, input_dtype(dtype), row), t.c = (adds ? y : c) + row * t.ldc, t.factors = factors ? factors + row : NULL;
    if (linear->pack) {
      char *end = packed + quire_packed_bytes(input_dtype(dtype), a.width, a.group, per_call);
      *end = 'e', linear->pack(&t.a, per_call, packed), t.packed = packed;
      if (*end != 'e') verdict("pack", dtype, "more bytes than planned", 1, 0);
    }
    linear->multiply(per_call, &t);
  }
  if (adds) level->add_columns(y, rows, c, t.ldc);
}

// The most rows of a call that are tried.
static int most_rows(int dtype) {
  int rows = 1;
  while (rows < MAX_ROWS && tiles->linear[dtype][quire_row_class(rows + 1)].rows > rows) rows++;
  return rows;
}

// q8 panels of the same weights give the same bits.
static void compare_widened(const char *panels, const uint16_t *scales, quire_rows a) {
  static uint8_t widened[2 * 16 * MAX_WIDTH], scratch[2 * 16 * MAX_WIDTH];
  float want[MAX_ROWS * 32], got[MAX_ROWS * 32];
  const int rows = most_rows(QUIRE_Q4);
  quire_linear_tile t = {.w = panels, .scales = scales, .panel_bytes = quire_panel_bytes(QUIRE_Q4, a.width), .scratch = scratch, .a = a, .next = panels, .ldc = 32};
  t.c = want, run_linear(tiles, QUIRE_Q4, rows, rows, t);
  for (int64_t i = 0; i < 2 * 16 * a.width; i++) {
    const int byte = (uint8_t)panels[i / 512 * 256 + i % 256], w = (i % 512 < 256 ? byte & 15 : byte >> 4) - 8;
    widened[i] = (uint8_t)(w + 128);
  }
  t.w = widened, t.panel_bytes = quire_panel_bytes(QUIRE_Q8, a.width);
  t.c = got, run_linear(tiles, QUIRE_Q8, 1, rows, t);
  expect_same("linear", QUIRE_Q4, "other bits than as q8", got, want, rows * 32 * (int64_t)sizeof *got);
}

// Blocks of q4 from random weights, those of zeros and of largest magnitude among them.
static void compare_quantize_q4(void) {
  float w[32 * 16];
  uint16_t scales[2][16];
  uint8_t blocks[2][256];
  for (int round = 0; round < 8; round++) {
    fill(w, 32 * 16);
    for (int lane = 0; lane < 16; lane++)
      for (int k = 0; k < 32; k++) w[k * 16 + lane] *= lane == 3 ? 0.f : ldexpf(1.f, lane * 4 * round - 60);
    tiles->quantize_q4(w, scales[0], blocks[0]), scalar->quantize_q4(w, scales[1], blocks[1]);
    expect_same("quantize", QUIRE_Q4, "other scales than scalar", scales[0], scales[1], sizeof scales[0]);
    expect_same("quantize", QUIRE_Q4, "other bits than scalar", blocks[0], blocks[1], sizeof blocks[0]);
    digest("quantize", QUIRE_Q4, scales[0], sizeof scales[0]), digest("quantize", QUIRE_Q4, blocks[0], sizeof blocks[0]);
  }
}

// Up to 7 all numbers of rows, as many as most calls take; beyond, those around whole tiles of 16.
static int is_tried(int rows) { return rows < 8 || (rows + 1) % 16 < 3; }

// Give each group of blocks a scale of any number of bits, and its sum. Scales of its other blocks are not read.
static void group_blocks(quire_rows *a, int64_t rows, int64_t group) {
  const int64_t blocks = a->width / 32;
  a->group = group;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t at = row * blocks + b, first = at - b % group;
      if (at == first) a->scales[at] = fabsf(next_float()) * 0x1p-7f;
      else a->sums[first] += a->sums[at], a->sums[at] = 12345, a->scales[at] = NAN;
    }
}

// `size` multiplies the scales of q8 rows.
static void compare_linear_of(const char *op, int dtype, int64_t width, int epilogue, float size, int64_t group) {
  static char panels[2 * 16 * MAX_WIDTH * 4];
  static _Alignas(64) quire_unpacked scratch[2 * MAX_WIDTH / QUIRE_SUPER_BLOCK];  // scratch memory for any dtype
  static uint16_t scales[2 * MAX_WIDTH / 32 * 16];
  static float bias[32], factors[MAX_ROWS], before[MAX_ROWS * 32], want[MAX_ROWS * 32], alone[MAX_ROWS * 32], got[MAX_ROWS * 32];
  quire_rows a = rows_of(input_dtype(dtype), width);
  for (int64_t i = 0; i < MAX_ROWS * width / 32; i++) a.scales[i] *= size;
  if (group) group_blocks(&a, MAX_ROWS, group);
  fill_panels(panels, dtype, width, 2);
  for (int64_t i = 0; i < 2 * width / 32 * 16; i++) scales[i] = next_scale();
  fill(bias, 32), fill(factors, MAX_ROWS), fill(before, MAX_ROWS * 32);
  for (int rows = 1; rows <= most_rows(dtype); rows++) {
    if (!is_tried(rows)) continue;
    quire_linear_tile t = {.w = panels, .scales = scales, .panel_bytes = quire_panel_bytes(dtype, width), .scratch = scratch, .a = a,
                           .bias = rows % 2 ? bias : NULL, .factors = rows % 3 ? factors : NULL, .next = panels, .next_lines = 1, .next_scales = (const char *)scales, .ldc = 32,
                           .epilogue = epilogue};
    memcpy(want, before, sizeof want), memcpy(alone, before, sizeof alone), memcpy(got, before, sizeof got);
    t.c = want, run_linear(scalar, dtype, 1, rows, t);
    if (tiles == scalar) memcpy(alone, want, sizeof alone);
    else t.c = alone, run_linear(tiles, dtype, 1, rows, t);
    t.c = got, run_linear(tiles, dtype, rows, rows, t);
    expect_scalar(op, dtype, got, want, rows * 32, 2e-6);
    if (rows <= 2) digest(op, dtype, got, rows * 32 * (int64_t)sizeof *got);  // 1 or 2 rows: as many as every level takes
    expect_same(op, dtype, "other bits than a row alone", got, alone, rows * 32 * (int64_t)sizeof *got);
  }
  if (dtype == QUIRE_Q4) compare_widened(panels, scales, a);
  free_rows(&a);
}

static void compare_linear(const char *op, int dtype, int64_t width, int epilogue) {
  compare_linear_of(op, dtype, width, epilogue, 1.f, 0);
}

static void compare_epilogues(int dtype, int64_t width) {
  compare_linear("linear", dtype, width, QUIRE_STORE);
  compare_linear("linear", dtype, width, QUIRE_ADD);
  compare_linear("linear", dtype, width, QUIRE_SWIGLU);
}

// The pages of one KV head, and the state of attention.
typedef struct {
  quire_page pages[PAGES];
  float m[MAX_ROWS], l[MAX_ROWS], o[MAX_ROWS * MAX_WIDTH];
  float total_m[MAX_ROWS], total_l[MAX_ROWS], total_o[MAX_ROWS * MAX_WIDTH];
  float s[64 * 64], p[64 * 64];
} attention;

static void reset(float *m, float *l, float *o, int64_t outputs) {
  for (int r = 0; r < MAX_ROWS; r++) m[r] = -INFINITY, l[r] = 0;
  memset(o, 0, (size_t)outputs * sizeof *o);
}

static quire_page new_page(int dtype, int64_t size, int64_t d) {
  quire_page p = {.dtype = dtype, .size = size, .d = d};
  p.k = calloc(1, PAGE_BYTES), p.v = calloc(1, PAGE_BYTES);
  p.k_scales = calloc(1, PAGE_BYTES), p.v_scales = calloc(1, PAGE_BYTES);
  return p;
}
static void free_page(quire_page *p) { free(p->k), free(p->v), free(p->k_scales), free(p->v_scales); }

// Two splits of one tile each, merged: rows [first, first + rows) of q, the last token of each at 64 + row.
static void run_attention(const quire_tiles *level, attention *x, int dtype, quire_rows q, int64_t values, int64_t size,
                          int64_t window, float softcap, int first, int rows) {
  const int64_t d = q.width;
  int64_t oldest[MAX_ROWS], newest[MAX_ROWS];
  for (int r = 0; r < rows; r++) {
    newest[r] = 64 + first + r;
    oldest[r] = window && newest[r] >= window ? newest[r] - window + 1 : 0;
  }
  reset(x->total_m, x->total_l, x->total_o, rows * values);
  for (int64_t token = 0; token < 128; token += 64) {
    quire_attention_tile t = {.q = from_row(q, quire_query_dtype(dtype), first), .oldest = oldest, .newest = newest,
                              .softcap = softcap, .first_token = token, .head_dim = d, .value_dim = values,
                              .num_pages = (int)(64 / size), .page_size = (int)size, .m = x->m, .l = x->l, .s = x->s,
                              .p = x->p, .o = x->o};
    for (int j = 0; j < 4; j++) {
      const quire_page *page = &x->pages[(token + 16 * j) / size];
      const int64_t slot = 16 * j % size;
      t.k[j] = (char *)page->k + slot * d * quire_itemsize(dtype);
      t.k_scales[j] = page->k_scales + slot * (d / 32);
      t.v_scales[j] = page->v_scales + slot;
      t.v[16 * j / size] = page->v;
    }
    reset(x->m, x->l, x->o, rows * values);
    level->attention[quire_kv_index(dtype)][quire_row_class(rows)](rows, &t);
    level->merge(rows, values, x->m, x->l, x->o, x->total_m, x->total_l, x->total_o);
  }
}

// The values of a page whose keys have them, by this level and by scalar.
static void compare_values_of_keys(int dtype, int64_t latent, quire_page *page) {
  quire_page panel = *page, same = new_page(dtype, page->size, page->d);
  for (int64_t slot = 0; slot < page->size; slot += 16) {
    const int64_t at = slot * 16 * quire_itemsize(dtype);
    panel.k = (char *)page->k + slot * page->d * quire_itemsize(dtype);
    panel.k_scales = page->k_scales + slot * (page->d / 32);
    tiles->values_of_keys(&panel, latent, page->size, (char *)page->v + at, page->v_scales + slot);
    scalar->values_of_keys(&panel, latent, page->size, (char *)same.v + at, same.v_scales + slot);
  }
  expect_same("values of keys", dtype, "other bits than scalar", page->v, same.v, PAGE_BYTES);
  expect_same("values of keys", dtype, "other scales than scalar", page->v_scales, same.v_scales, PAGE_BYTES);
  digest("values of keys", dtype, page->v, PAGE_BYTES);
  free_page(&same);
}

// With `latent` elements, the values are the first ones of the keys.
static void compare_attention(const char *op, int dtype, int64_t size, int64_t d, int64_t latent, int64_t window,
                              float softcap, int rows) {
  const double allowed = 1e-2;  // p is rounded to bf16, and a tie may fall either way
  const int64_t values = latent ? latent : d;
  static attention x, y;
  quire_rows q = rows_of(quire_query_dtype(dtype), d);
  float head[MAX_WIDTH];
  for (int i = 0; i < 128 / size; i++) {
    x.pages[i] = new_page(dtype, size, d), x.pages[i].shared = latent;
    for (int64_t slot = 0; slot < size; slot++) {
      fill(head, d), scalar->store_key(head, slot, &x.pages[i]);
      if (!latent) fill(head, d), scalar->store_value(head, slot, &x.pages[i]);
    }
    if (latent) compare_values_of_keys(dtype, latent, &x.pages[i]);
    y.pages[i] = x.pages[i];
  }
  run_attention(tiles, &x, dtype, q, values, size, window, softcap, 0, rows);
  if (tiles != scalar) run_attention(scalar, &y, dtype, q, values, size, window, softcap, 0, rows);
  const attention *want = tiles == scalar ? &x : &y;
  expect_scalar(op, dtype, x.total_o, want->total_o, rows * values, allowed);
  expect_scalar("attention's sums", dtype, x.total_l, want->total_l, rows, allowed / 10);
  digest(op, dtype, x.total_o, rows * values * (int64_t)sizeof *x.total_o);
  if (softcap == 0 && !latent) digest("attention's sums", dtype, x.total_l, rows * (int64_t)sizeof *x.total_l);
  for (int row = 0; row < rows; row++) {
    run_attention(tiles, &y, dtype, q, values, size, window, softcap, row, 1);
    expect_same(op, dtype, "other bits than a row alone", x.total_o + row * values, y.total_o,
                values * (int64_t)sizeof *y.total_o);
  }
  for (int i = 0; i < 128 / size; i++) free_page(&x.pages[i]);
  free_rows(&q);
}

static void compare_convert(int dtype, int64_t columns, int64_t width, const float *norm) {
  static float x[3 * MAX_WIDTH], squares[2][4 * MAX_WIDTH], factors[2][3];
  quire_output got = {dtype, rows_of(dtype, width), norm, squares[0], MAX_WIDTH};
  quire_output want = {dtype, rows_of(dtype, width), norm, squares[1], MAX_WIDTH};
  fill(x, 3 * MAX_WIDTH);
  for (int i = 0; dtype == QUIRE_Q8 && !norm && i < 32; i++) x[MAX_WIDTH + i] *= 0x1p-118f, x[2 * MAX_WIDTH + i] *= 0x1p-122f;
  tiles->convert(x, MAX_WIDTH, 3, columns, &got, 1, 0);
  scalar->convert(x, MAX_WIDTH, 3, columns, &want, 1, 0);
  const quire_rows a = from_row(got.rows, dtype, 1), b = from_row(want.rows, dtype, 1);
  expect_same("convert", dtype, "other bits than scalar", a.data, b.data, 3 * width * quire_itemsize(dtype));
  if (dtype == QUIRE_Q8) {
    expect_same("scales", dtype, "other bits than scalar", a.scales, b.scales, 3 * width / 32 * 4);
    expect_same("sums", dtype, "other bits than scalar", a.sums, b.sums, 3 * width / 32 * 4);
    for (int64_t i = 0; i < 3 * width / 32; i++) {
      int exponent;
      const float mantissa = frexpf(a.scales[i], &exponent) * 8.f;
      verdict("scales", dtype, "more than two bits of mantissa", fabsf(mantissa - truncf(mantissa)), 0);
      if (a.scales[i] < FLT_MIN) verdict("scales", dtype, "a number that is not normal", a.scales[i], 0);
    }
  }
  digest("convert", dtype, a.data, 3 * width * quire_itemsize(dtype));
  if (norm) {
    tiles->rms_factors(squares[0] + MAX_WIDTH, MAX_WIDTH, 3, columns, 1e-6f, factors[0]);
    scalar->rms_factors(squares[1] + MAX_WIDTH, MAX_WIDTH, 3, columns, 1e-6f, factors[1]);
    expect_scalar("1 / rms", QUIRE_F32, factors[0], factors[1], 3, 0);
    digest("1 / rms", QUIRE_F32, factors[0], sizeof factors[0]);
  }
  free_rows(&got.rows), free_rows(&want.rows);
}

// Groups of blocks; the last one of a row may be shorter. One group is zero, one has a NaN, one an infinite number.
static void compare_convert_groups(int64_t columns, int64_t width, int64_t group, const float *norm) {
  static float x[3 * MAX_WIDTH], squares[2][4 * MAX_WIDTH];
  quire_output got = {QUIRE_Q8, rows_of(QUIRE_Q8, width), norm, squares[0], MAX_WIDTH};
  quire_output want = {QUIRE_Q8, rows_of(QUIRE_Q8, width), norm, squares[1], MAX_WIDTH};
  got.rows.group = want.rows.group = group;
  fill(x, 3 * MAX_WIDTH);
  for (int64_t i = 0; i < columns && i < 32 * group; i++) x[MAX_WIDTH + i] = 0.f;
  x[columns - 1] = NAN, x[2 * MAX_WIDTH + columns / 2] = -INFINITY;
  tiles->convert(x, MAX_WIDTH, 3, columns, &got, 1, 0);
  scalar->convert(x, MAX_WIDTH, 3, columns, &want, 1, 0);
  const quire_rows a = from_row(got.rows, QUIRE_Q8, 1), b = from_row(want.rows, QUIRE_Q8, 1);
  expect_same("convert in groups", QUIRE_Q8, "other bits than scalar", a.data, b.data, 3 * width);
  digest("convert in groups", QUIRE_Q8, a.data, 3 * width);
  for (int64_t row = 0; row < 3; row++)
    for (int64_t first = 0; first < width / 32; first += group) {
      const int64_t at = row * (width / 32) + first, end = first + group < width / 32 ? first + group : width / 32;
      int32_t sum = 0;
      for (int64_t k = first * 32; k < end * 32; k++) sum -= 128 * ((int8_t *)a.data)[row * width + k];
      if (a.sums[at] != sum) verdict("sums in groups", QUIRE_Q8, "not the sum of the group", a.sums[at] - sum, 0);
      if (isnan(b.scales[at]) ? !isnan(a.scales[at]) : a.scales[at] != b.scales[at])
        verdict("scales in groups", QUIRE_Q8, "other bits than scalar", 1, 0);
      if (!isnan(b.scales[at])) digest("convert in groups", QUIRE_Q8, a.scales + at, sizeof *a.scales);
    }
  if (norm) {  // all columns of the second row are numbers
    expect_same("squares", QUIRE_Q8, "other bits than scalar", squares[0] + 2 * MAX_WIDTH, squares[1] + 2 * MAX_WIDTH, width / 32 * 4);
    digest("convert in groups", QUIRE_Q8, squares[0] + 2 * MAX_WIDTH, width / 32 * 4);
  }
  free_rows(&got.rows), free_rows(&want.rows);
}

// `columns` random numbers at the end of a page, of which the next one cannot be read.
static float *fill_before_guard(int64_t columns) {
  enum { BYTES = (MAX_WIDTH * 4 + 65535) / 65536 * 65536 };  // whole pages of any size
  static char *memory = NULL;
  if (!memory) {
    memory = mmap(NULL, BYTES + 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + BYTES, 65536, PROT_NONE)) abort();
  }
  float all[MAX_WIDTH], *x = (float *)(memory + BYTES) - columns;
  fill(all, MAX_WIDTH);
  return memcpy(x, all, (size_t)columns * sizeof *x);
}

// A column of weights, rotated and back.
static void compare_rotate(int64_t columns, int64_t width, int64_t group) {
  float got[MAX_WIDTH], want[MAX_WIDTH];
  const float *x = fill_before_guard(columns);
  tiles->rotate(x, columns, group, got), scalar->rotate(x, columns, group, want);
  expect_same("rotate", QUIRE_F32, "other bits than scalar", got, want, width * (int64_t)sizeof *got);
  digest("rotate", QUIRE_F32, got, width * (int64_t)sizeof *got);
  tiles->rotate_back(got, width, group), scalar->rotate_back(want, width, group);
  expect_same("rotate back", QUIRE_F32, "other bits than scalar", got, want, width * (int64_t)sizeof *got);
  digest("rotate", QUIRE_F32, got, width * (int64_t)sizeof *got);
  for (int64_t i = 0; i < width; i++)
    verdict("rotate back", QUIRE_F32, "off the column", fabs(got[i] - (i < columns ? x[i] : 0.f)), 1e-6);
}

static void compare_heads(int dtype, int64_t size, int64_t d) {
  float x[MAX_WIDTH], norm[MAX_WIDTH], rotary[MAX_WIDTH], got[MAX_WIDTH], want[MAX_WIDTH];
  const quire_head h = {.head_dim = d - 6, .rotary_dim = d - 6, .rotary_distance = d / 2 - 3, .norm = norm, .eps = 1e-6f, .scale = 0.3f};
  quire_page p = new_page(dtype, size, d), q = new_page(dtype, size, d);
  for (int64_t slot = 0; slot < size; slot++) {
    fill(x, MAX_WIDTH), fill(norm, MAX_WIDTH), fill(rotary, MAX_WIDTH);
    tiles->head(x, &h, rotary, got), scalar->head(x, &h, rotary, want);
    expect_scalar("head", QUIRE_F32, got, want, d, 0);
    digest("head", QUIRE_F32, got, d * (int64_t)sizeof *got);
    tiles->store_key(want, slot, &p), scalar->store_key(want, slot, &q);
    tiles->store_value(want, slot, &p), scalar->store_value(want, slot, &q);
  }
  expect_same("store_key", dtype, "other bits than scalar", p.k, q.k, PAGE_BYTES);
  expect_same("store_value", dtype, "other bits than scalar", p.v, q.v, PAGE_BYTES);
  expect_same("key scales", dtype, "other bits than scalar", p.k_scales, q.k_scales, PAGE_BYTES);
  expect_same("value scales", dtype, "other bits than scalar", p.v_scales, q.v_scales, PAGE_BYTES);
  digest("keys", dtype, p.k, PAGE_BYTES), digest("values", dtype, p.v, PAGE_BYTES);
  free_page(&p), free_page(&q);
}

// A head of which a part is rotated, whose norm has a factor of its own.
static void compare_part_of_head(int64_t d) {
  float x[MAX_WIDTH], norm[MAX_WIDTH], rotary[MAX_WIDTH], got[MAX_WIDTH], want[MAX_WIDTH];
  for (int64_t rotated = 0; rotated < d; rotated += 10) {
    const quire_head h = {.head_dim = d, .rotary_dim = rotated, .rotary_distance = rotated / 2, .norm = norm, .factor = 0.7f, .scale = 0.3f};
    fill(x, MAX_WIDTH), fill(norm, MAX_WIDTH), fill(rotary, MAX_WIDTH);
    tiles->head(x, &h, rotary, got), scalar->head(x, &h, rotary, want);
    expect_scalar("part of head", QUIRE_F32, got, want, d, 0);
    digest("part of head", QUIRE_F32, got, d * (int64_t)sizeof *got);
  }
}

// A LayerNorm of a head, and an RMS norm after the rotation.
static void compare_norms_of_head(int64_t d) {
  float x[MAX_WIDTH], norm[MAX_WIDTH], rotary[MAX_WIDTH], got[MAX_WIDTH], want[MAX_WIDTH];
  for (int last = 0; last < 2; last++) {
    const quire_head h = {.head_dim = d, .rotary_dim = d / 4 * 2, .rotary_distance = d / 4, .norm = norm, .eps = 1e-6f,
                          .scale = 0.3f,
                          .centered = !last, .norm_last = last};
    fill(x, MAX_WIDTH), fill(norm, MAX_WIDTH), fill(rotary, MAX_WIDTH);
    tiles->head(x, &h, rotary, got), scalar->head(x, &h, rotary, want);
    expect_scalar("norms of head", QUIRE_F32, got, want, d, 0);
    digest("norms of head", QUIRE_F32, got, d * (int64_t)sizeof *got);
  }
}

static void compare_norm_row(int64_t columns) {
  static float x[MAX_WIDTH], weight[MAX_WIDTH], bias[MAX_WIDTH], got[MAX_WIDTH], want[MAX_WIDTH];
  fill(x, MAX_WIDTH), fill(weight, columns), fill(bias, columns);
  for (int kind = QUIRE_LAYER_NORM; kind <= QUIRE_L2_NORM; kind++) {
    const float *b = kind == QUIRE_LAYER_NORM ? bias : NULL, *w = kind == QUIRE_L2_NORM ? NULL : weight;
    tiles->norm_row(kind, x, w, b, 1e-6f, columns, got), scalar->norm_row(kind, x, w, b, 1e-6f, columns, want);
    expect_scalar("norm row", QUIRE_F32, got, want, (columns + 15) / 16 * 16, 0);
    digest("norm row", QUIRE_F32, got, (columns + 15) / 16 * 16 * (int64_t)sizeof *got);
  }
  tiles->mean_rows(x, 48, 5, 48, got), scalar->mean_rows(x, 48, 5, 48, want);
  expect_scalar("mean rows", QUIRE_F32, got, want, 48, 0);
  digest("mean rows", QUIRE_F32, got, 48 * sizeof *got);
}

static void compare_activate(void) {
  float x[4096], got[4096], want[4096];
  for (int i = 0; i < 4096; i++) x[i] = next_float() * 8.f;
  x[0] = INFINITY, x[1] = -INFINITY, x[2] = 0.f, x[3] = -0.f;
  for (int epilogue = QUIRE_GELU; epilogue <= QUIRE_TANH; epilogue++) {
    memcpy(got, x, sizeof x), memcpy(want, x, sizeof x);
    tiles->activate(epilogue, got, 4096), scalar->activate(epilogue, want, 4096);
    expect_scalar("activation", QUIRE_F32, got, want, 4096, 0);
    digest("activation", QUIRE_F32, got, sizeof got);
    got[0] = NAN, tiles->activate(epilogue, got, 16);
    if (got[0] == got[0]) verdict("activation", QUIRE_F32, "a NaN was lost", 1, 0);
  }
}

static void compare_add_norm(int64_t columns) {
  static float y[MAX_WIDTH], weight[MAX_WIDTH], got[MAX_WIDTH], want[MAX_WIDTH];
  fill(y, MAX_WIDTH), fill(weight, MAX_WIDTH), fill(got, MAX_WIDTH), memcpy(want, got, sizeof want);
  memset(weight + columns, 0, (size_t)(MAX_WIDTH - columns) * sizeof *weight);
  tiles->add_norm(y, weight, 1e-6f, columns, got), scalar->add_norm(y, weight, 1e-6f, columns, want);
  expect_scalar("add norm", QUIRE_F32, got, want, MAX_WIDTH, 0);
  digest("add norm", QUIRE_F32, got, sizeof got);
  y[columns - 1] = 3e38f;
  if (tiles->inverse_rms(y, 1e-6f, columns) == tiles->inverse_rms(y, 1e-6f, columns))
    verdict("1 / rms", QUIRE_F32, "a sum that is not finite passed", 1, 0);
}

// Arguments from 2^-20 to 2^6, then those at which tanh is +-1 or no number.
static void compare_soft_cap(void) {
  static float x[544], y[544];
  for (int i = 0; i < 528; i++) x[i] = ldexpf(1.f + fabsf(next_float()), i % 26 - 20) * (i % 2 ? 1.f : -1.f);
  const float special[16] = {0.f, 7.9f, 7.91f, 100.f, 3e38f, INFINITY, -100.f, -INFINITY, NAN};
  memcpy(x + 528, special, sizeof special), memcpy(y, x, sizeof y);
  tiles->soft_cap(x, 544, 1.f);
  for (int i = 0; i < 536; i++) verdict("tanh", QUIRE_F32, "off libm", fabs(x[i] - tanh((double)y[i])), 4e-7 * fabs(tanh((double)y[i])));
  for (int i = 0; i < 536; i++) verdict("tanh", QUIRE_F32, "beyond 1", fabsf(x[i]), 1.0);
  if (x[536] == x[536]) verdict("tanh", QUIRE_F32, "a NaN passed", 1, 0);
  digest("tanh", QUIRE_F32, x, 536 * (int64_t)sizeof *x);
}

static void compare_gate(void) {
  static float gates[544], x[2][544];
  for (int i = 0; i < 544; i++) gates[i] = ldexpf(next_float(), i % 9), x[0][i] = x[1][i] = next_float();
  gates[540] = INFINITY, gates[541] = -INFINITY, gates[542] = NAN;
  tiles->gate(gates, 543, x[0]), scalar->gate(gates, 543, x[1]);
  expect_same("gate", QUIRE_F32, "other bits than scalar", x[0], x[1], 542 * (int64_t)sizeof(float));
  digest("gate", QUIRE_F32, x[0], 540 * (int64_t)sizeof(float));
  if (!(fabsf(x[0][541]) < 1e-30f) || x[0][542] == x[0][542]) verdict("gate", QUIRE_F32, "infinities", 1, 0);
}

static void compare_unpack(int dtype, int64_t width) {
  static char panel[16 * MAX_WIDTH * 4];
  static float got[MAX_WIDTH], want[MAX_WIDTH];
  uint16_t scales[MAX_WIDTH / 32 * 16];
  fill_panels(panel, dtype, width, 1);
  for (int i = 0; i < MAX_WIDTH / 32 * 16; i++) scales[i] = next_scale();
  for (int lane = 0; lane < 16; lane++) {
    tiles->unpack_column(panel, scales, dtype, 0, width, lane, got);
    scalar->unpack_column(panel, scales, dtype, 0, width, lane, want);
    expect_same("unpack_column", dtype, "other bits than scalar", got, want, width * (int64_t)sizeof *got);
  }
}

static void compare_to_bf16(void) {
  float x[16] = {NAN, -NAN, INFINITY, -INFINITY, 0.f, -0.f, 3.4028235e38f, 1.00390625f, 1.01171875f, 65535.f};
  uint16_t got[16], want[16];
  tiles->to_bf16(x, 16, got), scalar->to_bf16(x, 16, want);
  expect_same("to_bf16", QUIRE_BF16, "other bits than scalar", got, want, sizeof got);
}

static void compare_logits(int64_t n) {
  static float x[1000], y[1000];
  float top[2], maxima[2][2];
  fill(x, n);
  x[n / 2] = x[n - 1] = 2.f;  // a tie
  const int64_t at = tiles->argmax(x, n, &top[0]);
  if (at != scalar->argmax(x, n, &top[1]) || at != n / 2 || top[0] != top[1])
    verdict("argmax", QUIRE_F32, "wrong index", 1, 0);
  const double sums[2] = {tiles->sum_exp(x, n, 2.f), scalar->sum_exp(x, n, 2.f)};
  expect_same("sum of exp", QUIRE_F32, "other bits than scalar", &sums[0], &sums[1], sizeof sums[0]);
  digest("sum of exp", QUIRE_F32, &sums[0], sizeof sums[0]);
  tiles->exp_scaled(x, 2.f, 25.f, n / 16 * 16, y);
  digest("exp", QUIRE_F32, y, n / 16 * 16 * (int64_t)sizeof *y);
  for (int64_t i = 0; i < n / 16 * 16; i++)
    verdict("exp", QUIRE_F32, "off libm", fabs((double)y[i] / exp((double)((x[i] - 2.f) * 25.f)) - 1), 3e-7);
  const int32_t mask[3] = {0, -1, (int32_t)0x80000005};
  static float z[96];
  memcpy(y, x, sizeof z), memcpy(z, x, sizeof z);
  tiles->set_forbidden(mask, 3, -1.f, y), scalar->set_forbidden(mask, 3, -1.f, z);
  expect_same("set_forbidden", QUIRE_F32, "other bits than scalar", y, z, sizeof z);
  x[n / 3] = NAN;
  tiles->block_maxima(x + n / 3 - 1, 3, 2, 21, maxima[0], 1), scalar->block_maxima(x + n / 3 - 1, 3, 2, 21, maxima[1], 1);
  if (maxima[0][0] == maxima[0][0] || maxima[0][1] != maxima[1][1]) verdict("maxima", QUIRE_F32, "elsewhere", 1, 0);
  if (tiles->argmax(x, n, &top[0]) != -1) verdict("argmax", QUIRE_F32, "a NaN passed", 1, 0);
}

static void compare_experts(int64_t experts, int64_t chosen, int normalized) {
  float logits[MAX_WIDTH], weights[2][MAX_WIDTH], out[2][MAX_WIDTH];
  int32_t indices[2][MAX_WIDTH];
  static float y[8 * MAX_WIDTH];
  fill(logits, MAX_WIDTH), fill(y, 8 * MAX_WIDTH), fill(out[0], MAX_WIDTH);
  logits[experts - 1] = logits[experts / 2] = 1.f;  // a tie
  memcpy(out[1], out[0], sizeof out[0]);
  const quire_router router = {
      .experts = experts, .chosen = chosen, .groups = 1, .kept_groups = 1, .normalized = normalized, .scale = 1.f};
  tiles->route(&router, logits, indices[0], weights[0]), scalar->route(&router, logits, indices[1], weights[1]);
  if (indices[0][0] != experts / 2) verdict("route", QUIRE_F32, "wrong index", 1, 0);
  expect_same("route", QUIRE_F32, "other experts than scalar", indices[0], indices[1], chosen * (int64_t)sizeof(int32_t));
  expect_same("route", QUIRE_F32, "other bits than scalar", weights[0], weights[1], chosen * (int64_t)sizeof(float));
  for (int64_t i = 0; i < chosen; i++) indices[0][i] %= 8;
  tiles->combine(y, MAX_WIDTH, indices[0], weights[0], chosen, MAX_WIDTH, out[0]);
  scalar->combine(y, MAX_WIDTH, indices[0], weights[0], chosen, MAX_WIDTH, out[1]);
  expect_same("combine", QUIRE_F32, "other bits than scalar", out[0], out[1], sizeof out[0]);
  digest("route", QUIRE_F32, weights[0], chosen * (int64_t)sizeof(float));
  digest("combine", QUIRE_F32, out[0], sizeof out[0]);
}

#include "compare_recurrence.h"

static void compare_pages(int dtype) {
  for (int64_t size = 16; size <= 64; size *= 2)
    for (int64_t d = dtype == QUIRE_Q8 ? 32 : 16; d <= 128; d *= 2) {
      compare_heads(dtype, size, d);
      for (int rows = 1; rows <= MAX_ROWS; rows = rows * 3 + 1) {
        compare_attention("attention", dtype, size, d, 0, 0, 0, rows);
        compare_attention("attention", dtype, size, d, 0, 37, 0, rows);
      }
    }
}

// fp16 of ties, subnormal numbers, the largest numbers and what lies beyond them, with either sign.
static void compare_f16(void) {
  static const float numbers[16] = {0.f, 1.f + 0x1p-11f, 1.f + 0x3p-11f, 0x1.ffcp0f, 0x1.ffep0f, 0x1p-24f, 0x1p-25f, 0x3p-26f,
                                    0x1.ff8p-15f, 0x1.ffcp-15f, 65504.f, 65519.996f, 65520.f, FLT_MAX, INFINITY, NAN};
  static const uint16_t stored[16] = {0, 0x3c00, 0x3c02, 0x3fff, 0x4000, 1, 0, 1, 0x03ff, 0x0400, 0x7bff, 0x7bff, 0xffff, 0xffff, 0xffff, 0xffff};
  for (int sign = 0; sign < 2; sign++) {
    quire_page page = new_page(QUIRE_F16, 16, 16);
    float x[16];
    uint16_t want[16];
    for (int i = 0; i < 16; i++) x[i] = sign ? -numbers[i] : numbers[i], want[i] = (uint16_t)(stored[i] | (sign ? 0x8000 : 0));
    tiles->store_key(x, 5, &page), tiles->store_value(x, 5, &page);
    expect_same("store_value", QUIRE_F16, "other bits than fp16", (uint16_t *)page.v + 5 * 16, want, sizeof want);
    for (int i = 0; i < 16; i++) expect_same("store_key", QUIRE_F16, "other bits than fp16", (uint16_t *)page.k + i * 16 + 5, want + i, 2);
    free_page(&page);
  }
}

static void compare_level(void) {
  static float weight[MAX_WIDTH];
  state = 42, num_records = 0;
  fill(weight, MAX_WIDTH);
  for (int dtype = 0; dtype < 3; dtype++) {
    for (int64_t width = 32; width <= MAX_WIDTH; width *= 4) {
      compare_epilogues(dtype, width);
      compare_convert(dtype, width - 5, width, NULL);
      compare_convert(dtype, width - 5, width, weight);
      compare_unpack(dtype, width);
    }
    compare_pages(dtype);
  }
  compare_to_bf16();
  for (int64_t n = 48; n < 1000; n += 137) compare_logits(n);
  for (int64_t width = 32; width <= MAX_WIDTH; width *= 4) {
    compare_epilogues(QUIRE_Q4, width);
    compare_unpack(QUIRE_Q4, width);
  }
  compare_quantize_q4();
  for (int dtype = QUIRE_Q4_K; dtype <= QUIRE_Q6_K; dtype++)
    for (int64_t width = QUIRE_SUPER_BLOCK; width <= MAX_WIDTH; width += QUIRE_SUPER_BLOCK) {
      compare_epilogues(dtype, width);
      compare_unpack(dtype, width);
    }
  for (int dtype = 0; dtype < 4; dtype++) compare_linear("geglu", dtype, 128, QUIRE_GEGLU);
  for (int dtype = 0; dtype < 3; dtype++)
    for (int rows = 1; rows <= MAX_ROWS; rows = rows * 3 + 1)
      compare_attention("capped attention", dtype, 32, 64, 0, 37, 2.f, rows);
  for (int64_t d = 16; d <= 128; d *= 2) compare_part_of_head(d);
  for (int64_t columns = 45; columns < MAX_WIDTH; columns += 100) compare_add_norm(columns);
  compare_soft_cap();
  for (int64_t experts = 8; experts <= 200; experts = experts * 3 + 1)
    for (int normalized = 0; normalized < 2; normalized++) compare_experts(experts, 5, normalized);
  for (int64_t width = 32; width <= MAX_WIDTH; width *= 4) {
    compare_epilogues(QUIRE_MXFP4, width);
    compare_unpack(QUIRE_MXFP4, width);
  }
  for (int dtype = 0; dtype < 4; dtype++) compare_linear("clamped swiglu", dtype, 512, QUIRE_CLAMPED);
  for (int64_t width = 32; width <= MAX_WIDTH; width *= 4) {
    compare_epilogues(QUIRE_Q4_Z, width);
    compare_unpack(QUIRE_Q4_Z, width);
  }
  for (int dtype = 0; dtype < 4; dtype++) compare_linear("exact geglu", dtype, 128, QUIRE_GEGLU_EXACT);
  for (int64_t columns = 45; columns < MAX_WIDTH; columns += 100) compare_norm_row(columns);
  compare_activate();
  // Where products of scales are not normal numbers.
  for (int dtype = QUIRE_Q8; dtype < QUIRE_DTYPES; dtype++) compare_linear_of("tiny linear", dtype, 256, QUIRE_STORE, 0x1p-115f, 0);
  for (int64_t group = 1; group <= QUIRE_MOST_GROUP; group *= 2) {
    for (int64_t width = 32; width <= MAX_WIDTH; width += width < 192 ? 32 : 160) {
      compare_linear_of("linear in groups", QUIRE_Q8, width, QUIRE_STORE, 1.f, group);
      compare_convert_groups(width - 5, width, group, width % 64 ? weight : NULL);
      compare_rotate(width - 5, width, group);
    }
    compare_linear_of("linear in groups", QUIRE_Q8, 512, QUIRE_SWIGLU, 1.f, group);
  }
  for (int64_t taps = 1; taps <= 5; taps++) compare_convolution(WITH_GATES, 16 * taps + 5, taps, taps + taps % 3);
  compare_gate();
  compare_recurrences();
  compare_pages(QUIRE_F16);
  for (int rows = 1; rows <= MAX_ROWS; rows = rows * 3 + 1) compare_attention("capped attention", QUIRE_F16, 32, 64, 0, 37, 2.f, rows);
  compare_f16();
  for (int64_t d = 10; d <= 128; d += 22) compare_norms_of_head(d);
  const int kv_dtypes[] = {QUIRE_F32, QUIRE_BF16, QUIRE_Q8, QUIRE_F16};
  for (int i = 0; i < 4; i++)
    for (int64_t size = 16; size <= 64; size *= 2)
      for (int rows = 1; rows <= MAX_ROWS; rows = rows * 3 + 1)
        compare_attention("latent attention", kv_dtypes[i], size, 160, 96, 0, 0, rows);
}

// Fail where the digests of the last level are not those of the file, or print them if there is none.
static void compare_golden(const char *path) {
  char line[80], found[80];
  FILE *golden = path ? fopen(path, "r") : NULL;
  for (int i = 0; i < num_records; i++) {
    snprintf(found, sizeof found, "%016llx %s %s\n", (unsigned long long)records[i].digest, dtype_names[records[i].dtype],
             records[i].op);
    if (!path) printf("%s", found);
    else if (!golden || !fgets(line, sizeof line, golden) || strcmp(line, found))
      verdict(records[i].op, records[i].dtype, "other bits than in golden_bits.txt", 1, 0);
  }
  if (golden) fclose(golden);
}

// avx512 has two ways to the product of two scales, of which a process takes the faster one.
#if defined __x86_64__
extern int quire_adds_exponents;
static int num_ways(int level) { return level == QUIRE_AVX512 ? 2 : 1; }
static void take_way(int way) { quire_adds_exponents = way; }
#else
static int num_ways(int level) { return (void)level, 1; }
static void take_way(int way) { (void)way; }
#endif

int main(int count, char **arguments) {
  scalar = quire_isa_tiles(QUIRE_SCALAR);
  for (int level = QUIRE_SCALAR; level < QUIRE_LEVELS; level++) {
    tiles = quire_isa_tiles(level);
    const int before = failures;
    const char *obstacle = quire_isa_obstacle(level);
    for (int way = 0; !obstacle && way < num_ways(level); way++) {
      take_way(way);
      compare_level(), compare_golden(count > 1 ? arguments[1] : NULL);
    }
    printf("%s: %s\n", tiles->name, failures > before ? "FAILED" : obstacle ? obstacle : "ok");
  }
  return failures > 0;
}
