// Whether this machine can run a level, and if not, why. On x86, cpuid reports the processor's features and XGETBV the
// registers that the operating system saves; on AArch64, Linux's auxiliary vector reports both.
#define _GNU_SOURCE
#include "tiles.h"

#include <stddef.h>

extern const quire_tiles quire_tiles_scalar;

#if defined __x86_64__
#include <cpuid.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

extern const quire_tiles quire_tiles_avx2, quire_tiles_avx512, quire_tiles_amx, quire_tiles_amx_twin;
int self_test_amx(void);

static const quire_tiles *const levels[QUIRE_LEVELS] = {
  [QUIRE_SCALAR] = &quire_tiles_scalar, [QUIRE_AVX2] = &quire_tiles_avx2,
  [QUIRE_AVX512] = &quire_tiles_avx512, [QUIRE_AMX] = &quire_tiles_amx,
#if defined QUIRE_WITH_AMX_TWIN
  [QUIRE_AMX_TWIN] = &quire_tiles_amx_twin,
#endif
};

static uint64_t saved_state(void) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

static const char *obstacle_to_avx2(void) {
  unsigned a, b, c, d;
  const unsigned osxsave = 1u << 27, fma = 1u << 12, f16c = 1u << 29, avx2 = 1u << 5;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (fma | f16c)) != (fma | f16c)) return "the processor lacks FMA or F16C";
  const uint64_t ymm = 0x6;
  if (!(c & osxsave) || (saved_state() & ymm) != ymm) return "the operating system does not save AVX registers";
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & avx2)) return "the processor lacks AVX2";
  return NULL;
}

static const char *obstacle_to_avx512(void) {
  const char *lower = obstacle_to_avx2();
  if (lower) return lower;
  unsigned a, b, c, d;
  const unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11, bf16 = 1u << 5;
  __cpuid_count(7, 0, a, b, c, d);
  if ((b & (f | dq | bw | vl)) != (f | dq | bw | vl)) return "the processor lacks AVX-512 F, BW, VL or DQ";
  if (!(c & vnni)) return "the processor lacks AVX-512 VNNI";
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & bf16)) return "the processor lacks AVX-512 BF16";
  const uint64_t zmm = 0xe6;
  return (saved_state() & zmm) == zmm ? NULL : "the operating system does not save AVX-512 registers";
}

// AMX: the features, the state that the operating system saves, the kernel's permission, and a test of the instructions.

static sigjmp_buf refused;
static _Thread_local volatile sig_atomic_t testing;

// Another thread's SIGILL ends the process, as it would without this handler.
static void on_illegal_instruction(int number) {
  if (testing) siglongjmp(refused, 1);
  signal(number, SIG_DFL);
}

// A guest may report AMX and refuse its instructions.
static const char *failure_of_self_test(void) {
  const char *failure = NULL;
  struct sigaction action = {.sa_handler = on_illegal_instruction}, before;
  if (sigaction(SIGILL, &action, &before)) return "the self-test could not be protected from SIGILL";
  testing = 1;
  if (sigsetjmp(refused, 1)) failure = "the processor or its hypervisor refuses tile instructions (SIGILL)";
  else if (!self_test_amx()) failure = "the self-test of tile products found wrong sums";
  testing = 0;
  sigaction(SIGILL, &before, NULL);
  return failure;
}

static const char *find_obstacle_to_amx(void) {
  const char *lower = obstacle_to_avx512();
  if (lower) return lower;
  unsigned a, b, c, d;
  const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, guest = 1u << 31;
  __cpuid_count(7, 0, a, b, c, d);
  if ((d & (bf16 | tile | int8)) != (bf16 | tile | int8)) {
    __cpuid(1, a, b, c, d);
    return c & guest ? "the processor lacks AMX, or the hypervisor hides it" : "the processor lacks AMX";
  }
  const uint64_t tiles = 3u << 17;
  if ((saved_state() & tiles) != tiles) return "the operating system or hypervisor does not save tile registers";
  const long request_permission = 0x1023, tile_data = 18;
  static char refusal[120];
  if (syscall(SYS_arch_prctl, request_permission, tile_data)) {
    snprintf(refusal, sizeof refusal, "the kernel refused permission for tile registers (%s)", strerror(errno));
    return refusal;
  }
  return failure_of_self_test();
}

static const char *found;
static void find_once(void) { found = find_obstacle_to_amx(); }

static const char *obstacle_to_amx(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_once);
  return found;
}

const char *quire_isa_obstacle(int level) {
  switch (level) {
    case QUIRE_SCALAR: return NULL;
    case QUIRE_AVX2: return obstacle_to_avx2();
#if defined QUIRE_WITH_AMX_TWIN
    case QUIRE_AMX_TWIN:  // needs the instructions of avx512
#endif
    case QUIRE_AVX512: return obstacle_to_avx512();
    case QUIRE_AMX: return obstacle_to_amx();
    default: return "this build has no such level";
  }
}
#elif defined __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>

extern const quire_tiles quire_tiles_neon;

static const quire_tiles *const levels[QUIRE_LEVELS] = {&quire_tiles_scalar, &quire_tiles_neon};

const char *quire_isa_obstacle(int level) {
  const int capable = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP2) & HWCAP2_BF16);
  return level == QUIRE_SCALAR || capable ? NULL : "the processor lacks the dot products of Armv8.2 or BF16";
}
#else
static const quire_tiles *const levels[QUIRE_LEVELS] = {&quire_tiles_scalar};

const char *quire_isa_obstacle(int level) { return NULL; }
#endif

const quire_tiles *quire_isa_tiles(int level) { return levels[level]; }
