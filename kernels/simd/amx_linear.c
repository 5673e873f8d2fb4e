// Linear layers of the amx level. A call has up to AMX_LINEAR_ROWS rows, packed in the order in which the tiles of rows are
// read.
#include <assert.h>
#include <stddef.h>

#include "amx_int8.h"
#include "epilogue.h"

enum {
  LEAST_REST_INT8 = 4,  // Fewer rows than this beside full tiles run the function of avx512.
  BAND_TILES = 6,       // tiles of rows that pass by a band: their sums and activations stay in L1
  STEPS_IN_L1 = 8       // bf16: tiles of K of two panels that stay in L1, 16 KiB
};

INLINE int rows_of_tile(int tile, int rows) { return min_int(TILE_ROWS, rows - tile * TILE_ROWS); }
INLINE int tiles_of(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
INLINE int parts_of(int tiles) { return (tiles + BAND_TILES - 1) / BAND_TILES; }  // parts of a call that share a band
INLINE int share(int n, int part, int parts) { return n * (part + 1) / parts - n * part / parts; }

// Rows of int8 that are multiplied on tiles: the first ones of a call.
INLINE int rows_on_tiles(int rows) {
  return rows > TILE_ROWS && rows % TILE_ROWS < LEAST_REST_INT8 ? rows - rows % TILE_ROWS : rows;
}

// The band at a block of K. With scales per 32 or 64 of K, two dots share the loads and stores of their sums.
typedef struct {
  int dots, tiles;     // tiles of each dot; the last one may be a half
  int64_t blocks;      // blocks of each dot
  int64_t tile_bytes;  // bytes of a row of activations
} band_size;

INLINE band_size size_of_band(int64_t block, int64_t blocks, int64_t group) {
  const int64_t left = blocks - block, n = group <= 1 ? 1 : left < group ? left : group;
  const int dots = group <= 2 && left >= 2 * n && n >= group ? 2 : 1;
  return (band_size){dots, (int)(n + 1) / 2, n, group <= 1 ? 32 : TILE_BYTES};
}

// A packed tile of rows of one band: for each dot 16 scales and 16 sums, then [dot][tile][row][tile_bytes].
enum { HEADER_BYTES = 2 * TILE_ROWS * 4 };
INLINE int64_t bytes_of_unit(const band_size *s, int tile_rows) {
  return s->dots * (HEADER_BYTES + s->tiles * tile_rows * s->tile_bytes);
}

// Copy `bytes` of each row to lines of `line` bytes; the rest of a line, and of `all` lines, is zero.
INLINE void copy_rows(const int bytes, const int line, const char *from, int64_t stride, int rows, int all, char *out) {
  for (int i = 0; i < rows; i++, from += stride, out += line) {
    memcpy(out, from, (size_t)bytes);
    if (bytes < line) memset(out + bytes, 0, (size_t)(line - bytes));
  }
  if (rows < all) memset(out, 0, (size_t)((all - rows) * line));
}

// `rows` rows from row `row` on.
static void pack_unit(const quire_rows *a, int64_t block, const band_size *s, int row, int rows, int tile_rows, char *out) {
  const int64_t width = a->width, blocks = width / 32;
  const char *data = (const char *)a->data + row * width;
  char *tile = out + s->dots * HEADER_BYTES;
  for (int d = 0; d < s->dots; d++, block += s->blocks, out += HEADER_BYTES) {
    float *scales = (float *)out;
    int32_t *sums = (int32_t *)(scales + TILE_ROWS);
    memset(out, 0, HEADER_BYTES);
    for (int i = 0; i < rows; i++) scales[i] = a->scales[(row + i) * blocks + block];
    for (int i = 0; i < rows; i++) sums[i] = a->sums[(row + i) * blocks + block];
    for (int i = 0; i < s->tiles; i++, tile += tile_rows * s->tile_bytes) {
      const char *from = data + block * 32 + i * s->tile_bytes;
      if (s->tile_bytes == 32) copy_rows(32, 32, from, width, rows, tile_rows, tile);
      else if (2 * i + 1 < s->blocks) copy_rows(TILE_BYTES, TILE_BYTES, from, width, rows, tile_rows, tile);
      else copy_rows(32, TILE_BYTES, from, width, rows, tile_rows, tile);
    }
  }
}

// [tiles that share a band][band][tile of rows]
void LEVEL(pack_q8)(const quire_rows *a, int rows, void *packed) {
  const int64_t blocks = a->width / 32;
  const int on_tiles = rows_on_tiles(rows), tile_rows = min_int(rows, TILE_ROWS), tiles = tiles_of(on_tiles);
  const int parts = parts_of(tiles);
  char *out = packed;
  for (int part = 0, first = 0; part < parts; part++) {
    const int n = share(tiles, part, parts);
    band_size s;
    for (int64_t block = 0; block < blocks; block += s.dots * s.blocks) {
      s = size_of_band(block, blocks, a->group);
      for (int i = first; i < first + n; i++, out += bytes_of_unit(&s, tile_rows))
        pack_unit(a, block, &s, i * TILE_ROWS, rows_of_tile(i, on_tiles), tile_rows, out);
    }
    first += n;
  }
}

// [block of K][pair of tiles of rows][tile of K][tile of rows]
void LEVEL(pack_bf16)(const quire_rows *a, int rows, void *packed) {
  char *out = packed;
  const int64_t steps = a->width / 32;
  const int tile_rows = min_int(rows, TILE_ROWS), tiles = tiles_of(rows);
  for (int64_t begin = 0; begin < steps; begin += STEPS_IN_L1) {
    const int64_t end = begin + STEPS_IN_L1 < steps ? begin + STEPS_IN_L1 : steps;
    for (int pair = 0; pair < tiles; pair += 2)
      for (int64_t step = begin; step < end; step++)
        for (int tile = pair; tile < min_int(pair + 2, tiles); tile++, out += tile_rows * TILE_BYTES)
          copy_rows(TILE_BYTES, TILE_BYTES, (const char *)a->data + (tile * TILE_ROWS * steps + step) * TILE_BYTES,
                    steps * TILE_BYTES, rows_of_tile(tile, rows), tile_rows, out);
  }
}

// The epilogue of rows [row, row + rows) of the call; c holds the pair's two panels of these rows.
static void finish_rows(int row, int rows, vf c[][2], const quire_linear_tile *t) {
  quire_linear_tile part = *t;
  part.c += row * t->ldc;
  if (t->factors) part.factors += row;
  finish(rows, c, &part);
}

// Lines that are prefetched a few at a time.
typedef struct {
  const char *at;
  int left, at_once;
} lines;

INLINE lines lines_in(const void *at, int count, int times) {
  return (lines){at, count, (count + times - 1) / times};
}
#define FETCH_SOME(from, locality) \
  for (int some = min_int((from).at_once, (from).left); some > 0; some--, (from).left--, (from).at += 64) \
  __builtin_prefetch((from).at, 0, locality)

// c = one or two tiles of rows at `a` times the pair of panels, in steps of 32 of K: one sequential chain for each sum, which
// continues at c after the first block of K.
INLINE void multiply_bf16(const int tiles, int continues, const char *a, int tile_rows, const char *w0, const char *w1,
                          int64_t steps, lines *next, vf c[][2]) {
  const int64_t tile = tile_rows * TILE_BYTES, row = sizeof c[0];
  if (continues) {
    tile_load(0, &c[0][0], row);
    tile_load(1, &c[0][1], row);
    if (tiles == 2) {
      tile_load(2, &c[TILE_ROWS][0], row);
      tile_load(3, &c[TILE_ROWS][1], row);
    }
  } else {
    tile_zero(0);
    tile_zero(1);
    if (tiles == 2) {
      tile_zero(2);
      tile_zero(3);
    }
  }
  for (int64_t step = 0; step < steps; step++, w0 += TILE_ROWS * TILE_BYTES, w1 += TILE_ROWS * TILE_BYTES) {
    FETCH_SOME(*next, 2);
    tile_load_once(4, a, TILE_BYTES);
    tile_load(6, w0, TILE_BYTES);
    tile_dot_bf16(0, 4, 6);
    tile_load(7, w1, TILE_BYTES);
    tile_dot_bf16(1, 4, 7);
    if (tiles == 2) {
      tile_load_once(5, a + tile, TILE_BYTES);
      tile_dot_bf16(2, 5, 6);
      tile_dot_bf16(3, 5, 7);
    }
    a += tiles * tile;
  }
  tile_store(0, &c[0][0], row);
  tile_store(1, &c[0][1], row);
  if (tiles == 2) {
    tile_store(2, &c[TILE_ROWS][0], row);
    tile_store(3, &c[TILE_ROWS][1], row);
  }
}

// All row counts run the same products. Blocks of K, so that the panels' part stays in L1 for all rows.
void LEVEL(linear_bf16)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= AMX_LINEAR_ROWS && t->packed);
  const int64_t steps = t->a.width / 32;
  const int tile_rows = min_int(rows, TILE_ROWS), tiles = tiles_of(rows), pairs = (tiles + 1) / 2;
  vf c[AMX_LINEAR_ROWS][2];
  const char *a = t->packed, *w0 = t->w, *w1 = w0 + t->panel_bytes;
  lines next = lines_in(t->next, t->next_lines * (int)steps, pairs * (int)steps);
  use_tiles(TILES_BF16, tile_rows);
  for (int64_t begin = 0; begin < steps; begin += STEPS_IN_L1) {
    const int64_t n = begin + STEPS_IN_L1 < steps ? STEPS_IN_L1 : steps - begin, line = begin * TILE_ROWS * TILE_BYTES;
    for (int tile = 0; tile < tiles; tile += 2) {
      const int two = tile + 2 <= tiles;
      if (two) multiply_bf16(2, begin > 0, a, tile_rows, w0 + line, w1 + line, n, &next, c + tile * TILE_ROWS);
      else multiply_bf16(1, begin > 0, a, tile_rows, w0 + line, w1 + line, n, &next, c + tile * TILE_ROWS);
      a += (two ? 2 : 1) * n * tile_rows * TILE_BYTES;
    }
  }
  for (int row = 0; row < rows; row += TILE_ROWS) finish_rows(row, rows_of_tile(row / TILE_ROWS, rows), c + row, t);
}

