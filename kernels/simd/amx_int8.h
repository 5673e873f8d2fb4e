// int8 products of the amx level: up to four tiles of weights or pages stay while tiles of rows pass by. A tile of exact
// dots is stored, and scaled in f32 while the products of the next rows run: the operations of avx512 in their order, so
// that the bits are those of all levels.
#pragma once
#include "amx.h"

// A band of two panels: 1 or 2 dots that have a scale each, of some tiles of K. Tile i of a panel lies `stride` bytes after
// tile i - 1, except that the last tile may lie elsewhere.
typedef struct {
  const uint8_t *first[2], *last[2];
  int64_t stride;
  int dots, tiles;  // tiles of each dot
} band;

INLINE const uint8_t *weight_tile(const band *b, int panel, int i) {
  return i == b->dots * b->tiles - 1 ? b->last[panel] : b->first[panel] + i * b->stride;
}

// Dots in memory with their scales and sums: out[row][16 * panel ...] += dot * scales of the row and of the columns.
typedef struct {
  uint32_t (*dots)[2][TILE_ROWS][16];  // [dot][panel]
  const float *scales;                 // scales of the rows: row i, dot d at [d * dot_stride + i * row_stride]
  const int32_t *sums;                 // start values, in the same places, that make dots with unsigned weights exact
  int64_t dot_stride, row_stride;
  const uint16_t *columns[2];          // fp16 scales of each panel, of dot d at [d * column_stride]
  int64_t column_stride;
  float *out;                          // sums of row 0
  int64_t ld;
  int count, from, to;                 // number of dots; rows [from, to)
} product;

INLINE void scale_dots(const int count, const product *p, int from, int to) {
  vf scales[2][2];
  UNROLL_TILE for (int d = 0; d < count; d++)
    UNROLL_TILE for (int j = 0; j < 2; j++) scales[d][j] = vf_load_f16(p->columns[j] + d * p->column_stride);
  _Pragma("GCC unroll 4") for (int i = from; i < to; i++) {
    float *out = p->out + i * p->ld;
    vf x = vf_load(out), y = vf_load(out + 16);
    UNROLL_TILE for (int d = 0; d < count; d++) {
      const int64_t at = d * p->dot_stride + i * p->row_stride;
      const vi sum = vi_set1(p->sums[at]);
      const vf z = vf_set1(p->scales[at]);
      x = vf_fma(vf_from(vi_add(sum, vi_load(p->dots[d][0][i]))), vf_mul(scales[d][0], z), x);
      y = vf_fma(vf_from(vi_add(sum, vi_load(p->dots[d][1][i]))), vf_mul(scales[d][1], z), y);
    }
    vf_store(out, x), vf_store(out + 16, y);
  }
}

// Scale the rows of a product that are in [from, from + 8).
INLINE void scale_half(const product *p, const int from) {
  const int to = from + TILE_ROWS / 2;
  if (p->from <= from && p->to >= to) {  // most often; no loop for a remainder
    if (p->count == 2) scale_dots(2, p, from, to);
    else scale_dots(1, p, from, to);
    return;
  }
  const int begin = p->from > from ? p->from : from, end = min_int(p->to, to);
  if (begin >= end) return;
  if (p->count == 2) scale_dots(2, p, begin, end);
  else scale_dots(1, p, begin, end);
}

INLINE void load_band(const band *b) {
  tile_load(4, weight_tile(b, 0, 0), TILE_BYTES);
  tile_load(6, weight_tile(b, 1, 0), TILE_BYTES);
  if (b->dots * b->tiles != 2) return;
  tile_load(5, weight_tile(b, 0, 1), TILE_BYTES);
  tile_load(7, weight_tile(b, 1, 1), TILE_BYTES);
}

// How rows of activations are read: once from a stream, or again for each band.
#define LOAD_ROWS(once, tile, from, stride) \
  do { if (once) tile_load_once(tile, from, stride); else tile_load(tile, from, stride); } while (0)

// dots = the rows at `a` times the band, while the product `before` is scaled. Tiles of rows are `next_tile` bytes apart.
// Bands of up to two tiles of K are in tiles 4-7; a longer one is read from cache.
INLINE void multiply_band(const int once, const band *b, const char *a, int64_t stride, int64_t next_tile,
                          const product *before, uint32_t (*dots)[2][TILE_ROWS][16]) {
  tile_zero(0);
  tile_zero(1);
  if (b->dots * b->tiles <= 2) {
    LOAD_ROWS(once, 2, a, stride);
    tile_dot_s8u8(0, 2, 4);
    tile_dot_s8u8(1, 2, 6);
    if (b->tiles == 2) {
      LOAD_ROWS(once, 3, a + next_tile, stride);
      tile_dot_s8u8(0, 3, 5);
      tile_dot_s8u8(1, 3, 7);
    }
  } else {
    for (int i = 0; i < b->tiles; i++) {
      tile_load(4, weight_tile(b, 0, i), TILE_BYTES);
      LOAD_ROWS(once, 2, a + i * next_tile, stride);
      tile_load(6, weight_tile(b, 1, i), TILE_BYTES);
      tile_dot_s8u8(0, 2, 4);
      tile_dot_s8u8(1, 2, 6);
    }
  }
  scale_half(before, 0);
  if (b->dots == 2) {
    tile_store(0, dots[0][0], TILE_BYTES);
    tile_store(1, dots[0][1], TILE_BYTES);
    LOAD_ROWS(once, 3, a + next_tile, stride);
    tile_zero(0);
    tile_zero(1);
    tile_dot_s8u8(0, 3, 5);
    tile_dot_s8u8(1, 3, 7);
  }
  scale_half(before, TILE_ROWS / 2);
  tile_store(0, dots[b->dots - 1][0], TILE_BYTES);
  tile_store(1, dots[b->dots - 1][1], TILE_BYTES);
}
