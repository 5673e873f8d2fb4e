// Obstacles to the amx level, on machines that are made up: their processor, operating system and kernel
// answer as the test defines. Prints "ok", or what is wrong. Built by test_isa.py.
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PERMISSION = 0x1023, TILE_DATA = 18 };

typedef struct {
  const char *obstacle;           // NULL: none
  unsigned c1, b7, c7, d7, a7_1;  // cpuid: leaf 1; leaf 7, 0; leaf 7, 1
  uint32_t saved;                 // the registers that the operating system saves
  int refusal;                    // errno of the request for permission; or 0
  enum { RIGHT, WRONG, ILLEGAL } sums;  // result of the self-test
} made_up;

static made_up machine;
static int requests;

static int report(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
  *a = leaf == 7 && part == 1 ? machine.a7_1 : 0;
  *b = leaf == 7 && part == 0 ? machine.b7 : 0;
  *c = leaf == 1 ? machine.c1 : leaf == 7 && part == 0 ? machine.c7 : 0;
  *d = leaf == 7 && part == 0 ? machine.d7 : 0;
  return 1;
}

static long answer(long number, long request, long component) {
  requests += number == SYS_arch_prctl && request == PERMISSION && component == TILE_DATA;
  errno = machine.refusal;
  return machine.refusal ? -1 : 0;
}

#undef __cpuid
#undef __cpuid_count
#define __cpuid(leaf, a, b, c, d) report(leaf, 0, &a, &b, &c, &d)
#define __cpuid_count(leaf, part, a, b, c, d) report(leaf, part, &a, &b, &c, &d)
#define __get_cpuid(leaf, a, b, c, d) report(leaf, 0, a, b, c, d)
#define __get_cpuid_count(leaf, part, a, b, c, d) report(leaf, part, a, b, c, d)
#define __asm__(...) (low = machine.saved, high = 0)  // xgetbv
#define syscall(number, request, component) answer(number, request, component)
#include "simd/dispatch.c"

const quire_tiles quire_tiles_scalar, quire_tiles_avx2, quire_tiles_avx512, quire_tiles_amx;
int self_test_amx(void) { return machine.sums == ILLEGAL ? raise(SIGILL) : machine.sums == RIGHT; }

#define BIT(n) (1u << (n))
#define C1 (BIT(12) | BIT(27) | BIT(29))                     // FMA, OSXSAVE, F16C
#define B7 (BIT(5) | BIT(16) | BIT(17) | BIT(30) | BIT(31))  // AVX2; AVX-512 F, DQ, BW, VL
#define D7 (BIT(22) | BIT(24) | BIT(25))                     // AMX bf16, tile, int8
#define ALL C1, B7, BIT(11), D7, BIT(5)                      // all features, with AVX-512 VNNI and BF16
#define SAVED (0xe6 | 3u << 17)

int main(void) {
  const made_up machines[] = {
    {NULL, ALL, SAVED, 0, RIGHT},
    {"the self-test of tile products found wrong sums", ALL, SAVED, 0, WRONG},
    {"the processor or its hypervisor refuses tile instructions (SIGILL)", ALL, SAVED, 0, ILLEGAL},
    {"the kernel refused permission for tile registers (Operation not permitted)", ALL, SAVED, EPERM, RIGHT},
    {"the operating system or hypervisor does not save tile registers", ALL, 0xe6, 0, RIGHT},
    {"the operating system or hypervisor does not save tile registers", ALL, 0xe6 | 1u << 17, 0, RIGHT},
    {"the operating system does not save AVX-512 registers", ALL, 6, 0, RIGHT},
    {"the processor lacks AMX", C1, B7, BIT(11), 0, BIT(5), SAVED, 0, RIGHT},
    {"the processor lacks AMX", C1, B7, BIT(11), D7 & ~BIT(25), BIT(5), SAVED, 0, RIGHT},
    {"the processor lacks AMX, or the hypervisor hides it", C1 | BIT(31), B7, BIT(11), 0, BIT(5), SAVED, 0, RIGHT},
    {"the processor lacks AVX-512 BF16", C1, B7, BIT(11), D7, 0, SAVED, 0, RIGHT},
  };
  int wrong = 0;
  for (int i = 0; i < (int)(sizeof machines / sizeof *machines); i++) {
    machine = machines[i], requests = 0;
    const char *found = find_obstacle_to_amx(), *expected = machine.obstacle;
    const int asks = i < 4;  // the others lack something else
    if ((found && expected ? !strcmp(found, expected) : found == expected) && requests == asks) continue;
    printf("machine %d: %s, after %d requests for permission\n", i, found ? found : "no obstacle", requests);
    wrong = 1;
  }
  if (!wrong) puts("ok");
  return wrong;
}
