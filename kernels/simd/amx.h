// The vocabulary of the amx level: eight tiles of 16 rows x 64 bytes, configured per thread, and their products. Tile
// numbers are literals. Panels of weights and pages are tiles as they are stored.
#pragma once
#include <string.h>

#include "level.h"

enum { TILE_ROWS = 16, TILE_BYTES = 64 };
INLINE int min_int(int a, int b) { return a < b ? a : b; }
#define UNROLL_TILE _Pragma("GCC unroll 16")

// The static block of a thread: other thread-local memory of a shared library is allocated on its first use, in a step.
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec")))

// The argument of LDTILECFG; palette 1 has eight tiles, so the later entries stay zero.
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
// The same for what is read once: it does not displace other data from L1.
#define tile_load_once(tile, from, stride) \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define tile_store(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
// c += a * b: bf16 pairs; signed bytes of a times unsigned bytes of b
#define tile_dot_bf16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#define tile_dot_s8u8(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#endif

// Shapes of tiles. Those of bf16: sums 0-3, rows of activations 4 and 5, weights 6 and 7; 64 bytes of K. Those of int8: sums
// 0 and 1, rows of activations 2 and 3, weights or pages 4-7; 64 bytes of K, or blocks of 32 where each block has a scale.
enum { TILES_BF16 = 1, TILES_INT8 = 2, TILES_INT8_BLOCKS = 3 };
extern THREAD_LOCAL int LEVEL(tile_shape);  // shape of this thread's tiles; 0 if they are released
INLINE int shape_of(int kind, int rows) { return kind * 32 + rows; }
void LEVEL(configure)(int kind, int rows);

// Tiles of a kind for 1 to 16 rows of activations. A configuration takes some hundred cycles, so it stays until another one
// is needed or the step ends.
INLINE void use_tiles(int kind, int rows) {
  if (LEVEL(tile_shape) != shape_of(kind, rows)) LEVEL(configure)(kind, rows);
}