// One band of a pair of panels; `rest` is memory for a last tile that is half full.
static band band_at(const quire_linear_tile *t, int64_t block, const band_size *s,
                    uint8_t rest[2][TILE_ROWS * TILE_BYTES]) {
  const int64_t stride = s->tiles == 1 ? s->blocks * 512 : TILE_ROWS * TILE_BYTES;
  const int is_half = s->tile_bytes == TILE_BYTES && s->blocks % 2;
  band b = {.stride = stride, .dots = s->dots, .tiles = s->tiles};
  for (int panel = 0; panel < 2; panel++) {
    b.first[panel] = (const uint8_t *)t->w + panel * t->panel_bytes + block * 512;
    b.last[panel] = b.first[panel] + (s->dots * s->tiles - 1) * stride;
    if (is_half) b.last[panel] = memcpy(rest[panel], b.last[panel], 512);  // The rows have zeros there.
  }
  return b;
}

// The sums of some tiles of rows, and dots that are to be added. The processor compares the lowest 12 bits of addresses of
// loads and earlier stores: the dots of a tile, 2 KiB, lie in the other half of 4 KiB than its sums.
typedef struct {
  _Alignas(4096) vf sums[BAND_TILES * TILE_ROWS][2];
  _Alignas(4096) uint32_t dots[4][2][TILE_ROWS][16];
  uint8_t rest[2][TILE_ROWS * TILE_BYTES];
} part_memory;

