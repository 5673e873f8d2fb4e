// A pool of threads for work of which they take items. The caller is worker 0; the other workers join a run while
// it lasts, as their cores become free, and are never waited for unless they have taken an item. Between two runs no
// worker touches memory.
#pragma once
#include <stdint.h>

typedef struct quire_pool quire_pool;
typedef void (*quire_work)(void *argument, int worker, int workers);

quire_pool *quire_pool_new(int workers);  // NULL if memory or threads cannot be had
void quire_pool_free(quire_pool *pool);   // not during a run
// Call `work` as worker 0, and meanwhile as each other worker any number of times, also never. Returns when the call as
// worker 0 has returned and no other worker is inside `work`. One caller at a time.
void quire_pool_run(quire_pool *pool, quire_work work, void *argument);

// How far an op is. Zeroed memory is an op that has not begun.
typedef struct {
  _Alignas(64) long long taken;  // items, for `quire_next_index` and `quire_next_run`
  long long done;
  _Alignas(64) uint32_t finished;
  int64_t finished_ns;  // end of the work, on the monotonic clock
} quire_progress;

static inline int quire_is_finished(const quire_progress *progress) {
  return (int)__atomic_load_n(&progress->finished, __ATOMIC_ACQUIRE);
}
// Add `items` computed items; return how many are computed. The caller can then read all results of these items.
static inline long long quire_progress_add(quire_progress *progress, long long items) {
  return __atomic_add_fetch(&progress->done, items, __ATOMIC_ACQ_REL);
}
// Report `items` computed items of an op that has `total`; the last one finishes it.
void quire_pool_report(quire_pool *pool, quire_progress *progress, long long items, long long total);
// Wait until the op is finished, and return 1. To a worker other than 0 it may return 0 before; the worker must then
// return from `work`, and is called again when something has changed.
int quire_pool_await(quire_pool *pool, quire_progress *progress, int worker);

// A number that threads can wait for. Zeroed memory is a valid signal.
typedef struct {
  _Alignas(64) uint32_t value;
  _Alignas(64) uint32_t sleepers;
} quire_signal;
void quire_signal_await(quire_signal *signal, uint32_t value);  // returns when the signal is `value`
void quire_signal_set(quire_signal *signal, uint32_t value);

// Take the next index of work whose items cost unevenly. `counter` starts at 0.
static inline long long quire_next_index(long long *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

// Consecutive items [first, end).
typedef struct {
  long long first, end;
} quire_run;

// Take the next of `items` items, at most `most` of them and half of what is left per worker: neighboring items, whose
// results share cache lines, are mostly of one worker, and all workers end together. Return 0 if none is left.
static inline int quire_next_run(long long *counter, long long items, int workers, long long most, quire_run *run) {
  run->first = __atomic_load_n(counter, __ATOMIC_RELAXED);
  do {
    if (run->first >= items) return 0;
    const long long half = (items - run->first) / (2 * workers), size = half < most ? half : most;
    run->end = run->first + (size > 1 ? size : 1);
  } while (!__atomic_compare_exchange_n(counter, &run->first, run->end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return 1;
}

// One worker's share of an op's items. One share serves all ops of a run, one after another,
// numbered from 1 upwards; zeroed memory is a share before the first op. A worker may be late and still ask about an op
// that is finished, so each word has the number of its op in the upper 16 bits, and a word of a later op is left alone.
typedef struct {
  _Alignas(64) uint64_t taken;  // items: bits 0-23: by the worker, from the first; 24-47: by others, from the last
  uint64_t held;                // the item, of any share, that the worker is computing; or 0
  uint64_t written;             // items, of any share, whose results the worker has written
} quire_share;

enum { QUIRE_SHARE_ITEMS = 1 << 24, QUIRE_SHARE_OPS = 1 << 16 };  // a share has fewer items, a run has fewer ops

static inline uint64_t quire_share_word(uint64_t word, uint64_t op) {  // value at the start of the op, if `word` is older
  return word >> 48 < op ? op << 48 : word;
}
static inline long long quire_share_front(uint64_t taken) { return (long long)(taken & 0xffffff); }
static inline long long quire_share_back(uint64_t taken) { return (long long)(taken >> 24 & 0xffffff); }

// The items left of the share's `size`.
static inline long long quire_share_left(const quire_share *share, uint64_t op, long long size) {
  const uint64_t taken = quire_share_word(__atomic_load_n(&share->taken, __ATOMIC_RELAXED), op);
  return taken >> 48 == op ? size - quire_share_front(taken) - quire_share_back(taken) : 0;
}

// Take one of them; -1 if none is left.
static inline long long quire_share_take(quire_share *share, uint64_t op, long long size, int from_back) {
  uint64_t before = __atomic_load_n(&share->taken, __ATOMIC_RELAXED);
  for (;;) {
    const uint64_t taken = quire_share_word(before, op);
    const long long front = quire_share_front(taken), back = quire_share_back(taken);
    if (taken >> 48 != op || front + back >= size) return -1;
    if (__atomic_compare_exchange_n(&share->taken, &before, taken + (from_back ? 1 << 24 : 1), 0, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
      return from_back ? size - 1 - back : front;
  }
}

// A worker may lose its core while it computes an item, which is not 0 and unique in an op. Others may compute the same
// item, each in its own memory. The one for which `quire_share_release` returns 1 writes the result, and then counts it
// in its own share.
static inline void quire_share_hold(quire_share *share, uint64_t op, uint64_t item) {
  __atomic_store_n(&share->held, op << 48 | item, __ATOMIC_RELEASE);
}
static inline uint64_t quire_share_held(const quire_share *share, uint64_t op) {
  const uint64_t held = __atomic_load_n(&share->held, __ATOMIC_ACQUIRE);
  return held >> 48 == op ? held & 0xffffffffffff : 0;
}
static inline int quire_share_release(quire_share *share, uint64_t op, uint64_t item) {
  uint64_t held = op << 48 | item;
  return __atomic_compare_exchange_n(&share->held, &held, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}
static inline void quire_share_count(quire_share *share, uint64_t op) {
  __atomic_store_n(&share->written, quire_share_word(share->written, op) + 1, __ATOMIC_RELEASE);
}
// Finish the op if all its `total` items are written. Each worker calls it after it has counted its last item.
void quire_pool_report_written(quire_pool *pool, quire_progress *progress, const quire_share *shares, uint64_t op,
                               long long total);
