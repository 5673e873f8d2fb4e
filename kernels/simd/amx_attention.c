// Attention of the amx level: the products of scores and of weighted sums on tiles. The softmax between them is that of all
// levels, and int8 pages give the same bits.
#include <assert.h>
#include <stddef.h>

#include "amx.h"
#include "softmax.h"

// Four panels as tiles; copied where a page holds less than a tile. The rest of the tile is zero.
typedef struct {
  const char *at[4];
  _Alignas(64) char copy[4][TILE_ROWS * TILE_BYTES];
} panels;

INLINE int min_int(int a, int b) { return a < b ? a : b; }

// The first row of the tile for rows from `row` on: with 16 rows or more all tiles are full, and the last one overlaps the
// one before.
INLINE int first_row(int row, int rows) { return rows < TILE_ROWS ? 0 : min_int(row, rows - TILE_ROWS); }

// s[rows][64] = q · K for one tile of rows, 32 of head_dim per product
static void scores_bf16(int rows, const quire_attention_tile *t, int row, int fetch) {
  const int64_t d = t->head_dim, steps = (d + 31) / 32;
  const char *q = (const char *)t->q.data + row * d * 2;
  int64_t stride = d * 2;
  _Alignas(64) char q_copy[TILE_ROWS][TILE_BYTES];
  panels k;
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
  for (int64_t step = 0; step < steps; step++, q += TILE_BYTES) {
    if (fetch) fetch_pages(t, step, step + 1, 2 * steps);
    for (int j = 0; j < 4; j++) k.at[j] = (const char *)t->k[j] + step * TILE_ROWS * TILE_BYTES;
    if (32 * step + 32 > d) {  // the last 16
      memset(q_copy, 0, sizeof q_copy), memset(k.copy, 0, sizeof k.copy);
      for (int i = 0; i < min_int(rows, TILE_ROWS); i++) memcpy(q_copy[i], q + i * stride, TILE_BYTES / 2);
      for (int j = 0; j < 4; j++) k.at[j] = memcpy(k.copy[j], k.at[j], sizeof k.copy[j] / 2);
      q = q_copy[0], stride = TILE_BYTES;
    }
    tile_load(4, q, stride);
    tile_load(6, k.at[0], TILE_BYTES);
    tile_dot_bf16(0, 4, 6);
    tile_load(7, k.at[1], TILE_BYTES);
    tile_dot_bf16(1, 4, 7);
    tile_load(6, k.at[2], TILE_BYTES);
    tile_dot_bf16(2, 4, 6);
    tile_load(7, k.at[3], TILE_BYTES);
    tile_dot_bf16(3, 4, 7);
  }
  float *s = t->s + row * QUIRE_TILE;
  tile_store(0, s, QUIRE_TILE * sizeof *s);
  tile_store(1, s + 16, QUIRE_TILE * sizeof *s);
  tile_store(2, s + 32, QUIRE_TILE * sizeof *s);
  tile_store(3, s + 48, QUIRE_TILE * sizeof *s);
}

// The values of tokens [32 * step, 32 * step + 32) in `count` panels from column n on; `size` is that of an element.
INLINE void load_values(panels *v, int count, const quire_attention_tile *t, int64_t step, int64_t n, int64_t size) {
  const int64_t tokens = t->page_size, line = TILE_ROWS * size;
  for (int j = 0; j < count; j++, n += 16) {
    if (tokens >= 32) {
      v->at[j] = (const char *)t->v[32 * step / tokens] + n * tokens * size + 32 * step % tokens * line;
      continue;
    }
    memset(v->copy[j], 0, (size_t)(32 * line));
    for (int64_t page = 2 * step; page < 2 * step + 2 && page < t->num_pages; page++)
      memcpy(v->copy[j] + page % 2 * 16 * line, (const char *)t->v[page] + n * 16 * size, (size_t)(16 * line));
    v->at[j] = v->copy[j];
  }
}

// o[rows][n ...] = o * keep + p · V for one tile of rows and 64 or 16 columns, 32 tokens per product. Rows before `row`
// belong to an earlier tile and keep their results.
INLINE void values_bf16(const int count, int rows, const quire_attention_tile *t, int row, const softmax_result *soft,
                        int64_t n) {
  const int64_t d = t->head_dim, row_bytes = d * 4, steps = (t->num_pages * t->page_size + 31) / 32;
  const int first = first_row(row, rows), last = min_int(row + TILE_ROWS, rows);
  float *o = t->o + first * d + n;
  const char *p = (const char *)t->p + first * QUIRE_TILE * 2;
  _Alignas(64) float overlapping[TILE_ROWS][QUIRE_TILE];
  panels v;
  for (int r = row; r < last; r++)
    for (int j = 0; j < count; j++) {
      float *x = t->o + r * d + n + 16 * j;
      vf_store(x, vf_mul(vf_load(x), vf_set1(soft->keep[r])));
    }
  if (row == 0) fetch_pages(t, d + n, d + n + 16 * count, 2 * d);
  tile_load(0, o, row_bytes);
  if (count == 4) {
    tile_load(1, o + 16, row_bytes);
    tile_load(2, o + 32, row_bytes);
    tile_load(3, o + 48, row_bytes);
  }
  for (int64_t step = 0; step < steps; step++) {
    load_values(&v, count, t, step, n, 2);
    tile_load(4, p + step * TILE_BYTES, QUIRE_TILE * 2);
    tile_load(6, v.at[0], TILE_BYTES);
    tile_dot_bf16(0, 4, 6);
    if (count == 4) {
      tile_load(7, v.at[1], TILE_BYTES);
      tile_dot_bf16(1, 4, 7);
      tile_load(6, v.at[2], TILE_BYTES);
      tile_dot_bf16(2, 4, 6);
      tile_load(7, v.at[3], TILE_BYTES);
      tile_dot_bf16(3, 4, 7);
    }
  }
  const int64_t stride = first == row ? row_bytes : (int64_t)sizeof overlapping[0];
  float *out = first == row ? o : overlapping[0];
  tile_store(0, out, stride);
  if (count == 4) {
    tile_store(1, out + 16, stride);
    tile_store(2, out + 32, stride);
    tile_store(3, out + 48, stride);
  }
  for (int r = row; first < row && r < last; r++)
    memcpy(t->o + r * d + n, overlapping[r - first], (size_t)count * 16 * sizeof *o);
}