// Rows of a call that are packed one band after the other.
typedef struct {
  const quire_linear_tile *t;
  int first, tiles;     // the first row, number of tiles
  int rows, tile_rows;  // rows of the call, of each tile
} rows_part;

// Multiply a part by one band of the panels, from `packed` on; `last` is the product that is still to be added.
static const char *multiply_rows(const rows_part *part, int64_t block, const band_size *s, const char *packed, lines *next,
                                 part_memory *memory, product *last) {
  const quire_linear_tile *t = part->t;
  const int64_t band_bytes = s->dots * s->blocks * 512, scale = t->a.group > 1 ? block / t->a.group : block;
  const int64_t num_scales = quire_num_scales(t->a.width, t->a.group);
  const band b = band_at(t, block, s, memory->rest);
  lines following[2];
  for (int j = 0; j < 2; j++) following[j] = lines_in(b.first[j] + band_bytes, (int)band_bytes / 64, part->tiles);
  if (s->dots * s->tiles <= 2) load_band(&b);
  for (int i = 0; i < part->tiles; i++) {
    const int at = s->dots == 1 ? (i + 1) % 2 : last->dots == memory->dots ? 2 : 0;
    FETCH_SOME(*next, 2);
    FETCH_SOME(following[0], 3);
    FETCH_SOME(following[1], 3);
    multiply_band(1, &b, packed + s->dots * HEADER_BYTES, s->tile_bytes, part->tile_rows * s->tile_bytes, last,
                  memory->dots + at);
    *last = (product){
        .dots = memory->dots + at, .scales = (const float *)packed, .sums = (const int32_t *)packed + TILE_ROWS,
        .dot_stride = 2 * TILE_ROWS, .row_stride = 1,
        .columns = {t->scales + scale * 16, t->scales + (num_scales + scale) * 16}, .column_stride = 16,
        .out = (float *)memory->sums[i * TILE_ROWS], .ld = 32,
        .count = s->dots, .from = 0, .to = rows_of_tile(part->first / TILE_ROWS + i, part->rows)};
    packed += bytes_of_unit(s, part->tile_rows);
  }
  return packed;
}

