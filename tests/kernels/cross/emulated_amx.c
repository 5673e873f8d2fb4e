// Runs the machine code of the amx level on a processor without AMX: its tile instructions raise SIGILL, and the handler
// decodes and emulates them with the twin's operations. Linked with compare_levels.c in place of dispatch.c. What remains
// for a machine with AMX is speed, and how its bf16 products round. There, nothing is emulated: LDTILECFG is executed also
// without the permission to use tiles, so the twin would not see the shapes; compare_levels.c runs the real level.
#define _GNU_SOURCE
#define QUIRE_ISA_AMX_TWIN
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <ucontext.h>

#include "simd/amx.h"

extern const quire_tiles quire_tiles_scalar, quire_tiles_amx;
int self_test_amx(void);

twin_state quire_amx_twins[TWINS];
THREAD_LOCAL twin_state *quire_amx_twin;

static int64_t emulated;    // instructions
static int64_t operations;  // operations of the products: a multiplication and an addition each

// Whether the processor has AMX and the operating system saves its registers.
static int runs_tiles(void) {
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return 0;  // OSXSAVE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 24)) return 0;  // AMX-TILE
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) != 0;
}

// Whether the peak of a dtype counts what its products do.
static int counts_operations(int dtype) {
  float result;
  operations = 0;
  const int64_t counted = quire_tiles_amx.peak(dtype, 3, NULL, NULL, &result);
  return counted > 0 && counted == operations;
}

const quire_tiles *quire_isa_tiles(int level) { return level == QUIRE_AMX ? &quire_tiles_amx : &quire_tiles_scalar; }
const char *quire_isa_obstacle(int level) {
  if (level == QUIRE_SCALAR) return NULL;
  if (level != QUIRE_AMX) return "not a level of this test";
  if (!__builtin_cpu_supports("avx512bf16")) return "the level needs AVX-512";
  if (runs_tiles()) return "the processor runs tile instructions itself";
  if (!self_test_amx()) return "the self-test found wrong sums";
  return counts_operations(QUIRE_BF16) && counts_operations(QUIRE_Q8) ? NULL : "a peak counts other operations than it does";
}

// A three-byte VEX instruction of the map 0F38: prefix 0 none, 1 66, 2 F3, 3 F2; operands of modrm, vvvv and memory.
typedef struct {
  int prefix, opcode, mod, reg, rm, vvvv;
  uint64_t base, index;  // address of the memory operand; index is the stride of tile rows
  int length;
} instruction;

static uint64_t general_register(const ucontext_t *context, int number) {
  static const int at[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return (uint64_t)context->uc_mcontext.gregs[at[number]];
}

static int decode(const ucontext_t *context, instruction *out) {
  const uint8_t *code = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP], *at = code + 5;
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || code[2] & 0x84) return 0;  // VEX, map 0F38, W0, 128 bits
  const int high_index = !(code[1] & 0x40) << 3, high_base = !(code[1] & 0x20) << 3;
  *out = (instruction){.prefix = code[2] & 3, .vvvv = ~code[2] >> 3 & 15, .opcode = code[3], .mod = code[4] >> 6,
                       .reg = code[4] >> 3 & 7, .rm = code[4] & 7};
  int base = out->rm;
  if (out->mod != 3) {
    if (out->rm == 4) {
      const uint8_t sib = *at++;
      const int index = (sib >> 3 & 7) | high_index;
      base = sib & 7;
      if (index != 4) out->index = general_register(context, index) << (sib >> 6);
    }
    int32_t far = 0;
    const int without_base = out->mod == 0 && base == 5;
    if (out->mod == 1) far = (int8_t)*at++;
    else if (out->mod == 2 || without_base) memcpy(&far, at, 4), at += 4;
    if (without_base) out->base = out->rm == 4 ? 0 : (uint64_t)at;  // relative to the next instruction
    else out->base = general_register(context, base | high_base);
    out->base += (uint64_t)(int64_t)far;
  }
  out->length = (int)(at - code);
  return 1;
}

// Columns of c have 4 bytes, and so have the `of_k` elements of K in a column of a.
static void count_product(const instruction *i, int of_k) {
  const int rows = twin_rows(i->reg), columns = twin_bytes(i->reg) / 4, k = twin_bytes(i->rm) / 4 * of_k;
  operations += (int64_t)rows * columns * k * 2;
}

static int emulate(const instruction *i) {
  const int memory = i->mod != 3, what = i->opcode << 4 | i->prefix << 1 | memory;
  switch (what) {
    case 0x491: tile_config((const tile_shapes *)(i->base + i->index)); return 1;
    case 0x490: tile_release(); return i->reg == 0 && i->rm == 0;
    case 0x496: tile_zero(i->reg); return i->rm == 0;
    case 0x4b3: tile_load_once(i->reg, (const void *)i->base, (int64_t)i->index); return 1;
    case 0x4b7: tile_load(i->reg, (const void *)i->base, (int64_t)i->index); return 1;
    case 0x4b5: tile_store(i->reg, (void *)i->base, (int64_t)i->index); return 1;
    case 0x5c4: count_product(i, 2), tile_dot_bf16(i->reg, i->rm, i->vvvv); return 1;
    case 0x5e4: count_product(i, 4), tile_dot_s8u8(i->reg, i->rm, i->vvvv); return 1;
    default: return 0;
  }
}

static void on_illegal_instruction(int number, siginfo_t *info, void *context) {
  instruction found;
  (void)info;
  if (!decode(context, &found) || !emulate(&found)) {
    signal(number, SIG_DFL);  // not a tile instruction that is known here: end as without a handler
    return;
  }
  ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] += found.length;
  emulated++;
}

__attribute__((constructor)) static void start(void) {
  struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGILL, &action, NULL);
}

__attribute__((destructor)) static void report(void) { printf("%lld tile instructions emulated\n", (long long)emulated); }
