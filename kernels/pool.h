// A pool of threads that runs one function on all of them at once; the caller is worker 0. Between two runs no worker
// touches memory.
#pragma once
#include <stdint.h>

typedef struct quire_pool quire_pool;
typedef void (*quire_work)(void *argument, int worker, int workers);

quire_pool *quire_pool_new(int workers);  // NULL if memory or threads cannot be had
void quire_pool_free(quire_pool *pool);   // not during a run
void quire_pool_run(quire_pool *pool, quire_work work, void *argument);  // until all are done; one caller at a time
void quire_pool_barrier(quire_pool *pool);  // inside `work`: returns when all workers have arrived

// A number that threads can wait for. Zeroed memory is a valid signal.
typedef struct {
  _Alignas(64) uint32_t value;
  _Alignas(64) uint32_t sleepers;
} quire_signal;
void quire_signal_await(quire_signal *signal, uint32_t value);  // returns when the signal is `value`
void quire_signal_set(quire_signal *signal, uint32_t value);

// Take the next index of work whose items cost unevenly. `counter` starts at 0.
static inline long long quire_next_index(long long *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
