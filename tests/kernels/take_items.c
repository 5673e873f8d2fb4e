// The pool of kernels/pool.c under adverse conditions: a worker that keeps an item for ever, and random pauses in many short runs;
// runs of items that workers take at once; and a worker that comes to the core of another one.
// Prints "ok", or stops at an assertion. Built by test_pool.py, also with the thread sanitizer.
#define _GNU_SOURCE
#undef NDEBUG
#include <assert.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../kernels/pool.h"

enum { OPS = 8, MOST_WORKERS = 16, MOST_ITEMS = 40, RUN_ITEMS = 1000, MOST_OF_RUN = 12 };

typedef struct {
  quire_progress progress;
  uint64_t number;
  long long items;  // items of each share
  atomic_int writes[MOST_WORKERS * MOST_ITEMS];
} op_state;

static struct {
  quire_pool *pool;
  op_state ops[OPS];
  quire_share shares[MOST_WORKERS];
  int workers;
  int keeps;  // worker 1 keeps its first item until worker 0 has finished all ops
  atomic_int is_kept, is_over, is_lost;
} run;

static void pause_at_random(unsigned *seed) {
  if (!run.keeps && rand_r(seed) % 8 == 0) sched_yield();
}

static int write_item(op_state *op, uint64_t item, int holder, int writer) {
  if (!quire_share_release(&run.shares[holder], op->number, item)) return 0;
  atomic_fetch_add(&op->writes[item - 1], 1);
  quire_share_count(&run.shares[writer], op->number);
  return 1;
}

static int keep_first_item(int worker) {
  if (!run.keeps || worker != 1 || atomic_exchange(&run.is_kept, 1)) return 0;
  while (!atomic_load(&run.is_over)) sched_yield();
  return 1;
}

static void take_items(op_state *op, int worker, unsigned *seed) {
  while (run.keeps && worker != 1 && !atomic_load(&run.is_kept)) sched_yield();
  for (int turn = 0; turn < run.workers; turn++) {
    const int owner = (worker + turn) % run.workers;
    for (long long taken; (taken = quire_share_take(&run.shares[owner], op->number, op->items, turn)) >= 0;) {
      const uint64_t item = (uint64_t)(owner * op->items + taken + 1);
      quire_share_hold(&run.shares[worker], op->number, item);
      pause_at_random(seed);
      const int was_kept = keep_first_item(worker), won = write_item(op, item, worker, worker);
      if (was_kept) run.is_lost = !won;
    }
  }
}

static void help(op_state *op, int worker) {
  for (int other = 0; other < run.workers; other++) {
    const uint64_t item = quire_share_held(&run.shares[other], op->number);
    if (item) write_item(op, item, other, worker);
  }
}

static void work(void *argument, int worker, int workers) {
  (void)argument;
  unsigned seed = (unsigned)worker + 1;
  for (int i = 0; i < OPS; i++) {
    op_state *op = &run.ops[i];
    const long long total = op->items * workers;
    if (quire_is_finished(&op->progress)) continue;
    take_items(op, worker, &seed);
    quire_pool_report_written(run.pool, &op->progress, run.shares, op->number, total);
    help(op, worker);
    quire_pool_report_written(run.pool, &op->progress, run.shares, op->number, total);
    if (!quire_pool_await(run.pool, &op->progress, worker)) return;
  }
  if (worker == 0) atomic_store(&run.is_over, 1);
}

static void run_once(int workers, int items, int keeps) {
  memset(run.ops, 0, sizeof run.ops);
  memset(run.shares, 0, sizeof run.shares);
  run.workers = workers;
  run.keeps = keeps;
  run.is_kept = run.is_over = run.is_lost = 0;
  for (int i = 0; i < OPS; i++) run.ops[i].items = items, run.ops[i].number = (uint64_t)i + 1;
  quire_pool_run(run.pool, work, NULL);
  for (int i = 0; i < OPS; i++)
    for (int item = 0; item < items * workers; item++) assert(run.ops[i].writes[item] == 1);
}

static struct {
  long long counter, items;
  atomic_int taken[RUN_ITEMS];
} runs;

static void take_runs(void *argument, int worker, int workers) {
  quire_run taken;
  (void)argument, (void)worker;
  while (quire_next_run(&runs.counter, runs.items, workers, MOST_OF_RUN, &taken)) {
    const long long left = runs.items - taken.first, size = taken.end - taken.first;
    assert(size >= 1 && size <= MOST_OF_RUN && (size == 1 || 2 * workers * size <= left));  // all can end together
    assert(size == MOST_OF_RUN || 2 * workers * (size + 1) > left);
    for (long long item = taken.first; item < taken.end; item++) atomic_fetch_add(&runs.taken[item], 1);
  }
}

static void take_all_runs(quire_pool *pool, int items) {
  memset(&runs, 0, sizeof runs);
  runs.items = items;
  quire_pool_run(pool, take_runs, NULL);
  for (int item = 0; item < RUN_ITEMS; item++) assert(runs.taken[item] == (item < items));
}

// Two workers on one core: one moves to another core, and may use all of them afterwards.
static struct {
  quire_pool *pool;
  quire_progress progress;
  cpu_set_t all, last;
  atomic_int was_seen;
} cores;

static void come_to_one_core(void *argument, int worker, int workers) {
  (void)argument, (void)workers;
  if (worker == 1 && atomic_load(&cores.was_seen)) return;
  while (worker == 0 && !atomic_load(&cores.was_seen)) sched_yield();
  assert(!sched_setaffinity(0, sizeof cores.last, &cores.last));
  assert(!sched_setaffinity(0, sizeof cores.all, &cores.all));
  quire_pool_await(cores.pool, &cores.progress, worker);
  if (worker == 1) atomic_store(&cores.was_seen, 1);
  cpu_set_t allowed;
  assert(!sched_getaffinity(0, sizeof allowed, &allowed) && CPU_EQUAL(&allowed, &cores.all));
}

static void move_apart(void) {
  assert(!sched_getaffinity(0, sizeof cores.all, &cores.all));
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &cores.all)) continue;
    CPU_ZERO(&cores.last);
    CPU_SET(cpu, &cores.last);
  }
  cores.progress.finished = 1;  // nothing is waited for
  cores.pool = quire_pool_new(2);
  assert(cores.pool);
  quire_pool_run(cores.pool, come_to_one_core, NULL);
  quire_pool_free(cores.pool);
}

int main(void) {
  move_apart();
  const int workers[] = {1, 2, 3, MOST_WORKERS};
  for (int i = 0; i < 4; i++) {
    run.pool = quire_pool_new(workers[i]);
    assert(run.pool);
    for (int turn = 0; turn < 100; turn++) run_once(workers[i], turn % MOST_ITEMS, 0);
    if (workers[i] > 1) {
      run_once(workers[i], MOST_ITEMS, 1);
      assert(run.is_lost);  // another worker wrote it, and all ops ended meanwhile
    }
    for (int items = 0; items <= RUN_ITEMS; items = items * 2 + 1) take_all_runs(run.pool, items);
    quire_pool_free(run.pool);
  }
  puts("ok");
}
