// The configuration of tiles, the peak rates of their products, and a test that they are right on this machine.
#include "amx.h"

THREAD_LOCAL int LEVEL(tile_shape);
#if defined QUIRE_ISA_AMX_TWIN
twin_state quire_amx_twins[TWINS];
THREAD_LOCAL twin_state *quire_amx_twin;
#endif

void LEVEL(configure)(int kind, int rows) {
  tile_shapes shapes = {.palette = 1};
  const int first_weight = kind == TILES_BF16 ? 6 : 4, first_operand = kind == TILES_BF16 ? 4 : 2;
  for (int tile = 0; tile < 8; tile++) {
    shapes.rows[tile] = (uint8_t)(tile < first_weight ? rows : TILE_ROWS);
    shapes.row_bytes[tile] = TILE_BYTES;
    if (kind == TILES_INT8_BLOCKS && tile >= first_weight) shapes.rows[tile] = 8;
    else if (kind == TILES_INT8_BLOCKS && tile >= first_operand) shapes.row_bytes[tile] = 32;
  }
  tile_config(&shapes);
  LEVEL(tile_shape) = shape_of(kind, rows);
}

// Without a configuration, a context switch does not save the tiles' 8 KiB.
void LEVEL(end)(void) {
  if (LEVEL(tile_shape)) tile_release();
  LEVEL(tile_shape) = 0;
}

// Six chains, as many as two operands leave room for. The floats of the first chain are the result.
static int64_t peak_of_tiles(int dtype, int64_t steps, float *result) {
  _Alignas(64) static const char zeros[TILE_ROWS][TILE_BYTES];
  _Alignas(64) float sums[TILE_ROWS][16];
  use_tiles(TILES_BF16, TILE_ROWS);
  tile_zero(0); tile_zero(1); tile_zero(2); tile_zero(3); tile_zero(4); tile_zero(5);
  tile_load(6, zeros, TILE_BYTES);
  tile_load(7, zeros, TILE_BYTES);
  if (dtype == QUIRE_BF16) {
    for (int64_t step = 0; step < steps; step++) {
      tile_dot_bf16(0, 6, 7); tile_dot_bf16(1, 6, 7); tile_dot_bf16(2, 6, 7);
      tile_dot_bf16(3, 6, 7); tile_dot_bf16(4, 6, 7); tile_dot_bf16(5, 6, 7);
    }
  } else {
    for (int64_t step = 0; step < steps; step++) {
      tile_dot_s8u8(0, 6, 7); tile_dot_s8u8(1, 6, 7); tile_dot_s8u8(2, 6, 7);
      tile_dot_s8u8(3, 6, 7); tile_dot_s8u8(4, 6, 7); tile_dot_s8u8(5, 6, 7);
    }
  }
  tile_store(0, sums, TILE_BYTES);
  LEVEL(end)();
  *result = sums[0][0];
  return steps * 6 * TILE_ROWS * 16 * (dtype == QUIRE_BF16 ? 32 : 64) * 2;
}

int64_t LEVEL(peak)(int dtype, int64_t steps, const void *w, const void *a, float *result) {
  return dtype == QUIRE_F32 ? ISA(peak)(dtype, steps, w, a, result) : peak_of_tiles(dtype, steps, result);
}

// Small whole numbers, whose products and sums are exact in any order: 5 rows, 64 bytes of K, 16 columns.
enum { TEST_ROWS = 5 };
static int a_value(int i, int k) { return (7 * i + 3 * k) % 11 - 5; }
static int b_value(int k, int n) { return (5 * k + 2 * n) % 13; }

static uint16_t bf16_of(int x) {
  const float y = (float)x;
  uint32_t bits;
  memcpy(&bits, &y, sizeof bits);
  return (uint16_t)(bits >> 16);
}

int LEVEL(self_test)(void) {
  _Alignas(64) int8_t a8[TEST_ROWS][64];
  _Alignas(64) uint8_t b8[16][16][4];
  _Alignas(64) uint16_t a16[TEST_ROWS][32], b16[16][16][2];
  _Alignas(64) int32_t whole[TEST_ROWS][16];
  _Alignas(64) float real[TEST_ROWS][16];
  for (int i = 0; i < TEST_ROWS; i++)
    for (int k = 0; k < 64; k++) a8[i][k] = (int8_t)a_value(i, k), a16[i][k / 2] = bf16_of(a_value(i, k / 2));
  for (int k = 0; k < 64; k++)
    for (int n = 0; n < 16; n++) b8[k / 4][n][k % 4] = (uint8_t)(200 + b_value(k, n));
  for (int k = 0; k < 32; k++)
    for (int n = 0; n < 16; n++) b16[k / 2][n][k % 2] = bf16_of(b_value(k, n));
  use_tiles(TILES_BF16, TEST_ROWS);
  tile_zero(0);
  tile_load(4, a8, TILE_BYTES);
  tile_load(6, b8, TILE_BYTES);
  tile_dot_s8u8(0, 4, 6);
  tile_store(0, whole, TILE_BYTES);
  tile_zero(1);
  tile_load(5, a16, TILE_BYTES);
  tile_load(7, b16, TILE_BYTES);
  tile_dot_bf16(1, 5, 7);
  tile_store(1, real, TILE_BYTES);
  LEVEL(end)();
  int wrong = 0;
  for (int i = 0; i < TEST_ROWS; i++)
    for (int n = 0; n < 16; n++) {
      int of_64 = 0, of_32 = 0;
      for (int k = 0; k < 64; k++) of_64 += a_value(i, k) * (200 + b_value(k, n));
      for (int k = 0; k < 32; k++) of_32 += a_value(i, k) * b_value(k, n);
      wrong += whole[i][n] != of_64 || real[i][n] != (float)of_32;
    }
  return wrong == 0;
}