void LEVEL(attention_bf16)(int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  softmax_result soft;
  use_tiles_of_rows(min_int(rows, TILE_ROWS));
  for (int row = 0; row < rows; row += TILE_ROWS) scores_bf16(rows, t, first_row(row, rows), row == 0);
  softmax_tile(QUIRE_BF16, rows, t, &soft);
  int64_t n = 0;
  for (; n + 64 <= t->head_dim; n += 64)
    for (int row = 0; row < rows; row += TILE_ROWS) values_bf16(4, rows, t, row, &soft, n);
  for (; n < t->head_dim; n += 16)
    for (int row = 0; row < rows; row += TILE_ROWS) values_bf16(1, rows, t, row, &soft, n);
}

// s[16][64] = q · K; K of 16 tokens is a panel of a q8 layer.
static void scores_int8(const quire_attention_tile *t, int row) {
  const int64_t d = t->head_dim, blocks = d / 32;
  const quire_rows q = {(int8_t *)t->q.data + row * d, t->q.scales + row * blocks, t->q.sums + row * blocks, d};
  vf s[TILE_ROWS];
  for (int j = 0; j < 4; j++) {
    if (row == 0) fetch_pages(t, j, j + 1, 8);
    multiply_int8(1, 1, &q, t->k[j], t->k_scales[j], NULL, 0, s);
    for (int i = 0; i < TILE_ROWS; i++) vf_store(t->s + (row + i) * QUIRE_TILE + 16 * j, s[i]);
  }
}

// o[16][n, n + 32) = o * keep + p · V: an exact integer dot over the tile for each digit of p, 32 tokens per product, then
// the operations of avx512 in their order.
static void values_int8(const quire_attention_tile *t, int row, const softmax_result *soft, int64_t n) {
  const int64_t d = t->head_dim, steps = (t->num_pages * t->page_size + 31) / 32;
  const char *high = (const char *)t->p + row * QUIRE_TILE, *low = high + QUIRE_TILE * QUIRE_TILE;
  _Alignas(64) uint32_t dots[2][2][TILE_ROWS][16];  // [digit][panel]
  panels v;
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
  if (row == 0) fetch_pages(t, d + n, d + n + 32, 2 * d);
  for (int64_t step = 0; step < steps; step++) {
    load_values(&v, 2, t, step, n, 1);
    tile_load(4, high + step * 32, QUIRE_TILE);
    tile_load(5, low + step * 32, QUIRE_TILE);
    tile_load(6, v.at[0], TILE_BYTES);
    tile_dot_s8u8(0, 4, 6);
    tile_dot_s8u8(2, 5, 6);
    tile_load(7, v.at[1], TILE_BYTES);
    tile_dot_s8u8(1, 4, 7);
    tile_dot_s8u8(3, 5, 7);
  }
  tile_store(0, dots[0][0], TILE_BYTES);
  tile_store(1, dots[0][1], TILE_BYTES);
  tile_store(2, dots[1][0], TILE_BYTES);
  tile_store(3, dots[1][1], TILE_BYTES);
  for (int i = 0; i < TILE_ROWS; i++)
    for (int j = 0; j < 2; j++) {
      float *o = t->o + (row + i) * d + n + j * 16;
      const vi a = vi_add(vi_load(dots[0][j][i]), vi_set1(soft->high_sum[row + i]));
      const vi b = vi_add(vi_load(dots[1][j][i]), vi_set1(soft->low_sum[row + i]));
      const vf kept = vf_mul(vf_load(o), vf_set1(soft->keep[row + i]));
      const vf sum = vf_fma(vf_from(a), vf_set1(128.f), vf_from(b));
      vf_store(o, vf_fma(sum, vf_set1(soft->scale[row + i]), kept));
    }
}

// Rows that do not fill a tile run at the avx512 level.
void LEVEL(attention_int8)(int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  const int64_t d = t->head_dim;
  const int whole = rows - rows % TILE_ROWS;
  if (whole) {
    softmax_result soft;
    use_tiles_of_blocks();
    for (int row = 0; row < whole; row += TILE_ROWS) scores_int8(t, row);
    softmax_tile(QUIRE_Q8, whole, t, &soft);
    for (int64_t n = 0; n < d; n += 32)
      for (int row = 0; row < whole; row += TILE_ROWS) values_int8(t, row, &soft, n);
  }
  if (whole == rows) return;
  quire_attention_tile rest = *t;
  if (whole) rest.num_next_pages = 0;
  rest.q.data = (char *)t->q.data + whole * d;
  rest.q.scales += whole * (d / 32);
  rest.q.sums += whole * (d / 32);
  rest.oldest += whole;
  rest.newest += whole;
  if (rest.bias) rest.bias += whole;
  rest.m += whole;
  rest.l += whole;
  rest.o += whole * d;
  ISA(attention_int8)(rows - whole, &rest);
}
