// The self-test of tile products, without the kernel's permission to use them: on any machine their instructions raise
// SIGILL, which must become a reason, and the handler of SIGILL must be the one from before. With the option amx_twin the
// self-test itself runs as well, on tile operations in C.
#include "simd/dispatch.c"

int self_test_amx_twin(void);

static void before_the_test(int number) { (void)number; }

int main(void) {
  struct sigaction action = {.sa_handler = before_the_test};
  sigaction(SIGILL, &action, NULL);
  for (int attempt = 0; attempt < 2; attempt++) {
    const char *failure = failure_of_self_test();
    printf("%s\n", failure ? failure : "the tiles of this machine work without permission");
    if (!failure || !strstr(failure, "SIGILL")) return 1;
  }
  sigaction(SIGILL, NULL, &action);
  if (action.sa_handler != before_the_test) return 2;
#if defined QUIRE_WITH_AMX_TWIN
  if (!obstacle_to_avx512() && !self_test_amx_twin()) return 3;
#endif
  return 0;
}
