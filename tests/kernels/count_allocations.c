// Counts the allocations of threads that do not hold the GIL: the pool's workers, and threads inside a `with nogil`
// block. It is preloaded, so that it replaces glibc's allocator and the two calls that release and acquire the GIL.
// `allocations` is the count.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

_Atomic long allocations;
static __thread int holds_gil;  // a new thread does not

__attribute__((constructor)) static void main_thread_holds_gil(void) { holds_gil = 1; }

void *PyEval_SaveThread(void) {
  void *(*release)(void) = (void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread");
  void *state = release();
  holds_gil = 0;
  return state;
}

void PyEval_RestoreThread(void *state) {
  holds_gil = 1;
  void (*acquire)(void *) = (void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
  acquire(state);
}

static void count(void) {
  if (!holds_gil) atomic_fetch_add(&allocations, 1);
}

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t bytes) { return count(), __libc_malloc(bytes); }
void *calloc(size_t items, size_t bytes) { return count(), __libc_calloc(items, bytes); }
void *realloc(void *old, size_t bytes) { return count(), __libc_realloc(old, bytes); }
void *memalign(size_t alignment, size_t bytes) { return count(), __libc_memalign(alignment, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return count(), __libc_memalign(alignment, bytes); }

int posix_memalign(void **out, size_t alignment, size_t bytes) {
  void *memory = (count(), __libc_memalign(alignment, bytes));
  if (!memory) return ENOMEM;
  *out = memory;
  return 0;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  return count(), (void *)syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
}
void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
  return mmap(address, bytes, protection, flags, file, offset);
}
