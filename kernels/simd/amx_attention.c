// Attention of the amx level: the products of scores and of weighted sums on tiles. The softmax between them is that of all
// levels, and int8 pages give the same bits.
#include <assert.h>
#include <stddef.h>

#include "amx_int8.h"
#include "softmax.h"

// Four panels as tiles; copied where a page holds less than a tile. The rest of the tile is zero.
typedef struct {
  const char *at[4];
  _Alignas(64) char copy[4][TILE_ROWS * TILE_BYTES];
} panels;

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
  const int64_t d = t->value_dim, row_bytes = d * 4, steps = (t->num_pages * t->page_size + 31) / 32;
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

// The products of a tile of rows run while the softmax of the tile before is computed.
void LEVEL(attention_bf16)(int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  softmax_result soft;
  use_tiles(TILES_BF16, min_int(rows, TILE_ROWS));
  scores_bf16(rows, t, 0, 1);
  for (int row = 0; row < rows; row += TILE_ROWS) {
    const int next = row + TILE_ROWS;
    if (next < rows) scores_bf16(rows, t, first_row(next, rows), 0);
    softmax_range(QUIRE_BF16, row, min_int(next, rows), t, &soft);
    int64_t n = 0;
    for (; n + 64 <= t->value_dim; n += 64) values_bf16(4, rows, t, row, &soft, n);
    for (; n < t->value_dim; n += 16) values_bf16(1, rows, t, row, &soft, n);
  }
}

// s[rows][64] = q · K, two panels of 16 tokens and two blocks of 32 of head_dim at a time.
static void scores_int8(int rows, const quire_attention_tile *t) {
  const int64_t d = t->head_dim, blocks = d / 32;
  _Alignas(64) uint32_t dots[2][2][2][TILE_ROWS][16];
  product last = {.from = 0, .to = 0};
  int turn = 0;
  for (int i = 0; i < rows * QUIRE_TILE; i += 16) vf_store(t->s + i, vf_zero());
  for (int j = 0; j < 4; j += 2)
    for (int64_t block = 0; block < blocks; block += 2) {
      band b = {.stride = 512, .dots = block + 1 < blocks ? 2 : 1, .tiles = 1};
      for (int panel = 0; panel < 2; panel++) {
        b.first[panel] = (const uint8_t *)t->k[j + panel] + block * 512;
        b.last[panel] = b.first[panel] + (b.dots - 1) * 512;
      }
      load_band(&b);
      fetch_pages(t, j / 2 * blocks + block, j / 2 * blocks + block + b.dots, 4 * blocks);
      for (int row = 0; row < rows; row += TILE_ROWS, turn = !turn) {
        const int first = first_row(row, rows);
        const int64_t at = first * blocks + block;
        multiply_band(0, &b, (const char *)t->q.data + first * d + block * 32, d, 32, &last, dots[turn]);
        last = (product){
            .dots = dots[turn], .scales = t->q.scales + at, .sums = t->q.sums + at, .dot_stride = 1, .row_stride = blocks,
            .columns = {t->k_scales[j] + block * 16, t->k_scales[j + 1] + block * 16}, .column_stride = 16,
            .out = t->s + first * QUIRE_TILE + 16 * j, .ld = QUIRE_TILE,
            .count = b.dots, .from = row - first, .to = min_int(TILE_ROWS, rows - first)};
      }
    }
  scale_half(&last, 0);
  scale_half(&last, TILE_ROWS / 2);
}

// Exact dots of both digits of p with two panels of values, and where their sum goes.
typedef struct {
  uint32_t (*dots)[2][TILE_ROWS][16];  // [digit][panel]
  float *o;                            // first column of row 0
  int row, from, to;                   // number of row 0; rows [from, to)
} weighted;

// o = o * keep + p · V in the operations of avx512.
INLINE void add_weighted(const weighted *w, int64_t d, const softmax_result *soft, int from) {
  const int begin = w->from > from ? w->from : from, end = min_int(w->to, from + TILE_ROWS / 2);
  for (int i = begin; i < end; i++)
    UNROLL_TILE for (int j = 0; j < 2; j++) {
      float *o = w->o + i * d + j * 16;
      const vi a = vi_add(vi_load(w->dots[0][j][i]), vi_set1(soft->high_sum[w->row + i]));
      const vi b = vi_add(vi_load(w->dots[1][j][i]), vi_set1(soft->low_sum[w->row + i]));
      const vf kept = vf_mul(vf_load(o), vf_set1(soft->keep[w->row + i]));
      const vf sum = vf_fma(vf_from(a), vf_set1(128.f), vf_from(b));
      vf_store(o, vf_fma(sum, vf_set1(soft->scale[w->row + i]), kept));
    }
}

// dots = one digit of p times the values in tiles 4-7: 32 tokens, or 64.
INLINE void multiply_digit(const char *p, int two, const weighted *before, int64_t d, const softmax_result *soft, int from,
                           uint32_t (*dots)[TILE_ROWS][16]) {
  tile_zero(0);
  tile_zero(1);
  tile_load(2, p, QUIRE_TILE);
  tile_dot_s8u8(0, 2, 4);
  tile_dot_s8u8(1, 2, 6);
  if (two) {
    tile_load(3, p + 32, QUIRE_TILE);
    tile_dot_s8u8(0, 3, 5);
    tile_dot_s8u8(1, 3, 7);
  }
  add_weighted(before, d, soft, from);
  tile_store(0, dots[0], TILE_BYTES);
  tile_store(1, dots[1], TILE_BYTES);
}

// o[rows] = o * keep + p · V, 32 columns at a time.
static void values_int8(int rows, const quire_attention_tile *t, const softmax_result *soft) {
  const int64_t d = t->value_dim;
  const int two = t->num_pages * t->page_size > 32;
  _Alignas(64) uint32_t dots[2][2][2][TILE_ROWS][16];
  weighted last = {.from = 0, .to = 0};
  panels v;
  int turn = 0;
  for (int64_t n = 0; n < d; n += 32) {
    load_values(&v, 2, t, 0, n, 1);
    tile_load(4, v.at[0], TILE_BYTES);
    tile_load(6, v.at[1], TILE_BYTES);
    if (two) {
      load_values(&v, 2, t, 1, n, 1);
      tile_load(5, v.at[0], TILE_BYTES);
      tile_load(7, v.at[1], TILE_BYTES);
    }
    fetch_pages(t, d + n, d + n + 32, 2 * d);
    for (int row = 0; row < rows; row += TILE_ROWS, turn = !turn) {
      const int first = first_row(row, rows);
      const char *high = (const char *)t->p + first * QUIRE_TILE, *low = high + QUIRE_TILE * QUIRE_TILE;
      multiply_digit(high, two, &last, d, soft, 0, dots[turn][0]);
      multiply_digit(low, two, &last, d, soft, TILE_ROWS / 2, dots[turn][1]);
      last = (weighted){dots[turn], t->o + first * d + n, first, row - first, min_int(TILE_ROWS, rows - first)};
    }
  }
  add_weighted(&last, d, soft, 0);
  add_weighted(&last, d, soft, TILE_ROWS / 2);
}

void LEVEL(attention_int8)(int rows, const quire_attention_tile *t) {
  assert(rows >= 1 && rows <= QUIRE_TILE);
  softmax_result soft;
  use_tiles(TILES_INT8_BLOCKS, min_int(rows, TILE_ROWS));
  scores_int8(rows, t);
  softmax_tile(QUIRE_Q8, rows, t, &soft);
  values_int8(rows, t, &soft);
}
