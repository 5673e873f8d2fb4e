// The vocabulary of the amx level: eight tiles of 16 rows x 64 bytes, configured per thread, and their products. Tile
// numbers are literals. All shapes of this file give tiles 0-3 to sums, 4 and 5 to rows of activations, 6 and 7 to weights
// or pages, whose panels are tiles as they are stored.
#pragma once
#include <string.h>

#include "level.h"

enum { TILE_ROWS = 16, TILE_BYTES = 64 };
#define UNROLL_TILE _Pragma("GCC unroll 16")

// The static block of a thread: other thread-local memory of a shared library is allocated on its first use, in a step.
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec")))

// What LDTILECFG reads; palette 1 has eight tiles, so the later entries stay zero.
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_shapes;
_Static_assert(sizeof(tile_shapes) == 64, "LDTILECFG reads 64 bytes");

#if defined QUIRE_ISA_AMX_TWIN
#include "amx_twin.h"
#else
#define tile_config(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(*(shapes)))
#define tile_release() __asm__ volatile("tilerelease")
#define tile_zero(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define tile_load(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define tile_store(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
// c += a * b: bf16 pairs; signed bytes of a times unsigned bytes of b
#define tile_dot_bf16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#define tile_dot_s8u8(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#endif

// The shape of this thread's tiles: BLOCKS_OF_32, the number of rows (1-16) of tiles of 64 bytes, or 0 if released.
enum { BLOCKS_OF_32 = 32 };
extern THREAD_LOCAL int LEVEL(tile_shape);
void LEVEL(configure)(int shape);

// Tiles of `rows` activations, 64 bytes of K each, and of all 16 rows of weights. A configuration takes some hundred
// cycles, so it stays until another one is needed or the step ends.
INLINE void use_tiles_of_rows(int rows) {
  if (LEVEL(tile_shape) != rows) LEVEL(configure)(rows);
}

// Tiles for int8 with a scale per 32 of K: 16 rows x 32 bytes of activations, 8 rows x 64 bytes of weights.
INLINE void use_tiles_of_blocks(void) {
  if (LEVEL(tile_shape) != BLOCKS_OF_32) LEVEL(configure)(BLOCKS_OF_32);
}

// sums[16] = the 16 rows at `a` times one panel of unsigned int8: for each group of blocks an exact integer dot, in tiles of
// `step` blocks, which divides the group, then the operations of body_blocks or body_groups in their order, so that the bits
// are those of all levels. Two groups have their own memory, so that the product of one can overlap the scaling of the other.
INLINE void multiply_int8(const int64_t group, const int step, const quire_rows *a, const uint8_t *panel, const uint16_t *scales, const char *next, int lines,
                          vf sums[TILE_ROWS]) {
  const int64_t blocks = a->width / 32;
  _Alignas(64) uint32_t dots[2][TILE_ROWS][16];
  vf s[TILE_ROWS];
  UNROLL_TILE for (int i = 0; i < TILE_ROWS; i++) s[i] = vf_zero();
  int turn = 0;
  for (int64_t b = 0; b < blocks; b += group) {
    uint32_t (*dot)[16] = dots[turn];
    turn = !turn;
    const int64_t end = b + group < blocks ? b + group : blocks;
    tile_zero(0);
    for (int64_t j = b; j < end; j += step) {
      for (int i = 0; i < step * lines; i++) __builtin_prefetch(next + (j * lines + i) * 64, 0, 2);
      tile_load(4, (const char *)a->data + j * 32, a->width);
      tile_load(6, panel + j * 512, TILE_BYTES);
      tile_dot_s8u8(0, 4, 6);
    }
    tile_store(0, dot, TILE_BYTES);
    const vf p = vf_load_f16(scales + b * 16);
    int64_t at = b;
    UNROLL_TILE for (int i = 0; i < TILE_ROWS; i++, at += blocks) {
      __asm__("" : "+r"(at));  // an opaque `at`: 16 offsets would take the registers of the sums
      const vi exact = vi_add(vi_load(dot[i]), vi_set1(a->sums[at]));
      s[i] = vf_fma(vf_from(exact), vf_mul(p, vf_set1(a->scales[at])), s[i]);
    }
  }
  UNROLL_TILE for (int i = 0; i < TILE_ROWS; i++) sums[i] = s[i];
}
