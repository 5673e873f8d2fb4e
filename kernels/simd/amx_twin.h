// The tile operations in plain C, for tests of the amx level on a machine without AMX: what Intel's manual (SDM volume 2)
// says of each instruction. A shape that the processor refuses with #UD or #GP traps here as well.
#pragma once
#include <float.h>
#include <math.h>

// One thread's tiles. Thread-local memory of this size would be allocated in a step, so threads take turns with these.
typedef struct {
  int taken;
  tile_shapes shapes;
  _Alignas(64) uint8_t tile[8][TILE_ROWS][TILE_BYTES];
} twin_state;
enum { TWINS = 256 };
#define OUTLINE __attribute__((noinline, unused)) static  // a copy of these loops at each product takes a minute to compile
extern twin_state quire_amx_twins[TWINS];
extern THREAD_LOCAL twin_state *quire_amx_twin;  // NULL if not configured

INLINE void twin_check(int allowed) {
  if (!allowed) __builtin_trap();
}

INLINE int twin_rows(int tile) { return quire_amx_twin->shapes.rows[tile]; }
INLINE int twin_bytes(int tile) { return quire_amx_twin->shapes.row_bytes[tile]; }

INLINE void tile_config(const tile_shapes *shapes) {
  twin_check(shapes->palette == 1 && shapes->start_row == 0);
  for (int i = 0; i < 14; i++) twin_check(shapes->reserved[i] == 0);
  for (int i = 0; i < 16; i++) {
    const int rows = shapes->rows[i], bytes = shapes->row_bytes[i];
    twin_check(i < 8 ? rows <= TILE_ROWS && bytes <= TILE_BYTES && (rows == 0) == (bytes == 0) : !rows && !bytes);
  }
  for (int i = 0; !quire_amx_twin && i < TWINS; i++)
    if (!__atomic_exchange_n(&quire_amx_twins[i].taken, 1, __ATOMIC_ACQUIRE)) quire_amx_twin = &quire_amx_twins[i];
  twin_check(quire_amx_twin != 0);
  memset(quire_amx_twin->tile, 0, sizeof quire_amx_twin->tile);
  quire_amx_twin->shapes = *shapes;
}

INLINE void tile_release(void) {
  __atomic_store_n(&quire_amx_twin->taken, 0, __ATOMIC_RELEASE);
  quire_amx_twin = 0;
}

INLINE void tile_zero(int tile) {
  twin_check(twin_rows(tile));
  memset(quire_amx_twin->tile[tile], 0, sizeof quire_amx_twin->tile[tile]);
}

INLINE void tile_load(int tile, const void *from, int64_t stride) {
  tile_zero(tile);
  for (int i = 0; i < twin_rows(tile); i++)
    memcpy(quire_amx_twin->tile[tile][i], (const char *)from + i * stride, (size_t)twin_bytes(tile));
}

INLINE void tile_load_once(int tile, const void *from, int64_t stride) { tile_load(tile, from, stride); }

INLINE void tile_store(int tile, void *to, int64_t stride) {
  twin_check(twin_rows(tile));
  for (int i = 0; i < twin_rows(tile); i++)
    memcpy((char *)to + i * stride, quire_amx_twin->tile[tile][i], (size_t)twin_bytes(tile));
}

// c [m x n] += a [m x k] * b [k x n], in units of 4 bytes.
INLINE void twin_check_product(int c, int a, int b) {
  twin_check(c != a && c != b && a != b && twin_rows(c) && twin_rows(a) && twin_rows(b));
  twin_check(twin_rows(c) == twin_rows(a) && twin_bytes(a) == 4 * twin_rows(b) && twin_bytes(c) == twin_bytes(b));
  twin_check(twin_bytes(a) % 4 == 0 && twin_bytes(c) % 4 == 0);
}

// Denormals are zero, as operands and as results.
INLINE float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.f, x) : x; }

// The even and the odd elements of a row of 16 pairs of bf16.
INLINE void twin_widen(const uint8_t *row, float *even, float *odd) {
  for (int n = 0; n < 16; n++) {
    uint32_t pair;
    memcpy(&pair, row + 4 * n, sizeof pair);
    const uint32_t bits[2] = {pair << 16, pair & 0xffff0000};
    float x[2];
    memcpy(x, bits, sizeof x);
    even[n] = flushed(x[0]);
    odd[n] = flushed(x[1]);
  }
}

// The manual: within one instruction the even and the odd elements of K are two chains of fused operations that start at
// zero; their sum is then added to c. Rounding is to nearest even; MXCSR is ignored. All 16 columns are computed, which
// the compiler turns into vectors; the columns that c lacks are not stored.
OUTLINE void tile_dot_bf16(int c, int a, int b) {
  twin_check_product(c, a, b);
  const int rows = twin_rows(c), depth = twin_rows(b), columns = twin_bytes(c) / 4;
  float even_b[TILE_ROWS][16], odd_b[TILE_ROWS][16];
  for (int k = 0; k < depth; k++) twin_widen(quire_amx_twin->tile[b][k], even_b[k], odd_b[k]);
  for (int m = 0; m < rows; m++) {
    float even_a[16], odd_a[16], even[16] = {0}, odd[16] = {0}, *out = (float *)quire_amx_twin->tile[c][m];
    twin_widen(quire_amx_twin->tile[a][m], even_a, odd_a);
    for (int k = 0; k < depth; k++)
      for (int n = 0; n < 16; n++) {
        even[n] = flushed(fmaf(even_a[k], even_b[k][n], even[n]));
        odd[n] = flushed(fmaf(odd_a[k], odd_b[k][n], odd[n]));
      }
    for (int n = 0; n < columns; n++) out[n] = flushed(flushed(out[n]) + flushed(even[n] + odd[n]));
  }
}

// Sums of four products wrap around, without saturation. Floats add the terms of one instruction, which are at most 64 of
// at most 128 * 255, without rounding, and compilers make vectors of them.
OUTLINE void tile_dot_s8u8(int c, int a, int b) {
  twin_check_product(c, a, b);
  const int rows = twin_rows(c), depth = twin_rows(b), columns = twin_bytes(c) / 4;
  float factors[TILE_ROWS][4][16];
  for (int k = 0; k < depth; k++) {
    uint32_t four[16];
    memcpy(four, quire_amx_twin->tile[b][k], sizeof four);
    for (int i = 0; i < 4; i++)
      for (int n = 0; n < 16; n++) factors[k][i][n] = (float)(int32_t)(four[n] >> 8 * i & 0xff);
  }
  for (int m = 0; m < rows; m++) {
    float sums[16] = {0};
    uint32_t *out = (uint32_t *)quire_amx_twin->tile[c][m];
    const int8_t *x = (const int8_t *)quire_amx_twin->tile[a][m];
    for (int k = 0; k < depth; k++)
      for (int i = 0; i < 4; i++)
        for (int n = 0; n < 16; n++) sums[n] += x[4 * k + i] * factors[k][i][n];
    for (int n = 0; n < columns; n++) out[n] += (uint32_t)(int32_t)sums[n];
  }
}
