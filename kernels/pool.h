// A pool of threads that runs one function on all of them at once; the caller is worker 0.
// It must not know what is computed. One invariant: between two runs no worker touches anything.
#pragma once
#include <stdint.h>

typedef struct quire_pool quire_pool;
typedef void (*quire_work)(void *argument, int worker, int workers);

quire_pool *quire_pool_new(int workers);  // NULL if memory or threads are not to be had
void quire_pool_free(quire_pool *pool);   // not while it runs
void quire_pool_run(quire_pool *pool, quire_work work, void *argument);  // returns when all are done; one caller at a time
void quire_pool_barrier(quire_pool *pool);  // from inside `work`: all workers arrive before any goes on
int quire_pool_workers(const quire_pool *pool);

// A number that threads wait for; zeros are a valid start.
typedef struct {
  _Alignas(64) uint32_t value;
  _Alignas(64) uint32_t sleepers;
} quire_signal;
void quire_signal_await(quire_signal *signal, uint32_t value);  // returns when the signal is `value`
void quire_signal_set(quire_signal *signal, uint32_t value);

// Deal out work that costs unevenly: each call takes the next index. `counter` starts at 0.
static inline long long quire_take(long long *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
