// Holds up the first thread that reads a page, until it is let go. Every other thread may read the page.
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

static char *page;
static size_t page_bytes;
static atomic_int held, let_go;
static struct sigaction before;

static void on_fault(int number, siginfo_t *info, void *context) {
  (void)context;
  const char *address = info->si_addr;
  if (address < page || address >= page + page_bytes) {
    sigaction(number, &before, NULL);  // a real fault: it happens again
    return;
  }
  if (atomic_exchange(&held, 1)) mprotect(page, page_bytes, PROT_READ | PROT_WRITE);
  else while (!atomic_load(&let_go)) usleep(1000);
}

int hold_first_reader(void *start) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  page = start;
  page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  held = let_go = 0;
  return sigaction(SIGSEGV, &action, &before) || mprotect(page, page_bytes, PROT_NONE);
}

int is_held(void) { return held; }

void let_reader_go(void) {
  mprotect(page, page_bytes, PROT_READ | PROT_WRITE);
  atomic_store(&let_go, 1);
}

void stop_holding(void) { sigaction(SIGSEGV, &before, NULL); }