// Multiply a part by the pair of panels. Returns the end of its rows at `packed`.
static const char *multiply_part(const rows_part *part, const char *packed, lines *next) {
  const quire_linear_tile *t = part->t;
  const int64_t blocks = t->a.width / 32;
  part_memory memory;
  product last = {.dots = NULL};
  for (int i = 0; i < part->tiles * TILE_ROWS; i++) memory.sums[i][0] = memory.sums[i][1] = vf_zero();
  memset(memory.rest, 0, sizeof memory.rest);
  band_size s;
  for (int64_t block = 0; block < blocks; block += s.dots * s.blocks) {
    s = size_of_band(block, blocks, t->a.group);
    if (t->next_scales && part->first == 0)  // Both panels have 32 bytes for each dot, one panel after the other.
      for (int d = 0; d < s.dots; d++) __builtin_prefetch(t->next_scales + (block / s.blocks + d) * 64, 0, 2);
    packed = multiply_rows(part, block, &s, packed, next, &memory, &last);
  }
  scale_half(&last, 0);
  scale_half(&last, TILE_ROWS / 2);
  for (int i = 0; i < part->tiles * TILE_ROWS; i += TILE_ROWS)
    finish_rows(part->first + i, rows_of_tile((part->first + i) / TILE_ROWS, part->rows), memory.sums + i, t);
  return packed;
}

// The first rows run on tiles, the others by the function of avx512.
void LEVEL(linear_q8)(int rows, const quire_linear_tile *t) {
  assert(rows >= 1 && rows <= AMX_LINEAR_ROWS && t->packed);
  const int on_tiles = rows_on_tiles(rows), tiles = tiles_of(on_tiles), parts = parts_of(tiles);
  const int64_t blocks = t->a.width / 32, per_band = t->a.group > 2 ? t->a.group : 2;
  const char *packed = t->packed;
  quire_linear_tile other = *t;
  lines next = lines_in(t->next, t->next_lines * (int)blocks, tiles * (int)((blocks + per_band - 1) / per_band));
  use_tiles(t->a.group <= 1 ? TILES_INT8_BLOCKS : TILES_INT8, min_int(on_tiles, TILE_ROWS));
  for (int part = 0, first = 0; part < parts; part++) {
    const rows_part of_call = {t, first * TILE_ROWS, share(tiles, part, parts), on_tiles, min_int(on_tiles, TILE_ROWS)};
    packed = multiply_part(&of_call, packed, &next);
    first += of_call.tiles;
  }
  skip_rows(&other, on_tiles);
  other.next_lines = 0, other.next_scales = NULL;
  multiply_in_calls(ISA(linear_q8), rows - on_tiles, other);
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
