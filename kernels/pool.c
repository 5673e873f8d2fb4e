// Arrival counter and generation live on cache lines of their own. A waiter spins for some tens of microseconds, as long
// as one operation takes, then sleeps on a futex so that a core taken by somebody else costs its share and no more.
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

// A word that changes, and how many sleep until it does.
typedef struct {
  _Alignas(LINE) _Atomic uint32_t value;
  _Alignas(LINE) _Atomic uint32_t sleepers;
} signal_word;

struct quire_pool {
  signal_word started;   // bumped for each run, and to end
  signal_word released;  // bumped when all have arrived at a barrier
  _Alignas(LINE) _Atomic uint32_t arrived;
  _Alignas(LINE) quire_work work;
  void *argument;
  int ending;
  int workers;
  int threads;  // started, besides the caller
  pthread_t *thread;
};

typedef struct {
  quire_pool *pool;
  int worker;
} seat;

static void pause_briefly(void) {
#if defined __x86_64__
  __builtin_ia32_pause();
#elif defined __aarch64__
  __asm__ volatile("yield");
#endif
}

static void wait_change(signal_word *word, uint32_t seen) {
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(&word->value, memory_order_acquire) != seen) return;
    pause_briefly();
  }
  atomic_fetch_add(&word->sleepers, 1);
  while (atomic_load(&word->value) == seen) syscall(SYS_futex, &word->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  atomic_fetch_sub(&word->sleepers, 1);
}

static void change(signal_word *word) {
  atomic_fetch_add(&word->value, 1);
  if (atomic_load(&word->sleepers)) syscall(SYS_futex, &word->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void quire_pool_barrier(quire_pool *pool) {
  if (pool->workers == 1) return;
  const uint32_t seen = atomic_load_explicit(&pool->released.value, memory_order_relaxed);
  if (atomic_fetch_add(&pool->arrived, 1) + 1 < (uint32_t)pool->workers) {
    wait_change(&pool->released, seen);
    return;
  }
  atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
  change(&pool->released);
}

static void *serve(void *argument) {
  const seat at = *(seat *)argument;
  free(argument);
  quire_pool *pool = at.pool;
  for (uint32_t seen = 0;; seen++) {
    wait_change(&pool->started, seen);
    if (pool->ending) return NULL;
    pool->work(pool->argument, at.worker, pool->workers);
    quire_pool_barrier(pool);
  }
}

void quire_pool_run(quire_pool *pool, quire_work work, void *argument) {
  pool->work = work;
  pool->argument = argument;
  if (pool->workers > 1) change(&pool->started);
  work(argument, 0, pool->workers);
  quire_pool_barrier(pool);
}

int quire_pool_workers(const quire_pool *pool) { return pool->workers; }

void quire_pool_free(quire_pool *pool) {
  if (!pool) return;
  pool->ending = 1;
  change(&pool->started);
  for (int i = 0; i < pool->threads; i++) pthread_join(pool->thread[i], NULL);
  free(pool->thread);
  free(pool);
}

static int start_thread(quire_pool *pool, int worker) {
  seat *at = malloc(sizeof *at);
  if (!at) return 0;
  *at = (seat){pool, worker};
  if (pthread_create(&pool->thread[worker - 1], NULL, serve, at) == 0) return 1;
  free(at);
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
