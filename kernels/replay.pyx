# cython: language_level=3
"""One worker's part of a step: all ops of a program in order, with a barrier after each."""
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from .attention cimport run_attention
from .linear cimport run_linear
from .pool cimport quire_pool_barrier
from .rows cimport run_convert, run_embed, run_gather


cdef void replay_ops(void *argument, int worker, int workers) noexcept nogil:
    """Run the ops of a `Replay`; worker 0 measures them."""
    cdef Replay *replay = <Replay *>argument
    cdef int64_t i, before = _now(), after
    for i in range(replay.num_records):
        _run(&replay.records[i], &replay.step, replay.tiles, replay.pool, worker, workers)
        quire_pool_barrier(replay.pool)
        if worker == 0:
            after = _now()
            replay.records[i].nanoseconds += after - before
            before = after
    if replay.tiles.end != NULL:
        replay.tiles.end()


cdef int64_t _now() noexcept nogil:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec * <int64_t>1000000000 + at.tv_nsec


cdef void _run(Record *record, const Step *step, const quire_tiles *tiles, quire_pool *pool, int worker,
               int workers) noexcept nogil:
    if record.kind == LINEAR:
        run_linear(&record.op.linear, step, tiles, worker, workers)
    elif record.kind == ATTENTION:
        run_attention(&record.op.attention, step, tiles, pool, &record.counter, worker, workers)
    elif record.kind == CONVERT:
        run_convert(&record.op.convert, step, tiles, worker, workers)
    elif record.kind == EMBED:
        run_embed(&record.op.embed, step, tiles, worker, workers)
    else:
        run_gather(&record.op.gather, step, tiles, worker, workers)
