// Whether this machine can run a level. On x86, cpuid reports the processor's features and XGETBV the registers that
// the operating system saves; on AArch64, Linux's auxiliary vector reports both.
#include "tiles.h"

extern const quire_tiles quire_tiles_scalar;

#if defined __x86_64__
#include <cpuid.h>

extern const quire_tiles quire_tiles_avx2, quire_tiles_avx512;

static const quire_tiles *const levels[QUIRE_LEVELS] = {&quire_tiles_scalar, &quire_tiles_avx2, &quire_tiles_avx512};

static uint64_t saved_state(void) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

int quire_isa_supported(int level) {
  if (level == QUIRE_SCALAR) return 1;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const unsigned osxsave = 1u << 27, fma = 1u << 12, f16c = 1u << 29;
  if ((c & (osxsave | fma | f16c)) != (osxsave | fma | f16c)) return 0;
  const uint64_t ymm = 0x6, zmm = 0xe6, saved = saved_state();
  if ((saved & ymm) != ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const unsigned avx2 = 1u << 5, f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11;
  if (!(b & avx2)) return 0;
  if (level == QUIRE_AVX2) return 1;
  if ((saved & zmm) != zmm || (b & (f | dq | bw | vl)) != (f | dq | bw | vl) || !(c & vnni)) return 0;
  const unsigned bf16 = 1u << 5;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bf16) != 0;
}
#elif defined __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>

extern const quire_tiles quire_tiles_neon;

static const quire_tiles *const levels[QUIRE_LEVELS] = {&quire_tiles_scalar, &quire_tiles_neon};

int quire_isa_supported(int level) {
  return level == QUIRE_SCALAR || ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP2) & HWCAP2_BF16));
}
#else
static const quire_tiles *const levels[QUIRE_LEVELS] = {&quire_tiles_scalar};

int quire_isa_supported(int level) { return level == QUIRE_SCALAR; }
#endif

const quire_tiles *quire_isa_tiles(int level) { return levels[level]; }
