// Linear layers of the amx level. A call has up to AMX_LINEAR_ROWS rows; tiles of rows are multiplied two at a time with
// both panels, so that four tile loads feed four products.
#include <assert.h>
#include <stddef.h>

#include "amx.h"
#include "epilogue.h"

// The epilogue of rows [row, row + rows) of the call; c holds the pair's two panels of these rows.
static void finish_rows(int row, int rows, vf c[][2], const quire_linear_tile *t) {
  quire_linear_tile part = *t;
  part.c += row * t->ldc;
  if (t->factors) part.factors += row;
  finish(rows, c, &part);
}

// c = one or two tiles of rows at `a` times the pair of panels; one sequential chain over K, 32 elements per product.
INLINE void multiply_bf16(const int tiles, const quire_linear_tile *t, const int64_t first_row[2], const char *next,
                          int lines, vf c[2][TILE_ROWS][2]) {
  const int64_t width = t->a.width, row_bytes = width * 2;
  const char *a0 = (const char *)t->a.data + first_row[0] * row_bytes;
  const char *a1 = (const char *)t->a.data + first_row[1] * row_bytes;
  const char *w0 = t->w, *w1 = w0 + t->panel_bytes;
  tile_zero(0);
  tile_zero(1);
  if (tiles == 2) {
    tile_zero(2);
    tile_zero(3);
  }
  for (int64_t k = 0; k < width; k += 32) {
    next = fetch_next(next, lines);
    tile_load(6, w0 + k * 32, TILE_BYTES);
    tile_load(4, a0 + k * 2, row_bytes);
    tile_dot_bf16(0, 4, 6);
    tile_load(7, w1 + k * 32, TILE_BYTES);
    tile_dot_bf16(1, 4, 7);
    if (tiles == 2) {
      tile_load(5, a1 + k * 2, row_bytes);
      tile_dot_bf16(2, 5, 6);
      tile_dot_bf16(3, 5, 7);
    }
  }
  tile_store(0, &c[0][0][0], sizeof c[0][0]);
  tile_store(1, &c[0][0][1], sizeof c[0][0]);
  if (tiles == 2) {
    tile_store(2, &c[1][0][0], sizeof c[0][0]);
    tile_store(3, &c[1][0][1], sizeof c[0][0]);
  }
}

// All row counts run the same products. From 16 rows on, all tiles have 16: the last one overlaps the one before, and
// only its new rows are finished.
void LEVEL(linear_bf16)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= AMX_LINEAR_ROWS);
  use_tiles_of_rows(rows < TILE_ROWS ? rows : TILE_ROWS);
  const char *next = t->next;
  const int passes = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
  for (int pass = 0; pass < passes; pass++) {
    vf c[2][TILE_ROWS][2];
    const int row = pass * 2 * TILE_ROWS, tiles = rows - row > TILE_ROWS ? 2 : 1;
    const int lines = t->next_lines * (pass + 1) / passes - t->next_lines * pass / passes;
    int64_t first_row[2] = {row, row + TILE_ROWS};
    for (int i = 0; i < tiles; i++)
      if (rows >= TILE_ROWS && first_row[i] > rows - TILE_ROWS) first_row[i] = rows - TILE_ROWS;
    if (tiles == 2) multiply_bf16(2, t, first_row, next, lines, c);
    else multiply_bf16(1, t, first_row, next, lines, c);
    next += lines * 64 * (t->a.width / 32);
    for (int i = 0; i < tiles; i++) {
      const int begin = row + i * TILE_ROWS, end = begin + TILE_ROWS < rows ? begin + TILE_ROWS : rows;
      finish_rows(begin, end - begin, c[i] + (begin - first_row[i]), t);
    }
  }
}

// Rows of one tile times one panel. A group of an even number of blocks fills tiles of 64 bytes.
static void multiply_panel(const int step, const quire_linear_tile *t, int panel, int lines, vf sums[TILE_ROWS]) {
  const uint8_t *w = (const uint8_t *)t->w + panel * t->panel_bytes;
  const uint16_t *scales = t->scales + panel * (t->a.width / 2);
  if (t->a.group <= 1) multiply_int8(1, 1, &t->a, w, scales, t->next, lines, sums);
  else if (step == 1) multiply_int8(t->a.group, 1, &t->a, w, scales, t->next, lines, sums);
  else multiply_int8(t->a.group, 2, &t->a, w, scales, t->next, lines, sums);
}

// The rows that fill tiles share the prefetching; without any, the rows of the avx512 level do.
void LEVEL(linear_q8)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= AMX_LINEAR_ROWS);
  const int64_t blocks = t->a.width / 32;
  const int passes = rows / TILE_ROWS * 2, step = t->a.group > 1 && t->a.group % 2 == 0 && blocks % 2 == 0 ? 2 : 1;
  quire_linear_tile part = *t;
  if (passes && step == 1) use_tiles_of_blocks();
  if (passes && step == 2) use_tiles_of_rows(TILE_ROWS);
  for (int pass = 0; pass < passes; pass += 2) {
    vf c[TILE_ROWS][2];
    for (int panel = 0; panel < 2; panel++) {
      vf sums[TILE_ROWS];
      const int lines = t->next_lines * (pass + panel + 1) / passes - t->next_lines * (pass + panel) / passes;
      multiply_panel(step, &part, panel, lines, sums);
      part.next += lines * 64 * blocks;
      for (int i = 0; i < TILE_ROWS; i++) c[i][panel] = sums[i];
    }
    finish(TILE_ROWS, c, &part);
    skip_rows(&part, TILE_ROWS);
  }
  if (passes) part.next_lines = 0;
  multiply_in_calls(ISA(linear_q8), rows % TILE_ROWS, part);
}

// Blocks of q4 panels as blocks of q8 panels: w + 8 to w + 128.
static void widen_q4(const uint8_t *w, int64_t blocks, uint8_t *out) {
  for (int64_t b = 0; b < blocks; b++, w += 256, out += 512)
    for (int i = 0; i < 256; i++) {
      out[i] = (uint8_t)((w[i] & 15) + 120);
      out[256 + i] = (uint8_t)((w[i] >> 4) + 120);
    }
}

// q4 for rows that fill two tiles: widened to q8 once per call, which computes the same integers, so the same bits.
void LEVEL(linear_q4)(int rows, const quire_linear_tile *t) {
  if (rows < 2 * TILE_ROWS) {
    ISA(linear_q4)(rows, t);
    return;
  }
  quire_linear_tile widened = *t;
  widen_q4(t->w, 2 * t->a.width / 32, t->scratch);
  widened.w = t->scratch;
  widened.panel_bytes = quire_panel_bytes(QUIRE_Q8, t->a.width);
  LEVEL(linear_q8)(rows, &widened);
}
