// The arrival counter and the signals each have their own cache line. A waiting thread spins for some tens of
// microseconds, about as long as one op takes, and then sleeps on a futex, so that another process that takes a core
// costs its share of time and no more.
#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 1000, LINE = 64 };

struct quire_pool {
  quire_signal started;   // incremented for each run, and to end the threads
  quire_signal released;  // incremented when all workers have arrived at a barrier
  _Alignas(LINE) _Atomic uint32_t arrived;
  _Alignas(LINE) quire_work work;
  void *argument;
  int ending;
  int workers;
  int threads;  // started so far; the caller is not one of them
  pthread_t *thread;
};

typedef struct {
  quire_pool *pool;
  int worker;
} thread_argument;

static void pause_briefly(void) {
#if defined __x86_64__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

// Wait while `signal` is `seen`: spin first, then sleep.
static void wait_change(quire_signal *signal, uint32_t seen) {
  for (int i = 0; i < SPINS; i++) {
    if (__atomic_load_n(&signal->value, __ATOMIC_ACQUIRE) != seen) return;
    pause_briefly();
  }
  __atomic_fetch_add(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&signal->value, __ATOMIC_SEQ_CST) == seen)
    syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  __atomic_fetch_sub(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
}

void quire_signal_await(quire_signal *signal, uint32_t value) {
  for (uint32_t seen; (seen = __atomic_load_n(&signal->value, __ATOMIC_ACQUIRE)) != value;) wait_change(signal, seen);
}

void quire_signal_set(quire_signal *signal, uint32_t value) {
  __atomic_store_n(&signal->value, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&signal->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void quire_pool_barrier(quire_pool *pool) {
  if (pool->workers == 1) return;
  const uint32_t seen = __atomic_load_n(&pool->released.value, __ATOMIC_RELAXED);
  if (atomic_fetch_add(&pool->arrived, 1) + 1 < (uint32_t)pool->workers) {
    wait_change(&pool->released, seen);
    return;
  }
  atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
  quire_signal_set(&pool->released, seen + 1);
}

static void *run_thread(void *argument) {
  const thread_argument self = *(thread_argument *)argument;
  free(argument);
  quire_pool *pool = self.pool;
  for (uint32_t seen = 0;; seen++) {
    wait_change(&pool->started, seen);
    if (pool->ending) return NULL;
    pool->work(pool->argument, self.worker, pool->workers);
    quire_pool_barrier(pool);
  }
}

void quire_pool_run(quire_pool *pool, quire_work work, void *argument) {
  pool->work = work;
  pool->argument = argument;
  if (pool->workers > 1) quire_signal_set(&pool->started, pool->started.value + 1);
  work(argument, 0, pool->workers);
  quire_pool_barrier(pool);
}

void quire_pool_free(quire_pool *pool) {
  if (!pool) return;
  pool->ending = 1;
  quire_signal_set(&pool->started, pool->started.value + 1);
  for (int i = 0; i < pool->threads; i++) pthread_join(pool->thread[i], NULL);
  free(pool->thread);
  free(pool);
}

static int start_thread(quire_pool *pool, int worker) {
  thread_argument *argument = malloc(sizeof *argument);
  if (!argument) return 0;
  *argument = (thread_argument){pool, worker};
  if (pthread_create(&pool->thread[worker - 1], NULL, run_thread, argument) == 0) return 1;
  free(argument);
  return 0;
}

quire_pool *quire_pool_new(int workers) {
  quire_pool *pool = aligned_alloc(LINE, (sizeof *pool + LINE - 1) / LINE * LINE);
  if (!pool) return NULL;
  *pool = (quire_pool){.workers = workers};
  pool->thread = calloc((size_t)workers, sizeof *pool->thread);
  if (!pool->thread) {
    free(pool);
    return NULL;
  }
  for (int worker = 1; worker < workers; worker++) {
    if (!start_thread(pool, worker)) {
      quire_pool_free(pool);
      return NULL;
    }
    pool->threads++;
  }
  return pool;
}
