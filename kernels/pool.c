// The threads of the pool: how they wait, sleep and take items. Words that different threads write lie in cache lines of
// their own. A waiting thread spins for some tens of microseconds, about as long as one op takes, and then sleeps on a
// futex. No call waits for a thread to wake up or to get a core back, unless the thread was computing an item when it
// lost the core.
#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS = 1000, LINE = 64 };
static const uint32_t OPEN = 1u << 31;

typedef struct {
  _Alignas(LINE) int cpu;  // CPU that the worker was last seen on, or -1
} worker_place;

struct quire_pool {
  quire_signal changed;  // incremented when a run begins or ends, when an op is finished, and to end the threads
  _Alignas(LINE) _Atomic uint32_t inside;  // workers inside `work`, the caller left out; and OPEN while others may join
  _Alignas(LINE) quire_work work;
  void *argument;
  _Atomic int ending;
  int workers;
  int threads;  // started so far; the caller is not one of them
  pthread_t *thread;
  worker_place *place;
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

static void sleep_while(quire_signal *signal, uint32_t seen) {
  __atomic_fetch_add(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&signal->value, __ATOMIC_SEQ_CST) == seen)
    syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  __atomic_fetch_sub(&signal->sleepers, 1, __ATOMIC_SEQ_CST);
}

static void wake(quire_signal *signal) {
  if (__atomic_load_n(&signal->sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

// Wait while the word is `seen`; return whether it changed before `SPINS` pauses had passed.
static int spin_while(const uint32_t *word, uint32_t seen) {
  for (int i = 0; i < SPINS; i++) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return 1;
    pause_briefly();
  }
  return 0;
}

void quire_signal_await(quire_signal *signal, uint32_t value) {
  for (uint32_t seen; (seen = __atomic_load_n(&signal->value, __ATOMIC_ACQUIRE)) != value;)
    if (!spin_while(&signal->value, seen)) sleep_while(signal, seen);
}

void quire_signal_set(quire_signal *signal, uint32_t value) {
  __atomic_store_n(&signal->value, value, __ATOMIC_SEQ_CST);
  wake(signal);
}

static uint32_t changes(quire_pool *pool) { return __atomic_load_n(&pool->changed.value, __ATOMIC_SEQ_CST); }

static void announce_change(quire_pool *pool) {
  __atomic_fetch_add(&pool->changed.value, 1, __ATOMIC_SEQ_CST);
  wake(&pool->changed);
}

// Two workers on one core leave a core to other processes, and the kernel balances that only after tens of
// milliseconds. So a worker that has come to a core where it finds another one moves to any other core that it may use.
// It is not pinned: afterwards it may use the same cores as before.
static void keep_apart(quire_pool *pool, int worker) {
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE || cpu == pool->place[worker].cpu) return;
  __atomic_store_n(&pool->place[worker].cpu, cpu, __ATOMIC_RELAXED);
  cpu_set_t taken, allowed, free;
  CPU_ZERO(&taken);
  for (int i = 0; i < pool->workers; i++) {
    const int other = __atomic_load_n(&pool->place[i].cpu, __ATOMIC_RELAXED);
    if (i != worker && other >= 0) CPU_SET(other, &taken);
  }
  if (!CPU_ISSET(cpu, &taken) || sched_getaffinity(0, sizeof allowed, &allowed)) return;
  CPU_AND(&free, &allowed, &taken);
  CPU_XOR(&free, &free, &allowed);
  if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free)) return;
  __atomic_store_n(&pool->place[worker].cpu, sched_getcpu(), __ATOMIC_RELAXED);
  sched_setaffinity(0, sizeof allowed, &allowed);
}

void quire_pool_finish(quire_pool *pool, quire_progress *progress) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t unset = 0;  // two workers may see at the same time that all items are written
  __atomic_compare_exchange_n(&progress->finished_ns, &unset, now.tv_sec * 1000000000ll + now.tv_nsec, 0,
                              __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  __atomic_store_n(&progress->finished, 1, __ATOMIC_SEQ_CST);
  if (pool->workers > 1) announce_change(pool);
}

void quire_pool_report(quire_pool *pool, quire_progress *progress, long long items, long long total) {
  if (items ? quire_progress_add(progress, items) == total : total == 0)
    quire_pool_finish(pool, progress);
}

void quire_pool_report_written(quire_pool *pool, quire_progress *progress, const quire_share *shares, uint64_t op,
                               long long total) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // two workers count their last items: the later one sees both
  long long written = 0;
  for (int i = 0; i < pool->workers; i++) {
    const uint64_t word = __atomic_load_n(&shares[i].written, __ATOMIC_ACQUIRE);
    if (word >> 48 == op) written += (long long)(word & 0xffffffffffff);
  }
  if (written == total && !quire_is_finished(progress)) quire_pool_finish(pool, progress);
}

int quire_pool_await(quire_pool *pool, quire_progress *progress, int worker) {
  if (pool->workers > 1) keep_apart(pool, worker);
  for (;;) {
    const uint32_t seen = changes(pool);
    if (spin_while(&progress->finished, 0)) return 1;
    if (worker) return 0;
    sleep_while(&pool->changed, seen);
  }
}

static int join_run(quire_pool *pool) {
  uint32_t inside = atomic_load(&pool->inside);
  while (inside & OPEN)
    if (atomic_compare_exchange_weak(&pool->inside, &inside, inside + 1)) return 1;
  return 0;
}

static void leave_run(quire_pool *pool) {
  if (atomic_fetch_sub(&pool->inside, 1) == 1) announce_change(pool);
}

static void *run_thread(void *argument) {
  const thread_argument self = *(thread_argument *)argument;
  free(argument);
  quire_pool *pool = self.pool;
  for (;;) {
    const uint32_t seen = changes(pool);
    if (pool->ending) return NULL;
    if (join_run(pool)) {
      pool->work(pool->argument, self.worker, pool->workers);
      leave_run(pool);
    }
    sleep_while(&pool->changed, seen);
  }
}

void quire_pool_run(quire_pool *pool, quire_work work, void *argument) {
  if (pool->workers == 1) {
    work(argument, 0, 1);
    return;
  }
  pool->work = work;
  pool->argument = argument;
  atomic_store(&pool->inside, OPEN);
  announce_change(pool);
  work(argument, 0, pool->workers);
  atomic_fetch_and(&pool->inside, ~OPEN);
  for (uint32_t seen; seen = changes(pool), atomic_load(&pool->inside);)
    if (!spin_while(&pool->changed.value, seen)) sleep_while(&pool->changed, seen);
}

void quire_pool_free(quire_pool *pool) {
  if (!pool) return;
  pool->ending = 1;
  announce_change(pool);
  for (int i = 0; i < pool->threads; i++) pthread_join(pool->thread[i], NULL);
  free(pool->place);
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
  pool->place = aligned_alloc(LINE, (size_t)workers * sizeof *pool->place);
  if (!pool->thread || !pool->place) {
    quire_pool_free(pool);
    return NULL;
  }
  for (int worker = 0; worker < workers; worker++) pool->place[worker].cpu = -1;
  for (int worker = 1; worker < workers; worker++) {
    if (!start_thread(pool, worker)) {
      quire_pool_free(pool);
      return NULL;
    }
    pool->threads++;
  }
  return pool;
}
